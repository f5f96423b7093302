"""The offline search against an exhaustive search, and its report of prices."""

import itertools
import random
from dataclasses import replace

import pytest

from tandem.controlplane.planner.hardware import HARDWARE, MODELS, rates
from tandem.controlplane.planner.offline import Fleet, Offer, PlanResult, PlanTargets, Search, WorkerKind
from tandem.controlplane.planner.records import ObservedRequest, Rates, RoleSplit
from tandem.core.config import SloSection
from tandem.core.prefill_queue import PrefillSpeed

SLOW = Rates(prefill=PrefillSpeed(tokens_per_s=4000.0), decode_step_s=0.02, decode_sequence_s=0.001, kv_tokens=60_000)
FAST = Rates(
    prefill=PrefillSpeed(tokens_per_s=9000.0), decode_step_s=0.012, decode_sequence_s=0.0006, kv_tokens=200_000
)
CHEAP, DEAR = (
    WorkerKind(hardware="cheap", tp=1, rates=SLOW, price=1.0),
    WorkerKind(hardware="dear", tp=2, rates=FAST, price=1.1),
)


def linked(kind: WorkerKind, link_bytes_per_s: float, price: float = 0.0) -> WorkerKind:
    """On a network of such links, with 100 kB of KV a token."""
    rates = replace(kind.rates, kv_token_bytes=100_000, link_bytes_per_s=link_bytes_per_s)
    return replace(kind, rates=rates, price=kind.price + price, network=f"{link_bytes_per_s:g}")


def load(rate: float, prompt_tokens: int, output_tokens: int, seed: int, count: int = 120) -> list[ObservedRequest]:
    dice, at_s, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at_s += dice.expovariate(rate)
        prompt, output = (
            max(1, round(mean * dice.lognormvariate(-0.1, 0.45))) for mean in (prompt_tokens, output_tokens)
        )
        found.append(ObservedRequest(arrival_s=at_s, prompt_tokens=prompt, output_tokens=output))
    return found


def wanted(seed: int, rate: float, prompt: int, output: int, accelerators: int = 10) -> PlanTargets:
    promises = {"": SloSection(ttft_s=2.0, itl_s=0.05)}
    return PlanTargets(
        requests=load(rate, prompt, output, seed), promises=promises, target=0.9, accelerators=accelerators
    )


def every(search: Search, kinds: tuple[WorkerKind, ...], most: int) -> list[Offer]:
    """All fleets there are."""
    fleets = [Fleet(decode=kind, decode_count=count) for kind in kinds for count in range(1, most + 1)]
    for prefill, decode, p, d in itertools.product(kinds, kinds, range(1, most), range(1, most)):
        if prefill.network != decode.network:
            continue
        fleets.append(Fleet(prefill=prefill, prefill_count=p, decode=decode, decode_count=d))
    return [search.offer(fleet) for fleet in fleets if fleet.accelerators <= most]


LINKED = tuple(
    linked(kind, speed, price) for kind in (CHEAP, DEAR) for speed, price in ((0.2e9, 0.0), (0.4e9, 0.05), (9e9, 0.3))
)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("kinds", [(CHEAP, DEAR), LINKED], ids=["no links", "links"])
@pytest.mark.parametrize(
    ("seed", "rate", "prompt", "output"),
    [(1, 4.0, 1500, 30), (2, 4.0, 300, 250), (3, 3.0, 1200, 120), (4, 9.0, 600, 60), (5, 1.0, 200, 20)],
)
def test_the_answer_is_within_5_percent_of_trying_everything(
    seed: int, rate: float, prompt: int, output: int, kinds: tuple[WorkerKind, ...]
) -> None:
    load = wanted(seed, rate, prompt, output)
    answer = Search(load, kinds).run()
    tried = Search(load, kinds)
    best = min(every(tried, kinds, 10), key=lambda offer: offer.order)
    assert answer.best.reaches_target == best.reaches_target
    if best.reaches_target:
        assert answer.best.fleet.price <= 1.05 * best.fleet.price
    else:
        assert answer.best.forecast.score >= 0.95 * best.forecast.score
    assert answer.replays < tried_count(tried)


def tried_count(search: Search) -> int:
    return len(search._made)


def long_prompts(*kinds: WorkerKind) -> PlanResult:
    """A third of the answers is late where a worker computes between their tokens."""
    promises = {"": SloSection(ttft_s=2.0, itl_s=0.025)}
    return Search(
        PlanTargets(requests=load(4.0, 1500, 30, seed=1), promises=promises, target=0.9, accelerators=10), kinds
    ).run()  # fmt: skip


