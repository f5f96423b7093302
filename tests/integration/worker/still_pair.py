"""A served pair that stands still as soon as a request has come to a given point, and goes on when it is released."""

import threading
from collections.abc import Callable, Iterable

from tandem.rpc.v1 import engine_pb2 as e
from tests.integration.worker.loopback import Rank
from tests.integration.worker.rank_worker import ServedPair

PAUSE_S = 0.001


class StillPair(ServedPair):
    """While it stands still, services take what routers send; no rank turns, and nothing crosses between the ranks."""

    def begin(self) -> None:
        """Before the ranks' thread starts."""
        self.turns = 0
        self._held_kinds: frozenset[str] = frozenset()
        self._held: list[tuple[Rank, list[e.RankToHost]]] = []
        self._point: tuple[Callable[[], bool], threading.Event] | None = None
        self._is_still = threading.Event()

    def stand_still(self) -> None:
        """Now, until `run_to` or `go_on`."""
        self.call(self._is_still.set)

    def run_to(self, point: Callable[[], bool], held_kinds: Iterable[str] = ()) -> None:
        """Turn until `point` holds after some turn; messages of `held_kinds` between the ranks wait for `go_on`."""
        reached = threading.Event()

        def prepare() -> None:
            self._held_kinds, self._point = frozenset(held_kinds), (point, reached)
            self._is_still.clear()

        self.call(prepare)
        assert reached.wait(60), self.failure

    def go_on(self) -> None:
        """Deliver what was held, and turn for good. `turns` counts from here."""

        def release() -> None:
            self._held_kinds = frozenset()
            for rank, messages in self._held:
                rank.sent[:0] = messages
                self.carry(rank)
            self._held.clear()
            self._is_still.clear()
            self.turns = 0

        self.call(release)

    def turn(self) -> None:
        if self._is_still.is_set():
            threading.Event().wait(PAUSE_S)
            return
        super().turn()
        self.turns += 1
        if self._point is not None and self._point[0]():
            self._is_still.set()
            self._point[1].set()
            self._point = None

    def carry(self, rank: Rank) -> None:
        held = [m for m in rank.sent if m.HasField("peer") and m.peer.message.WhichOneof("kind") in self._held_kinds]
        if held:
            self._held.append((rank, list(held)))
            rank.sent[:] = [m for m in rank.sent if m not in held]
        super().carry(rank)
