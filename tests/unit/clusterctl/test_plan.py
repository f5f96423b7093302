"""`clusterctl plan` and `simulate`: answers without a cluster, as tables, documents, pictures and exit codes."""

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tandem.clusterctl import main as program
from tandem.clusterctl.exit_codes import Exit
from tandem.clusterctl.planning.plan import heaviest
from tandem.clusterctl.schemas.kinds import schema
from tandem.controlplane.planner.records import ObservedRequest

SMALL = ("--rate", "3", "--isl", "1500", "--osl", "100", "--slo-ttft", "2", "--slo-itl", "0.05")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = program.run(list(arguments))
    return code, *capsys.readouterr()


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, error = run(capsys, *arguments, "-o", "json")
    assert code == Exit.OK, error
    found: dict[str, Any] = json.loads(out)
    errors = jsonschema_rs.Draft202012Validator(schema(found["kind"])).iter_errors(found)
    assert [str(error) for error in errors] == []
    return found


def test_the_cheapest_workers_that_keep_the_promises(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "plan", *SMALL, "--hardware", "h100=3", "--hardware", "l40s=1", "--tp", "1", "--tp", "2")
    best = found["best"]
    assert best["reaches_target"]
    assert best["attained"] >= 0.95
    assert all(one["price_per_hour"] >= best["price_per_hour"] for one in found["others"] if one["reaches_target"])
    assert best["input_price_per_million"] > 0
    assert best["output_price_per_million"] > 0
    assert found["neighbours"]
    assert {one["fleet"] for one in found["others"]}.isdisjoint({best["fleet"]})


def test_a_price_decides(capsys: pytest.CaptureFixture[str]) -> None:
    cheap = document(capsys, "plan", *SMALL, "--hardware", "h100=1", "--hardware", "l4=50")
    assert "h100" in cheap["best"]["fleet"]
    assert "l4×" not in cheap["best"]["fleet"]


