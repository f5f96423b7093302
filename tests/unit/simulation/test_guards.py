"""The guards bear load: with any one of them switched off, histories that hold otherwise break a promise."""

import inspect

import pytest

from tandem.kvtransfer import frame_checks
from tandem.kvtransfer.coverage import Coverage
from tandem.kvtransfer.frame import Frame
from tests.unit.simulation.frame_walk import frame_walk
from tests.unit.simulation.frames import Pair
from tests.unit.simulation.walk import Walk

SEEDS = 400
GUARDS = (
    "attempt",
    "receiver's incarnation",
    "sender's incarnation",
    "checksum",
    "coverage",
    "distinct coverage",
    "sender",
    "withdrawal",
)


def _mark_again(coverage: Coverage, frame: Frame) -> int:
    """Mark as `Coverage.mark`, but a cell that comes twice counts twice."""
    coverage.missing_cells = max(0, coverage.missing_cells - len(frame.blocks) * len(frame.layers) * len(frame.heads))
    return 0


def switch_off(guard: str, patch: pytest.MonkeyPatch) -> None:
    """Take one guard out of the product's code."""
    if guard == "attempt":
        patch.setattr(frame_checks, "is_of_attempt", lambda frame, ticket: True)
    elif guard == "receiver's incarnation":
        patch.setattr(frame_checks, "is_for", lambda frame, incarnation: True)
    elif guard == "sender's incarnation":
        patch.setattr(frame_checks, "is_from", lambda frame, ticket: True)
    elif guard == "checksum":
        patch.setattr(frame_checks, "is_intact", lambda frame, crc: True)
    elif guard == "sender":
        patch.setattr(frame_checks, "is_of_sender", lambda worker, ticket: True)
    elif guard == "withdrawal":
        patch.setattr(frame_checks, "is_current", lambda payload: True)
    elif guard == "coverage":
        patch.setattr(Coverage, "is_complete", property(lambda coverage: True))
    elif guard == "distinct coverage":
        patch.setattr(Coverage, "has_new", lambda coverage, frame: True)
        patch.setattr(Coverage, "mark", _mark_again)


def frame_walks(seeds: int) -> int:
    """Return the number of transfers that were verified and admitted."""
    return sum(frame_walk(seed, 200).verified for seed in range(seeds))


def spoiled_walks(seeds: int) -> None:
    for seed in range(seeds):
        Walk(seed, {"spoil": 1}).run(800)


@pytest.mark.parametrize("guard", GUARDS)
def test_random_histories_of_frames_find_a_guard_that_is_off(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    switch_off(guard, monkeypatch)
    with pytest.raises(AssertionError, match=r"wrong bytes were verified|changed after its fence"):
        frame_walks(SEEDS)


def test_random_histories_of_frames_hold_with_all_guards_on() -> None:
    assert frame_walks(SEEDS // 4) > SEEDS // 8


@pytest.mark.parametrize("guard", ["checksum", "coverage"])
def test_a_walk_through_the_cluster_finds_a_guard_that_is_off(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These two stand between a broken wire and a wrong token."""
    switch_off(guard, monkeypatch)
    with pytest.raises(AssertionError, match="is not the answer"):
        spoiled_walks(40)


def late_frame(*, of: str) -> Pair:
    """The directed history: a frame of a transfer that has ended lands in its blocks' next transfer, of the same id."""
    pair = Pair()
    pair.begin(1, (0, 1), 1)
    for _ in range(3):
        pair.send(0)  # OPEN, and the first two data frames
    pair.end(1, "cancel")
    pair.cancel_sending(0)
    if of == "receiver's incarnation":
        pair.receiver_begins_anew()
    if of == "sender's incarnation":
        pair.sender_begins_anew()
    pair.begin(1, (0, 1), 2 if of == "attempt" else 1)
    for _ in range(6):
        pair.send(0)
    return pair


@pytest.mark.parametrize("guard", GUARDS[:3])
def test_a_late_frame_of_another(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = late_frame(of=guard)
    pair.settle()
    assert pair.verified == 1
    switch_off(guard, monkeypatch)
    broken = late_frame(of=guard)
    with pytest.raises(AssertionError, match="wrong bytes were verified"):
        broken.settle()


def spoiled(how: str) -> Pair:
    """A transfer of four frames, of which one is lost, doubled in place of the lost one, or has a flipped bit."""
    pair = Pair()
    pair.begin(1, (0, 1), 1)
    for _ in range(6):
        pair.send(0)
    if how == "checksum":
        pair.flip(2, 5)
    else:
        pair.lose(2)
    if how == "distinct coverage":
        pair.land(0)
        pair.land(0, again=True)
    return pair


@pytest.mark.parametrize("guard", GUARDS[3:6])
def test_a_wire_that_spoils(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = spoiled(guard)
    pair.settle()
    assert pair.verified == 0
    switch_off(guard, monkeypatch)
    with pytest.raises(AssertionError, match="wrong bytes were verified"):
        spoiled(guard).settle()


def meddled(how: str) -> Pair:
    """A transfer with a frame that has other bytes and the right sum: a stranger's, or of memory given away."""
    pair = Pair()
    pair.begin(1, (0, 1), 1)
    for _ in range(6):
        pair.send(0)
    pair.check()
    pair.land(0)  # OPEN
    if how == "sender":
        pair.forge(2)
    else:
        pair.withdraw(2)
    return pair


@pytest.mark.parametrize("guard", GUARDS[6:])
def test_other_bytes_with_the_right_sum(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = meddled(guard)
    pair.settle()
    assert pair.verified == (1 if guard == "sender" else 0), "a stranger changes nothing, a withdrawal ends the attempt"
    switch_off(guard, monkeypatch)
    broken = meddled(guard)
    with pytest.raises(AssertionError, match="wrong bytes were verified"):
        broken.settle()


def test_every_guard_is_among_them() -> None:
    """A guard that is added gets its place above."""
    named = {name for name, _ in inspect.getmembers(frame_checks, inspect.isfunction) if name.startswith("is_")}
    switched = set()
    for guard in GUARDS:
        with pytest.MonkeyPatch.context() as patch:
            before = {name: getattr(frame_checks, name) for name in named}
            switch_off(guard, patch)
            switched |= {name for name in named if getattr(frame_checks, name) is not before[name]}
    assert switched == named
