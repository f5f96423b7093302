"""Random lives of requests in a pool that is too small for them: integrity always, and the reference's tokens."""

import math
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.core.block_hash import chain
from tandem.core.errors import ContextLengthError
from tandem.core.handoff import ChoiceState
from tandem.core.ids import ChoiceIndex
from tandem.core.ledger import Holder, HoldKind
from tandem.engine.request import RequestKind
from tests.unit.engine.arithmetic import BLOCK, ROOT, Bench, Windows, expected, make_request, slot_value, tokens


class EngineMachine(RuleBasedStateMachine):
    """Adds of every kind, cancels, releases, pushes, tickets and steps, in any order."""

    @initialize(
        blocks=st.integers(8, 20),
        windows=st.sampled_from([(None,), (None, None), (2,), (6,), (None, 5), (9, 3)]),
        chunk=st.sampled_from([1, 4, 6, 64]),
        step_tokens=st.sampled_from([4, 9, 64]),
        max_sequences=st.sampled_from([3, 64]),
        ahead=st.sampled_from(["", "early", "late"]),
    )
    def start(
        self, blocks: int, windows: Windows, chunk: int, step_tokens: int, max_sequences: int, ahead: str
    ) -> None:
        self.bench = Bench(
            blocks,
            groups=len(windows),
            windows=windows,
            chunk_tokens=chunk,
            max_step_tokens=step_tokens,
            max_sequences=max_sequences,
            ahead=ahead,
        )
        self.engine = self.bench.engine
        self.count = 0
        self.gone: set[str] = set()
        self.findable: set[tuple[int, bytes]] = set()

    @rule(
        prompt=st.integers(1, 18),
        seed=st.integers(0, 2),
        max_tokens=st.integers(1, 14),
        n=st.integers(1, 3),
        kind=st.sampled_from([RequestKind.FULL, RequestKind.FULL, RequestKind.PREFILL_ONLY]),
        forced=st.lists(st.integers(0, 5), max_size=3),
        random=st.booleans(),
        eos=st.booleans(),
        forbids=st.booleans(),
    )
    def add(
        self,
        prompt: int,
        seed: int,
        max_tokens: int,
        n: int,
        kind: RequestKind,
        forced: list[int],
        random: bool,
        eos: bool,
        forbids: bool,
    ) -> None:
        self.count += 1
        key = f"r{self.count}"
        options: dict[str, Any] = {
            "n": n,
            "temperature": 1.0 if random else 0.0,
            "seed": seed,
            "frequency_penalty": 0.5 if random else 0.0,
            "ignore_eos": not eos,
        }
        if forbids:
            options |= {"min_tokens": max_tokens // 2, "bad_words": ((5,), (7, 9), (6, 6, 8))}
            options |= {"allowed_token_ids": (1, 5, 6, 7, 8, 9), "stop_token_ids": (8,)}
        plain = make_request(key, tokens(prompt, seed), max_tokens, **options)
        known = []
        for choice, length in enumerate(forced[:n]):
            outputs = expected(plain, choice, self.bench.groups, windows=self.bench.windows)
            if length < len(outputs):  # a replay that already ended is tested by itself
                known.append(ChoiceState(choice=ChoiceIndex(choice), tokens=outputs[:length]))
        request = make_request(
            key, plain.prompt, max_tokens, kind=kind, forced=tuple(known), arrival_s=float(self.count), **options
        )
        try:
            self.engine.add(request)
        except ContextLengthError:
            return
        self.bench.requests[key] = request

    @rule(prompt=st.integers(1, 12), seed=st.integers(0, 2), max_tokens=st.integers(2, 14), n=st.integers(1, 2))
    def add_prefilled(self, prompt: int, seed: int, max_tokens: int, n: int) -> None:
        """Act as a decode worker: match, share, reserve, receive, admit."""
        self.count += 1
        key = f"r{self.count}"
        request = make_request(key, tokens(prompt, seed), max_tokens, n=n, temperature=0.9, arrival_s=float(self.count))
        try:
            self.engine.check(request)
        except ContextLengthError:
            return
        holder = Holder(HoldKind.RESERVED, f"{key}/1")
        specs = self.engine.layout.groups
        hashes = chain(ROOT, request.prompt, BLOCK)
        window_offsets = [spec.first_to_hand_over(prompt) for spec in specs]
        room = self.engine.reserve(holder, hashes, -(-prompt // BLOCK), window_offsets)
        if room is None:
            return
        for group in room:
            value = 0
            for position, token in enumerate(request.prompt):
                value = slot_value(group.group, value, token)
                if position >= group.hits * BLOCK:
                    block = group.blocks[position // BLOCK]
                    self.bench.runner.pools[group.group][block][position % BLOCK] = value
        firsts = tuple(
            ChoiceState(
                choice=ChoiceIndex(c), tokens=expected(request, c, self.bench.groups, windows=self.bench.windows)[:1]
            )
            for c in range(n)
        )
        self.bench.requests[key] = make_request(
            key, request.prompt, max_tokens, n=n, temperature=0.9, arrival_s=float(self.count), forced=firsts
        )
        self.engine.add_prefilled(request, holder, tuple(group.blocks for group in room), firsts)

    @rule(pick=st.integers(0, 100))
    @precondition(lambda self: self.engine.in_flight())
    def cancel(self, pick: int) -> None:
        keys = self.engine.in_flight()
        key = keys[pick % len(keys)]
        assert self.engine.cancel(key)
        self.gone.add(key)

    @rule(pick=st.integers(0, 100), choice=st.integers(0, 3))
    @precondition(lambda self: self.engine.in_flight())
    def end_choice(self, pick: int, choice: int) -> None:
        """One choice is cancelled; the others go on as if nothing had happened."""
        keys = self.engine.in_flight()
        key = keys[pick % len(keys)]
        self.engine.end_choice(key, choice)
        self.bench.unwanted.add((key, choice))

    @rule(arrival=st.integers(0, 12), need=st.integers(1, 12))
    def preempt_for(self, arrival: int, need: int) -> None:
        """Preempt as a decode worker does for an older ticket: all that it needs comes free, or no request is
        disturbed."""
        engine = self.engine
        engine.preempt_for(math.inf, [1] * len(engine.ledgers))  # disturbs no request, but a step under way is over
        before = {ledger.group: ledger.counts() for ledger in engine.ledgers}
        victims = engine.preempt_for(float(arrival), [need] * len(engine.ledgers))
        assert all(self.bench.requests[key].arrival_s > arrival for key in victims)
        assert all(self.bench.requests[key].kind is RequestKind.FULL for key in victims)
        if victims:
            assert engine.is_short_of_blocks
            assert engine.load().running_requests >= 1, "the oldest goes on"
            assert all(ledger.available >= need + engine.growth_blocks for ledger in engine.ledgers)
        else:
            assert before == {ledger.group: ledger.counts() for ledger in engine.ledgers}

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.bench.step()
            self._release_parked(every=3)

    @rule()
    def run(self) -> None:
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.bench.step()
            self._release_parked(every=1)
        else:
            raise AssertionError(f"stuck: {self.engine.in_flight()}")
        self._release_parked(every=1)
        self.bench.check_idle()
        assert not self.bench.failed
        for key, request in self.bench.requests.items():
            if key in self.gone:
                continue
            if request.kind is RequestKind.FULL:
                self.bench.check_outputs(key)
        self.bench.requests.clear()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.scheduler.check_integrity()
        for event in self.engine.blocks.take_events():
            place = (event.group, bytes(event.hash))
            assert (place in self.findable) is not event.is_stored
            self.findable ^= {place}
        assert self.findable == {(ledger.group, bytes(h)) for ledger in self.engine.ledgers for h in ledger.hashes()}

    def _release_parked(self, every: int) -> None:
        """A transfer ended for every `every`-th parked request; its one new token a choice was right."""
        for number, key in enumerate(self.engine.in_flight()):
            request = self.bench.requests[key]
            places = [(key, choice) for choice in range(request.sampling.n)]
            places = [place for place in places if place not in self.bench.unwanted]
            if request.kind is RequestKind.PREFILL_ONLY and all(place in self.bench.outputs for place in places):
                if number % every:
                    continue
                for place in places:
                    choice = place[1]
                    forced = next((c.tokens for c in request.forced if c.choice == choice), ())
                    wanted = expected(request, choice, self.bench.groups, windows=self.bench.windows)
                    assert self.bench.outputs[place] == list(wanted[len(forced) : len(forced) + 1])
                self.engine.cancel(key)


EngineMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngineMachine = EngineMachine.TestCase
