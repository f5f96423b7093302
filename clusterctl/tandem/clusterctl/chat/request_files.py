"""Reads the files that `clusterctl chat` sends with every question: the schema of an answer, and tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.core.errors import ConfigError


def read_schema(path: Path) -> dict[str, Any]:
    """Read a JSON schema as the `response_format` of a request; ConfigError for anything else."""
    schema = _read("--schema", path)
    if not isinstance(schema, dict):
        raise ConfigError(f"--schema is {path}", why="a schema must be a JSON object", todo='Write {"type": …}')
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def read_tools(path: Path) -> list[dict[str, Any]]:
    """Read a JSON list of tools, each with or without the `function` around it; ConfigError for anything else."""
    tools = _read("--tools", path)
    if not isinstance(tools, list) or not tools:
        todo = 'Write [{"type": "function", "function": {"name": …, "parameters": …}}]'
        raise ConfigError(f"--tools is {path}", why="it must be a JSON list of tools", todo=todo)
    return [_tool(tool, f"tool {number} of {path}") for number, tool in enumerate(tools, 1)]


def _tool(tool: Any, which: str) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        todo = 'Write {"name": …, "description": …, "parameters": …}'
        raise ConfigError(f"{which} cannot be used", why="a function needs a name", todo=todo)
    return {"type": "function", "function": function}


def _read(flag: str, path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}", why=error.strerror or str(error), todo=f"Check {flag}") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, or no JSON
        raise ConfigError(f"{flag} is {path}", why=f"it is not JSON: {error}") from error
