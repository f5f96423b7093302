"""Ways on which one worker, or a pair, comes to an answer; each checks that it was really taken."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from proof.exactness.answers import Answer
from proof.exactness.ranks import answer_over_ranks
from proof.exactness.reference import Reference
from tandem.core.block_hash import BlockHash
from tandem.core.clock import MonotonicClock
from tandem.core.sampling import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.kv_pool import PoolCopies
from tandem.engine.request import EngineRequest
from tandem.engine.runner import ModelRunner
from tandem.engine.step_budget import SchedulerConfig
from tandem.engine.swapping import Swap
from tests.integration.worker.loopback import Loopback

LENGTHS = (1, 16, 33, 47, 64, 65, 90, 120)
"""Tokens of the prompts."""
OUTPUT_TOKENS = 12
MAX_MODEL_LEN = 256
_BEST = 20
_LONG_OUTPUT_TOKENS = 40
"""So many that requests that run together outgrow a pool without room for all."""
_ROOMY, _TIGHT = 1024, 18
"""Tokens of a pool that has room for all prompts, and blocks of one that does not."""

Way = Callable[[Path, str, list[list[int]], Reference], list[Answer]]
"""way(folder of the model, dtype, prompts, reference): an answer to each prompt."""


def answer_plainly(folder: Path, dtype: str, prompts: list[list[int]], _: Reference) -> list[Answer]:
    """Answer one prompt after another, each at once."""
    return [_ask(_engine(folder, dtype), [prompt])[0][0] for prompt in prompts]


def answer_in_chunks(chunk: int, folder: Path, dtype: str, prompts: list[list[int]], _: Reference) -> list[Answer]:
    """Chunks are whole blocks, so small ones need small blocks."""
    engine = _engine(folder, dtype, block_tokens=min(chunk, 16), chunk_tokens=chunk)
    return [_ask(engine, [prompt])[0][0] for prompt in prompts]


def answer_from_cache(folder: Path, dtype: str, prompts: list[list[int]], _: Reference) -> list[Answer]:
    engine, found = _engine(folder, dtype), []
    for prompt in prompts:
        _ask(engine, [prompt])
        answers, seen = _ask(engine, [prompt])
        _require(
            seen["cached"] == (len(prompt) - 1) // 16 * 16, f"{seen['cached']} of {len(prompt)} tokens were cached"
        )
        found += answers
    return found


def answer_together(folder: Path, dtype: str, prompts: list[list[int]], _: Reference) -> list[Answer]:
    answers, seen = _ask(_engine(folder, dtype), prompts)
    _require(seen["together"] >= 8, f"no more than {seen['together']} were answered in one step")
    return answers


def answer_after_preemption(
    is_swapped: bool, folder: Path, dtype: str, prompts: list[list[int]], _: Reference
) -> list[Answer]:
    """Computed again, or brought back from copies, which a CPU's pools are made to keep as a device's would."""
    engine = _engine(folder, dtype, num_blocks=_TIGHT, is_swapped=is_swapped)
    answers, seen = _ask(engine, prompts, _LONG_OUTPUT_TOKENS)
    _require(seen["preempted"] > 0, "nothing was preempted")
    return answers


def answer_transferred(folder: Path, dtype: str, prompts: list[list[int]], _: Reference) -> list[Answer]:
    """Answer through a hand-over from a prefill to a decode worker."""
    pair = Loopback(Path(tempfile.mkdtemp(prefix="td-")), folder, transport="shm", chunk_tokens=64, dtype=dtype)
    try:
        for number, prompt in enumerate(prompts):
            pair.submit(f"r{number}", prompt, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=_BEST)
        pair.run_until_rest()
        found = []
        for number, prompt in enumerate(prompts):
            _require(not pair.failed[f"r{number}"], f"{pair.failed[f'r{number}']}")
            chunks = sorted(pair.chunks[f"r{number}"][0], key=lambda chunk: chunk.index)
            said = [chunk.logprobs[0] for chunk in chunks]
            best = [[(each.token, each.logprob), *((top.token, top.logprob) for top in each.top)] for each in said]
            tokens = pair.tokens(f"r{number}")
            _require(len(tokens) == OUTPUT_TOKENS, f"{len(tokens)} tokens were answered")
            found.append(Answer(prompt, tokens, tokens, best))
        return found
    finally:
        pair.close()


PATHS: dict[str, Way] = {
    "plain": answer_plainly,
    **{f"chunks of {size}": partial(answer_in_chunks, size) for size in (1, 7, 16, 64)},
    "prefix hits": answer_from_cache,
    "preempted": partial(answer_after_preemption, False),
    "preempted, kept in memory": partial(answer_after_preemption, True),
    "transferred": answer_transferred,
    "eight at once": answer_together,
    **{f"{size} ranks": partial(answer_over_ranks, size, OUTPUT_TOKENS, MAX_MODEL_LEN) for size in (2, 4)},
}


def _engine(
    folder: Path, dtype: str, *, block_tokens: int = 16, chunk_tokens: int = 512, num_blocks: int = 0,
    is_swapped: bool = False,
) -> Engine:  # fmt: skip
    runner = ModelRunner(
        model_dir=folder, dtype=dtype, block_tokens=block_tokens, max_model_len=MAX_MODEL_LEN,
        num_blocks=num_blocks or _ROOMY // block_tokens,
    )  # fmt: skip
    speeds = {"save_bytes_per_s": 1e12, "restore_bytes_per_s": 1e12}
    swap = Swap(PoolCopies(runner.pools), runner.layout, 1 << 30, MonotonicClock(), **speeds) if is_swapped else None
    config = SchedulerConfig(chunk_tokens=chunk_tokens, max_step_s=60)
    return Engine(runner, config=config, clock=MonotonicClock(), swap=swap)


def _ask(
    engine: Engine, prompts: Sequence[list[int]], output_tokens: int = OUTPUT_TOKENS
) -> tuple[list[Answer], dict[str, int]]:
    """Send them; returns their answers, and observations on the way."""
    sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True, logprobs=_BEST)
    found = {f"r{number}": Answer(prompt, [], [], []) for number, prompt in enumerate(prompts)}
    for key, answer in found.items():
        request = EngineRequest(key=key, prompt=tuple(answer.prompt), sampling=sampling, hash_root=BlockHash(b"r" * 16))
        engine.add(request)
    seen = {"preempted": 0, "cached": 0, "together": 0}
    while engine.has_work:
        result = engine.step()
        _require(not result.failed, f"{result.failed}")
        seen["preempted"] += len(result.preempted)
        seen["together"] = max(seen["together"], len(result.outputs))
        for output in result.outputs:
            assert output.logprob is not None
            answer = found[output.key]
            answer.text.append(output.token)
            answer.chosen.append(output.token)
            answer.best.append([(output.logprob.token, output.logprob.logprob), *output.logprob.top])
            if output.finish is not None:
                seen["cached"] += engine.cached_tokens(output.key)
    engine.scheduler.check_integrity()
    return list(found.values()), seen


def _require(is_so: bool, else_what: str) -> None:
    if not is_so:
        raise AssertionError(else_what)
