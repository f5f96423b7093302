"""Text of one choice of an answer as its tokens come: detokenised, cut at stop strings, in updates of new text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tandem.core.handoff import TokenLogprob
from tandem.core.span_copy import SpanCopy
from tandem.core.state_enums import FinishReason
from tandem.router.dispatch.inflight_request import Echo, GenerationRequest
from tandem.router.output_formats.events import Content, Event, Reasoning
from tandem.router.output_formats.parser import OutputParser
from tandem.router.tokenization.detokenizer import StopMatcher
from tandem.router.tokenization.tokenizer import Tokenizer
from tandem.router.workers.proto_convert import TokenChunk


@dataclass(slots=True)
class ChoiceUpdate:
    """New output of one choice. The first `text_tokens` of `tokens` belong to the text; a stop token does not."""

    index: int
    text: str
    tokens: list[int] = field(default_factory=list)
    text_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stop: str | None = None
    """The stop string that ended the choice, of the last update."""
    echo: Echo | None = None
    """The prompt, which the text begins with."""
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    """With the first update of a choice that wants them: of its prompt from the second token on."""
    parts: list[Event] | None = None
    """The same output taken apart, if the choice is: `text` is its content. None = there is content alone."""


class Choice:
    """The text of one choice as it grows."""

    def __init__(self, index: int, tokenizer: Tokenizer, work: GenerationRequest) -> None:
        self.index = index
        self.finish: FinishReason | None = None
        self.has_begun = False
        self.token_count = 0
        self.first_s = self.last_s = 0.0
        self._text_chars = len(work.echo.text) if work.echo is not None else 0
        self._wants_offsets = work.wants_offsets
        parsing = work.parsing
        self._parser = OutputParser(parsing) if parsing is not None else None
        marks = parsing.marks if parsing is not None else {}
        self._detokenizer = tokenizer.marking_detokenizer(marks) if marks else tokenizer.detokenizer()
        self._shows_reasoning = work.shows_reasoning
        self.reasoning_tokens = 0
        predicted = work.sampling.prediction
        self._prediction = SpanCopy(predicted) if predicted else None
        self._matcher = StopMatcher(work.stop, is_included=work.includes_stop)
        self._min_tokens, self._includes_stop = work.sampling.min_tokens, work.includes_stop
        self._echo, self._is_echo_alone = work.echo, work.is_echo_alone
        self._is_stepwise = bool(work.stop) or work.wants_offsets or parsing is not None
        self._is_plain = not self._is_stepwise and not self._is_echo_alone

    def begin(self, update: ChoiceUpdate) -> None:
        """The first update: it repeats the prompt, if that was asked for."""
        self.has_begun = True
        if self._echo is not None:
            update.echo, update.text = self._echo, self._echo.text

    def add(self, chunk: TokenChunk, update: ChoiceUpdate) -> None:
        tokens = chunk.tokens
        if self._prediction is not None:
            for token in tokens:
                self._prediction.add(token)
        if self._is_plain and chunk.finish is None:  # as nearly always
            update.text += self._detokenizer.add(tokens)
            update.tokens.extend(tokens)
            update.text_tokens += len(tokens)
            self.token_count += len(tokens)
            if chunk.logprobs:
                update.logprobs.extend(chunk.logprobs)
            return
        if self._is_echo_alone:
            self._finish(FinishReason.LENGTH, update)
            return
        # Workers end a choice with STOP at a stop token only, which is no part of the text unless it was asked for.
        is_cut = chunk.finish is FinishReason.STOP and not self._includes_stop
        text_tokens = tokens[:-1] if is_cut else tokens
        step = 1 if self._is_stepwise else max(1, len(text_tokens))
        for start in range(0, len(text_tokens), step):
            part = text_tokens[start : start + step]
            if self._wants_offsets:
                update.offsets.append(self._text_chars)
            text = self._detokenizer.add(part)
            self._text_chars += len(text)
            self.token_count += len(part)
            is_shown = self._show(self._matcher.add(text, may_stop=self.token_count > self._min_tokens), part, update)
            if is_shown:
                update.tokens.extend(part)
                update.text_tokens += len(part)
                update.logprobs.extend(chunk.logprobs[start : start + step])
            if self._matcher.is_stopped:
                self._finish(FinishReason.STOP, update)
                break
        else:
            rest = tokens[len(text_tokens) :]
            update.tokens.extend(rest)
            update.logprobs.extend(chunk.logprobs[len(text_tokens) :])
            self.token_count += len(rest)
            if chunk.finish is not None:
                may_stop = self.token_count > self._min_tokens
                self._show(self._matcher.add(self._detokenizer.finish(), may_stop=may_stop), (), update)
                self._finish(FinishReason.STOP if self._matcher.is_stopped else chunk.finish, update)

    @property
    def predicted_tokens(self) -> int:
        """Its tokens that the prediction has, where the answer followed it."""
        return self._prediction.hits if self._prediction is not None else 0

    @property
    def parse_failures(self) -> int:
        """Texts that began as tool calls and were none."""
        return self._parser.failures if self._parser is not None else 0

    def _show(self, text: str, tokens: Sequence[int], update: ChoiceUpdate) -> bool:
        """Add `text`, which `tokens` completed; False = they are reasoning that is not shown."""
        if self._parser is None:
            update.text += text
            return True
        was_reasoning = self._parser.is_reasoning
        self._add_parts(self._parser.add(text), update)
        if was_reasoning and self._parser.is_reasoning:
            self.reasoning_tokens += len(tokens)
        return self._shows_reasoning or not (was_reasoning or self._parser.is_reasoning)

    def _add_parts(self, parts: Iterable[Event], update: ChoiceUpdate) -> None:
        update.parts = [] if update.parts is None else update.parts
        for part in parts:
            if isinstance(part, Content):
                update.text += part.text
            if self._shows_reasoning or not isinstance(part, Reasoning):
                update.parts.append(part)

    def _finish(self, finish: FinishReason, update: ChoiceUpdate) -> None:
        self._show(self._matcher.finish(), (), update)
        if self._parser is not None:
            self._add_parts(self._parser.finish(), update)
        self.finish = update.finish = finish
        update.stop = self._matcher.found


class WholeChoices:
    """Collects the updates of all choices of an answer."""

    def __init__(self, count: int) -> None:
        self._choices = [ChoiceUpdate(index, "") for index in range(count)]
        self._texts: list[list[str]] = [[] for _ in range(count)]

    def add(self, updates: Iterable[ChoiceUpdate]) -> None:
        for update in updates:
            whole = self._choices[update.index]
            self._texts[update.index].append(update.text)
            whole.echo = update.echo or whole.echo
            if update.prompt_logprobs is not None:
                whole.prompt_logprobs = update.prompt_logprobs
            whole.tokens += update.tokens
            whole.offsets += update.offsets
            whole.logprobs += update.logprobs
            whole.text_tokens += update.text_tokens
            whole.finish, whole.stop = update.finish or whole.finish, update.stop or whole.stop
            if update.parts is not None:
                whole.parts = [] if whole.parts is None else whole.parts
                whole.parts += update.parts

    def choices(self, prompt_count: int, kept: int | None = None) -> list[ChoiceUpdate]:
        """All choices, numbered prompt by prompt; with `kept` the best so many of each prompt, the best first.

        The best has the highest mean log-probability of its tokens; of equal ones the first.
        """
        for whole, texts in zip(self._choices, self._texts, strict=True):
            whole.text = "".join(texts)
        size = len(self._choices) // prompt_count
        if kept is None or kept == size:
            return self._choices
        best: list[ChoiceUpdate] = []
        for first in range(0, len(self._choices), size):
            best += sorted(self._choices[first : first + size], key=_badness)[:kept]
        for index, choice in enumerate(best):
            choice.index = index
        return best


def _badness(choice: ChoiceUpdate) -> float:
    return -mean_logprob([logprob.logprob for logprob in choice.logprobs])


def mean_logprob(logprobs: Sequence[float]) -> float:
    """Per token; an answer without any is as likely as can be."""
    return sum(logprobs) / len(logprobs) if logprobs else 0.0
