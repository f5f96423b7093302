"""Records and messages of a scripted worker, shared by tests and benches of the router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc

from tandem.core.call_proof import PROOF_KEY, STREAM, ProofChecker, Refused, value_of
from tandem.core.ids import Incarnation, WorkerId
from tandem.core.kv_compatibility import PROTOCOL
from tandem.core.proto_mapping import from_proto
from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import RoleName, WorkerState
from tandem.core.version import STREAM_VERSION
from tandem.rpc.v1 import worker_pb2 as w
from tandem.statestore.records import WorkerRecord

EOS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeUpWorker:
    """It claims to serve the bundled model; those of one fingerprint fit together."""

    worker: WorkerId
    incarnation: Incarnation
    role: RoleName
    address: str
    model: str = "tandem-tiny"
    fingerprint: str = "f" * 32
    block_tokens: int = 16
    max_model_len: int = 4096
    num_blocks: int = 512
    token_kv_bytes: int = 0
    groups: tuple[w.KvGroup, ...] = ()
    transports: tuple[str, ...] = ("shm", "grpc")
    protocol: int = STREAM_VERSION
    host: str = ""

    def info(self) -> w.WorkerInfo:
        """Its WorkerInfo for the hello of its stream."""
        profile = w.KvProfile(
            fingerprint=self.fingerprint, identity={"model": self.model, "revision": self.fingerprint},
            groups=self.groups, tp=1, protocol_major=PROTOCOL[0], protocol_minor=PROTOCOL[1],
            transports=["shm", "grpc"],
        )  # fmt: skip
        return w.WorkerInfo(
            worker=self.worker, incarnation=self.incarnation, role=self.role, address=self.address, model=self.model,
            fingerprint=self.fingerprint, tp=1, block_tokens=self.block_tokens, kv_dtype="float32",
            max_model_len=self.max_model_len, vocab_size=4096, num_blocks=[self.num_blocks],
            token_kv_bytes=self.token_kv_bytes, transports=self.transports, protocol=self.protocol,
            eos_token_ids=[EOS], host=self.host, profile=profile,
        )  # fmt: skip

    def record(self) -> WorkerRecord:
        """Its record for the registry."""
        return from_proto(WorkerRecord, self.info(), state=WorkerState.READY.value)


async def let_in(context: Any, secret: ClusterSecret, method: str = STREAM) -> None:
    """Prove to the caller of any scripted worker that this is a member of the cluster; end the call if the caller is
    none."""
    checker, line = ProofChecker(secret), value_of(context.invocation_metadata(), PROOF_KEY)
    refusal = checker.refusal(line, method, None)
    if refusal is not None and refusal.kind is Refused.STRANGER:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal.why)
    await context.send_initial_metadata(checker.answer(line))
