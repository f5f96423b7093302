"""Terms of a request: its caller, its SLO class, how urgent it is and how long it may take. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.core.api_keys import ANONYMOUS_TENANT, LEAST_URGENT, MOST_URGENT
from tandem.core.config import SloSection
from tandem.core.errors import InvalidRequestError, PermissionDeniedError
from tandem.router.error_quoting import quoted


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request. `slo` "" = the request may choose; `priority` = the most urgent it may be.
    `is_background`: a batch's, for which no client waits. `sees_load`: its answers may show the work that workers have
    for others."""

    tenant: str
    key_id: str = ""
    slo: str = ""
    priority: int = 0
    is_background: bool = False
    sees_load: bool = False


ANONYMOUS = Caller(tenant=ANONYMOUS_TENANT, sees_load=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloRequest:
    """SLO class, priority and timeout that a request asks for; None = nothing. `slo_param`, `timeout_param`: the names
    of its fields."""

    slo: str | None = None
    slo_param: str = "X-SLO-Class"
    priority: int | None = None
    timeout_s: float | None = None
    timeout_param: str = "timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class SloTerms:
    """Terms in force for a request. `slo` "" = no class. `ttft_s`, `itl_s` inf = nothing is promised. `is_background`:
    no client waits for it; it is in no queue and no budget here, since batches have a rate limit of their own."""

    tenant: str = ANONYMOUS.tenant
    slo: str = ""
    ttft_s: float = math.inf
    itl_s: float = math.inf
    priority: int = 0
    timeout_s: float = math.inf
    is_background: bool = False


class SloClasses:
    """The SLO classes of the configuration; `default` "" = requests that name none have none."""

    def __init__(self, classes: Mapping[str, SloSection], default: str, timeout_s: float) -> None:
        self._classes, self._default, self._timeout_s = dict(classes), default, timeout_s

    def set(self, name: str, section: SloSection) -> None:
        """A class promises this from now on; what was promised before holds."""
        self._classes[name] = section

    @property
    def sections(self) -> dict[str, SloSection]:
        return dict(self._classes)

    @property
    def default(self) -> str:
        return self._default

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._classes))

    @property
    def least_itl_s(self) -> float:
        """The strictest promise between tokens; inf = there is none. Requests that share a batch share its steps."""
        return min((one.itl_s or math.inf for one in self._classes.values()), default=math.inf)

    def terms(self, caller: Caller, wish: SloRequest) -> SloTerms:
        """InvalidRequestError or PermissionDeniedError when `wish` cannot be had."""
        slo, priority, timeout_s = self._slo(caller, wish), _priority(caller, wish), _timeout_s(wish)
        timeout_s = min(self._timeout_s, timeout_s)
        if caller.is_background:  # no client waits for its first token
            return SloTerms(tenant=caller.tenant, timeout_s=timeout_s, is_background=True)
        found = self._classes.get(slo, SloSection())
        return SloTerms(
            tenant=caller.tenant,
            slo=slo,
            ttft_s=found.ttft_s or math.inf,
            itl_s=found.itl_s or math.inf,
            priority=priority,
            timeout_s=timeout_s,
        )

    def _slo(self, caller: Caller, wish: SloRequest) -> str:
        if wish.slo is None:
            return caller.slo or self._default
        if caller.slo and wish.slo != caller.slo:
            raise PermissionDeniedError(
                f"requests with this key are of the SLO class {caller.slo}", why=f"{wish.slo_param} names another",
                todo="leave it out", param=wish.slo_param,
            )  # fmt: skip
        if wish.slo not in self._classes:
            raise InvalidRequestError(
                f"the SLO class {quoted(wish.slo)} does not exist", why=f"there are: {', '.join(self.names) or 'none'}",
                param=wish.slo_param,
            )  # fmt: skip
        return wish.slo


def _priority(caller: Caller, wish: SloRequest) -> int:
    if wish.priority is None:
        return caller.priority
    if not MOST_URGENT <= wish.priority <= LEAST_URGENT:
        why = f"it must be between {MOST_URGENT} and {LEAST_URGENT}"
        raise InvalidRequestError(f"priority is {wish.priority}", why=why, param="priority")
    if wish.priority < caller.priority:
        raise PermissionDeniedError(
            f"priority is {wish.priority}", why=f"the most urgent that is allowed here is {caller.priority}",
            todo="leave it out or use another key", param="priority",
        )  # fmt: skip
    return wish.priority


def _timeout_s(wish: SloRequest) -> float:
    if wish.timeout_s is None:
        return math.inf
    if not 0 < wish.timeout_s < math.inf:
        raise InvalidRequestError(
            f"{wish.timeout_param} is {wish.timeout_s:g}", why="it must be a number of seconds above 0",
            param=wish.timeout_param,
        )  # fmt: skip
    return wish.timeout_s
