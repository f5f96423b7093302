"""The table of links: trusted speeds and their lifetime, owners of failures, reports to others, the chosen link."""

import threading
from dataclasses import replace

import pytest

from tandem.core.clock import ManualClock
from tandem.core.link_speed import LinkSpeed, rate
from tandem.kvtransfer import link_speeds
from tandem.kvtransfer.link_speeds import FORGET_S, FRESH_S, LAST_RETRY_S, LinkSpeeds, fastest

TCP = LinkSpeed(from_host="a", to_host="b", transport="tcp", peer="d0", bytes_per_s=1e9, latency_s=1e-4)
BROKEN = LinkSpeed(from_host="a", to_host="b", transport="tcp", peer="d0", failure="refused")


def test_a_measurement_is_believed_for_a_while_and_then_known_but_old() -> None:
    clock = ManualClock(5.0)
    speeds = LinkSpeeds(clock)
    assert speeds.latest(TCP.route) is None
    speeds.note(TCP)
    clock.advance(FRESH_S)
    assert speeds.fresh(TCP.route) == replace(TCP, age_s=FRESH_S)
    clock.advance(1.0)
    assert speeds.fresh(TCP.route) is None
    assert speeds.latest(TCP.route) == replace(TCP, age_s=FRESH_S + 1.0)
    assert speeds.fresh(("b", "a", "tcp")) is None  # a link has a direction


def test_the_younger_measurement_counts_whoever_took_it() -> None:
    clock = ManualClock(1000.0)
    speeds = LinkSpeeds(clock)
    speeds.learn([replace(TCP, age_s=30.0)])
    speeds.learn([replace(TCP, bytes_per_s=5e8, age_s=40.0)])
    assert speeds.latest(TCP.route) == replace(TCP, age_s=30.0)
    speeds.learn([replace(TCP, bytes_per_s=7e8, age_s=10.0)])
    assert speeds.latest(TCP.route) == replace(TCP, bytes_per_s=7e8, age_s=10.0)


def test_only_what_was_measured_here_is_news() -> None:
    clock = ManualClock()
    speeds = LinkSpeeds(clock)
    speeds.learn([TCP])
    assert speeds.take_news() == []
    speeds.note(TCP)
    clock.advance(2.0)
    assert speeds.take_news() == [replace(TCP, age_s=2.0)]
    assert speeds.take_news() == []


def test_a_failure_is_one_worker_s_and_ends_with_its_success() -> None:
    clock = ManualClock()
    speeds = LinkSpeeds(clock)
    speeds.note(TCP)
    clock.advance(1.0)
    speeds.note(BROKEN)
    assert speeds.failure(TCP.route, "d0") == "refused"
    assert speeds.failure(TCP.route, "d1") == ""
    assert speeds.fresh(TCP.route) is not None  # what is known of the hosts stays
    clock.advance(1.0)
    speeds.learn([replace(TCP, peer="d1")])
    assert speeds.failure(TCP.route, "d0") == "refused"
    speeds.note(TCP)
    assert speeds.failure(TCP.route, "d0") == ""
    assert not speeds.is_barred(TCP.route, "d0")


def test_what_failed_is_tried_again_after_pauses_that_double_up_to_a_bound() -> None:
    clock = ManualClock()
    speeds = LinkSpeeds(clock, first_retry_s=10.0)
    for pause_s in (10.0, 20.0, 40.0, 80.0, 160.0, 320.0, LAST_RETRY_S, LAST_RETRY_S):
        speeds.note(BROKEN)
        clock.advance(pause_s - 1.0)
        assert speeds.is_barred(TCP.route, "d0")
        clock.advance(1.0)
        assert not speeds.is_barred(TCP.route, "d0")


def test_a_failure_that_comes_back_from_others_is_not_a_second_one() -> None:
    """Its age went over two other clocks: it may look younger than it is."""
    clock = ManualClock(100.0)
    speeds = LinkSpeeds(clock, first_retry_s=10.0)
    speeds.note(BROKEN)
    clock.advance(3.0)
    speeds.learn([replace(BROKEN, age_s=2.9)])
    clock.advance(7.0)
    assert not speeds.is_barred(TCP.route, "d0")
    speeds.learn([replace(BROKEN, age_s=1.0)])  # another worker has tried it meanwhile
    assert speeds.is_barred(TCP.route, "d0")


def test_old_rows_are_forgotten() -> None:
    clock = ManualClock(2 * FORGET_S)
    speeds = LinkSpeeds(clock)
    speeds.learn([replace(TCP, age_s=FORGET_S - 1.0), replace(BROKEN, age_s=FORGET_S - 2.0)])
    assert len(speeds.rows()) == 2
    clock.advance(3.0)
    speeds.learn([])
    assert speeds.rows() == []


