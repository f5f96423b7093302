"""A follower obeys in order: nothing is pushed before it is computed here, nor past the lease."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tandem.core.ids import GroupId, Incarnation, TransferId
from tandem.engine.request import TokenOutput
from tandem.engine.runner_protocol import SampleRow, SeqSlice, StepBatch
from tandem.worker.commands import (
    AFTER_STEP,
    CancelReceiving,
    CancelSending,
    Command,
    Finish,
    PushCommand,
    SetIncarnation,
    Step,
    Stop,
    decode,
    encode,
)
from tandem.worker.follower import Follower, Reporter
from tandem.worker.followers import Followers, LeaderRunner
from tandem.workercore.heartbeat import Pulse
from tandem.workercore.message_ring import RingPair, RingReader, RingWriter

T, OTHER = TransferId(7), TransferId(8)
BATCH = StepBatch([5], [0], [SeqSlice(1, 1, ((3,),))], [0])


class Journal:
    """Runner and both transfer ends of a rank, which write down what they are asked to do."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.between_layers: Callable[[int], None] = lambda stored: None

    def step(
        self, batch: StepBatch, rows: Sequence[SampleRow], on_layers: Callable[[int, int], None] | None = None
    ) -> list[TokenOutput]:
        for layer in range(4):
            self.done.append(f"layer {layer}")
            self.between_layers(layer + 1)
            if on_layers is not None:
                on_layers(layer, layer + 1)
        self.done.append("step")
        return []

    def push(self, transfer: int, group: int, src: Any, dst: Any, layers: range, *_: int | None) -> None:
        self.done.append(f"push {transfer} {layers.start}-{layers.stop}")

    def finish(self, transfer: int) -> None:
        self.done.append(f"finish {transfer}")

    def cancel(self, transfer: int, reason: str = "") -> None:
        self.done.append(f"cancel {transfer}")

    def links(self) -> tuple[()]:
        return ()

    def set_incarnation(self, incarnation: int) -> None:
        self.done.append("incarnation")

    def counters(self) -> dict[str, int]:
        return {}


class Clock:
    now = 0.0

    def now_s(self) -> float:
        return self.now


class Rig:
    """A follower and rank 0's end of its rings."""

    def __init__(self) -> None:
        self.pair = RingPair.create("test-follower")
        self.pulse = Pulse.create("test-follower")
        self.clock, self.journal = Clock(), Journal()
        self._writer = RingWriter(self.pair.commands)
        does: Any = self.journal
        reporter = Reporter(RingWriter(self.pair.reports))
        commands = RingReader(self.pair.commands)
        self.follower = Follower(does, does, does, commands, reporter, self.pulse, self.clock)

    def say(self, command: Command, after_layers: int = AFTER_STEP) -> None:
        self._writer.write(encode(command, after_layers), 1.0)

    def turn(self) -> list[str]:
        """Run one turn; return its actions."""
        self.follower.turn(max_wait_s=0.0)
        done, self.journal.done = self.journal.done, []
        return done


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.pulse.close()
    rig.pair.close()


def push(transfer: TransferId, first: int, last: int) -> PushCommand:
    return PushCommand(transfer, GroupId(0), [], [], range(first, last))


def test_a_push_given_ahead_of_this_rank_waits_for_its_layers_and_all_else_behind_it(rig: Rig) -> None:
    """Rank 0 is two layers ahead: it had stored layers 0-1 at its report, this rank has stored one."""

    def rank_0_is_ahead(stored: int) -> None:
        if stored == 1:
            rig.say(push(T, 0, 2), after_layers=2)
            rig.say(CancelReceiving(OTHER, "gone"), after_layers=2)
        if stored == 4:
            rig.say(push(T, 2, 4), after_layers=4)
            rig.say(Finish(T))  # after the step

    rig.journal.between_layers = rank_0_is_ahead
    rig.say(Step(BATCH, has_hook=True))
    assert rig.turn() == [
        "layer 0", "layer 1", "push 7 0-2", "cancel 8", "layer 2", "layer 3", "push 7 2-4", "step", "finish 7",
    ]  # fmt: skip


def test_a_push_given_between_steps_waits_for_the_end_of_a_step_that_this_rank_is_still_in(rig: Rig) -> None:
    """Rank 0 has ended the step, and its ticket came: the layers that it stored are not all stored here yet."""

    def rank_0_is_done(stored: int) -> None:
        if stored == 1:
            rig.say(push(T, 0, 4))

    rig.journal.between_layers = rank_0_is_done
    rig.say(Step(BATCH, has_hook=True))
    assert rig.turn() == ["layer 0", "layer 1", "layer 2", "layer 3", "step", "push 7 0-4"]


