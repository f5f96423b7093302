"""Routers' messages to each other about prompts that they sent, and their use."""

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.block_hash import BlockHash
from tandem.core.clock import ManualClock
from tandem.core.ids import Incarnation, WorkerId
from tandem.statestore.index.shared_speculation import HintKind, News, SharedSpeculation, pack, unpack
from tandem.statestore.index.speculation import MAX_BLOCKS, Speculation
from tandem.statestore.keys import Keys

OTHER, W, V = Incarnation(7), WorkerId("w1"), WorkerId("w2")
HASHES = [BlockHash(hashlib.sha256(b"%d" % n).digest()[:16]) for n in range(4)]
SENT = News(HintKind.SENT, "r1", W, Incarnation(5), HASHES)

incarnations = st.integers(0, 2**63 - 1).map(Incarnation)
short = st.text(max_size=60)
every_news = st.lists(
    st.builds(
        News, st.sampled_from(HintKind), short, short.map(WorkerId), incarnations, st.lists(st.sampled_from(HASHES))
    )
)


def speculation(max_blocks: int = MAX_BLOCKS, clock: ManualClock | None = None) -> SharedSpeculation:
    redis: Any = None  # nothing is sent here
    return SharedSpeculation(redis, Keys("test"), clock or ManualClock(), Incarnation(3), max_blocks=max_blocks)


@given(incarnations, every_news)
def test_what_is_told_is_what_is_heard(router: Incarnation, every: list[News]) -> None:
    assert unpack(pack(router, every)) == (router, every)


@pytest.mark.parametrize("cut", [1, 3, 16, 40])
def test_half_a_message_is_refused(cut: int) -> None:
    message = pack(OTHER, [SENT])
    with pytest.raises(ValueError, match=r"cut short|too short"):
        unpack(message[:-cut])
    with pytest.raises(ValueError, match="too short"):
        unpack(b"")


@given(st.binary(max_size=100))
def test_any_bytes_are_read_or_refused(message: bytes) -> None:
    try:
        unpack(message)
    except ValueError:
        return


def test_what_others_sent_is_expected_until_it_is_over() -> None:
    one = speculation()
    one.hear(pack(OTHER, [SENT]))
    assert one.lookup(HASHES) == {(W, 5): 4}
    one.hear(pack(OTHER, [News(HintKind.WITHDRAWN, "r1", W)]))
    assert one.lookup(HASHES) == {}
    one.hear(pack(OTHER, [SENT, News(HintKind.SETTLED, "r1", W), News(HintKind.WITHDRAWN, "r1", W)]))
    assert one.lookup(HASHES) == {(W, 5): 4}, "computed: its own events are on their way"
    one.check_integrity()


def test_requests_of_two_routers_are_two() -> None:
    one = speculation()
    one.expect("r1", W, Incarnation(5), HASHES[:2])
    one.hear(pack(OTHER, [SENT]))
    one.hear(pack(OTHER, [News(HintKind.WITHDRAWN, "r1", W)]))
    assert one.lookup(HASHES) == {(W, 5): 2}


def test_its_own_words_are_no_news() -> None:
    one = speculation()
    one.hear(pack(Incarnation(3), [SENT]))
    assert one.lookup(HASHES) == {}


def test_what_is_heard_goes_before_what_was_sent_here() -> None:
    one = speculation(max_blocks=6)
    one.expect("r1", W, Incarnation(5), HASHES)
    one.hear(pack(OTHER, [News(HintKind.SENT, "r1", V, Incarnation(5), HASHES)]))
    assert one.lookup(HASHES) == {(W, 5): 4, (V, 5): 2}, "as far as there is room"
    one.expect("r2", W, Incarnation(5), HASHES[:1])
    assert one.lookup(HASHES) == {(W, 5): 4}
    one.expect("r3", W, Incarnation(5), HASHES[:1])
    one.hear(pack(OTHER, [News(HintKind.SENT, "r2", V, Incarnation(5), HASHES)]))
    assert one.lookup(HASHES) == {(W, 5): 4}, "there is no room"
    one.check_integrity()


steps = st.tuples(
    st.sampled_from([*HintKind, None]), st.booleans(), st.sampled_from(["a", "b", "c"]), st.integers(1, len(HASHES))
)


@given(st.lists(steps, max_size=40))
def test_what_was_sent_here_is_expected_as_if_nothing_was_heard(every: list[Any]) -> None:
    clock = ManualClock()
    shared, alone = speculation(max_blocks=9, clock=clock), Speculation(clock, max_blocks=9)
    for kind, is_heard, request, blocks in every:
        if kind is None:
            clock.advance(0.4)
        elif is_heard:
            shared.hear(pack(OTHER, [News(kind, request, V, Incarnation(5), HASHES[:blocks])]))
        else:
            assert _did(shared, kind, request, blocks) == _did(alone, kind, request, blocks)
        assert shared.lookup(HASHES).get((W, Incarnation(5))) == alone.lookup(HASHES).get((W, Incarnation(5)))
        shared.check_integrity()


def _did(speculation: Speculation, kind: HintKind, request: str, blocks: int) -> bool:
    if kind is HintKind.SENT:
        speculation.expect(request, W, Incarnation(5), HASHES[:blocks])
        return True
    return speculation.settle(request, W) if kind is HintKind.SETTLED else speculation.withdraw(request, W)
