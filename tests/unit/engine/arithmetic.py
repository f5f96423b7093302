"""A runner that is arithmetic: a wrong, stale or missing block changes the next token.

Every token's slot gets a number chained from the number *read back* from the slot before it, in every KV group. The
logits come from all numbers of the context, of a group with a window the last ones, read through the block tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from tandem.core.block_hash import BlockHash, chain
from tandem.core.clock import ManualClock
from tandem.core.handoff import ChoiceState
from tandem.core.ids import BlockId, GroupId
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.core.sampling import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.request import EngineRequest, RequestKind, StepResult, TokenOutput
from tandem.engine.runner_protocol import Ahead, Begun, SampleRow, SeqSlice, StepBatch
from tandem.engine.sampler import sample
from tandem.engine.sampling_state import ChoiceSampling
from tandem.engine.step_budget import SchedulerConfig

ROOT = BlockHash(b"r" * 16)
VOCAB = 32
EOS = 1
BLOCK = 4
_MASK = (1 << 61) - 1


Windows = tuple[int | None, ...]
"""Of each KV group, in tokens."""


def layout(groups: int = 1, block_tokens: int = BLOCK, windows: Windows = ()) -> KVLayout:
    specs = tuple(
        KVGroupSpec(
            group=GroupId(g), layers=(g,), planes=2, heads=1, width=4, block_tokens=block_tokens, dtype="float32",
            window=windows[g] if windows else None,
        )
        for g in range(groups)
    )  # fmt: skip
    return KVLayout(groups=specs)


def cached_blocks(engine: Engine, root: BlockHash, prompt: Sequence[int], group: GroupId) -> list[BlockId]:
    """Blocks of the longest cached prefix of full blocks."""
    return engine.ledgers[group].match(chain(root, prompt, engine.layout.groups[group].block_tokens))


def mix(a: int, b: int) -> int:
    """A cheap 61-bit hash of two numbers."""
    x = (a * 0x9E3779B97F4A7C15 + b * 0xC2B2AE3D27D4EB4F + 0x165667B19E3779F9) & ((1 << 64) - 1)
    x ^= x >> 29
    return (x * 0xBF58476D1CE4E5B9 >> 3) & _MASK


def seen_from(window: int | None, length: int) -> int:
    """The first of `length` tokens that the last one sees."""
    return max(0, length - window) if window else 0


def slot_value(group: int, before: int, token: int) -> int:
    return mix(mix(before, token + 1), group)


def logits_of(context: Sequence[int]) -> list[float]:
    """Logits from the numbers of all context tokens of all groups, in order."""
    key = 0
    for value in context:
        key = mix(key, value)
    return [(mix(key, token) >> 11) / (1 << 48) for token in range(VOCAB)]


class ArithmeticRunner:
    """`poison` tokens give NaN logits, `broken` ones raise. `steps` counts forwards, `copies` copied blocks."""

    def __init__(
        self, num_blocks: int = 64, *, groups: int = 1, max_model_len: int = 256, poison: int = -1, broken: int = -1,
        windows: Windows = (), ahead: str = "",
    ) -> None:  # fmt: skip
        """`ahead`: a step that begins before the one before it is known computes "early", there and then, or "late",
        when its results are asked for; "" = there are none."""
        self._ahead = ahead
        self._begun: BegunArithmetic | None = None
        self.begun = 0
        self.layout = layout(groups, windows=windows)
        self.max_model_len = max_model_len
        self.vocab_size = VOCAB
        self.eos_token_ids: tuple[int, ...] = (EOS,)
        # Group 1 has other block ids for the same content, so that tables cannot be mixed up unseen.
        self.num_blocks = tuple(num_blocks + g for g in range(groups))
        self.pools = [[[0] * BLOCK for _ in range(count)] for count in self.num_blocks]
        self.poison, self.broken = poison, broken
        self.steps = self.copies = self.tokens = self.most_sequences = 0
        self.duration_s: Callable[[StepBatch], float] = lambda batch: 0.0
        self.clock = ManualClock()

    @property
    def ahead(self) -> Ahead | None:
        return self if self._ahead else None

    def begin(
        self, batch: StepBatch, rows: Sequence[SampleRow], before: Begun | None = None, chosen: Sequence[int] = ()
    ) -> Begun | None:
        assert self._begun is None or before is self._begun, "a step begins behind the latest one"
        tables = [SeqSlice(s.query_tokens, s.context_tokens, tuple(map(list, s.block_tables))) for s in batch.sequences]
        kept = StepBatch(list(batch.token_ids), list(batch.positions), tables, list(batch.logit_rows))
        assert before is None or isinstance(before, BegunArithmetic)
        begun = BegunArithmetic(self, kept, list(rows), before, list(chosen))
        self._begun = begun
        self.begun += before is not None
        if self._ahead == "early":
            begun.compute()
        return begun

    def is_over(self, begun: BegunArithmetic) -> None:
        if begun is self._begun:
            self._begun = None

    def copy_blocks(self, group: int, pairs: list[tuple[int, int]]) -> None:
        assert self._begun is None, "a copy beside a step"
        assert not {source for source, _ in pairs} & {target for _, target in pairs}
        for source, target in pairs:
            self.pools[group][target] = list(self.pools[group][source])
            self.copies += 1

    def step(
        self, batch: StepBatch, rows: Sequence[SampleRow], on_layers: Callable[[int, int], None] | None = None
    ) -> list[TokenOutput]:
        assert self._begun is None, "a step beside another"
        return self.compute(batch, rows, on_layers)

    def compute(
        self, batch: StepBatch, rows: Sequence[SampleRow], on_layers: Callable[[int, int], None] | None = None
    ) -> list[TokenOutput]:
        queries = [s.query_tokens for s in batch.sequences]
        assert sum(queries) == len(batch.token_ids) == len(batch.positions)
        assert queries == sorted(queries, key=lambda count: count > 1), "decodes come first"
        if self.broken in batch.token_ids:
            raise RuntimeError("a broken step")
        self.steps += 1
        self.tokens += len(batch.token_ids)
        self.most_sequences = max(self.most_sequences, len(batch.sequences))
        written: set[tuple[int, int, int]] = set()
        contexts: dict[int, list[int]] = {}
        row = 0
        for sequence in batch.sequences:
            for position in range(sequence.context_tokens - sequence.query_tokens, sequence.context_tokens):
                token = batch.token_ids[row]
                assert batch.positions[row] == position
                for group, table in enumerate(sequence.block_tables):
                    pool = self.pools[group]
                    before = pool[table[(position - 1) // BLOCK]][(position - 1) % BLOCK] if position else 0
                    place = (group, table[position // BLOCK], position % BLOCK)
                    assert place not in written, "two sequences write one slot"
                    written.add(place)
                    pool[place[1]][place[2]] = slot_value(group, before, token)
                if row in batch.logit_rows:
                    contexts[row] = [
                        self.pools[group][table[p // BLOCK]][p % BLOCK]
                        for group, table in enumerate(sequence.block_tables)
                        for p in range(seen_from(self.layout.groups[group].window, position + 1), position + 1)
                    ]
                row += 1
        if on_layers is not None:
            on_layers(0, 1)
        self.clock.advance(self.duration_s(batch))
        logits = torch.tensor([logits_of(contexts[r]) for r in batch.logit_rows]).reshape(-1, VOCAB)
        for index, r in enumerate(batch.logit_rows):
            if batch.token_ids[r] == self.poison:
                logits[index] = float("nan")
        return sample(logits, rows) if rows else []


class BegunArithmetic:
    """A step that `begin` began. Its tokens are those that the step before chose."""

    def __init__(
        self, runner: ArithmeticRunner, batch: StepBatch, rows: list[SampleRow], before: BegunArithmetic | None,
        chosen: list[int],
    ) -> None:  # fmt: skip
        self._runner, self._batch, self._rows, self._before, self._chosen = runner, batch, rows, before, chosen
        self._sampled: list[TokenOutput] | Exception | None = None

    def compute(self) -> None:
        """Once; what it raises is kept."""
        if self._sampled is not None:
            return
        try:
            if self._before is not None:
                tokens = self._before.tokens()
                self._batch.token_ids[:] = [tokens[i] for i in self._chosen]
            self._sampled = self._runner.compute(self._batch, self._rows)
        except Exception as error:  # noqa: BLE001 - reported by `results`
            self._sampled = error

    def tokens(self) -> list[int]:
        self.compute()
        assert self._sampled is not None
        if isinstance(self._sampled, Exception):
            raise RuntimeError("the step before failed")
        return [one.token for one in self._sampled]

    def results(self) -> list[TokenOutput]:
        self.compute()
        self._runner.is_over(self)
        assert self._sampled is not None
        if isinstance(self._sampled, Exception):
            raise self._sampled
        return self._sampled


def expected(
    request: EngineRequest, choice: int = 0, groups: int = 1, max_model_len: int = 256, windows: Windows = ()
) -> tuple[int, ...]:
    """The outputs of a choice, computed without blocks, batches or chunks (forced ones included)."""
    forced = next((c.tokens for c in request.forced if c.choice == choice), ())
    outputs = list(forced)
    sampling = request.sampling
    state = ChoiceSampling(sampling, choice, request.prompt, outputs, (EOS,))
    while len(outputs) < sampling.max_tokens and len(request.prompt) + len(outputs) < max_model_len:
        context: list[int] = []
        for group in range(groups):
            value, values = 0, []
            for token in (*request.prompt, *outputs):
                value = slot_value(group, value, token)
                values.append(value)
            context += values[seen_from(windows[group] if windows else None, len(values)) :]
        (result,) = sample(torch.tensor([logits_of(context)]), [SampleRow(0, len(outputs), state)])
        outputs.append(result.token)
        state.count(result.token)
        is_ending = (result.token == EOS and not sampling.ignore_eos) or result.token in sampling.stop_token_ids
        if is_ending and len(outputs) > sampling.min_tokens:
            break
    return tuple(outputs)


def make_request(
    key: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    kind: RequestKind = RequestKind.FULL,
    arrival_s: float = 0.0,
    deadline_s: float = math.inf,
    forced: tuple[ChoiceState, ...] = (),
    **sampling: object,
) -> EngineRequest:
    settings: dict[str, object] = {"temperature": 0.0, "ignore_eos": True} | sampling
    return EngineRequest(
        key=key,
        prompt=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **settings),  # type: ignore[arg-type]
        hash_root=ROOT,
        kind=kind,
        arrival_s=arrival_s,
        deadline_s=deadline_s,
        forced=forced,
    )


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    """A prompt of `count` tokens; equal seeds share their prefix."""
    return tuple(2 + mix(seed, i) % (VOCAB - 4) for i in range(count))


class Bench:
    """An engine over arithmetic that collects what comes out, and checks its integrity after every step."""

    def __init__(self, num_blocks: int = 64, *, groups: int = 1, windows: Windows = (), **config: object) -> None:
        runner_options = {k: config.pop(k) for k in ("poison", "broken", "max_model_len", "ahead") if k in config}
        make_swap = config.pop("swap", None)  # of the runner
        self.groups, self.windows = groups, windows
        self.runner = ArithmeticRunner(num_blocks, groups=groups, windows=windows, **runner_options)  # type: ignore[arg-type]
        self.engine = Engine(
            self.runner,
            config=SchedulerConfig(**config),  # type: ignore[arg-type]
            clock=self.runner.clock,
            swap=make_swap(self.runner) if make_swap else None,  # type: ignore[operator]
        )
        self.requests: dict[str, EngineRequest] = {}
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.ended: dict[tuple[str, int], str] = {}
        self.preempted: list[str] = []
        self.failed: dict[str, Exception] = {}
        self.unwanted: set[tuple[str, int]] = set()
        """Choices that were ended from outside."""

    def add(self, *args: object, **options: object) -> EngineRequest:
        request = make_request(*args, **options)  # type: ignore[arg-type]
        self.requests[request.key] = request
        self.engine.add(request)
        return request

    def step(self) -> StepResult:
        result = self.engine.step()
        self.engine.scheduler.check_integrity()
        for output in result.outputs:
            place = (output.key, output.choice)
            got = self.outputs.setdefault(place, [])
            forced = next((c.tokens for c in self.requests[output.key].forced if c.choice == output.choice), ())
            assert place not in self.ended, "a token after the end"
            assert output.index == len(forced) + len(got), "indices have a gap"
            got.append(output.token)
            if output.finish is not None:
                self.ended[place] = output.finish
        self.preempted += result.preempted
        self.failed |= result.failed
        return result

    def run(self, limit: int = 1000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {limit} steps: {self.engine.in_flight()}")

    def finish(self, *keys: str) -> None:
        """Run to the end and check these outputs, or all of them, and that nothing is held."""
        self.run()
        self.check_outputs(*keys)
        self.check_idle()

    def check_outputs(self, *keys: str) -> None:
        """The outputs of these requests, or of all, are the reference's."""
        for key in keys or self.requests:
            self._check_output(self.requests[key])

    def _check_output(self, request: EngineRequest) -> None:
        key = request.key
        for choice in range(request.sampling.n):
            forced = next((c.tokens for c in request.forced if c.choice == choice), ())
            got = (*forced, *self.outputs.get((key, choice), ()))
            wanted = expected(request, choice, self.groups, self.runner.max_model_len, self.windows)
            if (key, choice) in self.unwanted:
                assert got == wanted[: len(got)], (key, choice)
                continue
            assert got == wanted, (key, choice)
            assert (key, choice) in self.ended

    def check_findable(self, key: str) -> None:
        """Check that all findable blocks of the first choice, in any group, are those that the reference would have
        stored."""
        request = self.requests[key]
        every = (*request.prompt, *self.outputs.get((key, 0), ()))
        for group, ledger in enumerate(self.engine.ledgers):
            values = [0]
            for token in every:
                values.append(slot_value(group, values[-1], token))
            for index, block_hash in enumerate(chain(ROOT, every, BLOCK)):
                block = ledger.lookup(block_hash)
                if block is not None:
                    start = 1 + index * BLOCK
                    assert self.runner.pools[group][block] == values[start : start + BLOCK], (key, group, index)

    def check_idle(self) -> None:
        """Nothing is held: all blocks are free or cached."""
        self.engine.scheduler.check_integrity()
        assert not self.engine.has_work
        assert self.engine.in_flight() == []
        for ledger in self.engine.ledgers:
            counts = ledger.counts()
            assert counts.free + counts.cached == counts.total
