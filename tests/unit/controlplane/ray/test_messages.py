"""Orders pass as one line of JSON and differ if any of their fields differs."""

from __future__ import annotations

import dataclasses

import pytest

from tandem.controlplane.ray.messages import PlacedOrder, from_json, to_json
from tandem.core.config import WorkerSection
from tandem.core.errors import ConfigError
from tandem.core.lifecycle import RoleName
from tests.unit.controlplane.ray.orders_rig import ORDER


def test_a_charge_comes_back_whole_from_one_line() -> None:
    charge = PlacedOrder(order=ORDER, gpus=("0", "GPU-b"), controller_ip="10.0.0.1")
    text = to_json(charge)
    assert "\n" not in text
    assert from_json(text, PlacedOrder) == charge


@pytest.mark.parametrize("text", ['{"order": 1}', "[1]", "None", ""])
def test_what_is_no_charge_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="order"):
        from_json(text, PlacedOrder)


def test_any_difference_makes_another_digest() -> None:
    others = [
        dataclasses.replace(ORDER, threads=3),
        dataclasses.replace(ORDER, hardware="h100"),
        dataclasses.replace(ORDER, config=dataclasses.replace(ORDER.config, role=RoleName.DECODE)),
        dataclasses.replace(ORDER, config=dataclasses.replace(ORDER.config, settings=WorkerSection(tp=2))),
    ]
    assert len({ORDER.digest, *(other.digest for other in others)}) == 5
    assert dataclasses.replace(ORDER).digest == ORDER.digest
