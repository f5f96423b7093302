"""What routers say to each other of prompts that they sent, and what they make of it."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.blockhash import BlockHash
from tandem.core.clock import ManualClock
from tandem.core.ids import Incarnation, WorkerId
from tandem.prefixindex.keys import Keys
from tandem.prefixindex.sharedspeculation import Kind, News, SharedSpeculation, pack, unpack

OTHER, W = Incarnation(7), WorkerId("w1")
HASHES = [BlockHash(hashlib.sha256(b"%d" % n).digest()[:16]) for n in range(4)]
SENT = News(Kind.SENT, "r1", W, Incarnation(5), HASHES)

incarnations = st.integers(0, 2**63 - 1).map(Incarnation)
short = st.text(max_size=60)
every_news = st.lists(
    st.builds(News, st.sampled_from(Kind), short, short.map(WorkerId), incarnations, st.lists(st.sampled_from(HASHES)))
)


def speculation() -> SharedSpeculation:
    redis: Any = None  # nothing is sent here
    return SharedSpeculation(redis, Keys("test"), ManualClock(), Incarnation(3))


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
    one.hear(pack(OTHER, [News(Kind.WITHDRAWN, "r1", W)]))
    assert one.lookup(HASHES) == {}
    one.hear(pack(OTHER, [SENT, News(Kind.SETTLED, "r1", W), News(Kind.WITHDRAWN, "r1", W)]))
    assert one.lookup(HASHES) == {(W, 5): 4}, "computed: its own events are on their way"
    one.check_integrity()


def test_requests_of_two_routers_are_two() -> None:
    one = speculation()
    one.expect("r1", W, Incarnation(5), HASHES[:2])
    one.hear(pack(OTHER, [SENT]))
    one.hear(pack(OTHER, [News(Kind.WITHDRAWN, "r1", W)]))
    assert one.lookup(HASHES) == {(W, 5): 2}


def test_its_own_words_are_no_news() -> None:
    one = speculation()
    one.hear(pack(Incarnation(3), [SENT]))
    assert one.lookup(HASHES) == {}
