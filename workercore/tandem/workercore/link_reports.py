"""A rank's reports of its links: each new measurement at once, the links in use every few seconds."""

from __future__ import annotations

from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.link_wire import link_to_wire, speed_from_wire, speed_to_wire
from tandem.workercore.role import RoleContext

LOOK_EVERY_S = 2.0


class LinkNews:
    """Belongs to the step loop's thread."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._links: list[w.LinkReport] = []
        self._looked_s = float("-inf")

    def publish(self) -> None:
        """Send the measurements since the last call."""
        if self._context.speeds is None:
            return
        for speed in self._context.speeds.take_news():
            self._context.outbox.put(e.RankToHost(link_measured=speed_to_wire(speed)))
            self._looked_s = float("-inf")  # a new link is to be shown

    def learn(self, message: e.LinkSpeeds) -> None:
        """Take in what others measured from this host."""
        if self._context.speeds is not None:
            self._context.speeds.learn(map(speed_from_wire, message.rows))

    def links(self) -> list[w.LinkReport]:
        """The links in use, as of a few seconds ago."""
        now_s = self._context.clock.now_s()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            self._links = [link_to_wire(link) for link in self._context.sender.links()]
        return self._links
