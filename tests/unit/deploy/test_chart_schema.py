"""The chart's schema knows the settings as the code has them."""

import dataclasses
import json

from tandem.core.config import RouterSection, WorkerSection
from tools import chart_schema


def test_the_file_is_what_the_settings_are() -> None:
    assert chart_schema.FILE.read_text() == chart_schema.text(), "run `python -m tools.chart_schema`"


def test_settings_have_their_types_and_bounds() -> None:
    found = chart_schema.settings()["properties"]
    assert found["worker"]["properties"]["chunk_tokens"] == {"type": "integer", "minimum": 1}
    assert found["worker"]["properties"]["max_step_s"] == {"type": "number", "exclusiveMinimum": 0}
    assert found["worker"]["properties"]["transports"]["items"]["enum"]
    assert found["router"]["properties"]["disaggregation"] == {"enum": ["auto", "always", "never"]}
    assert found["slo"]["additionalProperties"]["additionalProperties"] is False


def test_what_the_chart_sets_itself_cannot_be_given_twice() -> None:
    found = chart_schema.settings()["properties"]
    for section, kind in (("worker", WorkerSection), ("router", RouterSection)):
        fields = {field.name for field in dataclasses.fields(kind)}
        missing = fields - set(found[section]["properties"])
        assert missing == chart_schema.OF_THE_CHART[section]


def test_it_is_written_where_helm_looks() -> None:
    assert chart_schema.FILE.name == "values.schema.json"
    assert json.loads(chart_schema.text())["additionalProperties"] is False
