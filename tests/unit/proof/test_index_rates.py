"""The proof of the index compares hit rates of one router and of three until it is fairly sure, and no longer."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from proof.index import __main__ as proof
from tests.chaos.router_scene import ROUTERS, Left

SPREAD = 0.0125
"""Of a rate of 200 requests, as measured."""


class Scene:
    """Rates drawn around 0.7 for one router and `three` for three."""

    def __init__(self, seed: int, three: float, spread: float) -> None:
        self.routers = ["a", "b", "c"]
        self.prompts = SimpleNamespace(wrong=[])
        self.asked = 0
        self._dice, self._means, self._spread = random.Random(seed), {1: 0.7, ROUTERS: three}, spread

    def hit_rate(self, routers: Sequence[str], requests: int, questions: int) -> float:
        self.asked += 1
        return self._dice.gauss(self._means[len(routers)], self._spread)

    def kill_router(self, number: int, rng: random.Random) -> Left:
        return Left(asked=1, failed=0, probes=1, hits=1)


def pairs_and_verdict(monkeypatch: pytest.MonkeyPatch, scene: Scene) -> tuple[int, bool]:
    @contextlib.contextmanager
    def made() -> Iterator[Scene]:
        yield scene

    monkeypatch.setattr(proof, "router_scene", made)
    is_kept = not proof.is_short(proof.run_routers(1))
    return scene.asked // 2 - proof.FIRST_PAIRS, is_kept


@pytest.mark.parametrize(("three", "kept"), [(0.7, True), (0.67, False)])
def test_ten_pairs_are_enough_where_they_say_it_clearly(
    monkeypatch: pytest.MonkeyPatch, three: float, kept: bool
) -> None:
    assert pairs_and_verdict(monkeypatch, Scene(1, three, 0.001)) == (proof.PAIRS, kept)


def test_what_is_not_clear_is_measured_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.3 % less, as measured: a mean of ten is below the limit of 2 % one time in five."""
    found = [pairs_and_verdict(monkeypatch, Scene(seed, 0.7 * 0.987, SPREAD)) for seed in range(200)]
    assert max(pairs for pairs, _ in found) == proof.MOST_PAIRS
    assert sum(kept for _, kept in found) > 0.9 * len(found)
    monkeypatch.setattr(proof, "MOST_PAIRS", proof.PAIRS)
    ten = [pairs_and_verdict(monkeypatch, Scene(seed, 0.7 * 0.987, SPREAD)) for seed in range(200)]
    assert sum(kept for _, kept in ten) < 0.9 * len(ten)


def test_what_is_worse_than_allowed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [pairs_and_verdict(monkeypatch, Scene(seed, 0.7 * 0.97, SPREAD)) for seed in range(200)]
    assert sum(not kept for _, kept in found) > 0.95 * len(found)


def test_three_routers_that_find_too_little_stay_on_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = Scene(1, 0.6, 0.001)
    monkeypatch.setattr(proof, "router_scene", lambda: contextlib.nullcontext(scene))
    monkeypatch.setattr(sys, "argv", ["proof.index", "--seeds", "0", "--out", str(tmp_path / "index.json")])
    assert proof.main() == 1
    monkeypatch.setattr(proof, "router_scene", lambda: pytest.fail("it is measured again"))
    assert proof.main() == 1
    assert "--fresh" in capsys.readouterr().out
