"""Control channels between workers, as their hosts keep them: dialled on first use by one side, answered by the other.

Each end notices by itself that a channel was cut, and informs its rank then; messages before that are lost.
"""

from collections import deque
from collections.abc import Callable

from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w


class Channel:
    """One channel. `lines[0]` runs from the dialler (`ends[0]`) to the acceptor (`ends[1]`), `lines[1]` back."""

    def __init__(self, ends: tuple[str, str], incarnations: tuple[int, int]) -> None:
        self.ends, self.incarnations = ends, incarnations
        self.lines: tuple[deque[w.PeerMessage], deque[w.PeerMessage]] = (deque(), deque())
        self.is_cut = False
        self.has_noticed = [False, False]

    def say(self, end: int, message: w.PeerMessage) -> None:
        if not self.is_cut:
            self.lines[end].append(message)

    def cut(self) -> None:
        """Messages under way are lost."""
        self.is_cut = True
        for line in self.lines:
            line.clear()


class Channels:
    """All channels of a test. `incarnation_of(name)` is what a host calls itself now; `deliver` reaches a rank."""

    def __init__(
        self,
        incarnation_of: Callable[[str], int],
        deliver: Callable[[str, e.HostToRank], None],
        clock_s: Callable[[], float],
    ) -> None:
        self._incarnation_of, self._deliver, self._clock_s = incarnation_of, deliver, clock_s
        self.all: list[Channel] = []

    def send(self, name: str, to: e.ToPeer) -> None:
        """Handle a rank's message as the host of `name` does."""
        mine = self._incarnation_of(name)
        if not to.address:
            for channel in self.all:
                if channel.ends == (to.worker, name) and not channel.has_noticed[1]:
                    channel.say(1, to.message)
                    return
        for channel in self.all:
            is_it = channel.ends == (name, to.worker) and channel.incarnations[1] == to.incarnation
            if is_it and not channel.has_noticed[0]:
                channel.say(0, to.message)
                return
        if not to.address:
            self._tell(name, to.worker, to.incarnation, "there is no control channel to it")
            return
        channel = Channel((name, to.worker), (mine, to.incarnation))
        if self._incarnation_of(to.worker) == to.incarnation:
            for older in list(self.all):
                if older.ends == channel.ends and not older.has_noticed[1]:
                    older.cut()
                    older.has_noticed[1] = True
                    self._tell(to.worker, name, 0, "it opened another control channel")
        else:  # its hello is refused
            channel.is_cut = channel.has_noticed[1] = True
        channel.say(0, to.message)
        self.all.append(channel)

    def carry(self, channel: Channel, line: int, message: w.PeerMessage) -> None:
        """A message arrives."""
        stamped = e.FromPeer(
            worker=channel.ends[line], incarnation=channel.incarnations[line], message=message,
            received_s=self._clock_s(),
        )  # fmt: skip
        self._deliver(channel.ends[1 - line], e.HostToRank(peer=stamped))

    def unnoticed(self) -> list[tuple[Channel, int]]:
        """Cut channels, and the ends that have not noticed."""
        self.all = [c for c in self.all if not (c.is_cut and all(c.has_noticed))]
        return [(c, end) for c in self.all if c.is_cut for end in (0, 1) if not c.has_noticed[end]]

    def notice(self, channel: Channel, end: int) -> None:
        """The host at this end sees that the channel has ended."""
        if not channel.has_noticed[end]:
            channel.has_noticed[end] = True
            other = 1 - end
            self._tell(channel.ends[end], channel.ends[other], channel.incarnations[other], "the channel was cut")

    def close_all(self, name: str, *, is_dead: bool = False) -> None:
        """The host of one worker closes its channels (and informs its rank), or dies with them."""
        for channel in self.all:
            if name in channel.ends:
                channel.cut()
                end = channel.ends.index(name)
                if is_dead:
                    channel.has_noticed[end] = True
                else:
                    self.notice(channel, end)

    def _tell(self, name: str, other: str, incarnation: int, reason: str) -> None:
        gone = e.PeerGone(worker=other, incarnation=incarnation, reason=reason)
        self._deliver(name, e.HostToRank(peer_gone=gone))
