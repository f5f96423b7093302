"""Fields of requests about drafts: OpenAI's `prediction`, and `speculative`. Neither changes an answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tandem.router.api.http.strict_models import FIRST_ERROR, Strict

MAX_PREDICTION_PARTS = 1024


class PredictedPart(Strict):
    type: Literal["text"]
    text: str


class Prediction(Strict):
    """Text that much of the answer will repeat, as when a text is edited."""

    type: Literal["content"]
    content: str | Annotated[list[PredictedPart], Field(max_length=MAX_PREDICTION_PARTS), FIRST_ERROR]


class SpeculationFields(Strict):
    prediction: Prediction | None = None
    speculative: bool | None = None


DRAFTING = frozenset(SpeculationFields.model_fields)


def drafting_of(body: SpeculationFields) -> dict[str, Any]:
    """Sampling options: the predicted text, which the parser makes tokens of, and whether drafts are unwanted."""
    options: dict[str, Any] = {}
    if body.prediction is not None:
        content = body.prediction.content
        options["prediction"] = content if isinstance(content, str) else "".join(part.text for part in content)
    if body.speculative is False:
        options["without_drafts"] = True
    return options
