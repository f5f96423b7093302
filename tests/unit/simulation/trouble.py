"""Everything that goes wrong in a world: lost, doubled, late and spoiled messages, cuts, lapses, deaths, cancels."""

from tests.unit.simulation.world import World

BREAKS = ("wire", "channel", "notice", "notice")
LOSSES = ("lapse", "renew", "register", "restart", "router")
WAITS_S = (0.01, 0.6, 1.1, 3.0, 6.0, 31.0)
"""Among them: past a ticket's use, a lease, the wait for an announcement, a request's deadline."""


class Trouble:
    """Each method does one thing to the `which`-th of those that it can be done to, or nothing if there is none."""

    def __init__(self, world: World) -> None:
        self._world = world

    def disturb(self, which: int, how: str) -> None:
        """A message of a control channel, or a frame, is lost, comes twice, or comes after those behind it."""
        lines = [line for line in self._world.lines() if line.is_lossy]
        if not lines:
            return
        line = lines[which % len(lines)]
        first = line.items.popleft()
        if how == "double":
            line.items.extendleft([first, first])
        elif how == "late":
            line.items.append(first)

    def spoil(self, which: int, how: str, where: int) -> None:
        """A bit of a frame's head or payload flips, or its payload ends too soon."""
        lines = [line for line in self._world.lines() if line.name == "frames"]
        if lines:
            line = lines[which % len(lines)]
            line.items.appendleft(spoiled(line.items.popleft(), how, where))

    def cancel(self, which: int) -> None:
        """The client of a request is gone."""
        running = self._world.router.running
        if running:
            self._world.router.cancel(running[which % len(running)])

    def end_choice(self, which: int, choice: int) -> None:
        """A choice that has not ended met a stop string."""
        running = self._world.router.running
        if running:
            flight = running[which % len(running)]
            going_on = sorted(set(range(flight.ask.n)) - flight.ended)
            self._world.router.end_choice(flight, going_on[choice % len(going_on)])

    def plan_anew(self, which: int) -> None:
        """The router does not want to wait any longer."""
        running = self._world.router.running
        if running:
            self._world.router.again(running[which % len(running)])

    def break_link(self, which: int, what: str) -> None:
        """A KV link or a control channel breaks, or an end of one notices."""
        world = self._world
        {"wire": world.cut_wire, "channel": world.cut_channel, "notice": world.notice}[what](which)

    def lose_worker(self, name: str, what: str) -> None:
        """A worker stands still past its lease, goes on, registers anew, dies; or its router leaves it."""
        world = self._world
        if what == "lapse":
            world.workers[name].pulse.grant(world.clock.now_s())
        elif what == "renew":
            world.workers[name].pulse.grant(0.0)
        elif what == "register":
            world.register_anew(name)
        elif what == "restart":
            world.restart(name)
        else:
            world.cut_router(name)


def spoiled(packet: tuple[bytes, bytes], how: str, where: int) -> tuple[bytes, bytes]:
    """A frame as a broken wire would deliver it."""
    head, payload = packet
    if how == "head":
        return _flip(head, where), payload
    if how == "truncate":
        return head, payload[: where % max(1, len(payload))]
    return (head, _flip(payload, where)) if payload else (head, payload)


def _flip(data: bytes, where: int) -> bytes:
    at = where % len(data)
    return data[:at] + bytes([data[at] ^ 1 << where % 8]) + data[at + 1 :]