def test_pairs_need_a_link_that_carries_what_they_compute() -> None:
    """A prefill worker makes 0.4 GB of KV a second."""
    fast, slow = (long_prompts(linked(CHEAP, speed)).best for speed in (9e9, 0.05e9))
    assert fast.fleet.prefill is not None
    assert slow.fleet.prefill is None
    assert slow.fleet.price > fast.fleet.price


def test_a_faster_link_is_taken_where_it_is_worth_its_price() -> None:
    """And the best of the others is reported, of each link by itself."""
    answers = [long_prompts(linked(CHEAP, 0.05e9), linked(CHEAP, 9e9, price)) for price in (0.01, 5.0)]
    assert [answer.best.fleet.link_bytes_per_s for answer in answers] == [9e9, 0.05e9]
    for answer in answers:
        found = (answer.best, *answer.others)
        assert len({one.fleet.kinds for one in found}) == len(found) == 4
        pairs = [one.fleet for one in found if one.fleet.prefill is not None]
        assert sorted(fleet.link_bytes_per_s for fleet in pairs) == [0.05e9, 9e9], "both workers on the same network"


def test_where_nothing_reaches_the_target_the_nearest_is_said() -> None:
    answer = Search(wanted(1, 50.0, 3000, 200, accelerators=3), (CHEAP,)).run()
    assert not answer.best.reaches_target
    assert answer.best.fleet.accelerators == 3


def ask(accelerators: int = 10) -> PlanResult:
    return Search(wanted(3, 3.0, 1200, 120, accelerators), (CHEAP, DEAR)).run()


def test_neighbours_differ_by_one_worker_and_others_are_of_other_kinds() -> None:
    answer = ask()
    best = answer.best.fleet
    for offer in answer.neighbours:
        change = RoleSplit(
            abs(offer.fleet.prefill_count - best.prefill_count), abs(offer.fleet.decode_count - best.decode_count)
        )
        assert max(change.prefill, change.decode) == 1
        assert offer.fleet.accelerators <= 10
    kinds = [(str(offer.fleet.prefill), str(offer.fleet.decode)) for offer in answer.others]
    assert len(set(kinds)) == len(kinds)
    assert (str(best.prefill), str(best.decode)) not in kinds


def test_prices_of_tokens_add_up_to_the_price_of_the_fleet() -> None:
    for offer in (ask().best, *ask().others):
        requests = wanted(3, 3.0, 1200, 120).requests
        hours = (requests[-1].arrival_s - requests[0].arrival_s) / 3600
        spent = offer.input_price * sum(one.prompt_tokens for one in requests) / 1e6
        spent += offer.output_price * sum(one.output_tokens for one in requests) / 1e6
        assert spent == pytest.approx(offer.fleet.price * hours)


def test_progress_is_told() -> None:
    said: list[tuple[int, int]] = []
    Search(wanted(5, 1.0, 200, 20), (CHEAP,), lambda done, of: said.append((done, of))).run()
    assert said[0] == (0, 2)
    assert said[-1] == (2, 2)


def test_no_fleet_is_an_error() -> None:
    with pytest.raises(ValueError, match="no fleet fits"):
        Search(wanted(5, 1.0, 200, 20, accelerators=1), (DEAR,)).run()


def test_rates_by_arithmetic_are_those_of_the_simulators_default() -> None:
    """An H100 with Llama-3-8B: the numbers of docs/simulator.md."""
    found = rates(HARDWARE["h100"], MODELS["llama-3-8b"], 1)
    assert found is not None
    assert 1 / found.prefill.tokens_per_s == pytest.approx(40e-6, rel=0.01)
    assert found.prefill.context_s == pytest.approx(1.5e-9, rel=0.01)
    assert found.decode_step_s == pytest.approx(0.0065, rel=0.02)
    assert found.decode_context_s == pytest.approx(52e-9, rel=0.02)
    assert found.kv_tokens == pytest.approx(426_000, rel=0.02)


def test_a_model_that_does_not_fit_is_left_out_and_more_ranks_are_faster() -> None:
    big = MODELS["llama-3-70b"]
    assert rates(HARDWARE["h100"], big, 1) is None
    four, eight = (rates(HARDWARE["h100"], big, tp) for tp in (4, 8))
    assert four is not None
    assert eight is not None
    assert 1.5 < eight.prefill.tokens_per_s / four.prefill.tokens_per_s < 2
    assert eight.decode_step_s < four.decode_step_s
