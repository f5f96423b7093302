"""Internal gRPC channels go straight to their targets: no proxy of the environment reads workers' messages."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DIALS = [
    path.relative_to(ROOT).as_posix()
    for path in sorted(ROOT.glob("*/tandem/**/*.py"))
    if ".insecure_channel(" in path.read_text() or ".secure_channel(" in path.read_text()
]


@pytest.mark.parametrize("path", DIALS)
def test_every_channel_ignores_proxies(path: str) -> None:
    text = (ROOT / path).read_text()
    calls = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr.endswith("secure_channel")
    ]
    assert calls
    for call in calls:
        (options,) = [ast.unparse(word.value) for word in call.keywords if word.arg == "options"]
        defined = text.partition(f"\n{options}")[2].partition("\n)\n")[0] or options
        assert "('grpc.enable_http_proxy', 0)" in defined.replace('"', "'"), f"{path}:{call.lineno}"


def test_the_channels_are_found() -> None:
    assert len(DIALS) >= 4
