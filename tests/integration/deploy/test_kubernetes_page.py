"""docs/operate/kubernetes.md: the values that it begins with install, and take the secret that its commands make."""

from __future__ import annotations

import re
import shlex

import yaml

from tests.integration.deploy.mounting import secrets_of
from tests.integration.deploy.rendering import ROOT, Helm

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
