"""Made-up facts that workers report of themselves."""

from typing import Any

from tandem.core.ids import GroupId, Incarnation, WorkerId
from tandem.core.kv_compatibility import KVProfile
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.core.state_enums import RoleName
from tandem.kvtransfer.wire import profile_from_wire
from tandem.router.workers.proto_convert import WorkerFacts
from tandem.rpc.v1 import worker_pb2 as w


def worker_facts(worker: str, role: RoleName, incarnation: int = 1, fingerprint: str = "f") -> WorkerFacts:
    """A small worker; those of one fingerprint fit together."""
    profile = w.KvProfile(
        fingerprint=fingerprint, identity={"revision": fingerprint}, tp=1, protocol_major=2, transports=["shm"]
    )
    return WorkerFacts(
        worker=WorkerId(worker), incarnation=Incarnation(incarnation), role=role, address="here:1", model="m",
        fingerprint=fingerprint, tp=1, block_tokens=16, kv_dtype="float32", max_model_len=4096, vocab_size=4096,
        num_blocks=(512,), token_kv_bytes=64, transports=("shm",), protocol=2, eos_token_ids=(1,), pid=1,
        rank_pids=(2,), profile=profile_from_wire(profile),
    )  # fmt: skip


def facts(
    name: str, role: RoleName, block_tokens: int = 16, dtype: str = "float32", incarnation: int = 1, **more: Any
) -> WorkerFacts:
    """A worker with one KV group, in blocks of `block_tokens`."""
    spec = KVGroupSpec(
        group=GroupId(0), layers=(0,), planes=2, heads=2, width=8, block_tokens=block_tokens, dtype=dtype
    )  # fmt: skip
    profile = KVProfile(fingerprint="f", identity=(), layout=KVLayout(groups=(spec,)), **more)
    return WorkerFacts(
        worker=WorkerId(name), incarnation=Incarnation(incarnation), role=role, address="", model="m", fingerprint="f",
        tp=1, block_tokens=block_tokens, kv_dtype=dtype, max_model_len=100, vocab_size=100, num_blocks=(9,),
        token_kv_bytes=1, transports=(), protocol=2, eos_token_ids=(), pid=1, rank_pids=(), profile=profile,
    )  # fmt: skip
