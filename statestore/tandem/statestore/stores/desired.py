"""The desired state of the cluster in the durable store: one version wins, all other writers read and try again."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from redis.asyncio import Redis

from tandem.core.desired import (
    DRAIN_DEADLINE_S,
    MAX_WORKERS,
    DesiredState,
    DesiredWorker,
    Pool,
    Revision,
    Rollout,
    RolloutPhase,
)
from tandem.core.errors import ConfigError
from tandem.core.ids import WorkerId
from tandem.core.state_enums import RoleName
from tandem.statestore.connection import raising_unavailable
from tandem.statestore.keys import Keys
from tandem.statestore.pubsub import Wakeups
from tandem.statestore.when_full import HASH_FIRST

_log = logging.getLogger(__name__)

# A call repeated because its answer got lost finds its own text and succeeds again.
_SAVE = f"""{HASH_FIRST}
local at = redis.call('HMGET', KEYS[1], 'version', 'state')
if at[1] ~= ARGV[2] or at[2] ~= ARGV[3] then
  if (at[1] or '0') ~= ARGV[1] then return 0 end
  redis.call('HSET', KEYS[1], 'version', ARGV[2], 'state', ARGV[3], 'saved_s', redis.call('TIME')[1])
end
if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'configured', ARGV[4]) end
return 1
"""
_NOTE_CONFIGURED = f"""
if redis.call('HGET', KEYS[1], 'version') ~= ARGV[1] then return 0 end
{HASH_FIRST}
redis.call('HSET', KEYS[1], 'configured', ARGV[2])
return 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The stored state at one moment. `state` None: nothing, or nothing readable, for the reason in `trouble`.

    `configured`: the configuration at the time when it was begun, whatever it was changed to since; None = not noted.
    """

    version: int
    state: DesiredState | None
    trouble: str
    configured: DesiredState | None


class DesiredStateStore:
    """Reads and writes the state. Except for `watch` all raise UnavailableError when Redis does not answer."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis: Any = redis  # its stubs mix plain and awaitable results
        self._keys = keys
        self._script: Any = redis.register_script(_SAVE)
        self._note: Any = redis.register_script(_NOTE_CONFIGURED)
        self._wakeups = Wakeups(redis, keys.desired_channel)

    async def load(self) -> DesiredState | None:
        """The state, or None when none was ever saved. ConfigError: the stored one cannot be read."""
        with raising_unavailable():
            text = await self._redis.hget(self._keys.desired, "state")
        return None if text is None else from_json(text)

    async def dated(self) -> tuple[DesiredState | None, float]:
        """As `load`, and its age in seconds, by the server's clock; 0 where none was noted."""
        with raising_unavailable():
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.hmget(self._keys.desired, "state", "saved_s")
                pipeline.time()
                (text, saved_s), (now_s, _) = await pipeline.execute()
        age_s = max(0.0, float(int(now_s) - int(saved_s))) if saved_s is not None else 0.0
        return (None if text is None else from_json(text)), age_s

    async def version(self) -> int:
        """Version of the state, also of one that `load` cannot read; 0 = none was ever saved."""
        with raising_unavailable():
            return int(await self._redis.hget(self._keys.desired, "version") or 0)

    async def recorded(self) -> Recorded:
        """The whole record, also of a state that cannot be read."""
        with raising_unavailable():
            version, text, noted = await self._redis.hmget(self._keys.desired, "version", "state", "configured")
        state, trouble = _readable(text)
        return Recorded(version=int(version or 0), state=state, trouble=trouble, configured=_readable(noted)[0])

    async def save(self, state: DesiredState, expected_version: int, *, configured: DesiredState | None = None) -> bool:
        """Write `state` if version `expected_version` stands there (0 = none yet); False = another writer was faster.

        `state.version` must be `expected_version + 1`; it is validated first, and members are named where it names
        none. `configured`: what is configured, noted beside it in the same step; None = what was noted stays. Raises
        ConfigError, ValueError.
        """
        if state.version != expected_version + 1:
            raise ValueError(f"version {state.version} cannot follow version {expected_version}")
        state = state.filled()
        if not state.is_stopped:
            state.validate()
        noted = to_json(configured) if configured is not None else ""
        args = [expected_version, state.version, to_json(state), noted]
        with raising_unavailable():
            is_saved = bool(await self._script(keys=[self._keys.desired], args=args))
            if is_saved:
                await self._redis.publish(self._keys.desired_channel, state.version)
        return is_saved

    async def note_configured(self, configured: DesiredState, version: int) -> bool:
        """Note the configuration beside the record, which stays; False = it has another version now."""
        with raising_unavailable():
            return bool(await self._note(keys=[self._keys.desired], args=[version, to_json(configured)]))

    async def watch(self, on_change: Callable[[DesiredState], None], *, poll_s: float = 1.0) -> None:
        """Call `on_change` with the state now and after every change, until cancelled.

        Versions may be skipped, never repeated. It is called in this task and must not block. Survives outages.
        """
        seen: DesiredState | None = None

        async def look() -> None:
            nonlocal seen
            try:
                state = await self.load()
            except ConfigError as error:
                _log.error("desired state is broken", extra={"fields": {"why": error.message}})
                return
            if state is not None and state != seen:
                on_change(state)
                seen = state

        await self._wakeups.poll(look, poll_s, "desired state")


