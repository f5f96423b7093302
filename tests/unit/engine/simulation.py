"""A simulated engine on virtual time, small enough to be filled, preempted and broken by tests."""

from collections.abc import Sequence
from typing import Any

from tandem.core.block_hash import BlockHash
from tandem.core.clock import ManualClock
from tandem.core.handoff import ChoiceState, TokenLogprob
from tandem.core.ids import ChoiceIndex, GroupId
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.core.sampling import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.request import EngineRequest
from tandem.engine.runner_protocol import SampleRow, SeqSlice, StepBatch
from tandem.engine.sampling_state import ChoiceSampling
from tandem.engine.sim.arithmetic import START, chain, combine, expected_tokens, fold, prompt_logprob
from tandem.engine.sim.runner import SimRunner
from tandem.engine.step_budget import SchedulerConfig

ROOT = BlockHash(b"r" * 16)
VOCAB = 1 << 31
EOS = (7, 11)
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def layout(
    *, groups: int = 1, layers: int = 2, heads: int = 2, width: int = 8, block_tokens: int = 4,
    dtype: str = "float32", tp: int = 1,
) -> KVLayout:  # fmt: skip
    """Layers are dealt out to the groups in turns."""
    specs = tuple(
        KVGroupSpec(
            group=GroupId(g), layers=tuple(range(g, layers * groups, groups)), planes=2, heads=heads, width=width,
            block_tokens=block_tokens, dtype=dtype,
        )
        for g in range(groups)
    )  # fmt: skip
    return KVLayout(groups=specs, tp=tp)


def new_runner(shape: KVLayout, num_blocks: int = 64, **options: Any) -> SimRunner:
    settings: dict[str, Any] = {"vocab_size": VOCAB, "eos_token_ids": EOS, "max_model_len": 256} | options
    return SimRunner(shape, [num_blocks + g for g in range(len(shape.groups))], **settings)


def new_engine(runner: SimRunner, **config: Any) -> Engine:
    return Engine(runner, config=SchedulerConfig(**config), clock=ManualClock())


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Equal seeds share their prefix."""
    return tuple((seed * 7919 + 31 * i * i + 17) % VOCAB for i in range(length))


def request(key: str, prompt: Sequence[int], forced: Sequence[int] = (), **sampling: Any) -> EngineRequest:
    settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8} | sampling
    states = (ChoiceState(choice=ChoiceIndex(0), tokens=tuple(forced)),) if forced else ()
    return EngineRequest(
        key=key, prompt=tuple(prompt), sampling=SamplingParams(**settings), hash_root=ROOT, forced=states
    )


def run(engine: Engine, requests: Sequence[EngineRequest], limit: int = 2000) -> dict[tuple[str, int], list[int]]:
    """New tokens of every choice of all requests, which all run to their end."""
    for each in requests:
        engine.add(each)
    tokens: dict[tuple[str, int], list[int]] = {}
    for _ in range(limit):
        if not engine.has_work:
            return tokens
        result = engine.step()
        engine.scheduler.check_integrity()
        assert not result.failed
        for output in result.outputs:
            tokens.setdefault((output.key, output.choice), []).append(output.token)
    raise AssertionError("the engine does not come to rest")


def oracle(each: EngineRequest, choice: int = 0, groups: int = 1) -> list[int]:
    forced = next((c.tokens for c in each.forced if c.choice == choice), ())
    return expected_tokens(
        each.prompt, each.sampling.max_tokens - len(forced), VOCAB, eos_token_ids=EOS, outputs=forced,
        sampling=each.sampling, choice=choice, groups=groups,
    )  # fmt: skip


def prefill(runner: SimRunner, prompt: Sequence[int], tables: tuple[Sequence[int], ...]) -> int:
    """Compute a whole prompt in one step; the token after it."""
    batch = StepBatch(list(prompt), list(range(len(prompt))), [SeqSlice(len(prompt), len(prompt), tables)])
    batch.logit_rows.append(len(prompt) - 1)
    return runner.step(batch, [_row()])[0].token


def say_again(runner: SimRunner, prompt: Sequence[int], tables: tuple[Sequence[int], ...]) -> int:
    """Compute the prompt's last token alone, over the KV that is there; the token after it."""
    last = len(prompt) - 1
    batch = StepBatch([prompt[last]], [last], [SeqSlice(1, last + 1, tables)], [0])
    return runner.step(batch, [_row()])[0].token


def _row() -> SampleRow:
    return SampleRow(0, 0, ChoiceSampling(GREEDY, 0, ()))


def expected_prompt_logprobs(prompt: Sequence[int], vocab_size: int, params: SamplingParams) -> list[TokenLogprob]:
    """The oracle of `prompt_logprobs`: of every prompt token but the first."""
    value, found = 0, []
    for each, token in zip(chain(START, prompt), prompt[1:], strict=False):
        value = fold(value, (each,))
        found.append(prompt_logprob(combine([value]), token, params, vocab_size))
    return found
