"""The proof that changes code: which changes it makes, and what it takes for a test that noticed one."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from proof.mutation import __main__ as proof
from proof.mutation.house import House, Outcome
from proof.mutation.mutants import mutants
from proof.mutation.targets import ROOT, TARGETS
from proof.record import CUT

CODE = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass(frozen=True)
class Pair:
    one: int | None = None

def add(a: int | None, b: int, *, kind: type = int) -> int | None:
    if kind is str:
        return None
    if a == 1:
        raise ValueError("a" + "b")
    for _ in zip([b], [b], strict=True):
        pass
    never = 2 * 3  # pragma: no cover
    return a + b
"""
HASHES = "core/tandem/core/block_hash.py"
TESTS = ("tests/unit/core/test_block_hash.py",)


def test_only_what_can_change_behaviour_is_changed(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    found = mutants(tmp_path, ["code.py"])
    text = CODE.splitlines()
    assert {text[mutant.line - 1].strip() for mutant in found} == {
        "if kind is str:",
        "if a == 1:",
        "for _ in zip([b], [b], strict=True):",
        "return a + b",
    }
    assert len({mutant.key for mutant in found}) == len(found)
    assert not any(mutant.operator.endswith(("_Is_Eq", "TrueWithFalse")) for mutant in found)
    for mutant in found:
        changed = (mutant.source(CODE) or "").splitlines()
        assert [n for n, line in enumerate(changed, 1) if line != text[n - 1]] == [mutant.line]


def test_every_target_has_files_and_tests() -> None:
    for target in TARGETS.values():
        assert target.paths()
        assert all((ROOT / test).exists() for test in target.tests)
        assert all((ROOT / path).exists() for path in target.left_out)
        for path in target.paths():
            tests = target.tests_of(path)
            assert any((ROOT / test).exists() for test in tests)
            assert all((ROOT / test).exists() for test in tests if test.startswith("tests/"))


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(tmp_path_factory.mktemp("mutation") / "copy")


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        ("hashlib.sha256(parent +", "hashlib.sha256(b'' +", Outcome.FAILED),
        ("    return hashes\n", "    return list(hashes)\n", Outcome.PASSED),
    ],
)
def test_tests_of_the_copy_run_on_the_changed_code(house: House, before: str, after: str, outcome: Outcome) -> None:
    code = (house.folder / HASHES).read_text()
    assert before in code
    assert house.try_out(HASHES, code.replace(before, after), TESTS, normal_s=60.0) is outcome
    assert (house.folder / HASHES).read_text() == code
    assert (ROOT / HASHES).read_text() == code


def test_a_run_that_does_not_end_is_told_from_one_that_fails(house: House) -> None:
    assert house.run(TESTS, timeout_s=0.01) is Outcome.HUNG


def test_a_smaller_sample_keeps_what_a_larger_one_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a target that has only begun breaks no promise yet."""
    out, outcomes = tmp_path / "mutation.json", [Outcome.FAILED] * 4 + [Outcome.PASSED]

    class Played:
        def __init__(self, folder: Path) -> None:
            self.folder = folder

        def timed(self, tests: Sequence[str]) -> float:
            return 1.0

        def try_out(self, file: str, code: str, tests: Sequence[str], normal_s: float) -> Outcome:
            return outcomes.pop()

    monkeypatch.setattr(proof, "House", Played)

    def run(sample: int, budget_s: float) -> int:
        flags = ["--target", "blockhash", "--jobs", "1", "--sample", str(sample), "--budget-s", str(budget_s)]
        monkeypatch.setattr(sys, "argv", ["proof.mutation", *flags, "--out", str(out)])
        return proof.main()

    assert run(4, 1000) == 1  # one of four survived
    assert run(2, 1000) == 1
    assert run(4, 1000) == 1
    assert len(outcomes) == 1  # none was tried twice
    assert run(6, 0) == CUT
    assert not outcomes
