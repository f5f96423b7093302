"""Conditional disaggregation: waiting requests and their causes, a prefill worker that writes answers, busy wires."""

import dataclasses
import math
from typing import Any

import pytest

from tandem.core.config import Disaggregation
from tandem.router.routing.cost_model import ANSWER_TOKENS, HANDOFF_S, LEAST_COMPUTING, MOST_COMPUTING
from tandem.router.routing.plan import Candidate, Cost, Job, Plan
from tandem.router.routing.policies.cost import CostPolicy
from tests.unit.router.candidates import at, d, of_kv, p

TOKEN_BYTES = 2 * 2 * 8 * 4
KV = of_kv("float32")


def plan(*candidates: Candidate, mode: Disaggregation = Disaggregation.AUTO, **job: Any) -> Plan:
    """Plan a prompt that takes a second to compute, and a tenth of one over the wire."""
    wanted = Job(**{"prompt_tokens": 1000, "max_tokens": 500} | job)
    return CostPolicy(mode).plan(wanted, candidates)


def cost(*candidates: Candidate, mode: Disaggregation = Disaggregation.ALWAYS, **job: Any) -> Cost:
    found = plan(*candidates, mode=mode, **job).cost
    assert found is not None
    return found


def computing(name: str = "p0", link_bytes_per_s: float = 1e4 * TOKEN_BYTES, **more: Any) -> Candidate:
    return p(name, prefill_speed=at(1000.0), profile=KV, link_speed=lambda to: link_bytes_per_s, **more)


def decoding(name: str = "d0", **more: Any) -> Candidate:
    return d(name, **{"prefill_speed": at(1000.0), "profile": KV, "decode_step_s": 0.01} | more)


# ---- waiting in the router, and its causes ---------------------------------------------------------------------------


def test_a_full_decode_worker_is_not_sent_prompts_past_idle_prefill_workers() -> None:
    """Four hundred wait since it has no room for answers. Computing prompts there does not help: answers take longer
    then, and room comes later still."""
    prefills = [computing(f"p{number}") for number in range(3)]
    full = decoding(running=60, in_flight=60, free_blocks=8, total_blocks=768)
    assert plan(*prefills, full, waiting=400).workers != ("d0",)
    assert plan(*prefills, full, waiting=400).workers[0] in {"p0", "p1", "p2"}


def test_where_all_prefill_workers_are_busy_it_is_them_who_are_waited_for() -> None:
    busy = [computing(f"p{number}", queued_tokens=100) for number in range(3)]
    idle_one = [*busy[:2], computing("p2")]
    room = decoding(running=60, in_flight=60, free_blocks=500, total_blocks=768)
    assert plan(*busy, room, waiting=400).workers == ("d0",), "133 lose a second there, 61 here"
    assert plan(*idle_one, room, waiting=400).workers[0] == "p2"


def test_those_who_wait_for_room_lose_an_answer_s_time_of_its_seat() -> None:
    full = decoding(running=50, in_flight=50, decode_sequence_s=1e-9)
    alone, waited = cost(computing(), full), cost(computing(), full, waiting=100)
    assert waited.others_s - alone.others_s == pytest.approx(100 * ANSWER_TOKENS * 0.01 / 50, rel=1e-4)
    two = [full, decoding("d1", running=50, in_flight=50, decode_sequence_s=1e-9)]
    assert cost(computing(), *two, waiting=100).others_s == pytest.approx(50 * ANSWER_TOKENS * 0.01 / 50, rel=1e-4)


# ---- a prefill worker that writes the answer too ---------------------------------------------------------------------


def test_an_answer_stays_at_the_prefill_worker_where_handing_it_over_costs_more() -> None:
    slow = computing(link_bytes_per_s=300.0 * TOKEN_BYTES)
    assert plan(computing(), decoding()).workers == ("p0", "d0"), "a tenth of a second on the wire"
    assert plan(slow, decoding()).workers == ("d0",), "three seconds; one, where nobody decodes"
    chosen = plan(slow, decoding(running=4, in_flight=4))
    assert (chosen.workers, chosen.reason) == (("p0",), "a prefill worker that writes the answer too costs least")
    assert plan(slow, decoding(running=4, in_flight=4), mode=Disaggregation.ALWAYS).workers == ("p0", "d0")


