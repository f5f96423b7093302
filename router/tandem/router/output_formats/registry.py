"""All formats by name, and those of a model: named by a setting, or found in its chat template and its tokens."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tandem.core.output_format_names import ReasoningFormatName, ToolFormatName
from tandem.router.output_formats.families.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from tandem.router.output_formats.families.function_gemma import FUNCTION_GEMMA
from tandem.router.output_formats.families.harmony import HARMONY
from tandem.router.output_formats.families.hermes import HERMES, SMOLLM2
from tandem.router.output_formats.families.llama_json import LLAMA_JSON
from tandem.router.output_formats.families.mistral import MISTRAL, MISTRAL_LIST
from tandem.router.output_formats.families.pythonic import PYTHONIC
from tandem.router.output_formats.families.qwen_coder import QWEN_CODER
from tandem.router.output_formats.reasoning import HARMONY_CHANNELS, MISTRAL_THINK, THINK, ReasoningFormat
from tandem.router.output_formats.tool_format import ToolFormat

_TOOLS = (
    HARMONY, FUNCTION_GEMMA, DEEPSEEK_V3, DEEPSEEK_V31, MISTRAL, MISTRAL_LIST, QWEN_CODER, SMOLLM2, HERMES, PYTHONIC,
    LLAMA_JSON,
)  # fmt: skip
"""In the order in which a template is asked for their signs: the special ones first."""
TOOLS = {ToolFormatName(one.name): one for one in _TOOLS}
REASONING = {ReasoningFormatName(one.name): one for one in (HARMONY_CHANNELS, MISTRAL_THINK, THINK)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFormats:
    """How a model writes tool calls and reasoning; None = it does not."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags that may be tokens of the model."""
        tools = self.tools.tags if self.tools else ()
        return tuple(dict.fromkeys((*tools, *(self.reasoning.tags if self.reasoning else ()))))


def formats_of(
    template: str,
    tokens: Collection[str],
    *,
    tools: ToolFormatName = ToolFormatName.AUTO,
    reasoning: ReasoningFormatName = ReasoningFormatName.AUTO,
) -> ModelFormats:
    """The formats of a model with the chat template `template` and the special `tokens`, unless they are named."""
    found = _found_tools(template) if tools is ToolFormatName.AUTO else TOOLS.get(tools)
    thoughts = _found_reasoning(template, tokens) if reasoning is ReasoningFormatName.AUTO else REASONING.get(reasoning)
    return ModelFormats(tools=found, reasoning=thoughts)


def _found_tools(template: str) -> ToolFormat | None:
    for one in _TOOLS:
        if any(all(sign in template for sign in signs) for signs in one.signs):
            return one
    return next((one for one in _TOOLS if one.toolless_sign and one.toolless_sign in template), None)


def _found_reasoning(template: str, tokens: Collection[str]) -> ReasoningFormat | None:
    if all(sign in template for sign in HARMONY.signs[0]):
        return HARMONY_CHANNELS
    for one in (MISTRAL_THINK, THINK):
        if one.end in template or one.end in tokens:
            return one
    return None
