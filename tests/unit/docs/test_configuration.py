"""docs/configuration.md lists every setting, with its default and its flag."""

from __future__ import annotations

import dataclasses
import json
import re
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tandem.clusterctl.main import app
from tandem.core import config_loader
from tandem.core.config import (
    AdmissionSection,
    BudgetSection,
    ClusterConfig,
    FurtherModelSection,
    ModelSection,
    PlannerSection,
    PoolSection,
    PriceSection,
    RayClusterSection,
    RaySection,
    RedisSection,
    RoleSection,
    RouterSection,
    SimSection,
    SloSection,
    StoreSection,
    TracingSection,
    WorkerSection,
)

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "configuration.md").read_text()
SECTIONS: dict[str, Any] = {
    "Top level": ClusterConfig, "`[model]`": ModelSection, "`[pools]`": PoolSection, "`[worker]`": WorkerSection,
    "`[worker.sim]`": SimSection, "`[prefill]`, `[decode]`, `[mixed]`": RoleSection, "`[router]`": RouterSection,
    "`[admission]`": AdmissionSection, "`[slo.<class>]`": SloSection, "`[redis]`": RedisSection,
    "`[store]`": StoreSection, "`[budget.<tenant>]`": BudgetSection, "`[[models]]`": FurtherModelSection,
    "`[ray]`": RaySection, "`[ray.raycluster]`": RayClusterSection, "`[planner]`": PlannerSection,
    "`[price]`": PriceSection, "`[tracing]`": TracingSection,
}  # fmt: skip


def rows(title: str) -> list[list[str]]:
    start = TEXT.index(f"## {title}\n")
    text = TEXT[start : TEXT.find("\n## ", start)]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def flags() -> set[str]:
    parameters = typer.main.get_command(app).commands["up"].params  # type: ignore[attr-defined]
    return {option for parameter in parameters for option in parameter.opts}


def written(value: Any) -> str:
    """Return the value as written in TOML."""
    if isinstance(value, StrEnum):
        return json.dumps(value.value)
    return json.dumps(list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize("title", SECTIONS)
def test_every_setting_is_there_with_its_default(title: str) -> None:
    kind = SECTIONS[title]
    fields = {field.name: getattr(kind(), field.name) for field in dataclasses.fields(kind)}
    plain = {n: value for n, value in fields.items() if not (dataclasses.is_dataclass(value) or value == {})}
    table = {row[0].strip("`"): row for row in rows(title)}
    assert set(table) == set(plain)
    if kind is not RoleSection:
        assert {name: row[1].strip("`") for name, row in table.items()} == {n: written(v) for n, v in plain.items()}


def test_every_section_is_there() -> None:
    nested = {
        field.name for field in dataclasses.fields(ClusterConfig) if dataclasses.is_dataclass(field.default_factory)
    }
    named = set(re.findall(r"`\[(\w+)\]`", "".join(SECTIONS)))
    assert nested == named


def test_every_flag_of_a_setting_is_there_and_real() -> None:
    named = set(re.findall(r"`(--[a-z-]+)`", TEXT))
    start = {"--config", "--fetch", "--timeout", "--as-configured", "--dry-run"}
    start |= {"--output", "-o", "--json", "--help", "-h"}
    assert flags() - named <= start
    assert named <= flags()


def test_the_example_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("".join(re.findall(r"```toml\n(.*?)```", TEXT, flags=re.DOTALL)))
    config = config_loader.load(path, ClusterConfig)
    assert (config.pools.decode, config.decode.tp, config.worker.kv_dtype) == (2, 2, "bfloat16")
    assert [(model.served_names, model.pools.mixed) for model in config.models] == [(("small", "qwen"), 1)]
