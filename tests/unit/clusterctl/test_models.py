"""`clusterctl models`: what it lists, prints and refuses. What a fetch does is in tests/integration/cluster."""

from pathlib import Path

import pytest

from tandem.clusterctl import main as program
from tandem.clusterctl.exit_codes import Exit
from tandem.controlplane import model_download
from tandem.controlplane.model_catalog import BUNDLED, SMOLLM2, bundled_model
from tandem.core.errors import UnavailableError
from tests.unit.clusterctl.document_check import checked


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_MODELS_DIR", str(tmp_path))
    return tmp_path


def put(root: Path) -> Path:
    with (root / SMOLLM2.file).open("wb") as file:
        file.truncate(SMOLLM2.size)
    return root / SMOLLM2.file


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = program.run(["models", *arguments])
    return code, *capsys.readouterr()


def test_the_list_says_what_is_here_and_what_can_be_pulled(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    found = checked(run(capsys, "list", "-o", "json")[1], "Models")
    assert found["folder"] == str(root)
    assert [(row["name"], row["state"], row["is_default"]) for row in found["models"]] == [
        (BUNDLED, "bundled", True), ("smollm2", "available", False),
    ]  # fmt: skip
    assert found["models"][0]["path"] == str(bundled_model())
    path = put(root)
    found = checked(run(capsys, "list", "-o", "json")[1], "Models")
    assert found["models"][1] == {
        "name": "smollm2", "state": "fetched", "path": str(path), "size_bytes": SMOLLM2.size, "license": "Apache-2.0",
        "about": SMOLLM2.words, "is_default": True,
    }  # fmt: skip
    shown = run(capsys, "list")[1].splitlines()
    assert [line.split()[0] for line in shown] == ["NAME", "tandem-tiny", "smollm2"]
    assert all(word in shown[2] for word in ("(default)", "fetched", "98 MB", str(path)))


def test_pull_prints_the_path_at_once_where_it_is_here(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    path = put(root)
    assert run(capsys, "pull", "smollm2") == (0, f"{path}\n", "")
    (row,) = checked(run(capsys, "pull", "smollm2", "-o", "json")[1], "Models")["models"]
    assert row["path"] == str(path)


def test_a_pull_that_fails_is_a_line_and_an_exit_code(
    capsys: pytest.CaptureFixture[str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise UnavailableError("smollm2 cannot be fetched", why="nobody answers")

    monkeypatch.setattr(model_download, "_fetch", fail)
    code, out, error = run(capsys, "pull", "smollm2")
    assert (code, out) == (Exit.FAILED, "")
    assert error.splitlines() == [
        f"fetching smollm2 (98 MB, Apache-2.0) into {root}",
        "clusterctl: smollm2 cannot be fetched: nobody answers.",
    ]


def test_remove_takes_it_away_and_may_be_repeated(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    path = put(root)
    assert run(capsys, "remove", "smollm2") == (0, f"removed {path}\n", "")
    assert not path.exists()
    assert run(capsys, "remove", "smollm2") == (0, "smollm2 is not here\n", "")


@pytest.mark.parametrize("command", ["pull", "remove"])
@pytest.mark.parametrize(
    ("name", "said"),
    [("smol", "no model 'smol' can be fetched: there are: smollm2."), (BUNDLED, "it comes with Tandem")],
)
def test_others_are_unknown(capsys: pytest.CaptureFixture[str], root: Path, command: str, name: str, said: str) -> None:
    code, out, error = run(capsys, command, name)
    assert (code, out) == (Exit.NOT_FOUND, "")
    assert said in error
