"""Exactness against transformers: log-probabilities, greedy tokens, KV bytes, for every family of models.

Part `pairs`, in fp32: a case is one pair of ranks (model × transport × chunk size) that answers every prompt length
cold, again with prefix hits, eight at once, and with three choices. Part `paths`, in fp32 and bfloat16: every family on
every way to an answer (`PATHS`). Finished cases are kept in --out.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bench.report import ROOT
from proof.exactness.answers import ENOUGH, PathVerdict, Verdict, compare, judge
from proof.exactness.paths import LENGTHS as PATH_LENGTHS
from proof.exactness.paths import PATHS
from proof.exactness.reference import Reference
from proof.record import Record, add_every, arguments_of, share
from tandem.engine.model_config import read_model_config
from tandem.kernels.dtypes import TORCH_DTYPES
from tests.integration.worker.loopback import Loopback
from tools.random_model import RandomModel, make_random_model

BUNDLED = "tandem-tiny"
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2",
    "deepseek_v3",
)  # fmt: skip
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1024, 2047, 3000)
SLICE_LENGTHS = (1, 16, 17, 65, 300)
OUTPUT_TOKENS = 6


@dataclass(frozen=True, slots=True)
class Case:
    """One pair of ranks and its settings."""

    model: str
    transport: str
    chunk_tokens: int


def cases(is_slice: bool) -> Iterator[Case]:
    """All cases; the slice is one chunk size a transport, every model."""
    for model in (BUNDLED, *FAMILIES):
        for transport, chunk in [("shm", 64), ("grpc", 16)] if is_slice else _all_settings():
            yield Case(model, transport, chunk)


def _all_settings() -> list[tuple[str, int]]:
    return [(transport, chunk) for transport in ("shm", "grpc") for chunk in (16, 64, 512)]


def model_folder(name: str, seed: int, under: Path) -> Path:
    """The bundled model, or a random one of the family, made on first use."""
    if name == BUNDLED:
        return ROOT / "models" / BUNDLED
    folder = under / f"random-{name}"
    if not folder.exists():
        make_random_model(RandomModel(family=name, seed=seed, max_positions=4096), folder)
    return folder


class Run:
    """All requests of one case; collects verdicts by way of running."""

    def __init__(self, case: Case, folder: Path, reference: Reference, seed: int, lengths: tuple[int, ...]) -> None:
        self._reference, self._lengths = reference, lengths
        self._random = random.Random(f"{seed}/{case.model}")
        self._pair = Loopback(
            Path(tempfile.mkdtemp(prefix="td-")), folder, transport=case.transport, chunk_tokens=case.chunk_tokens
        )
        vocab = self._pair.p.context.engine.vocab_size
        self._prompts = [[self._random.randrange(vocab) for _ in range(length)] for length in lengths]
        self._count = 0

    def verdicts(self) -> dict[str, Verdict]:
        try:
            worst = {"cold": self._one_by_one()}
            self._check_bytes()
            worst |= {
                "prefix hits": self._one_by_one(),
                "eight at once": self._together(),
                "three choices": self._choices(),
            }
            for rank in (self._pair.p, self._pair.d):
                rank.check_baseline()
            return worst
        finally:
            self._pair.close()

    def _check_bytes(self) -> None:
        """Check that every block that was handed over is the sender's, byte for byte."""
        sender, receiver = self._pair.p, self._pair.d
        for group, pool in sender.pools.items():
            spec = pool.spec
            here, there = sender.context.engine.ledgers[group], receiver.context.engine.ledgers[group]
            shared = [h for h in here.hashes() if there.lookup(h) is not None]
            crossed = [n // spec.block_tokens - spec.first_to_hand_over(n) for n in self._lengths]
            if len(shared) < sum(crossed):
                raise AssertionError("not every full block that is needed of the prompts is cached on both sides")
            for block_hash in shared:
                copies = []
                for pools, ledger in ((sender.pools, here), (receiver.pools, there)):
                    block, out = ledger.lookup(block_hash), bytearray(spec.block_bytes())
                    assert block is not None
                    pools[group].read_into([block], range(len(spec.layers)), range(spec.heads), memoryview(out))
                    copies.append(out)
                if copies[0] != copies[1]:
                    raise AssertionError(f"block {block_hash.hex()} differs between sender and receiver")

    def _one_by_one(self) -> Verdict:
        verdicts = []
        for prompt in self._prompts:
            name = self._submit(prompt)
            self._pair.run_until_rest()
            verdicts.append(self._verdict(name, prompt, choice=0, is_greedy=True))
        return _worst(verdicts)

    def _together(self) -> Verdict:
        prompts = [*self._prompts, *self._prompts][: max(8, len(self._prompts))]
        verdicts = []
        for start in range(0, len(prompts), 8):
            names = [(self._submit(prompt), prompt) for prompt in prompts[start : start + 8]]
            self._pair.run_until_rest()
            verdicts += [self._verdict(name, prompt, choice=0, is_greedy=True) for name, prompt in names]
        return _worst(verdicts)

    def _choices(self) -> Verdict:
        verdicts = []
        for prompt in self._prompts:
            name = self._submit(prompt, n=3, temperature=1.0, seed=5)
            self._pair.run_until_rest()
            verdicts += [self._verdict(name, prompt, choice=choice, is_greedy=False) for choice in range(3)]
        return _worst(verdicts)

    def _submit(self, prompt: list[int], **sampling: Any) -> str:
        self._count += 1
        name = f"r{self._count}"
        self._pair.submit(name, prompt, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=20, **sampling)
        return name

    def _verdict(self, name: str, prompt: list[int], *, choice: int, is_greedy: bool) -> Verdict:
        tokens = self._pair.tokens(name, choice)
        if len(tokens) != OUTPUT_TOKENS:
            raise AssertionError(f"{name}: {len(tokens)} tokens, {self._pair.failed[name]}")
        chunks = sorted(self._pair.chunks[name][choice], key=lambda chunk: chunk.index)
        expected = self._reference.logprobs(prompt, tokens)
        if not self._reference.is_clear(prompt, tokens):
            return Verdict(0.0, len(tokens), clear_tokens=0, unequal=0)
        return compare(chunks, expected, is_greedy=is_greedy)


def _worst(verdicts: list[Verdict]) -> Verdict:
    return Verdict(
        max(v.max_error for v in verdicts),
        sum(v.tokens for v in verdicts),
        sum(v.clear_tokens for v in verdicts),
        sum(v.unequal for v in verdicts),
    )


def main() -> int:
    parser = arguments_of("exactness", __doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slice", action="store_true", help="a few lengths and settings, as CI does")
    parser.add_argument("--part", choices=("pairs", "paths"), action="append", help="one of them; all by default")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no case is begun")
    add_every(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lengths = SLICE_LENGTHS if arguments.slice else LENGTHS
    about = {"seed": arguments.seed, "lengths": lengths}
    record = Record(arguments.out, "exactness", about, is_fresh=arguments.fresh)
    done: list[dict[str, Any]] = record.content.setdefault("cases", [])
    wanted = share(list(cases(arguments.slice)), arguments.seed, arguments.every)
    print(f"seed {arguments.seed}, lengths {lengths}")
    parts, ends_s = arguments.part or ["pairs", "paths"], time.monotonic() + arguments.budget
    left = 0
    with tempfile.TemporaryDirectory(prefix="td-models-") as under:
        references: dict[str, Reference] = {}
        for case in wanted if "pairs" in parts else ():
            if asdict(case) in [entry["case"] for entry in done]:
                continue
            if time.monotonic() > ends_s:
                left += 1
                continue
            started = time.monotonic()
            folder = model_folder(case.model, arguments.seed, Path(under))
            if case.model not in references:
                references[case.model] = Reference(folder)
            verdicts = Run(case, folder, references[case.model], arguments.seed, lengths).verdicts()
            done.append({"case": asdict(case), "verdicts": {k: asdict(v) for k, v in verdicts.items()}})
            record.save()
            _show(case, verdicts, time.monotonic() - started)
        if "paths" in parts:
            # Ranks, which take longest, are the last of all.
            ordered = [(family, path, dtype) for path, family, dtype in product(PATHS, FAMILIES, ENOUGH)]
            combinations = share(ordered, arguments.seed, arguments.every)
            left += run_paths(combinations, record, arguments.seed, Path(under), ends_s)
    paths = record.content.get("paths", [])
    broken = sum(not _is_exact(entry) for entry in done) + sum(bool(entry["complaint"]) for entry in paths)
    return record.verdict(len(done) + len(paths), left=left, broken=broken)


def run_paths(
    combinations: Sequence[tuple[str, str, str]], record: Record, seed: int, under: Path, ends_s: float
) -> int:
    """Run each (family, path, dtype) that is not on record yet; returns how many are left when time is up."""
    done: list[dict[str, Any]] = record.content.setdefault("paths", [])
    references: dict[tuple[str, str], Reference] = {}
    left = 0
    for family, path, dtype in combinations:
        if (family, path, dtype) in [(entry["family"], entry["path"], entry["dtype"]) for entry in done]:
            continue
        if time.monotonic() > ends_s:
            left += 1
            continue
        started = time.monotonic()
        folder = model_folder(family, seed, under)
        if (family, dtype) not in references:
            references[family, dtype] = Reference(folder, TORCH_DTYPES[dtype])
        verdict = check_path(family, path, dtype, folder, references[family, dtype], seed)
        done.append({"family": family, "path": path, **asdict(verdict), "complaint": verdict.complaint})
        record.save()
        print(
            f"{family:12} {path:26} {dtype:9} {verdict.complaint.upper() or 'exact':9} error {verdict.max_error:.1e}, "
            f"{verdict.tokens - verdict.skipped}/{verdict.tokens} compared ({time.monotonic() - started:.0f} s)",
            flush=True,
        )
    return left


def check_path(family: str, path: str, dtype: str, folder: Path, reference: Reference, seed: int) -> PathVerdict:
    """Send the same prompts as on every path of this family and seed, and judge the answers."""
    draw = random.Random(f"{seed}/{family}/paths")
    vocab = read_model_config(folder).vocab_size
    prompts = [[draw.randrange(2, vocab) for _ in range(length)] for length in PATH_LENGTHS]
    answers = PATHS[path](folder, dtype, prompts, reference)
    looked = ((each, reference.logprobs(each.prompt, each.text)) for each in answers)
    is_exact = dtype == "float32"  # in bfloat16 a router may choose otherwise: the difference is judged like any other
    return judge(
        dtype, ((each, rows, not is_exact or reference.is_clear(each.prompt, each.text)) for each, rows in looked)
    )


def _show(case: Case, verdicts: dict[str, Verdict], took_s: float) -> None:
    for name, v in verdicts.items():
        exact = "exact" if v.is_exact else "NOT EXACT"
        print(
            f"{case.model:12} {case.transport:5} chunk {case.chunk_tokens:<4} {name:14} {exact:9} "
            f"error {v.max_error:.1e}, {v.clear_tokens}/{v.tokens} clear, {v.unequal} unequal ({took_s:.0f} s)",
            flush=True,
        )


def _is_exact(entry: dict[str, Any]) -> bool:
    return all(Verdict(**verdict).is_exact for verdict in entry["verdicts"].values())


if __name__ == "__main__":
    sys.exit(main())
