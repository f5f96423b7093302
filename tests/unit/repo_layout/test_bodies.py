"""Schemas of bodies: every field has a bound on the bytes that a client may put into it."""

import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from tandem.router.api.http.body_parser import unbounded
from tandem.router.api.http.openapi import OPERATIONS
from tandem.router.api.http.strict_models import FIRST_ERROR

BODIES: dict[type[BaseModel], None] = dict.fromkeys(one.body for one in OPERATIONS if one.body is not None)
READ_BY_THE_MODEL = {
    "TextPart.text", "Message.content", "Message.reasoning_content", "Message.reasoning", "Message.refusal",
    "ItemPart.text", "RefusalPart.refusal", "ThoughtPart.text", "MessageItem.content",
    "CalledFunction.arguments", "FunctionCallItem.arguments", "CallOutputItem.output", "OutputPart.text",
    "CustomCallItem.input", "CalledCustomTool.input",
    "TokenizeRequest.prompt", "CompletionRequest.prompt", "ResponseRequest.input", "ResponseRequest.instructions",
    "Prediction.content", "PredictedPart.text",
    "MessageParam.content", "TextBlock.text", "ThinkingBlock.thinking", "ToolResultBlock.content",
    "CountTokensRequest.system", "MessagesRequest.system",
}  # fmt: skip
"""The bytes of a body are their bound, and then the context of the model."""
CHECKED_LATER = {
    "cache_salt", "chat_template_kwargs", "prompt_cache_key", "stop", "bad_words", "logit_bias", "described",
    "guided_json",
}  # fmt: skip
"""Texts with lengths that their readers check, for gRPC too; stored texts are among the others."""
BODY_MODELS = pytest.mark.parametrize("body", list(BODIES), ids=lambda one: one.__name__)


def test_there_are_bodies() -> None:
    assert len(BODIES) >= 6


@BODY_MODELS
def test_every_list_and_map_has_a_bound_of_entries(body: type[BaseModel]) -> None:
    assert unbounded(body) == [], "give it Field(max_length=…)"


@BODY_MODELS
def test_no_list_is_walked_behind_its_first_wrong_element(body: type[BaseModel]) -> None:
    lists = [(place, said) for place, kind, said in _parts(body) if typing.get_origin(kind) is list]
    assert [place for place, said in lists if FIRST_ERROR not in said and not _holds_nothing(said)] == []


@BODY_MODELS
def test_every_text_that_no_model_reads_has_a_bound_of_characters(body: type[BaseModel]) -> None:
    free = {place for place, kind, said in _parts(body) if kind is str and _most(said) is None}
    assert {place for place in free if place.rpartition(".")[2] not in CHECKED_LATER} <= READ_BY_THE_MODEL


def _parts(model: type[BaseModel]) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """(place, type, metadata) of everything in the fields of `model` and of the models in it."""
    for name, field in model.model_fields.items():
        yield from _inside(f"{model.__name__}.{name}", field.annotation, tuple(field.metadata))


def _inside(place: str, kind: Any, said: tuple[Any, ...]) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Annotated:
        yield from _inside(place, arguments[0], (*said, *arguments[1:]))
        return
    yield place, kind, said
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield from _parts(kind)
    if typing.get_origin(kind) in (list, dict, typing.Union, types.UnionType):
        for one in arguments:
            yield from _inside(place, one, ())


def _most(said: tuple[Any, ...]) -> int | None:
    found = (one for each in said for one in (each, *getattr(each, "metadata", ())))
    return next((one.max_length for one in found if getattr(one, "max_length", None) is not None), None)


def _holds_nothing(said: tuple[Any, ...]) -> bool:
    return _most(said) == 0