def test_and_where_the_decode_worker_is_far_behind() -> None:
    behind = decoding(running=200, in_flight=200, decode_sequence_s=0.001)
    assert plan(computing(), behind).workers == ("p0",)
    assert plan(computing(computing=0.9), decoding(running=5, in_flight=5)).workers == ("p0", "d0")


def test_prompts_to_come_interrupt_an_answer_where_they_are_computed() -> None:
    def decode_s(worker: Candidate, **job: Any) -> float:
        return cost(computing(), worker, **job).decode_s

    assert decode_s(decoding()) == 0.0
    answer_s = ANSWER_TOKENS * 0.01
    assert decode_s(decoding(computing=0.75)) == pytest.approx(3 * answer_s)
    assert decode_s(decoding(computing=1.0)) == pytest.approx(answer_s * MOST_COMPUTING / (1 - MOST_COMPUTING))
    assert decode_s(decoding(computing=0.75), answer_tokens=40.0) == pytest.approx(3 * 40 * 0.01)
    assert decode_s(decoding(computing=0.75), answer_tokens=40.0, max_tokens=10) == pytest.approx(3 * 10 * 0.01)


def test_a_prefill_worker_is_taken_to_be_there_for_prompts() -> None:
    slow = computing(link_bytes_per_s=300.0 * TOKEN_BYTES)
    far = decoding(running=9, in_flight=9)
    found = {str(one.decode): one.cost for one in plan(slow, far).options if one.prefill is None and one.cost}
    share = LEAST_COMPUTING / (1 - LEAST_COMPUTING)
    assert found["p0"].decode_s == pytest.approx(share * ANSWER_TOKENS * 0.01), "as long steps as at those who decode"


def test_without_a_decode_worker_it_is_waited_for_and_one_token_never_crosses() -> None:
    assert plan(computing(), decoding(), max_tokens=1).workers == ("p0",)
    assert plan(computing(), decoding(), max_tokens=1).reason == "one token needs no decode worker"


# ---- wires -----------------------------------------------------------------------------------------------------------


def test_a_wire_that_is_busy_is_waited_for() -> None:
    """Ten thousand tokens a second: a thousand are there when they are computed, but for the last chunk."""
    hidden_s = cost(computing(), decoding()).move_s
    assert hidden_s == pytest.approx(HANDOFF_S + 0.0512)
    for ends in ((30_000, 0), (0, 30_000), (30_000, 20_000)):
        sender, receiver = computing(tokens_in_transfer=ends[0]), decoding(tokens_in_transfer=ends[1])
        assert cost(sender, receiver).move_s == pytest.approx(HANDOFF_S + 3.0 + 0.1 - 1.0)
        queued = dataclasses.replace(sender, queued_tokens=1500)
        assert cost(queued, receiver).move_s == pytest.approx(HANDOFF_S + 3.0 - 1.5 + 0.1 - 1.0), "meanwhile it empties"
    assert cost(computing(tokens_in_transfer=500), decoding()).move_s == hidden_s


def test_a_pause_breaks_the_promise_of_short_answers() -> None:
    slow, receiver = computing(link_bytes_per_s=500.0 * TOKEN_BYTES), decoding()
    assert cost(slow, receiver).broken_s == 0.0, "nothing was promised"
    pause_s = cost(slow, receiver).move_s
    few, many = (cost(slow, receiver, itl_s=0.05, answer_tokens=tokens).broken_s for tokens in (20.0, 200.0))
    assert few == pytest.approx((1 - math.exp(-pause_s / (20 * 0.04))) * 20 * 0.05)
    assert many == pytest.approx((1 - math.exp(-pause_s / (200 * 0.04))) * 200 * 0.05)
