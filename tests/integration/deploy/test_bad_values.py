"""Values that would not work are refused before anything is sent, and the message names the key.

The first line of each file has what the message must contain.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.deploy.rendering import CHART, Helm, HelmError

BAD = sorted((Path(__file__).parent / "bad").glob("*.yaml"))
FREE = "as Kubernetes has it"
HANDED_DOWN = "what a parent chart hands down; unused"


def test_there_are_more_than_twenty() -> None:
    assert len(BAD) > 20


@pytest.mark.parametrize("path", BAD, ids=lambda path: str(path.stem))
def test_they_are_refused_and_the_key_is_named(path: Path, helm: Helm) -> None:
    text = path.read_text()
    expected = text.splitlines()[0].removeprefix("# ")
    with pytest.raises(HelmError) as refused:
        helm.render(text)
    assert expected in str(refused.value)


def objects(schema: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every part of the schema that describes an object, conditions apart."""
    if isinstance(schema, list):
        for number, part in enumerate(schema):
            yield from objects(part, f"{place}/{number}")
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield place, schema
        for name, part in schema.items():
            if name not in ("allOf", "if", "then", "else"):
                yield from objects(part, f"{place}/{name}")


def test_no_object_takes_unknown_keys() -> None:
    """Each names its keys and refuses others, or gives the form of all values, or is described by Kubernetes."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    found = dict(objects(schema))
    assert len(found) > 50
    for place, each in found.items():
        if each.get("$comment") in (FREE, HANDED_DOWN):
            continue
        others = each["additionalProperties"]
        assert others is False or others["type"] or others["enum"], place
    free = {place.split("/")[-1] for place, each in found.items() if each.get("$comment") == FREE}
    assert free == {"nodeAffinity", "podAffinity", "podAntiAffinity", "items"}


def test_the_schema_is_not_hidden_from_helm() -> None:
    """A chart that lists its schema there has none."""
    ignored = [line for line in (CHART / ".helmignore").read_text().splitlines() if not line.startswith("#")]
    assert not [line for line in ignored if "schema" in line or line.startswith("*")]


def test_every_value_is_described() -> None:
    """The schema knows every value of values.yaml; values that it knows beyond that have no default."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(values) == set(schema["properties"]) - {"global"}
