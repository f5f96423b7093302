"""Proofs with the same entries under each seed: seeds divide them, and none is left out."""

import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from proof.exactness import __main__ as exactness
from proof.exactness.answers import PathVerdict, Verdict
from proof.exactness.paths import PATHS
from proof.record import CUT, Record, add_every, arguments_of, share
from proof.survival import __main__ as survival
from proof.transfer import __main__ as transfer
from proof.transfer.plan import matrix
from tests.chaos.strikes import CELLS

SEEDS = (70, 71, 72)


@pytest.fixture(autouse=True)
def is_logging_again() -> Iterator[None]:
    yield
    logging.disable(logging.NOTSET)


def out_of(
    monkeypatch: pytest.MonkeyPatch, path: Path, main: Callable[[], int], *arguments: str
) -> tuple[int, dict[str, Any]]:
    """Exit status and results."""
    monkeypatch.setattr(sys, "argv", ["proof", "--out", str(path), *arguments])
    return main(), json.loads(path.read_text())


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_seeds_in_a_row_divide_all_entries(every: int) -> None:
    shares = [share(range(10), seed, every) for seed in range(70, 70 + every)]
    assert sorted(entry for one in shares for entry in one) == list(range(10))


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "a"])
def test_what_is_no_share_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = arguments_of("some", "")
    add_every(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([f"--every={text}"])
    assert "is no whole number from 1 on" in capsys.readouterr().err


def test_survival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(engine: str, todo: Sequence[tuple[Any, int]], record: Record, ends_s: float) -> None:
        for cell, seed in todo:
            struck.append((engine, str(cell), seed))
        record.save()

    struck: list[tuple[str, str, int]] = []
    monkeypatch.setattr(survival, "run", run)
    path = tmp_path / "out.json"
    assert out_of(monkeypatch, path, survival.main, "--seed=70", "--passes=3", "--every=3")[0] == CUT, "none was struck"
    assert len(struck) == 2 * len(CELLS)
    assert {cell for _, cell, _ in struck} == {str(cell) for cell in CELLS}
    assert {(engine, seed) for engine, _, seed in struck} == {(e, s) for e in ("sim", "model") for s in SEEDS}
    struck.clear()
    one = str(CELLS[7])
    out_of(monkeypatch, path, survival.main, "--seed=71", "--every=3", "--engines=sim", f"--only={one}")
    assert struck == [("sim", one, 71)]


def test_exactness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Exact:
        def __init__(self, *_: object) -> None: ...

        def verdicts(self) -> dict[str, Verdict]:
            return {"cold": Verdict(0.0, 1, 1, 0)}

    monkeypatch.setattr(exactness, "Run", Exact)
    monkeypatch.setattr(exactness, "Reference", lambda _: None)
    monkeypatch.setattr(exactness, "model_folder", lambda *_: tmp_path)
    ran: list[str] = []
    for seed in SEEDS:
        path = tmp_path / f"{seed}.json"
        status, results = out_of(monkeypatch, path, exactness.main, f"--seed={seed}", "--every=3", "--part=pairs")
        cases = [entry["case"] for entry in results["cases"]]
        assert status == 0
        assert {(case["model"], case["transport"]) for case in cases} == {
            (model, transport) for model in (exactness.BUNDLED, *exactness.FAMILIES) for transport in ("shm", "grpc")
        }
        ran += [str(case) for case in cases]
    assert len(set(ran)) == len(ran) == len(list(exactness.cases(is_slice=False)))


def test_paths_of_exactness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped goes on, and one complaint is a broken promise."""
    ran: list[tuple[str, str, str]] = []

    def check(family: str, path: str, dtype: str, *_: object) -> PathVerdict:
        ran.append((family, path, dtype))
        is_bad = ran[-1] == ("qwen3", "2 ranks", "bfloat16")
        return PathVerdict(dtype, 0.0, 96, 0, int(is_bad))

    monkeypatch.setattr(exactness, "check_path", check)
    monkeypatch.setattr(exactness, "Reference", lambda *_: None)
    monkeypatch.setattr(exactness, "model_folder", lambda *_: tmp_path)
    out, paths = tmp_path / "out.json", ("--seed=1", "--part=paths")
    assert out_of(monkeypatch, out, exactness.main, *paths, "--every=3")[0] in (0, 1)
    some = len(ran)
    status, results = out_of(monkeypatch, out, exactness.main, *paths)
    assert status == 1
    assert 0 < some < len(ran) == len(set(ran)) == len(exactness.FAMILIES) * len(PATHS) * 2
    assert [entry["complaint"] for entry in results["paths"] if entry["complaint"]] == ["1 tokens differ"]
    monkeypatch.setattr(sys, "argv", ["proof", f"--out={tmp_path / 'none.json'}", *paths, "--budget=-1"])
    assert exactness.main() == CUT


def test_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_cases(part: str, seed: int, indices: Sequence[int], *_: object) -> Iterator[dict[str, Any]]:
        ran.setdefault(part, []).extend(indices)
        for index in indices:
            none: dict[str, Any] = {"violations": [], "hits": {}, "figures": [], "held": []}
            yield {"index": index, "transport": "tcp", "transfers": 40, "admitted": 40, "bytes": 1} | none

    ran: dict[str, list[int]] = {}
    monkeypatch.setattr(transfer, "run_cases", run_cases)
    for seed in SEEDS:
        path = tmp_path / f"{seed}.json"
        flags = (f"--seed={seed}", "--every=3", "--part=wire", "--part=matrix", "--count=1200")
        status, results = out_of(monkeypatch, path, transfer.main, *flags)
        assert (status, results["summary"]["wire"]["transfers"]) == (0, 400)
        assert len(results["matrix"]) == len(matrix()) / 3
    assert {part: sorted(indices) for part, indices in ran.items()} == {
        "wire": list(range(30)), "matrix": list(range(len(matrix())))
    }  # fmt: skip
