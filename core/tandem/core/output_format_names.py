"""Names of the formats of tool calls and reasoning, as settings name them (docs/tools.md)."""

from __future__ import annotations

from enum import StrEnum


class ToolFormatName(StrEnum):
    """How a model writes tool calls; AUTO = found in its chat template."""

    AUTO = "auto"
    NONE = "none"
    HERMES = "hermes"
    SMOLLM2 = "smollm2"
    LLAMA3_JSON = "llama3_json"
    PYTHONIC = "pythonic"
    QWEN3_CODER = "qwen3_coder"
    MISTRAL = "mistral"
    MISTRAL_LIST = "mistral_list"
    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V31 = "deepseek_v31"
    HARMONY = "harmony"
    FUNCTION_GEMMA = "function_gemma"


class ReasoningFormatName(StrEnum):
    """How a model marks its reasoning; AUTO = found in its chat template and its tokens."""

    AUTO = "auto"
    NONE = "none"
    THINK = "think"
    MISTRAL = "mistral"
    HARMONY = "harmony"


class ReasoningField(StrEnum):
    """Fields of a chat answer that contain reasoning."""

    REASONING_CONTENT = "reasoning_content"
    REASONING = "reasoning"
    BOTH = "both"