def test_old_rows_are_forgotten_where_nobody_tells_of_any() -> None:
    clock = ManualClock()
    speeds = LinkSpeeds(clock)
    speeds.note(BROKEN)
    clock.advance(FORGET_S + 1.0)
    speeds.note(replace(BROKEN, peer="d1"))
    assert [row.peer for row in speeds.rows()] == ["d1"]


def test_the_speed_to_a_worker_without_a_link_is_that_of_its_host() -> None:
    speeds = LinkSpeeds(ManualClock())
    speeds.learn(
        [TCP, replace(TCP, transport="grpc", bytes_per_s=3e9, peer="d1"), replace(TCP, to_host="c", peer="d2")]
    )
    assert speeds.fastest_to("d0", "a") == 3e9  # d0 and d1 are on b
    assert speeds.fastest_to("d2", "a") == 1e9
    assert speeds.fastest_to("d0", "elsewhere") is None
    assert speeds.fastest_to("d9", "a") is None


@pytest.mark.parametrize(
    ("rates", "place"),
    [
        ([1.0], 0),
        ([1.0, 1.2], 0),  # near the best the order decides: measurements are noisy
        ([1.0, 1.3], 1),
        ([1.0, 1.3, 1.5], 1),
        ([1.0, 0.5, 2.0], 2),
        ([0.0, 0.1], 1),
    ],
)
def test_the_fastest_is_taken_and_the_order_decides_between_equals(rates: list[float], place: int) -> None:
    assert fastest(rates) == place


def test_what_nobody_takes_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_speeds, "MAX_ROWS", 3)
    speeds = LinkSpeeds(ManualClock())
    for number in range(5):
        speeds.note(replace(TCP, to_host=f"h{number}"))
    assert [row.to_host for row in speeds.take_news()] == ["h2", "h3", "h4"]


def test_what_others_tell_of_a_failure_counts_from_a_second_on() -> None:
    clock = ManualClock(100.0)
    speeds = LinkSpeeds(clock, first_retry_s=10.0)
    speeds.learn([replace(BROKEN, age_s=5.0)])
    speeds.learn([replace(BROKEN, age_s=4.0)])  # the same one, by another clock
    clock.advance(5.0)
    assert not speeds.is_barred(TCP.route, "d0")
    speeds.learn([replace(BROKEN, age_s=0.0)])
    clock.advance(19.5)
    assert speeds.is_barred(TCP.route, "d0"), "it has failed twice"
    clock.advance(0.5)
    assert not speeds.is_barred(TCP.route, "d0")


def test_a_success_of_the_same_moment_ends_a_failure() -> None:
    speeds = LinkSpeeds(ManualClock())
    speeds.note(BROKEN)
    speeds.note(TCP)
    assert speeds.failure(TCP.route, "d0") == ""
    assert speeds.latest(TCP.route) == TCP
    speeds.note(replace(TCP, bytes_per_s=2e9))
    assert speeds.latest(TCP.route) == TCP, "the first of one moment counts"


def test_two_hosts_are_measured_by_one_at_a_time() -> None:
    speeds = LinkSpeeds(ManualClock())
    is_wanted = threading.Event()
    is_wanted.set()
    taken, answers = threading.Event(), []

    def second() -> None:
        taken.set()
        with speeds.turn("a", "b", is_wanted.is_set) as is_mine:
            answers.append(is_mine)

    with speeds.turn("a", "b", lambda: True) as is_mine:
        assert is_mine
        waiting = threading.Thread(target=second)
        waiting.start()
        assert taken.wait(5)
        with speeds.turn("a", "c", lambda: True) as other:
            assert other  # other hosts do not wait
        is_wanted.clear()
        waiting.join(5)
        assert answers == [False]  # its link was closed meanwhile
    with speeds.turn("a", "b", lambda: True) as is_mine:
        assert is_mine


def test_who_stands_still_while_it_measures_keeps_others_waiting_for_a_moment_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_speeds, "TURN_S", 0.2)
    speeds = LinkSpeeds(ManualClock())
    answers: list[bool] = []

    def second() -> None:
        with speeds.turn("a", "b", lambda: True) as is_mine:
            answers.append(is_mine)

    with speeds.turn("a", "b", lambda: True):
        waiting = threading.Thread(target=second)
        waiting.start()
        waiting.join(10)
        assert answers == [True]


def test_rates_for_people() -> None:
    assert [rate(0), rate(12.5e6), rate(9.6e8), rate(3.2e9)] == ["–", "12.5 MB/s", "960 MB/s", "3.20 GB/s"]