def test_rank_0_says_of_every_command_how_much_of_a_step_it_follows() -> None:
    """Between steps all of it: with a smaller number a follower that lags would obey in the middle of the step."""
    pair = RingPair.create("test-leader")
    followers = Followers([pair], on_lost=lambda error: None)
    commands = RingReader(pair.commands)

    class Layers(Journal):
        layout = max_model_len = num_blocks = vocab_size = eos_token_ids = None

    does: Any = Layers()
    runner = LeaderRunner(does, followers)
    try:
        followers.broadcast(push(T, 0, 1))
        runner.step(BATCH, (), lambda first, last: followers.broadcast(push(T, first, last)))
        followers.broadcast(Finish(T))
        said = [(type(command), after) for after, command in map(decode, commands.read_all())]
        pushes = [(PushCommand, after) for after in (1, 2, 3, 4)]
        assert said == [(PushCommand, AFTER_STEP), (Step, AFTER_STEP), *pushes, (Finish, AFTER_STEP)]
    finally:
        followers.start()  # close waits for its thread
        followers.close()
        commands.close()
        pair.close()


def test_the_next_step_is_never_begun_inside_one(rig: Rig) -> None:
    def rank_0_is_done(stored: int) -> None:
        if stored == 4 and "step" not in rig.journal.done:
            rig.say(Step(BATCH, has_hook=False))
            rig.say(Stop())

    rig.journal.between_layers = rank_0_is_done
    rig.say(Step(BATCH, has_hook=True))
    layers = [f"layer {layer}" for layer in range(4)]
    assert rig.turn() == [*layers, "step", *layers, "step"]


def test_nothing_is_pushed_past_the_lease(rig: Rig) -> None:
    rig.pulse.grant(10.0)
    rig.clock.now = 11.0
    rig.say(push(T, 0, 2))
    rig.say(push(OTHER, 0, 2))
    rig.say(Finish(T))
    rig.say(CancelReceiving(T, "fences need no lease"))
    assert rig.turn() == ["cancel 7"]
    rig.say(CancelSending(OTHER))
    assert rig.turn() == ["cancel 8"]
    rig.pulse.grant(20.0)
    assert rig.turn() == ["push 7 0-2", "finish 7"], "in order, without what was cancelled"


def test_what_waited_for_the_lease_is_void_for_another_incarnation(rig: Rig) -> None:
    rig.say(SetIncarnation(Incarnation(2)))
    rig.pulse.grant(10.0, 2)
    assert rig.turn() == ["incarnation", "incarnation"]
    rig.clock.now = 11.0
    rig.say(push(T, 0, 2))
    assert rig.turn() == []
    rig.pulse.grant(20.0, 3)
    assert rig.turn() == [], "the host registered anew, rank 0 has not said so yet"
    rig.say(SetIncarnation(Incarnation(3)))
    assert rig.turn() == ["incarnation", "incarnation"]
    assert rig.turn() == []
    rig.say(push(OTHER, 0, 2))
    assert rig.turn() == ["push 8 0-2"]


def test_a_step_over_more_blocks_than_fit_the_ring_arrives_in_pieces(rig: Rig) -> None:
    """A quarter of a thousand requests behind one long prefix name its blocks once each."""
    table, many = list(range(8192)), 260
    batch = StepBatch([5] * many, [0] * many, [SeqSlice(1, 1, (table,)) for _ in range(many)], [0])
    followers = Followers([rig.pair], on_lost=lambda error: None)
    taken: list[StepBatch] = []

    def step(batch: StepBatch, rows: object, on_layers: object) -> list[TokenOutput]:
        taken.append(batch)
        return []

    rig.journal.step = step  # type: ignore[method-assign,assignment]
    sending = threading.Thread(target=followers.broadcast, args=(Step(batch, has_hook=False),))
    sending.start()
    try:
        for _ in range(100):
            rig.follower.turn(max_wait_s=0.1)
            if taken:
                break
    finally:
        sending.join(20)
        followers.start()  # close waits for its thread
        followers.close()
    assert [list(s.block_tables[0]) for s in taken[0].sequences] == [table] * many
    assert rig.turn() == [], "only the stop was left"
