"""Decides what each step computes: decodes first, then prompts, within a budget of tokens and time.

    add ──▶ waiting ──admit──▶ running ──last token──▶ gone
               ▲                 │  └──PREFILL_ONLY: first tokens──▶ parked ──cancel──▶ gone
               └────preempt──────┘

The youngest is preempted (its blocks go back; it is computed again, or its KV waits in host memory: see `swapping`),
never the oldest, never a PREFILL_ONLY request.
Blocks for all tokens a request knows are taken at admission, so only decoding can run short of them. Prompts
are computed in the order of `SchedulerConfig.queue` (tandem.core.prefill_queue), chunk by chunk: shorter work that
comes later goes between the chunks of longer work.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Collection, Iterator
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field

from tandem.core.ledger import LedgerError
from tandem.core.prefill_queue import QueuedWork, attended
from tandem.engine.block_manager import BlockCopy, BlockSpace
from tandem.engine.draft_planning import DraftPlanner
from tandem.engine.request import EngineLoad
from tandem.engine.sequence import Age, QueueState, RequestState, Sequence
from tandem.engine.step_budget import REST_SHARE, SHORT_REST, SchedulerConfig, StepPace
from tandem.engine.swapping import Swap


@dataclass(slots=True)
class StepItem:
    """Tokens [start, end) of one sequence to compute. `sampling_choices` sample from the last one's logits.

    `drafts`: tokens that probably follow a decode's; they are computed with it, and hold as far as they are chosen.
    """

    state: RequestState
    sequence: Sequence
    start: int
    end: int
    sampling_choices: list[Sequence]
    copies: list[BlockCopy]
    drafts: tuple[int, ...] = ()


@dataclass(slots=True)
class StepPlan:
    """Plan of one step. `items` holds decodes first, then chunks."""

    items: list[StepItem] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    recomputed_tokens: int = 0
    admitted: dict[str, int] = field(default_factory=dict)
    decode_tokens: int = 0
    prefill_tokens: int = 0
    prefill_attended: float = 0.0
    scored_tokens: int = 0
    context_tokens: int = 0
    decode_attended: float = 0.0
    logit_rows: int = 0


class Scheduler:
    """Queues and step plans. Owned by the step loop's thread; blocks live in `space`."""

    def __init__(
        self,
        space: BlockSpace,
        config: SchedulerConfig,
        pace: StepPace,
        max_scored_tokens: int,
        swap: Swap | None = None,
        ending: Collection[int] = (),
    ) -> None:
        """`max_scored_tokens` bounds the prompt tokens with computed logits in one step; one block always fits. `swap`:
        None = KV of preempted requests is computed again. `ending`: tokens that end an answer are never drafted."""
        self._swap = swap
        self.drafts = DraftPlanner(space, config.draft_rows, config.speculation, ending)
        self._space, self._config, self._pace = space, config, pace
        self._max_scored_tokens = max(max_scored_tokens, space.block_tokens)
        self._states: dict[str, RequestState] = {}
        self._waiting: list[RequestState] = []  # by rank
        self._running: list[RequestState] = []  # by age
        self._blocked: tuple[str, int] | None = None  # the request that found too few blocks, and how many there were
        self.is_starved = False
        """True if the oldest running request found no block to grow into in the latest plan."""
        self.reserved_sequences = 0
        """Choices that are to run here once their prompts' KV has come; admission keeps turns for them."""

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def has_preempted(self) -> bool:
        """True if a preempted request waits; those come first in the queue."""
        return bool(self._waiting) and self._waiting[0].is_preempted

    @property
    def oldest_preempted_s(self) -> float | None:
        """Arrival time of the oldest preempted request that waits."""
        return self._waiting[0].age[0] if self.has_preempted else None

    @property
    def running_sequences(self) -> int:
        """Choices that grow by a token a step."""
        return sum(len(state.live) for state in self._running)

    def has_turn_for(self, choices: int, arrival_s: float, reserved: int) -> bool:
        """True if so many more choices can run, of a request that arrived at `arrival_s`: never more than
        `max_sequences` with those that run, wait and came before, or are `reserved` (see `reserved_sequences`)."""
        self.reserved_sequences = reserved
        older = sum(len(state.live) for state in self._waiting if state.age[0] <= arrival_s)
        ahead = self.running_sequences + self.reserved_sequences + older
        return not ahead or ahead + choices <= self._config.max_sequences

    def states(self) -> list[RequestState]:
        """Every request that is waiting, running or parked."""
        return list(self._states.values())

    def load(self, now_s: float) -> EngineLoad:
        """Number of waiting and running requests, sequences and tokens."""
        prefilling = [state for state in self._running if state.catching_up()]
        work = [self._queued(state, now_s) for state in (*prefilling, *self._waiting)]
        return EngineLoad(
            queued_requests=len(self._waiting),
            running_requests=len(self._running),
            decoding_sequences=sum(len(state.decoding()) for state in self._running),
            queued_tokens=sum(row.tokens for row in work),
            queue=tuple(work),
        )

    def get(self, key: str) -> RequestState | None:
        return self._states.get(key)

    def add(self, state: RequestState) -> None:
        """Queue a request."""
        self._states[state.request.key] = state
        insort(self._waiting, state, key=_rank)

    def add_running(self, state: RequestState) -> None:
        """Take in a request with a prompt that is already computed here."""
        self._states[state.request.key] = state
        self._run(state)

    def park(self, state: RequestState) -> None:
        """Stop computing a request but keep its blocks."""
        self._running.remove(state)
        state.place = QueueState.PARKED

    def remove(self, state: RequestState) -> None:
        """Forget a request wherever it is and give back its blocks."""
        if state.place is QueueState.GONE:
            return
        if state.place is QueueState.WAITING:
            self._waiting.remove(state)
        elif state.place is QueueState.RUNNING:
            self._running.remove(state)
        state.place = QueueState.GONE
        if self._swap is not None:
            self._swap.drop(state.request.key)
        self.is_starved = False  # the next plan decides it
        del self._states[state.request.key]
        self._space.release(state)

    def end_choice(self, state: RequestState, choice: int) -> None:
        """Take a choice out of a request that goes on with others. Nothing if it has no others, or this one has
        ended."""
        sequence = next((s for s in state.live if s.choice == choice), None)
        if sequence is None:
            return
        self._space.end_sequence(state, sequence)
        self._blocked = None  # it may need less now
        if state.place is QueueState.WAITING:
            state.is_forked = len(state.live) <= 1
        if state.is_prefill_only and state.place is not QueueState.WAITING:
            if state.place is QueueState.RUNNING and state.is_first_token_done:
                self.park(state)
        elif not state.live:
            self.remove(state)

    def plan(self, now_s: float) -> StepPlan:
        """Return the next step. Block tables already have room for it; an empty plan means nothing can run now."""
        plan = StepPlan()
        self.is_starved = False
        prefilling = self._plan_decodes(plan)
        self._plan_prefills(plan, prefilling, now_s)
        return plan

    def plan_ahead(self, items: AbstractSequence[StepItem]) -> StepPlan | None:
        """Plan the step behind one that computes `items`, before its tokens are known: one token more of each choice
        that does not end by its number of tokens. Tables have room for it.

        None where something else may be due (prompts, waiting requests, copies, preemption for blocks), or where a
        choice's next token depends on those before in more than its logits.
        """
        if self._waiting or len(items) != self.running_sequences:
            return None
        plan = StepPlan()
        for item in items:
            state, sequence = item.state, item.sequence
            if item.end - item.start != 1 or len(item.sampling_choices) != 1 or sequence.sampling.changes_scores:
                return None
            if item.drafts or sequence.sampling.has_offer:
                return None
            if len(sequence.outputs) + 1 >= state.request.sampling.max_tokens:
                continue  # no other length ends it: requests fit into the context
            end = item.end + 1
            if not self._space.extend_ahead(state, sequence, end):
                return None
            plan.items.append(StepItem(state, sequence, end - 1, end, [sequence], []))
        _count_decodes(plan)
        return plan if plan.items else None

    def check_integrity(self) -> None:
        """Raise LedgerError if queues, places and ledgers disagree."""
        places = {QueueState.WAITING: self._waiting, QueueState.RUNNING: self._running}
        for place, queue in places.items():
            if {s.request.key for s in queue} != {k for k, s in self._states.items() if s.place is place}:
                raise LedgerError(f"the {place.name.lower()} queue disagrees with its requests")
        if self._running != sorted(self._running, key=_age) or self._waiting != sorted(self._waiting, key=_rank):
            raise LedgerError("a queue is out of order")
        self._space.check_integrity(self.states())
        waiting = {state.request.key for state in self._waiting if state.is_preempted}
        if self._swap is not None and not waiting.issuperset(self._swap.keys):
            raise LedgerError(f"KV is kept for {set(self._swap.keys) - waiting}, which are not preempted")

    def _plan_decodes(self, plan: StepPlan) -> list[RequestState]:
        """Plan one token for every decoding choice, oldest first; returns the requests that still prefill."""
        prefilling: list[RequestState] = []
        limit = min(self._config.max_sequences, self._config.max_step_tokens)
        # By age: a request preempted for blocks is younger, so it is not in the plan yet.
        for state in tuple(self._running):
            if state.place is not QueueState.RUNNING:
                continue
            decoding = state.decoding()
            if len(decoding) < len(state.live):
                prefilling.append(state)
            items: list[StepItem] = []
            for sequence in decoding[: limit - len(plan.items)]:
                end = sequence.computed + 1
                copies = self._make_room(state, sequence, end, plan)
                if copies is None:
                    break
                items.append(StepItem(state, sequence, end - 1, end, [sequence], copies))
            if state.place is QueueState.RUNNING:
                plan.items += items
        self.drafts.plan(plan.items, limit)
        _count_decodes(plan)
        return [state for state in prefilling if state.place is QueueState.RUNNING]

    def _plan_prefills(self, plan: StepPlan, prefilling: list[RequestState], now_s: float) -> None:
        """Spend the rest of the budget on prompts, at least one block if any request waits and has room."""
        budget = self._pace.chunk_budget(plan.decode_tokens)
        # A request just preempted would only take back the blocks that an older one needs.
        is_closed = bool(plan.preempted)
        for state in self._queue(prefilling, now_s):
            if state.place is QueueState.WAITING:
                # The first for which there is no room keeps younger ones out, or it would starve.
                is_closed = is_closed or not self._admit(state, plan)
                if is_closed:
                    if not prefilling:
                        break
                    continue
                budget -= self._plan_next(state, plan)
            budget -= self._plan_chunks(state, budget, plan)
            if budget <= 0:
                break

    def _queue(self, prefilling: list[RequestState], now_s: float) -> Iterator[RequestState]:
        """Requests with prompt tokens to compute: preempted ones foremost, then in order."""
        if not self._config.queue.stretch:
            return heapq.merge(sorted(prefilling, key=_rank), list(self._waiting), key=_rank)
        return self._by_due(prefilling, now_s)

    def _by_due(self, prefilling: list[RequestState], now_s: float) -> Iterator[RequestState]:
        every = (*prefilling, *self._waiting)
        heap = [(not state.is_preempted, self._due_s(state, now_s), state.age, state) for state in every]
        heapq.heapify(heap)
        while heap:
            yield heapq.heappop(heap)[-1]

    def _due_s(self, state: RequestState, now_s: float) -> float:
        """Return the time when its prompt is due, by the queue's rules and the present prefill speed."""
        return self._queued(state, now_s).due_s

    def _queued(self, state: RequestState, now_s: float) -> QueuedWork:
        """Remaining work of a request: prompt tokens, and known output tokens, that still have to be computed."""
        tokens, pairs = 0, 0.0
        for start, end in self._remaining(state):
            tokens += end - start
            pairs += attended(start, end)
        request, remaining_s = state.request, self._pace.prefill_speed.seconds(tokens, pairs)
        due_s = self._config.queue.due_s(
            arrived_s=request.arrival_s, remaining_s=remaining_s, now_s=now_s, deadline_s=request.deadline_s
        )
        return QueuedWork(due_s, tokens, attended=pairs)

    def _remaining(self, state: RequestState) -> list[tuple[int, int]]:
        """[start, end) of every sequence that has tokens to compute."""
        if state.place is QueueState.WAITING:
            return [(self._space.cached_tokens(state), state.goal(state.leader))]
        return [(sequence.computed, state.goal(sequence)) for sequence in state.catching_up()]

    def _admit(self, state: RequestState, plan: StepPlan) -> bool:
        """Move a waiting request to the running ones if there is room for all tokens it knows."""
        running = self.running_sequences
        taken = running + self.reserved_sequences
        if taken and taken + len(state.live) > self._config.max_sequences:
            return False
        mark = (state.request.key, min(ledger.available for ledger in self._space.ledgers))
        if self._running and mark == self._blocked:
            return False
        # One block for every running choice, or admission would soon preempt what it admitted.
        if not self._space.admit(state, headroom_blocks=running):
            self._blocked = mark
            return False
        self._blocked = None
        self._waiting.remove(state)
        self._run(state)
        if state.cached_tokens is None:
            state.cached_tokens = min(state.leader.computed, state.leader.prompt_tokens)
            plan.admitted[state.request.key] = state.cached_tokens
        if self._swap is not None:
            self._swap.bring_back(state)
            self._space.leave(state, state.leader)  # KV that was not kept is not written, so never published
            self._space.publish(state, state.leader)
        plan.recomputed_tokens += max(0, state.lost_tokens - state.computed_tokens)
        state.lost_tokens = 0
        return True

    def _plan_next(self, state: RequestState, plan: StepPlan) -> int:
        """Plan the next token of a request that has come back with all of its KV; returns how many that are."""
        for sequence in state.decoding():
            end = sequence.computed + 1
            plan.items.append(StepItem(state, sequence, end - 1, end, [sequence], []))
            plan.decode_tokens += 1
            plan.context_tokens += end
            plan.decode_attended += end - 0.5
        return len(state.decoding())

    def _plan_chunks(self, state: RequestState, budget: int, plan: StepPlan) -> int:
        """Plan chunks of a request within `budget` tokens; returns how many were planned."""
        used = 0
        size = self._space.block_tokens
        for sequence in state.catching_up():
            start, goal = sequence.computed, state.goal(sequence)
            if state.is_held:  # the token that is sampled from comes once the grammar, or its mask, is there
                goal = (goal - 1) // size * size
            chunk = max(self._config.chunk_tokens, size)
            most = min(budget - used, chunk)
            room = self._config.max_step_tokens - plan.prefill_tokens - used
            takes_rest = most > SHORT_REST and not plan.decode_tokens
            if takes_rest and goal - start <= min(most + max(SHORT_REST, most // REST_SHARE), chunk, room):
                most = goal - start
            if state.unscored_tokens:
                most = min(most, self._max_scored_tokens - plan.scored_tokens)
            end = min(goal, start + most)
            if end < goal:
                end = end // size * size
            if end <= start:
                break
            copies = self._space.extend(state, sequence, end)
            if copies is None:  # only copies for blocks that a push shares can be short here: the push will end
                break
            plan.items.append(StepItem(state, sequence, start, end, state.sampling_choices(sequence, end), copies))
            used += end - start
            plan.prefill_attended += attended(start, end)
            plan.context_tokens += end
            plan.scored_tokens += len(state.scoring(sequence, start, end))
        plan.prefill_tokens += used
        return used

    def _make_room(self, state: RequestState, sequence: Sequence, end: int, plan: StepPlan) -> list[BlockCopy] | None:
        """Blocks for tokens up to `end`, by preempting younger requests where there are too few.

        None if the request must wait: it was preempted itself, or as the oldest it keeps what it has.
        """
        while (copies := self._space.extend(state, sequence, end)) is None:
            victim = next((s for s in reversed(self._running) if s is state or not s.is_prefill_only), state)
            if victim is state and state is self._running[0]:
                self.is_starved = True
                return None
            self._preempt(victim)
            plan.preempted.append(victim.request.key)
            if victim is state:
                return None
        return copies

    def preempt_for(self, arrival_s: float, needs: AbstractSequence[int]) -> list[str]:
        """Preempt the youngest of those that arrived after `arrival_s` until each group has `needs[i]` blocks available
        besides one for each choice that still runs. Returns their keys; none, and nothing changed, if all of them
        together are not enough. The oldest running request and PREFILL_ONLY ones are never among them.
        """
        victims: list[RequestState] = []
        for state in reversed(self._running[1:]):
            if state.age[0] <= arrival_s:
                break
            if state.is_prefill_only:
                continue
            victims.append(state)
            headroom = self.running_sequences - sum(len(victim.live) for victim in victims)
            leaving = [holder for victim in victims for holder in victim.holders]
            if all(
                ledger.available + ledger.freed_without(leaving) >= need + headroom
                for ledger, need in zip(self._space.ledgers, needs, strict=True)
            ):
                for victim in victims:
                    self._preempt(victim)
                return [victim.request.key for victim in victims]
        return []

    def _preempt(self, state: RequestState) -> None:
        self._running.remove(state)
        state.lost_tokens = state.computed_tokens
        if self._swap is not None:
            self._swap.offer(state, self._pace.prefill_speed)
        self._space.release(state)
        state.place = QueueState.WAITING
        state.is_preempted = True
        insort(self._waiting, state, key=_rank)

    def _run(self, state: RequestState) -> None:
        state.place = QueueState.RUNNING
        insort(self._running, state, key=_age)


def _count_decodes(plan: StepPlan) -> None:
    """For a plan that has nothing else yet."""
    contexts = [item.end + count for item in plan.items for count in range(len(item.drafts) + 1)]
    plan.decode_tokens = len(contexts)
    plan.context_tokens = sum(contexts)
    plan.decode_attended = plan.context_tokens - plan.decode_tokens / 2


def _age(state: RequestState) -> Age:
    return state.age


def _rank(state: RequestState) -> tuple[bool, Age]:
    return state.rank
