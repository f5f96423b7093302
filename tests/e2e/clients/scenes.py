"""Conversations of the scripted model: the question that begins each, and what the model writes in every turn."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


def written_call(name: str, **arguments: Any) -> str:
    """A call as models of the Hermes format write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


@dataclass(frozen=True, slots=True)
class Scene:
    """`turns`: the answers of the model, in order; each sees the results of the calls before it."""

    question: str
    turns: tuple[str, ...]


THOUGHT = "<think>\nI have to look.\n</think>\n\n"
LOOK = THOUGHT + "Let me see.\n" + written_call("get_weather", city="Zürich", days=2)
SAID = "In Zürich it is 21° and sunny."
REPORT: dict[str, Any] = {"city": "Zürich", "degrees": 21}

WEATHER = Scene("How is the weather in Zürich?", (LOOK, SAID))
TWO_TOWNS = Scene(
    "Compare the weather of Zürich and Oslo.",
    (
        written_call("get_weather", city="Zürich", days=1) + "\n" + written_call("get_weather", city="Oslo", days=1),
        SAID,
    ),
)
REPORT_BY_TOOL = Scene("Report the weather by a tool.", (LOOK, written_call("final_result", **REPORT)))
REPORT_AS_JSON = Scene("Report the weather as JSON.", (LOOK, json.dumps(REPORT)))
JSON_AT_ONCE = Scene("Give me the report in JSON at once.", (json.dumps(REPORT),))
FINAL_ANSWER = Scene(
    "Find the weather and give a final answer.",
    (written_call("get_weather", city="Zürich", days=2), written_call("final_answer", answer=SAID)),
)
CODE = Scene(
    "Write code that finds the weather.",
    (
        'Thought: I look.\n<code>\nfound = get_weather(city="Zürich", days=2)\nprint(found)\n</code>',
        "Thought: I know.\n<code>\nfinal_answer(found)\n</code>",
    ),
)
HAND_OVER = Scene("Ask the forecaster for the weather.", (written_call("transfer_to_forecaster"), LOOK, SAID))

SCENES = (
    WEATHER, TWO_TOWNS, REPORT_BY_TOOL, REPORT_AS_JSON, JSON_AT_ONCE, FINAL_ANSWER, CODE, HAND_OVER,
)  # fmt: skip
