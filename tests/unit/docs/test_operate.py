"""Test pages of docs/operate against the code: logs, sizing, prefill and decode."""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tandem.clusterctl.inspect.log_files import records
from tandem.controlplane.planner.hardware import HARDWARE, MODELS, rates
from tandem.controlplane.planner.records import ObservedRequest, Rates, RoleSplit
from tandem.controlplane.planner.split_forecast import forecast
from tandem.controlplane.simulator.workloads import varied
from tandem.core.config import RouterSection, SloSection, WorkerSection
from tandem.core.prefill_queue import attended
from tests.unit.docs.operating import table

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "operate" / "choosing-pd.md").read_text()
ITL_S, TTFT_S = 0.03, 2.0
WORKERS, LOAD = 8, 0.9
LINKS = [
    ("llama-3-8b", "h100", 1), ("llama-3-8b", "a100", 1), ("llama-3-8b", "l40s", 1), ("llama-3-8b", "l4", 1),
    ("qwen3-32b", "h100", 2), ("qwen3-32b", "a100", 2), ("llama-3-70b", "h100", 4), ("llama-3-70b", "h100", 8),
]  # fmt: skip
SHAPES = [(8192, 256), (4096, 128), (4096, 256), (2048, 512), (1024, 512), (512, 512), (512, 1024)]


def worker(model: str, hardware: str, tp: int) -> Rates:
    found = rates(HARDWARE[hardware], MODELS[model], tp)
    assert found is not None, "it fits"
    return found


@dataclass(frozen=True)
class Work:
    """Time that a request of that shape takes on a worker of each role, each kept busy. Seconds."""

    prompt: int
    answer: int
    prefill_s: float
    sequences: int
    step_s: float

    @property
    def decode_s(self) -> float:
        return self.answer * self.step_s / self.sequences

    @property
    def ratio(self) -> float:
        """Prefill workers for each decode worker."""
        return self.prefill_s / self.decode_s


