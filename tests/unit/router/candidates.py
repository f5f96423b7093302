"""Workers as policies see them, in few words."""

from typing import Any

from tandem.core.ids import GroupId, Incarnation, WorkerId
from tandem.core.kv_compatibility import KVProfile
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.core.prefill_queue import PrefillSpeed
from tandem.core.state_enums import RoleName
from tandem.router.routing.plan import Candidate


def at(tokens_per_s: float, context_s: float = 0.0) -> PrefillSpeed:
    return PrefillSpeed(tokens_per_s=tokens_per_s, context_s=context_s)


def worker(name: str, role: RoleName, **more: Any) -> Candidate:
    return Candidate(worker=WorkerId(name), incarnation=Incarnation(1), role=role, **more)


def p(name: str = "p0", **more: Any) -> Candidate:
    return worker(name, RoleName.PREFILL, **more)


def d(name: str = "d0", **more: Any) -> Candidate:
    return worker(name, RoleName.DECODE, **more)


def m(name: str = "m0", **more: Any) -> Candidate:
    return worker(name, RoleName.MIXED, **more)


def profile(fingerprint: str = "abc", transports: tuple[str, ...] = ("shm",)) -> KVProfile:
    identity = (("model", "m"), ("revision", fingerprint))
    return KVProfile(fingerprint=fingerprint, identity=identity, layout=KVLayout(groups=()), transports=transports)


def of_kv(dtype: str, block_tokens: int = 16, **more: Any) -> KVProfile:
    """One KV group: 2 planes × 2 heads × 8 values a token."""
    spec = KVGroupSpec(
        group=GroupId(0), layers=(0,), planes=2, heads=2, width=8, block_tokens=block_tokens, dtype=dtype
    )  # fmt: skip
    return KVProfile(fingerprint="abc", identity=(), layout=KVLayout(groups=(spec,)), **more)