def test_people_see_the_best_first_and_what_is_beside(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", *SMALL)
    assert code == Exit.OK
    assert "planned for" in out
    assert "IN/M" in out
    rows = out.splitlines()[2:]
    assert rows[0].startswith("best")
    assert any(row.startswith("beside") for row in rows)


def test_promises_that_nothing_keeps_end_with_8(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = run(capsys, "plan", *SMALL, "--accelerators", "2", "--slo-ttft", "0.01")
    assert code == Exit.SLO_MISSED
    assert "best" in out
    assert "nothing within 2 accelerators keeps 95%" in error


LONG = ("--rate", "10", "--isl", "4096", "--osl", "32", "--slo-itl", "0.02")
"""On H100, with prefill workers that make 3.3 GB of KV a second each."""


@pytest.mark.parametrize(("link", "pairs"), [("1e9", False), ("20e9", True)])
def test_pairs_are_not_recommended_over_links_that_cannot_carry_their_kv(
    capsys: pytest.CaptureFixture[str], link: str, pairs: bool
) -> None:
    best = document(capsys, "plan", *LONG, "--link", link)["best"]
    assert best["reaches_target"]
    assert best["link_bytes_per_s"] == float(link)
    assert (best["prefill"] is not None) is pairs
    assert (best["mixed"] is None) is pairs


@pytest.mark.parametrize(("price", "link"), [("0.3", 20e9), ("9", 1e9)])
def test_links_are_chosen_by_what_they_save(capsys: pytest.CaptureFixture[str], price: str, link: float) -> None:
    asked = ("plan", *LONG, "--link", "1e9", "--link", f"20e9={price}")
    found = document(capsys, *asked)
    assert found["best"]["link_bytes_per_s"] == link
    assert {one["link_bytes_per_s"] for one in (found["best"], *found["others"])} == {1e9, 20e9}
    assert all(one["price_per_hour"] >= found["best"]["price_per_hour"] for one in found["others"])
    _, out, _ = run(capsys, *asked)
    rows = [row for row in out.splitlines() if row.startswith(("best", "else"))]
    assert {" 1.00 GB/s " in row for row in rows} == {True, False}, "people see the best of every link"


def test_a_link_is_the_hardwares_own_unless_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    plain = document(capsys, "plan", *SMALL, "--hardware", "l40s")
    assert plain["best"]["link_bytes_per_s"] == 5e9
    assert document(capsys, "plan", *SMALL, "--hardware", "l40s", "--link", "0") == plain


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lines = [f"2023-11-16 18:{15 + n // 60:02}:{n % 60:02}.0000000,{400 + n},{10 + n % 50}" for n in range(120)]
    path = tmp_path / "requests.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n")
    return path


def test_a_trace_is_planned_for_its_heaviest_minutes(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    found = document(capsys, "plan", "--trace", str(trace), "--scale", "4", "--window", "10")
    assert found["requests"] == "requests"
    assert found["planned_for"]["seconds"] == pytest.approx(10.0)
    assert found["planned_for"]["rate"] == pytest.approx(4.1, rel=0.02)


def test_measured_rates_take_the_place_of_hardware(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    measured = tmp_path / "mine.json"
    measured.write_text(json.dumps({"prefill_tokens_per_s": 50_000, "decode_step_s": 0.005, "decode_sequence_s": 1e-4}))
    found = document(capsys, "plan", *SMALL, "--calibration", str(measured), "--price", "2")
    assert "measured" in found["best"]["fleet"]
    assert found["best"]["price_per_hour"] == 2.0 * found["best"]["accelerators"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no requests are given"),
        (("--rate", "3"), "no requests are given"),
        ((*SMALL, "--trace", "x.csv"), "both --trace and --rate"),
        ((*SMALL, "--hardware", "h10"), "Did you mean 'h100'"),
        ((*SMALL, "--hardware", "h100=free"), "Write it like h100=2.5"),
        ((*SMALL, "--link", "fast"), "Write it like 20e9"),
        ((*SMALL, "--link", "-1"), "'-1' is not the speed of a link in bytes per second"),
        ((*SMALL, "--link", "20e9=free"), "'20e9=free' is not the speed of a link"),
        ((*SMALL, "--link", "20e9=-1"), "'20e9=-1' is not the speed of a link"),
        ((*SMALL, "--model", "llama-3-8"), "Did you mean 'llama-3-8b'"),
        ((*SMALL, "--model", "llama-3-70b"), "Allow a larger --tp"),
        ((*SMALL, "--tp", "5"), "Use 1, 2, 3, 4 or 8"),
        ((*SMALL, "--target", "95"), "Use a share from 0 to 1"),
        ((*SMALL, "--tp", "8", "--accelerators", "4"), "nothing fits 4 accelerators"),
        ((*SMALL, "--slo-ttft", "-1"), "--slo-ttft is -1"),
        (("--trace", "none.csv"), "cannot be read"),
    ],
)
def test_mistakes_say_what_to_do(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    code, out, error = run(capsys, "plan", *arguments)
    assert code == Exit.USAGE
    assert not out
    assert message in error
    assert len(error.splitlines()) == 1


def test_the_heaviest_window_is_found() -> None:
    quiet = [ObservedRequest(arrival_s=float(at), prompt_tokens=10, output_tokens=1) for at in range(100)]
    busy = [ObservedRequest(arrival_s=200.0 + at / 10, prompt_tokens=10, output_tokens=1) for at in range(100)]
    found = heaviest([*quiet, *busy], 10.0, 1000)
    assert [one.arrival_s for one in found] == [one.arrival_s for one in busy]
    assert len(heaviest([*quiet, *busy], 10.0, 30)) == 30


def test_splits_are_swept_and_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "splits.svg"
    found = document(capsys, "simulate", "splits", *SMALL, "--workers", "3", "--picture", str(picture))
    assert [row["split"] for row in found["splits"]] == ["1P:2D", "2P:1D", "3M"]
    assert found["best"] in {"1P:2D", "2P:1D", "3M"}
    assert picture.read_text().startswith("<?xml")


def test_the_map_says_where_pairs_lose(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "map.png"
    small = (
        "--prompt",
        "256",
        "--answer",
        "16",
        "--load",
        "0.5",
        "--link",
        "1e9",
        "--workers",
        "2",
        "--requests",
        "40",
    )
    found = document(capsys, "simulate", "map", *small, "--picture", str(picture))
    (point,) = found["points"]
    assert set(point["by_way"]) == {"auto", "always", "never", "mixed"}
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("splits", *SMALL, "--workers", "1"), "Use 2 or more"),
        (("splits", *SMALL, "--picture", "x.doc"), "Use a name that ends in .svg"),
        (("map", "--load", "0"), "--load is 0"),
    ],
)
def test_mistakes_of_simulations(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    code, _, error = run(capsys, "simulate", *arguments)
    assert code == Exit.USAGE
    assert message in error
