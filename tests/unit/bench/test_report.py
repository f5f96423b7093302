"""Rows in files: what was measured under the same load goes on, and names its commit."""

import json
from pathlib import Path

import pytest

from bench.report import Row, commit, kept, quantile, write


def test_rows_of_the_same_load_and_commit_are_kept(tmp_path: Path) -> None:
    rows = [Row("case", "metric", 2.0, "ms", 4.0), Row("case", "other", 1.0, "/s")]
    out = tmp_path / "new" / "some.json"
    write("some", rows, out, load={"seed": 1})
    written = json.loads(out.read_text())
    assert (written["name"], written["commit"], written["load"]) == ("some", commit(), {"seed": 1})
    assert [row["ratio"] for row in written["rows"]] == [0.5, None]
    assert kept(out, {"seed": 1}) == rows
    assert kept(out, {"seed": 2}) == []
    write("some", rows, out, load={"seed": 1}, commit="of another time")
    assert kept(out, {"seed": 1}) == []
    assert [path.name for path in out.parent.iterdir()] == ["some.json"]


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() == ""


@pytest.mark.parametrize(("percent", "value"), [(50, 3.0), (99, 4.96)])
def test_quantiles_lie_between_neighbours(percent: int, value: float) -> None:
    assert quantile([5.0, 1.0, 2.0, 4.0, 3.0], percent) == pytest.approx(value)
    assert quantile([7.0], percent) == 7.0
