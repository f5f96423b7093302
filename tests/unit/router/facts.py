"""What workers say of themselves, made up."""

from __future__ import annotations

from tandem.core.ids import Incarnation, WorkerId
from tandem.core.lifecycle import RoleName
from tandem.kvtransfer.wire import profile_from_wire
from tandem.router.wire import WorkerFacts
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
