"""The contents of the images, as far as they are known without building one: nothing here has a Docker."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.integration.deploy.dockerfile import IMAGES, Stage, lets_through, stages
from tests.integration.deploy.installed import PROJECT, environment
from tests.integration.deploy.mounting import mounted
from tests.integration.deploy.rendering import CHART, ROOT, Helm
from tools.image_requirements import FOLDER, WITHOUT_CUDA, requirements
from tools.image_requirements import IMAGES as EXTRAS

STAGES = stages()
TARGETS = sorted(EXTRAS)
HADOLINT = Path(sys.executable).with_name("hadolint")
HEAVY = re.compile(r"^(ray|torch|triton|nvidia-.*|cuda-.*)$")
each_target = pytest.mark.parametrize("target", TARGETS)


def lint(path: Path) -> list[str]:
    """Rules that it breaks."""
    done = subprocess.run(
        [str(HADOLINT), "--no-fail", "--format", "json", str(path)], capture_output=True, timeout=60, check=True
    )
    return [found["code"] for found in json.loads(done.stdout)]


def pinned(name: str) -> dict[str, str]:
    """Package to version, of one of requirements/*.txt, each with its hash."""
    lines = [line for line in (FOLDER / f"{name}.txt").read_text().splitlines() if not line.startswith("#")]
    matches = [re.fullmatch(r"(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    assert all(matches), name
    return {canonicalize_name(match[1]): match[2] for match in matches if match}


def test_hadolint_has_nothing_to_say() -> None:
    assert lint(IMAGES / "Dockerfile") == []


def test_hadolint_would_say_it(tmp_path: Path) -> None:
    text = (IMAGES / "Dockerfile").read_text()
    (tmp_path / "Dockerfile").write_text(
        text.replace("PATH=/opt/tandem/bin:$PATH", "PATH=/opt:$PATH\nADD x /x\nRUN cd /")
    )
    assert {"DL3020", "DL3003"} <= set(lint(tmp_path / "Dockerfile"))


@each_target
def test_an_image_is_nobody_and_runs_what_the_chart_runs(target: str, helm: Helm) -> None:
    stage = STAGES[target]
    release = helm.render((CHART / "ci" / "minimal.yaml").read_text())
    [router] = [each for each in release.containers() if each.name == "router"]
    assert stage.last("USER") == "{runAsUser}:{runAsGroup}".format(**router.pod["securityContext"]) == "10001:10001"
    assert stage.lines.index(("USER", "10001:10001")) > max(
        n for n, (name, _) in enumerate(stage.lines) if name == "RUN"
    )
    module = "tandem.controlplane.container_entrypoints"
    started = ["clusterctl"] if target == "clusterctl" else ["python", "-m", module]
    assert stage.entrypoint() == started
    if started[0] == "python":
        assert started == router.command[:3]
    assert stage.variables()["HOME"] == next(v["value"] for v in router.spec["env"] if v["name"] == "HOME")
    assert stage.variables()["PATH"].startswith("/opt/tandem/bin:")


def test_ports_are_those_that_the_chart_names(helm: Helm) -> None:
    release = helm.render((CHART / "ci" / "minimal.yaml").read_text())
    for each in release.containers():
        if each.is_ours:
            ports = {str(port["containerPort"]) for port in each.spec["ports"]}
            target = "worker-cuda" if each.name == "worker" else each.name
            assert set(STAGES[target].last("EXPOSE").split()) == ports


@each_target
def test_variables_are_such_as_something_reads(target: str) -> None:
    known = {"HOME", "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"}
    of_nvidia = {"NVIDIA_DRIVER_CAPABILITIES"}
    assert set(STAGES[target].variables()) == known | (of_nvidia if target in ("worker-cuda", "ray") else set())
    assert hasattr(constants, "HF_HOME"), "what compose.yaml and the chart set beside these"


@each_target
def test_an_image_has_one_environment_the_wheel_and_a_list_of_what_is_in_it(target: str) -> None:
    assert list(STAGES[target].copies()) == [(f"{target}-environment", ["/opt/tandem"])]
    made = STAGES[f"{target}-environment"]
    assert ("wheel", ["/wheels"]) in made.copies()
    [last] = made.all("RUN")[-1:]
    steps = [step.strip() for step in last.split("&&")]
    assert steps[:2] == ["python -m pip install --no-index /wheels/*.whl", "python -m pip check"]
    assert steps[2].startswith("cyclonedx-py environment ")
    assert "--output-file /opt/tandem/sbom.cdx.json /opt/tandem/bin/python" in steps[2]
    installs = [run for run in made.all("RUN") if "--require-hashes" in run]
    assert [name for run in installs for name in re.findall(r"requirements/(\S+)\.txt", run)] == [
        "tools", target, *(["torch-cpu"] if target in WITHOUT_CUDA else []),
    ]  # fmt: skip
    variables = made.variables()
    assert variables["PIP_PYTHON"] == "/opt/tandem/bin/python"
    assert (variables["PIP_NO_DEPS"], variables["PIP_ONLY_BINARY"]) == ("1", ":all:")


def test_the_wheel_is_built_once() -> None:
    builds = [run for stage in STAGES.values() for run in stage.all("RUN") if " wheel " in run]
    assert len(builds) == 1
    assert "--no-build-isolation" in builds[0], "by the tools that are pinned"


def test_every_file_that_is_copied_is_there_and_in_the_context() -> None:
    for stage in STAGES.values():
        for source, paths in stage.copies():
            for path in paths if not source and paths != ["."] else ():
                assert (ROOT / path).is_file(), path
                assert lets_through(path)


def test_the_context_is_what_the_wheel_is_made_of() -> None:
    target = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    files = ["pyproject.toml", "README.md", "LICENSE", "docs/configuration.md"]
    assert set(target["force-include"]) == {"models/tandem-tiny", "docs/configuration.md"}
    folders = [*target["packages"], "models/tandem-tiny", "deploy/images/requirements"]
    files += [str(path.relative_to(ROOT)) for name in folders for path in (ROOT / name).rglob("*") if path.is_file()]
    wanted = [path for path in files if "__pycache__" not in path]
    assert len(wanted) > 300
    assert [path for path in wanted if not lets_through(path)] == []
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    assert {path for path in tracked if path and lets_through(path)} <= set(wanted)
    for secret in (".git/config", ".venv/bin/python", "deploy/compose/secrets/admin-key", "core/x/__pycache__/y.pyc"):
        assert not lets_through(secret)


@pytest.mark.parametrize("name", [*TARGETS, "tools"])
def test_what_is_installed_is_what_pyproject_asks_for(name: str) -> None:
    """All of it is resolved when the file is written, and checked when an image is built (`pip check`)."""
    there = pinned(name)
    if name in WITHOUT_CUDA:
        [line] = (FOLDER / "torch-cpu.txt").read_text().splitlines()[1:]
        assert line == f"torch=={pinned('worker-cuda')['torch']}+cpu"
        there["torch"] = line.partition("==")[2]
    wanted = ["hatchling", "cyclonedx-bom"] if name == "tools" else requirements(EXTRAS[name])
    for text in wanted:
        requirement = Requirement(text)
        assert canonicalize_name(requirement.name) in there, f"python -m tools.image_requirements {name}"
        assert requirement.specifier.contains(there[canonicalize_name(requirement.name)], prereleases=True), text


@pytest.mark.parametrize("name", ["router", "clusterctl"])
def test_the_front_door_brings_neither_torch_nor_ray(name: str) -> None:
    assert {each for each in pinned(name) if HEAVY.match(each)} == set()
    assert {"ray", "torch", "triton"} <= {each for each in pinned("ray") if HEAVY.match(each)}
    assert not [each for each in pinned("worker-cpu") if HEAVY.match(each)], "torch comes without CUDA"


@pytest.mark.parametrize(("target", "part"), [("router", "router"), ("worker-cpu", "worker")])
def test_what_an_image_installs_is_enough_for_what_it_runs(target: str, part: str, helm: Helm, tmp_path: Path) -> None:
    python = environment(tmp_path / "opt", EXTRAS[target])
    for module in ("typer", "ray", "torch", "fastapi"):
        has = {"torch": part == "worker", "fastapi": part == "router"}.get(module, False)
        program = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
        assert (subprocess.run([python, "-c", program], check=False).returncode == 0) is has, module
    release = helm.render((CHART / "ci" / "minimal.yaml").read_text())
    place = mounted(tmp_path / "pod", release)
    each = next(found for found in release.containers() if found.name == part)
    command = [str(python), *place.command(each.command)[1:], "--check-config"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    modules = {"router": "tandem.router.__main__, tandem.router.tracing.otel", "worker": "tandem.worker.__main__"}[part]
    entrypoints = "tandem.controlplane.container_entrypoints"
    program = f"import {modules}, {entrypoints}.prestop, {entrypoints}.readiness_probe"
    done = subprocess.run([str(python), "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_clusterctl_runs_with_what_its_image_installs(tmp_path: Path) -> None:
    python = environment(tmp_path / "opt", EXTRAS["clusterctl"])
    for words in (
        ["version"],
        ["key", "create", "--help"],
        ["status", "--help"],
        ["scale", "--help"],
        ["plan", "--help"],
    ):
        command = [str(python), "-m", "tandem.clusterctl", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr


def test_bake_builds_every_target_as_the_chart_calls_it() -> None:
    bake = json.loads((IMAGES / "bake.json").read_text())
    assert sorted(bake["group"]["default"]["targets"]) == TARGETS
    shared = bake["target"]["all"]
    assert (ROOT / shared["dockerfile"]).is_file()
    assert "type=sbom" in shared["attest"]
    tags = {bake["target"][name]["tags"][0].replace("${TAG}", bake["variable"]["TAG"]["default"]) for name in TARGETS}
    assert {bake["target"][name]["target"] for name in TARGETS} <= set(STAGES)
    version = PROJECT["project"]["version"]
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == version
    values = yaml.safe_load((CHART / "values.yaml").read_text())["image"]
    assert {f"{values[name]['repository']}:{version}" for name in ("router", "worker", "ray")} <= tags
    assert bake["target"]["worker-cpu"]["args"] == {"TORCH_INDEX": "${TORCH_INDEX}"}
    assert ("ARG", "TORCH_INDEX") in STAGES["worker-cpu-environment"].lines


def test_python_is_one_that_the_project_takes() -> None:
    [base] = re.findall(r"^ARG PYTHON=(\S+)$", (IMAGES / "Dockerfile").read_text(), re.MULTILINE)
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm", base), "what requirements/*.txt are resolved for"
    assert {stage.all("FROM")[0] for stage in STAGES.values()} == {"${PYTHON}"}
    assert PROJECT["project"]["requires-python"] == ">=3.11"
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"][0].startswith("hatchling")


def test_a_stage_is_read_with_what_it_is_made_of() -> None:
    assert isinstance(STAGES["worker-cuda"], Stage)
    assert [name for name, _ in STAGES["worker-cuda"].lines if name in ("FROM", "SHELL", "USER")] == [
        "FROM",
        "SHELL",
        "USER",
    ]
