"""Test extras of an installation, and internal gRPC channels."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools.package_closure import closure

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = {"ray", "torch", "triton"}


def test_neither_the_core_nor_the_router_brings_ray_or_torch() -> None:
    extras = PROJECT["optional-dependencies"]
    assert not closure(PROJECT["dependencies"]) & HEAVY
    router = closure([*PROJECT["dependencies"], *extras["router"]])
    assert not router & HEAVY
    assert {"fastapi", "starlette"} <= router, "the closure is followed"
    assert not closure(extras["cluster"]) & HEAVY
    assert "ray" in closure(extras["ray"])


@pytest.mark.slow
def test_nothing_but_ray_s_own_processes_needs_ray() -> None:
    """Ray is absent for this Python: what a local cluster runs is imported nevertheless."""
    program = """
import sys
sys.modules["ray"] = None
import tandem.controlplane.up, tandem.clusterctl.main, tandem.router.__main__, tandem.worker.__main__
assert "tandem.controlplane.ray.driver" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


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
