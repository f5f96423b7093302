"""The mixed role: prefill and decode of every request on one worker, no transfer."""

from __future__ import annotations

from collections.abc import Collection

from tandem.core.errors import InvalidRequestError
from tandem.core.ids import Incarnation, WorkerId
from tandem.core.lifecycle import RoleName
from tandem.engine.request import LayerHook, StepResult
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.local_requests import WholeRequests
from tandem.workercore.requests import Tracked
from tandem.workercore.role import RoleContext
from tandem.workercore.transfer_claims import Claim


class MixedRole:
    """Serves whole requests only."""

    name = RoleName.MIXED

    def __init__(self, context: RoleContext) -> None:
        self._whole = WholeRequests(context)

    @property
    def layer_hook(self) -> LayerHook | None:
        return None

    def submit(self, tracked: Tracked, message: w.Submit) -> None:
        if message.leg != w.LEG_FULL:
            raise InvalidRequestError("this worker hands nothing over", why="it has the mixed role", todo="plan anew")
        self._whole.add(tracked)

    def cancel(self, tracked: Tracked, reason: str) -> None:
        self._whole.cancel(tracked)

    def end_choices(self, tracked: Tracked, choices: Collection[int]) -> None:
        self._whole.end_choices(tracked, choices)

    def peer_message(self, peer: WorkerId, message: w.PeerMessage, received_s: float) -> None:
        return

    def peer_gone(self, peer: WorkerId, incarnation: Incarnation, reason: str) -> None:
        return

    def transfer_event(self, event: object) -> None:
        return

    def before_step(self) -> None:
        return

    def after_step(self, result: StepResult) -> None:
        self._whole.after_step(result, {})

    def tick(self, now_s: float) -> None:
        return

    def claims(self) -> list[Claim]:
        return []

    def is_idle(self) -> bool:
        return self._whole.is_idle()
