"""An installation of the router gets neither Ray nor torch, and a machine without Ray runs everything but Ray."""

from __future__ import annotations

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
