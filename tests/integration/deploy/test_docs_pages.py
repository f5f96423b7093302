"""Test pages of docs/operate on Kubernetes: they render and install."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from tests.e2e.pages import PAGES, commands
from tests.integration.deploy.kubelet import kept
from tests.integration.deploy.mounting import secrets_of
from tests.integration.deploy.release_pods import Cluster, get
from tests.integration.deploy.rendering import ROOT, Helm, Release
from tools.waiting import wait_for

PAGE = (ROOT / "docs" / "operate" / "kubernetes.md").read_text()


def test_the_first_values_take_the_secret_that_is_made_before(helm: Helm) -> None:
    [values] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    release = helm.render(values)
    assert release.lint == []
    commands = [
        shlex.split(line)
        for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    [made] = [words for words in commands if words[0] == "kubectl" and "secret" in words]
    keys = {word.partition("=")[2].partition("=")[0] for word in made if word.startswith("--from-literal=")}
    name = made[made.index("generic") + 1]
    wanted = set().union(*(secrets_of(each) for each in release.containers()))
    assert wanted == {(name, key) for key in keys}


def test_the_values_for_traces_are_taken(helm: Helm) -> None:
    [first] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    [traces] = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/operate/tracing.md").read_text(), re.DOTALL)
    release = helm.render(first + traces)
    assert release.lint == []
    wanted = set().union(*(secrets_of(each) for each in release.containers() if each.name == "router"))
    assert {("collector-key", "headers"), ("collector-ca", "ca.crt")} <= wanted
    assert not {("collector-key", "headers")} & set().union(
        *(secrets_of(each) for each in release.containers() if each.name == "worker")
    )


def test_what_is_printed_are_the_next_three_commands(helm: Helm) -> None:
    [values] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert yaml.safe_load(values).keys() == {"auth", "clusterSecret", "redis"}
    assert re.findall(r"^(\d)\. ", helm.render(values).notes, re.MULTILINE) == ["1", "2", "3"]


[VALUES] = re.findall(r"```yaml\n(.*?)```", (PAGES / "first-hour.md").read_text(), re.DOTALL)
COMMANDS = commands("first-hour", "On Kubernetes")
RUN_HERE = ("clusterctl ", "curl ")


@pytest.fixture
def release(helm: Helm) -> Release:
    install = shlex.split(next(command for command in COMMANDS if command.startswith("helm ")))
    assert (install[1], install[3:]) == ("install", ["deploy/helm/tandem", "-n", "serving", "-f", "values.yaml"])
    return helm.render(VALUES, name=install[2])


def test_the_values_install_and_take_the_secret_that_is_made_before(release: Release) -> None:
    assert release.lint == []
    made = shlex.split(next(command for command in COMMANDS if "create secret" in command))
    keys = {word.partition("=")[2].partition("=")[0] for word in made if word.startswith("--from-literal=")}
    wanted = set().union(*(secrets_of(each) for each in release.containers()))
    assert wanted == {(made[made.index("generic") + 1], key) for key in keys}


def test_the_image_is_one_that_is_built(release: Release) -> None:
    bake = json.loads((ROOT / "deploy/images/bake.json").read_text())
    image = yaml.safe_load(VALUES)["image"]["worker"]
    tags = [tag.replace("${TAG}", bake["variable"]["TAG"]["default"]) for tag in bake["target"]["worker-cpu"]["tags"]]
    assert tags == [f"{image['repository']}:{image['tag']}"]


def test_what_comes_after_the_install_is_what_helm_prints(release: Release) -> None:
    printed = [line.strip() for line in release.notes.splitlines()]
    after = COMMANDS[next(n for n, command in enumerate(COMMANDS) if command.startswith("helm ")) + 1 :]
    assert [command for command in after if command.startswith(("kubectl", "("))] == [
        line for line in printed if line.startswith(("kubectl", "("))
    ]
    assert next(command for command in after if "key create" in command) in printed
    asked = next(line for line in printed if line.startswith("curl"))
    mine = next(command for command in after if command.startswith("curl"))
    assert set(shlex.split(asked)) - set(shlex.split(mine)) == {shlex.split(asked)[-1]}, "but for what is asked"


@pytest.fixture
def pods(release: Release, tmp_path: Path) -> Iterator[Cluster]:
    """The release, on an emulated cluster."""
    with kept(release, tmp_path) as kubelet:
        yield kubelet.pods


def test_its_commands_scale_the_release(pods: Cluster, tmp_path: Path) -> None:
    ready = pods.ready("router-a")
    wait_for(lambda: get(f"{ready['http']}/readyz") == 200, 120, pods.logs())
    secret = pods.pods["router-a"].place.folder / "etc/tandem/secrets/admin-key"
    (tmp_path / "admin.key").write_text(secret.read_text())
    here = {"http://127.0.0.1:8000": ready["http"], "http://127.0.0.1:8002": ready["admin"]}
    told = []
    for command in (command for command in COMMANDS if command.startswith(RUN_HERE)):
        done = ran(command, here, tmp_path)
        assert done.returncode == 0, (command, done.stdout, done.stderr, pods.logs())
        told.append(done)
        if "key create" in command:
            here["YOUR KEY"] = done.stdout.strip()
    _, asked, status, dry, _, workers = told
    assert json.loads(asked.stdout)["choices"][0]["message"]["content"]
    assert re.match(r"health +ok\n", status.stdout)
    assert "decode" in dry.stdout + dry.stderr
    assert len([row for row in workers.stdout.splitlines() if " decode " in row]) == 2


def ran(command: str, here: Mapping[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """With what is printed in place of what is so `here`."""
    for printed, ours in here.items():
        command = command.replace(printed, ours)
    words = shlex.split(command)
    program = [sys.executable, "-m", "tandem.clusterctl"] if words[0] == "clusterctl" else words[:1]
    return subprocess.run([*program, *words[1:]], cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_everything_else_is_of_programs_that_are_not_here() -> None:
    others = [command for command in COMMANDS if not command.startswith(RUN_HERE)]
    assert all(command.startswith(("kubectl ", "helm install ", "(umask 077; kubectl ")) for command in others)
