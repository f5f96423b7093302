"""Answers of a model that is split over the processes of a tensor-parallel group, on gloo.

All ranks are given the same steps beforehand, so what follows a prompt is the reference's own answer; what the ranks
would have chosen themselves is in their logits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from bench.report import ROOT
from proof.exactness.answers import Answer
from proof.exactness.reference import Reference
from tests.integration.engine import tp_program

PATIENCE_S = 100
_BLOCK, _BEST = 16, 20


def answer_over_ranks(
    size: int, output_tokens: int, max_model_len: int, folder: Path, dtype: str, prompts: list[list[int]],
    reference: Reference,
) -> list[Answer]:  # fmt: skip
    """Answer each prompt on its own, then one token of each in a step."""
    texts = [reference.greedy(prompt, output_tokens) for prompt in prompts]
    steps = _steps(prompts, texts)
    options = {"dtype": dtype, "num_blocks": 16 * len(prompts), "max_model_len": max_model_len}
    case = {"folder": str(folder), "options": options | {"block_tokens": _BLOCK}, "steps": steps}
    with tempfile.TemporaryDirectory(prefix="td-ranks-") as name:
        (Path(name) / "cases.json").write_text(json.dumps({"only": case}))
        _run(Path(name), size)
        found = load_file(Path(name) / "only-0.safetensors")
    rows = [[found[f"logits {number}"][0]] for number in range(len(prompts))]
    for step in range(output_tokens - 1):
        for row, logits in zip(rows, found[f"logits {len(prompts) + step}"], strict=True):
            row.append(logits)
    answers = []
    for prompt, text, row in zip(prompts, texts, rows, strict=True):
        tops = [logits.log_softmax(-1).topk(_BEST) for logits in row]
        best = [list(zip(top.indices.tolist(), top.values.tolist(), strict=True)) for top in tops]
        answers.append(Answer(prompt, text, [pairs[0][0] for pairs in best], best))
    return answers


def _steps(prompts: list[list[int]], texts: list[list[int]]) -> list[dict[str, Any]]:
    tables, free = [], 0
    for prompt, text in zip(prompts, texts, strict=True):
        blocks = -(-(len(prompt) + len(text)) // _BLOCK)
        tables.append(list(range(free, free + blocks)))
        free += blocks
    steps = []
    for prompt, table in zip(prompts, tables, strict=True):
        sequence = {"query": len(prompt), "context": len(prompt), "table": table}
        positions, rows = list(range(len(prompt))), [len(prompt) - 1]
        steps.append({"tokens": prompt, "positions": positions, "sequences": [sequence], "rows": rows})
    for place in range(len(texts[0]) - 1):
        at = [len(prompt) + place for prompt in prompts]
        sequences = [
            {"query": 1, "context": position + 1, "table": table} for position, table in zip(at, tables, strict=True)
        ]
        tokens, rows = [text[place] for text in texts], list(range(len(prompts)))
        steps.append({"tokens": tokens, "positions": at, "sequences": sequences, "rows": rows})
    return steps


def _run(folder: Path, size: int) -> None:
    """Run all ranks, each a process, to their end; AssertionError with their output if one fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    commands = [
        [sys.executable, "-m", tp_program.__name__, str(folder), str(rank), str(size), "cases", "60", "60"]
        for rank in range(size)
    ]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=pipe, stderr=subprocess.STDOUT)
        for command in commands
    ]
    try:
        said = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise AssertionError("\n".join(said))
