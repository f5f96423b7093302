"""Text of one choice of an answer as its tokens come: detokenised, cut at stop strings, in updates of new text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.core.handoff import TokenLogprob
from tandem.core.lifecycle import FinishReason
from tandem.router.dispatch.inflight_request import Arrival, GenerationRequest
from tandem.router.tokenization.detokenizer import StopMatcher
from tandem.router.tokenization.echo import Echo
from tandem.router.tokenization.tokenizer import Tokenizer
from tandem.router.tracing.calls import Call


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
    echo: Echo | None = None
    """The prompt, which the text begins with."""
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    """With the first update of a choice that wants them: of its prompt from the second token on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSettings:
    """`received_s` is when the API call arrived; `api` names it in metrics; `tokenizer` is the model's, `model` is what
    the client called that; `call` is ended with the answer."""

    api: str
    model: str
    tokenizer: Tokenizer
    stop: tuple[str, ...]
    received_s: float
    backlog_bytes: int
    wants_offsets: bool = False
    includes_stop: bool = False
    call: Call | None = None


class Choice:
    """The text of one choice as it grows."""

    def __init__(self, index: int, settings: AnswerSettings, work: GenerationRequest) -> None:
        self.index = index
        self.finish: FinishReason | None = None
        self.has_begun = False
        self.token_count = 0
        self.first_s = self.last_s = 0.0
        self._text_chars = len(work.echo.text) if work.echo is not None else 0
        self._wants_offsets = settings.wants_offsets
        self._detokenizer = settings.tokenizer.detokenizer()
        self._matcher = StopMatcher(settings.stop, is_included=settings.includes_stop)
        self._min_tokens, self._includes_stop = work.sampling.min_tokens, settings.includes_stop
        self._echo, self._is_echo_alone = work.echo, work.is_echo_alone
        self._is_stepwise = bool(settings.stop) or settings.wants_offsets
        self._is_plain = not self._is_stepwise and not self._is_echo_alone

    def begin(self, update: ChoiceUpdate) -> None:
        """The first update: it repeats the prompt, if that was asked for."""
        self.has_begun = True
        if self._echo is not None:
            update.echo, update.text = self._echo, self._echo.text

    def add(self, arrival: Arrival, update: ChoiceUpdate) -> None:
        tokens = arrival.tokens
        if self._is_plain and arrival.finish is None:  # as nearly always
            update.text += self._detokenizer.add(tokens)
            update.tokens.extend(tokens)
            update.text_tokens += len(tokens)
            self.token_count += len(tokens)
            if arrival.logprobs:
                update.logprobs.extend(arrival.logprobs)
            return
        if self._is_echo_alone:
            self._finish(FinishReason.LENGTH, update)
            return
        # Workers end a choice with STOP at a stop token only, which is no part of the text unless it was asked for.
        is_cut = arrival.finish is FinishReason.STOP and not self._includes_stop
        text_tokens = tokens[:-1] if is_cut else tokens
        step = 1 if self._is_stepwise else max(1, len(text_tokens))
        for start in range(0, len(text_tokens), step):
            part = text_tokens[start : start + step]
            if self._wants_offsets:
                update.offsets.append(self._text_chars)
            text = self._detokenizer.add(part)
            self._text_chars += len(text)
            self.token_count += len(part)
            update.text += self._matcher.add(text, may_stop=self.token_count > self._min_tokens)
            update.tokens.extend(part)
            update.text_tokens += len(part)
            if self._matcher.is_stopped:
                self._finish(FinishReason.STOP, update)
                break
        else:
            rest = tokens[len(text_tokens) :]
            update.tokens.extend(rest)
            self.token_count += len(rest)
            if arrival.finish is not None:
                may_stop = self.token_count > self._min_tokens
                update.text += self._matcher.add(self._detokenizer.finish(), may_stop=may_stop)
                self._finish(FinishReason.STOP if self._matcher.is_stopped else arrival.finish, update)
        taken = len(update.tokens) - len(update.logprobs)
        update.logprobs.extend(arrival.logprobs[:taken])

    def _finish(self, finish: FinishReason, update: ChoiceUpdate) -> None:
        update.text += self._matcher.finish()
        self.finish = update.finish = finish
