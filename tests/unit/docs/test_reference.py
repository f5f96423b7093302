"""Test the reference pages of the API, the configuration and metrics against the code."""

import ast
import dataclasses
import json
import re
from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
from pydantic import BaseModel

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
from tandem.core.metric_names import CATALOGUE
from tandem.router.api.http import schemas, tool_fields
from tandem.router.api.http.batches_api import BatchRequest
from tandem.router.api.http.messages import blocks
from tandem.router.api.http.messages import schemas as messages
from tandem.router.api.http.openapi import UPLOAD
from tandem.router.api.http.responses import items, tools
from tandem.router.api.http.responses.schemas import ReasoningOptions, ResponseRequest
from tandem.rpc.v1 import inference_pb2 as i
from tools import metrics_page

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "api.md").read_text()
PARAMETERS, TESTED = TEXT.partition("## Parameters")[2].split("## What tests each parameter")
BODIES: tuple[type[BaseModel], ...] = (
    schemas.ChatRequest, schemas.CompletionRequest, schemas.StreamOptions, schemas.TokenizeRequest,
    schemas.DetokenizeRequest, schemas.Message, ResponseRequest, BatchRequest, tool_fields.Tool, tool_fields.Function,
    tool_fields.AllowedChoice, tool_fields.AllowedTools, tool_fields.ToolCall, tool_fields.CalledFunction,
    tool_fields.ReasoningParam,
    tool_fields.CustomTool, tool_fields.Custom, tool_fields.GrammarFormat, tool_fields.GrammarDefinition,
    tool_fields.NamedCustomChoice, tool_fields.CustomToolCall, tool_fields.CalledCustomTool,
    tools.FunctionTool, tools.FlatCustomTool, tools.FlatGrammarFormat, tools.AllowedToolsChoice, ReasoningOptions,
    items.FunctionCallItem, items.CustomCallItem, items.CallOutputItem, items.OutputPart,
    messages.MessagesRequest, messages.ToolParam, messages.ToolChoiceParam, messages.ThinkingParam,
    messages.OutputConfig, messages.UserMetadata, blocks.TextBlock, blocks.ThinkingBlock,
    blocks.RedactedThinkingBlock, blocks.ToolUseBlock, blocks.ToolResultBlock,
)  # fmt: skip
MESSAGES: tuple[Any, ...] = (
    i.GenerateRequest, i.GenerateSampling, i.ChatMessages, i.ChatMessage, i.TokenizeRequest, i.DetokenizeRequest,
)  # fmt: skip


def rows() -> Iterator[tuple[set[str], str, str]]:
    """Names of parameters, what tests them over HTTP, and over gRPC."""
    for line in TESTED.splitlines():
        if line.startswith("| ") and "::" in line:
            names, http, rpc = line.strip("|").split("|")
            yield set(re.findall(r"`([\w-]+)`", names)), http.strip(), rpc.strip()


def http_names() -> set[str]:
    names = {name for body in BODIES for name in body.model_fields}
    return names | {name.partition("[")[0] for name in UPLOAD["properties"]}


def rpc_names() -> set[str]:
    return {field.name for message in MESSAGES for field in message.DESCRIPTOR.fields}


def test_every_parameter_is_tested() -> None:
    assert http_names() - {name for names, http, _ in rows() if http for name in names} == set()
    assert rpc_names() - {name for names, _, rpc in rows() if rpc for name in names} == set()


def test_no_parameter_is_made_up() -> None:
    named = {name for row in rows() for name in row[0]}
    assert {name for name in named if not name.startswith("X-")} <= http_names() | rpc_names()


@pytest.mark.parametrize("body", [schemas.ChatRequest, schemas.CompletionRequest])
def test_every_parameter_of_a_generation_is_explained(body: type[BaseModel]) -> None:
    for name in body.model_fields:
        assert f"`{name}`" in PARAMETERS or f"`{name}." in PARAMETERS, name


def test_the_tests_exist() -> None:
    named = set(re.findall(r"`([\w/]+)::(\w+)`", TESTED))
    assert len(named) > 40
    for file, function in named:
        assert function in functions(file), f"{file} has no {function}"


@cache
def functions(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / "tests" / f"{file}.py").read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


SETTINGS = (Path(__file__).resolve().parents[3] / "docs" / "configuration.md").read_text()
SECTIONS: dict[str, Any] = {
    "Top level": ClusterConfig, "`[model]`": ModelSection, "`[pools]`": PoolSection, "`[worker]`": WorkerSection,
    "`[worker.sim]`": SimSection, "`[prefill]`, `[decode]`, `[mixed]`": RoleSection, "`[router]`": RouterSection,
    "`[admission]`": AdmissionSection, "`[slo.<class>]`": SloSection, "`[redis]`": RedisSection,
    "`[store]`": StoreSection, "`[budget.<tenant>]`": BudgetSection, "`[[models]]`": FurtherModelSection,
    "`[ray]`": RaySection, "`[ray.raycluster]`": RayClusterSection, "`[planner]`": PlannerSection,
    "`[price]`": PriceSection, "`[tracing]`": TracingSection,
}  # fmt: skip


def setting_rows(title: str) -> list[list[str]]:
    start = SETTINGS.index(f"## {title}\n")
    text = SETTINGS[start : SETTINGS.find("\n## ", start)]
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
    table = {row[0].strip("`"): row for row in setting_rows(title)}
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
    named = set(re.findall(r"`(--[a-z-]+)`", SETTINGS))
    start = {"--config", "--fetch", "--timeout", "--as-configured", "--dry-run"}
    start |= {"--output", "-o", "--json", "--help", "-h"}
    assert flags() - named <= start
    assert named <= flags()


def test_the_example_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("".join(re.findall(r"```toml\n(.*?)```", SETTINGS, flags=re.DOTALL)))
    config = config_loader.load(path, ClusterConfig)
    assert (config.pools.decode, config.decode.tp, config.worker.kv_dtype) == (2, 2, "bfloat16")
    assert [(model.served_names, model.pools.mixed) for model in config.models] == [(("small", "qwen"), 1)]


PAGES = sorted((Path(__file__).resolve().parents[3] / "docs").rglob("*.md"))


def test_the_page_is_what_the_names_are() -> None:
    assert metrics_page.FILE.read_text() == metrics_page.text(), "run `python -m tools.metrics_page`"


def test_every_metric_has_one_row() -> None:
    rows = re.findall(r"^\| `([\w:]+)` \|", metrics_page.text(), flags=re.MULTILINE)
    assert sorted(rows) == sorted(CATALOGUE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_metrics_that_pages_name_exist(page: Path) -> None:
    named = set(re.findall(r"\b(tandem_\w+?(?:_total|_seconds|_bytes|_blocks|_tokens|_requests))\b", page.read_text()))
    assert named - set(CATALOGUE) == set()
