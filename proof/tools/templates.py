"""Chat templates against transformers: the same prompt for the same conversation, and the answers in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from proof.tools.conversations import Conversation
from tandem.core.errors import InvalidRequestError
from tandem.router.output_formats.registry import ModelFormats, formats_of
from tandem.router.tokenization.chat_template import ChatTemplate, Rendering

MISSING: tuple[Mapping[str, Any], ...] = ({}, {"content": None}, {"content": ""})
"""Ways to leave out content; templates differ in which they accept."""
ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eot|>", "</s>", "<｜end▁of▁sentence｜>", "<｜Assistant｜>", "<end_of_turn>",
    "<start_function_response>",
)  # fmt: skip
OPENERS = ("<think>\n\n</think>\n\n", "<think>\n", "<think>", "</think>")
"""Ends of prompts that belong to the answer of the next message."""
LOSSY: Mapping[str, str] = {
    "SmolLM3-3B": "writes no calls of earlier answers",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "writes no calls beside content",
    "vllm-fork-functiongemma": "writes every value as a text, lists and objects as Python shows them",
    "vllm-gemma3_pythonic": "loses the comma between arguments, and writes content behind the calls",
    "vllm-llama3.2_pythonic": "writes texts without quotes",
    "vllm-llama4_pythonic": "writes every value between quotes, without escapes",
}
"""Templates that write earlier calls in a way that loses some of them: these cannot be read again."""
TOOL_NAMES = ("xml_tools", "custom_tools")
"""Other names of tools, which the router sets where a template reads them."""


@dataclass(frozen=True, slots=True)
class Written:
    """An answer as a template writes it, and if the prompt began its reasoning."""

    text: str
    begins_inside: bool


class RefusedError(Exception):
    """Transformers cannot render a conversation; says why."""


class Comparison:
    """One template; `theirs` is a tokenizer of transformers. ModelError if it does not compile here."""

    def __init__(self, file: Path, theirs: Any) -> None:
        self._source = file.read_text()
        self._theirs = theirs
        self._ours = ChatTemplate(self._source, {name: getattr(theirs, name) for name in ("bos_token", "eos_token")})
        self.formats: ModelFormats = formats_of(self._source, ())
        self._tools = {name: None for name in TOOL_NAMES if name in self._source}
        self.styles: set[str] = set()
        """Forms of messages in which transformers' rendering was ours."""

    def most_calls(self, conversation: Conversation) -> int:
        """Calls of one message that the template writes, out of those of `conversation`, which are two at least."""
        written = []
        for count in (1, 2):
            messages = conversation.cut(count).until_calls()
            with suppress(InvalidRequestError):
                written.append(len(self._ours.render(messages, Rendering(tools=conversation.tools, adds_prompt=False))))
        return 3 if len(written) == 2 and written[0] < written[1] else 1

    def difference(self, conversation: Conversation) -> str:
        """The first prompt of the conversation that differs from transformers', "" = none. RefusedError where
        transformers renders none."""
        for name, adds_prompt in (("whole", True), ("before", True), ("until_calls", False)):
            messages = getattr(conversation, name)()
            try:
                ours = self._ours.render(messages, Rendering(tools=conversation.tools, adds_prompt=adds_prompt))
            except InvalidRequestError as error:
                ours = f"refused: {error.why}"
            others = []
            for style, theirs in self._theirs_of(conversation, name, adds_prompt=adds_prompt):
                if theirs == ours:
                    self.styles.add(style)
                    break
                others.append(theirs[-300:])
            else:
                return f"{name}: {ours[-300:]!r}, transformers: {others}"
        return ""

    def _theirs_of(self, conversation: Conversation, name: str, *, adds_prompt: bool) -> Iterator[tuple[str, str]]:
        """The forms of messages that the template takes, and transformers' prompts for them. RefusedError if it takes
        none."""
        why, is_taken = "", False
        for is_text in (False, True):
            for missing in MISSING:
                messages = getattr(conversation, name)(is_text=is_text, missing=missing)
                tools = dict.fromkeys(self._tools, conversation.tools)
                try:
                    text = self._render_theirs(messages, conversation.tools, adds_prompt=adds_prompt, **tools)
                except Exception as error:  # noqa: BLE001 - a template fails as it likes
                    why = str(error) or type(error).__name__
                    continue
                is_taken = True
                content = next(iter(missing.values()), "absent")
                yield f"{'text' if is_text else 'object'}, content {content!r}", text
        if not is_taken:
            raise RefusedError(why)

    def _render_theirs(self, messages: list[Any], tools: Any, *, adds_prompt: bool, **more: Any) -> str:
        """`apply_chat_template`, or what that calls where content is none, for it leaves such content out."""
        given = {"chat_template": self._source, "add_generation_prompt": adds_prompt, "tools": tools, **more}
        if all(message.get("content", "") is not None for message in messages):
            return str(self._theirs.apply_chat_template(messages, tokenize=False, **given))
        from transformers.utils.chat_template_utils import render_jinja_template  # it takes seconds

        rendered: Any = render_jinja_template(conversations=[messages], **self._theirs.special_tokens_map, **given)
        return str(rendered[0][0])

    def answer(self, conversation: Conversation) -> Written | None:
        """The last answer as the template writes it behind its prompt; None = that is not at its place."""
        prompt = Rendering(tools=conversation.tools)
        before = self._ours.render(conversation.before(), prompt)
        whole = self._ours.render(conversation.until_calls(), replace(prompt, adds_prompt=False))
        for opener in ("", *OPENERS):
            if before.endswith(opener) and whole.startswith(before.removesuffix(opener)):
                begun = before.removesuffix(opener)
                return Written(self._ended(whole[len(begun) :]), self._begins_inside(begun))
        # Some templates write other things before, once an answer follows: then the calls alone are looked for.
        question = next(one["content"] for one in reversed(conversation.before()) if one["role"] == "user")
        asked = whole.rfind(question)
        form = self.formats.tools
        places = [whole.find(tag, asked + len(question)) for tag in (form.triggers if form else ())]
        start = min((at for at in places if at >= 0), default=-1)
        return Written(self._ended(whole[start:]), False) if asked >= 0 and start >= 0 else None

    def _begins_inside(self, prompt: str) -> bool:
        return self.formats.reasoning is not None and prompt.rstrip().endswith("<think>")

    def _ended(self, text: str) -> str:
        """Without tokens that end an answer, which are special ones of the model."""
        for end in (*ENDS, self._theirs.eos_token):
            text = text.replace(end, "")
        return text.strip()
