"""Limits on thoughts in the tokens of a model: which sequence ends them, by format, prompt and tools."""

from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import UnsupportedParameterError
from tandem.core.thought_budget import ThoughtBudget
from tandem.router.dispatch.inflight_request import GenerationRequest
from tandem.router.output_formats.choice import ThoughtLimit, ToolUse
from tandem.router.output_formats.registry import ModelFormats, formats_of
from tandem.router.serving.answer_formats import thought_budget_of
from tandem.router.tokenization.tokenizer import Tokenizer
from tests.thinking_model import MODEL, thinking_model

HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
TOOLS = ToolUse(tools=({"type": "function", "function": {"name": "now"}},), mode="auto", allowed=("now",))


class Model:
    """A model with tags as tokens, and with formats that its template and its tokens tell."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = Tokenizer.load(path)
        self.formats = formats_of(self.tokenizer.chat_source, self.tokenizer.added_tokens)

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode_now(text, add_special_tokens=False))

    def budget(self, tokens: int, prompt: str = "Hello", **more: Any) -> ThoughtBudget | None:
        ask = GenerationRequest(**{"api": "chat", **more})
        limit = ThoughtLimit(tokens, "thinking_token_budget")
        return thought_budget_of(ask, limit, self.ids(prompt), self.tokenizer, self.formats)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(thinking_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(thinking_model(tmp_path_factory.mktemp("model"), HARMONY, "harmony", more=""))


def test_a_line_break_that_is_forced_counts(thinker: Model) -> None:
    (begin,), (end,), closing = thinker.ids("<think>"), thinker.ids("</think>"), thinker.ids("\n</think>\n\n")
    assert closing[1] == end
    assert thinker.budget(9) == ThoughtBudget(tokens=8, begin=(begin,), ends=(end,), closing=closing)
    assert thinker.budget(1) == ThoughtBudget(tokens=0, begin=(begin,), ends=(end,), closing=closing)
    assert thinker.budget(0) == ThoughtBudget(tokens=0, begin=(begin,), ends=(end,), closing=closing[1:])


@pytest.mark.parametrize(
    ("prompt", "is_begun"),
    [("Hi", False), ("Hi <think>", True), ("Hi<think>\n", True), ("<think>\n\n</think>\n", None)],
)
def test_the_end_of_the_prompt_tells_if_a_thought_has_begun(thinker: Model, prompt: str, is_begun: bool | None) -> None:
    budget = thinker.budget(9, prompt)
    assert (None if budget is None else budget.is_begun) == is_begun


def test_a_call_ends_a_thought_where_tools_are_offered(thinker: Model) -> None:
    (call,) = thinker.ids("<tool_call>")
    without, budget = thinker.budget(9), thinker.budget(9, tools=TOOLS)
    assert without is not None
    assert budget is not None
    assert call not in without.ends
    assert call in budget.ends


def test_harmony_goes_on_in_the_channel_of_the_answer(harmony: Model) -> None:
    budget, with_tools = harmony.budget(9), harmony.budget(9, tools=TOOLS)
    whole = harmony.ids("<|end|><|start|>assistant<|channel|>final<|message|>")
    ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
    wanted = ThoughtBudget(
        tokens=9, begin=harmony.ids("<|channel|>analysis<|message|>"), closing=whole, last_closing=whole,
        ends=tuple(token for tag in ends for token in harmony.ids(tag)),
    )  # fmt: skip
    assert budget == wanted
    assert with_tools is not None
    assert with_tools.closing == harmony.ids("<|end|><|start|>assistant"), "then it may call one"
    assert with_tools.last_closing == whole


@pytest.mark.parametrize("api", ["chat", "grpc"])
def test_models_that_do_not_mark_thoughts_by_tokens_refuse_it(api: str) -> None:
    model = Model(MODEL)
    with pytest.raises(UnsupportedParameterError, match="it has no known format of thoughts") as refused:
        model.budget(9, api=api)
    assert refused.value.param == "thinking_token_budget"
    assert model.budget(9, api="messages") is None
    model.formats = ModelFormats(reasoning=formats_of("</think>", ()).reasoning)
    with pytest.raises(UnsupportedParameterError, match="</think> is not one of its tokens"):
        model.budget(9, api=api)