def to_json(state: DesiredState) -> str:
    """One line of JSON."""
    return json.dumps(asdict(state), separators=(",", ":"))


def from_json(text: bytes | str) -> DesiredState:
    """The state; ConfigError when it is none."""
    try:
        return from_record(json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError("the desired state in Redis cannot be read", why=f"{type(error).__name__}: {error}") from None


def from_record(raw: Mapping[str, Any]) -> DesiredState:
    """The state out of what `to_json` wrote, decoded; ValueError, TypeError or KeyError when it is none."""
    if not isinstance(raw, dict):
        raise TypeError("it is not an object")
    pools = tuple(_as_pool(pool) for pool in raw["pools"])
    if sum(pool.count for pool in pools) > MAX_WORKERS:
        raise ValueError(f"it counts more than {MAX_WORKERS} workers")
    state = DesiredState(
        version=_whole(raw["version"]),
        pools=pools,
        members=tuple(_as_member(member) for member in raw.get("members", ())),
        max_ranks=_whole(raw.get("max_ranks", 0)),
        drain_deadline_s=_seconds(raw.get("drain_deadline_s", DRAIN_DEADLINE_S)),
        is_stopped=bool(raw["is_stopped"]),
        revisions=tuple(_as_revision(one) for one in raw.get("revisions", ())),
        rollouts=tuple(_as_rollout(one) for one in raw.get("rollouts", ())),
    )
    return state.filled()


def _readable(text: bytes | None) -> tuple[DesiredState | None, str]:
    """(the state, "") or (None, why it is unreadable); a missing one has no error."""
    try:
        return (None if text is None else from_json(text)), ""
    except ConfigError as error:
        return None, error.message


def _as_pool(raw: object) -> Pool:
    known = _typed(raw, {"name": str, "model": str, "role": str, "count": int, "revision": str, "tp": int,
                         "hardware": str})  # fmt: skip
    return Pool(**{**known, "role": RoleName(known["role"])})


def _as_member(raw: object) -> DesiredWorker:
    """Records of earlier releases have no deadline of a member."""
    own_s = raw.get("drain_deadline_s") if isinstance(raw, dict) else None
    rest = {name: value for name, value in raw.items() if name != "drain_deadline_s"} if isinstance(raw, dict) else raw
    known = _typed(rest, {"worker_id": str, "pool": str, "role": str, "is_cordoned": bool, "restart_generation": int,
                         "revision": str})  # fmt: skip
    return DesiredWorker(
        **{**known, "worker_id": WorkerId(known["worker_id"]), "role": RoleName(known["role"])},
        drain_deadline_s=None if own_s is None else _seconds(own_s),
    )


def _as_revision(raw: object) -> Revision:
    known = _typed(raw, {"name": str, "model": str, "model_path": str, "settings": dict})
    if not all(type(part) is str for pair in known["settings"].items() for part in pair):
        raise TypeError("settings of a revision are not strings")
    return Revision(**known)


def _as_rollout(raw: object) -> Rollout:
    known = _typed(raw, {"model": str, "revision": str, "previous": str, "sizes": dict, "phase": str, "reason": str,
                         "is_undo": bool, "max_surge": int, "max_unavailable": int})  # fmt: skip
    sizes = {str(pool): _whole(count) for pool, count in known["sizes"].items()}
    return Rollout(**{**known, "phase": RolloutPhase(known["phase"]), "sizes": sizes})


def _typed(raw: object, types: Mapping[str, type]) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise TypeError("a part of it is not an object")
    for name, value in raw.items():
        if type(value) is not types.get(name):  # a bool is no int here
            raise TypeError(f"{str(name)[:80]!r} cannot be {str(value)[:80]!r}")
    return raw


def _seconds(value: object) -> float:
    """A finite number of 0 or more, not NaN."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
        return float(value)
    raise ValueError(f"{str(value)[:80]!r} is not a number of seconds")


def _whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{str(value)[:80]!r} is not a whole number")
    return value