@cache
def work(prompt: int, answer: int) -> Work:
    one = worker("llama-3-8b", "h100", 1)
    context = prompt + answer / 2
    each_s = one.decode_sequence_s + one.decode_context_s * context
    sequences = min(one.max_sequences, one.kv_tokens // (prompt + answer), int((ITL_S - one.decode_step_s) / each_s))
    prefill_s = one.prefill_step_s + one.prefill.seconds(prompt, attended(0, prompt))
    return Work(prompt, answer, prefill_s, sequences, one.decode_step_s + sequences * each_s)


@cache
def best_split(prompt: int, answer: int) -> RoleSplit:
    """Return the best split of WORKERS, by the planner's replay, at LOAD of their capacity by the arithmetic; of equals
    the one with most decode workers."""
    each = work(prompt, answer)
    rate = LOAD * WORKERS / (each.prefill_s + each.decode_s)
    trace = varied(requests=600, rate=rate, prompt_tokens=prompt, output_tokens=answer, seed=1)
    seen = [
        ObservedRequest(arrival_s=one.arrival_s, prompt_tokens=one.prompt_tokens, output_tokens=one.output_tokens)
        for one in trace.requests
    ]
    promises = {"": SloSection(ttft_s=TTFT_S, itl_s=ITL_S)}
    splits = [RoleSplit(prefill, WORKERS - prefill) for prefill in range(1, WORKERS)]
    one = worker("llama-3-8b", "h100", 1)
    return max(splits, key=lambda split: forecast(split, seen, one, promises).score)


def ratio(value: float) -> str:
    """Such as 2.2:1 or 1:2.0."""
    return f"{value:.1f}:1" if value >= 1 else f"1:{1 / value:.1f}"


def test_links_that_hide_a_transfer() -> None:
    rows = []
    for model, hardware, tp in LINKS:
        one = worker(model, hardware, tp)
        made = one.prefill.tokens_per_s * one.kv_token_bytes
        rows.append([
            f"`{model}`", f"{tp} × `{hardware}`", f"{one.kv_token_bytes // 1024} KiB",
            f"{one.prefill.tokens_per_s:,.0f}", f"{made / 1e9:.1f} GB/s", f"{8 * made / 1e9:.0f} Gbit/s",
        ])  # fmt: skip
    assert table(TEXT, "The link") == rows


def test_ratios_by_length() -> None:
    rows = []
    for shape in SHAPES:
        each = work(*shape)
        rows.append([
            f"{each.prompt:,}", f"{each.answer:,}", f"{each.prefill_s * 1e3:.0f} ms", f"{each.sequences}",
            f"{each.step_s * 1e3:.1f} ms", f"{each.decode_s * 1e3:.0f} ms", ratio(each.ratio), f"{best_split(*shape)}",
        ])  # fmt: skip
    assert table(TEXT, "The ratio") == rows


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_planner_is_not_far_from_the_arithmetic(shape: tuple[int, int]) -> None:
    """Within one worker of eight."""
    split, share = best_split(*shape), work(*shape).ratio
    assert abs(split.prefill - WORKERS * share / (1 + share)) <= 1


def test_rules_of_thumb_hold_for_the_table() -> None:
    long_prompts = [work(*shape).ratio for shape in SHAPES if shape[0] >= 16 * shape[1]]
    long_answers = [work(*shape).ratio for shape in SHAPES if shape[0] <= 4 * shape[1] and shape[0] >= shape[1]]
    assert all(2 <= value <= 5 for value in long_prompts)
    assert all(0.5 <= value <= 1 for value in long_answers)
    assert "2:1 to 4:1" in TEXT
    assert "1:2 to 1:1" in TEXT


def test_kv_of_a_token_is_two_planes_of_every_layer() -> None:
    """layers, KV heads, width of a head; bfloat16."""
    shapes = {"llama-3-8b": (32, 8, 128), "llama-3-70b": (80, 8, 128), "qwen3-32b": (64, 8, 128)}
    for name, (layers, heads, width) in shapes.items():
        assert MODELS[name].kv_token_bytes == 2 * layers * heads * width * 2
    assert "2 · 32 · 8 · 128 · 2 = 131,072 bytes" in TEXT


def test_what_is_left_after_the_last_step() -> None:
    section = WorkerSection()
    last = section.chunk_tokens * MODELS["llama-3-8b"].kv_token_bytes / 4
    assert f"{last / 1e6:.1f} MB" in TEXT
    said = re.findall(r"([\d.]+) ms over (\d+) GB/s", TEXT)
    assert said
    assert [ms for ms, _ in said] == [f"{last / (float(speed) * 1e9) * 1e3:.1f}" for _, speed in said]


SIZING = (ROOT / "docs" / "operate" / "sizing.md").read_text()


def test_what_workers_hold() -> None:
    rows = []
    for name, model in MODELS.items():
        held = 64 * 4096 * model.kv_token_bytes
        least = next(tp for tp in (1, 2, 4, 8) if rates(HARDWARE["h100"], model, tp))
        rows.append([
            f"`{name}`", f"{model.weight_bytes / 1e9:.0f} GB", f"{held / 2**30:.0f} GiB",
            f"{2**33 // model.kv_token_bytes:,}", str(least),
        ])  # fmt: skip
    assert table(SIZING, "Workers") == rows
    assert HARDWARE["h100"].memory_bytes == 80e9


def test_what_a_router_served() -> None:
    rows: list[dict[str, Any]] = json.loads((ROOT / "bench/results/router.json").read_text())["rows"]
    figures = {(row["case"], row["metric"]): row["value"] for row in rows}
    text = "128-token text, 32 tokens"
    most = figures[text, "streams a second, the most served"]
    assert f"one served at most {most:.0f} streams a second of 128-token prompts\nand 32-token answers" in SIZING
    assert (
        f"{round(figures['128 token ids, 512 tokens', 'tokens a second, served'], -2):,.0f} tokens a second" in SIZING
    )


def test_bounds_are_those_of_the_code() -> None:
    section = RouterSection()
    assert f"`index_memory_bytes` ({section.index_memory_bytes >> 20} MiB" in SIZING
    assert f"`slow_reader_backlog_bytes` ({section.slow_reader_backlog_bytes >> 20} MiB)" in SIZING


PAGE = (Path(__file__).resolve().parents[3] / "docs" / "operate" / "logs.md").read_text()


def test_both_lines_say_the_same(tmp_path: Path) -> None:
    for language in ("text", "json"):
        [line] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
        (tmp_path / "router-0.log").write_text(line)
        (found,) = records(tmp_path, ["router-0"])
        assert (found.time, found.level) == ("2026-11-23T13:04:16.211Z", "WARNING"), language
        assert found.text.split() == [
            "attempt", "failed", "request=cmpl-0123abcd", "trace=0af7651916cd43dd8448eb211c80319c", "attempt=1",
            "cause=lost",
        ]  # fmt: skip
