"""When a link is busy, what it achieves, and when that is far below what was measured."""

import pytest

from tandem.core.clock import ManualClock
from tandem.core.ids import TransferId
from tandem.kvtransfer.link_meter import ENOUGH_BYTES, ENOUGH_TRANSFERS, TELLING_BYTES, LinkMeter

MIB = 1 << 20


def send(meter: LinkMeter, clock: ManualClock, transfer: int, size: int, write_s: float, answer_s: float) -> None:
    """One transfer: a push that takes `write_s` to write, and the receiver's answer `answer_s` later."""
    meter.begin()
    clock.advance(write_s)
    meter.wrote(size)
    meter.finishing(TransferId(transfer))
    clock.advance(answer_s)
    meter.answered(TransferId(transfer))


def test_only_busy_time_counts() -> None:
    clock = ManualClock()
    meter = LinkMeter(clock)
    for number in range(4):
        send(meter, clock, number, 4 * MIB, 0.1, 0.1)
        assert not meter.is_busy
        clock.advance(60.0)  # a prompt is computed
    assert meter.achieved_bytes_per_s() == pytest.approx(16 * MIB / 0.8)


def test_overlapping_transfers_count_once() -> None:
    clock = ManualClock()
    meter = LinkMeter(clock)
    meter.begin()
    clock.advance(1.0)
    meter.wrote(4 * MIB)
    meter.finishing(TransferId(1))
    meter.begin()
    clock.advance(1.0)
    meter.wrote(4 * MIB)
    meter.finishing(TransferId(2))
    assert meter.is_busy
    meter.answered(TransferId(1))
    meter.answered(TransferId(1))  # once is enough
    meter.answered(TransferId(9))  # it was not asked
    clock.advance(2.0)
    assert meter.is_busy
    meter.answered(TransferId(2))
    assert not meter.is_busy
    assert meter.achieved_bytes_per_s() == 8 * MIB / 4.0


def test_little_has_no_rate() -> None:
    clock = ManualClock()
    meter = LinkMeter(clock)
    send(meter, clock, 1, MIB // 2, 0.1, 0.1)
    assert meter.achieved_bytes_per_s() == 0.0


def test_far_below_needs_enough_bytes_or_transfers() -> None:
    clock = ManualClock()
    meter = LinkMeter(clock)
    measured, latency_s = 1e9, 1e-4
    size = ENOUGH_BYTES // 4
    for number in range(3):
        send(meter, clock, number, size, 0.5, 0.5)
        assert not meter.is_far_below(measured, latency_s)
    send(meter, clock, 3, size, 0.5, 0.5)
    assert meter.is_far_below(measured, latency_s)
    assert not meter.is_far_below(2e7, latency_s)  # 16 MB/s is near 20 MB/s
    meter.restart()
    assert not meter.is_far_below(measured, latency_s)
    assert meter.achieved_bytes_per_s() == ENOUGH_BYTES / 4.0  # shown until there is something newer
    for number in range(ENOUGH_TRANSFERS):
        send(meter, clock, number, MIB // 4, 0.02, 0.02)
    assert meter.is_far_below(measured, latency_s)


def test_far_above_needs_enough_bytes() -> None:
    clock = ManualClock()
    meter = LinkMeter(clock)
    assert not meter.is_far_above(1e6)
    send(meter, clock, 1, ENOUGH_BYTES // 2, 0.01, 0.01)
    assert not meter.is_far_above(1e6)
    send(meter, clock, 2, ENOUGH_BYTES // 2, 0.01, 0.01)
    assert meter.is_far_above(1e6)
    assert not meter.is_far_above(ENOUGH_BYTES / 0.04)
    assert not meter.is_far_above(ENOUGH_BYTES / 0.04 / 3.9)
    meter.restart()
    assert not meter.is_far_above(1e6)


def test_many_small_transfers_on_a_fast_link_are_not_far_below() -> None:
    """Each costs a round trip or two, at any bandwidth of the link."""
    clock = ManualClock()
    meter = LinkMeter(clock)
    for number in range(2000):
        send(meter, clock, number, 4096, 0.0, 2e-4)
    assert not meter.is_far_below(1e10, 1e-4)
    assert meter.is_far_below(1e10, 1e-6)


@pytest.mark.parametrize(("times", "is_far"), [(3.9, False), (4.0, False), (4.1, True)])
def test_far_is_four_times(times: float, is_far: bool) -> None:
    clock = ManualClock()
    meter = LinkMeter(clock)
    meter.begin()
    clock.advance(4.0)
    meter.wrote(ENOUGH_BYTES)
    assert meter.is_far_below(ENOUGH_BYTES * times / 4.0, 0.0) is is_far
    assert meter.is_far_above(ENOUGH_BYTES / times / 4.0) is is_far
    assert not meter.is_far_below(0.0, 0.0), "nothing was measured"
    assert not meter.is_far_above(0.0), "nothing was measured"


def test_round_trips_are_those_of_writes_and_of_answers() -> None:
    clock = ManualClock()
    meter = LinkMeter(clock)
    for number in range(ENOUGH_TRANSFERS):
        send(meter, clock, number, 0, 0.0, 0.125)
    assert not meter.is_far_below(1e9, 1 / 64)
    assert meter.is_far_below(1e9, 1 / 65)


@pytest.mark.parametrize(("busy_s", "is_far"), [(0.25, True), (0.24, False)])
def test_a_quarter_of_a_second_says_something(busy_s: float, is_far: bool) -> None:
    clock = ManualClock()
    meter = LinkMeter(clock)
    meter.begin()
    clock.advance(busy_s)
    meter.wrote(ENOUGH_BYTES)
    assert meter.is_far_below(1e12, 0.0) is is_far


def test_a_link_that_is_busy_now_counts_until_now() -> None:
    clock = ManualClock()
    meter = LinkMeter(clock)
    assert not meter.is_busy
    meter.begin()
    assert meter.is_busy
    clock.advance(1.0)
    meter.wrote(TELLING_BYTES)
    assert not meter.is_busy
    assert meter.achieved_bytes_per_s() == TELLING_BYTES
    meter.begin()
    clock.advance(1.0)
    assert meter.achieved_bytes_per_s() == TELLING_BYTES / 2
    meter.wrote(0)
    meter.restart()
    meter.begin()
    clock.advance(1.0)
    meter.wrote(TELLING_BYTES - 1)
    assert meter.achieved_bytes_per_s() == TELLING_BYTES / 2, "too little to say anything new"


def test_a_short_hiccup_is_not_far_below() -> None:
    clock = ManualClock()
    meter = LinkMeter(clock)
    send(meter, clock, 1, ENOUGH_BYTES, 0.1, 0.1)  # a quarter of a second measures more of the scheduler
    assert not meter.is_far_below(1e12, 0.0)


def test_what_was_under_way_at_a_restart_goes_on_counting() -> None:
    clock = ManualClock()
    meter = LinkMeter(clock)
    meter.begin()
    clock.advance(10.0)
    meter.restart()
    assert meter.is_busy
    clock.advance(1.0)
    meter.wrote(2 * MIB)
    assert meter.achieved_bytes_per_s() == 2 * MIB / 1.0
