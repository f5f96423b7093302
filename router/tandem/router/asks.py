"""What a client asks for, whatever door it came through: checked, tokenised, and turned into work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.core.errors import ContextLengthError, InvalidRequestError, UnknownModelError
from tandem.core.sampling import SamplingParams
from tandem.router.admission.gate import ANONYMOUS, Caller
from tandem.router.admission.terms import Wish
from tandem.router.badwords import check_words, word_tokens
from tandem.router.echo import echo_of
from tandem.router.quoting import quoted
from tandem.router.requests import Work
from tandem.router.tokenizer import Tokenizer
from tandem.router.workers import WorkerTable

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_PROMPTS = 32
MAX_SCORES = 1 << 18
"""Log-probabilities of prompt tokens in one answer, alternatives included."""
_NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One API call. Exactly one of `prompts` (text or token ids) and `messages` is given.

    `sampling` holds the SamplingParams fields that the client gave. Without max_tokens an answer is at most
    `default_max_tokens` long, None = what is left of the context. `max_tokens_param` names the field in errors. With
    `echo` an answer begins with its prompt, and may be no longer. Of `sampling.n` choices the `kept` best are wanted.
    """

    api: str
    model: str
    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[Mapping[str, Any], ...] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    includes_stop: bool = False
    bad_words: tuple[str, ...] = ()
    echo: bool = False
    kept: int | None = None
    default_max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    logprobs_param: str = "logprobs"
    caller: Caller = ANONYMOUS
    wish: Wish = field(default_factory=Wish)

    @property
    def is_echo_alone(self) -> bool:
        return self.echo and self.sampling.get("max_tokens") == 0


class AskReader:
    """Turns asks into work; every complaint names the field."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        table: WorkerTable,
        served_names: Sequence[str],
        timeout_s: float,
        random_seed: Callable[[], int],
        salt_of: Callable[[str], bytes] = lambda tenant: b"",
    ) -> None:
        self.tokenizer = tokenizer
        self.served_names = tuple(served_names)
        self._table, self._timeout_s, self._random_seed = table, timeout_s, random_seed
        self._salt_of = salt_of

    @property
    def context_tokens(self) -> int:
        """The longest prompt and answer together that can be served now."""
        limits = [limit for limit in (self._table.context_tokens(), self.tokenizer.context_tokens) if limit]
        return min(limits, default=0)

    def check_model(self, model: str) -> None:
        if model not in self.served_names:
            raise UnknownModelError(
                f"the model {quoted(model)} does not exist",
                why=f"this cluster serves {', '.join(self.served_names)}",
                param="model",
            )

    async def read(self, ask: Ask) -> list[Work]:
        """One work a prompt; raises InvalidRequestError and its kinds."""
        self.check_model(ask.model)
        _check_stops(ask.stop)
        is_echo_alone = ask.is_echo_alone
        ask = await self._prepared(ask)
        # Checked before the prompt is tokenised; the real limit follows once its length is known.
        self._sampling(ask, max_tokens=ask.sampling.get("max_tokens", _NO_LIMIT), seed=0)
        seed = ask.sampling.get("seed")
        seed = self._random_seed() if seed is None else seed
        works = [self._work(ask, prompt, seed) for prompt in await self._prompts(ask)]
        _check_scores(works, "prompt_logprobs" if "prompt_logprobs" in ask.sampling else "logprobs")
        if not ask.echo:
            return works
        wants_offsets, echoed = "logprobs" in ask.sampling, []
        for work, prompt in zip(works, ask.prompts, strict=True):
            echo = await echo_of(prompt, work.prompt, self.tokenizer, wants_offsets)
            echoed.append(replace(work, echo=echo, is_echo_alone=is_echo_alone))
        return echoed

    async def _prepared(self, ask: Ask) -> Ask:
        """With everything in `sampling` as sampling takes it."""
        more: dict[str, Any] = {}
        if ask.bad_words:
            check_words(ask.bad_words)
            more["bad_words"] = await word_tokens(ask.bad_words, self.tokenizer)
        if ask.is_echo_alone:  # nobody answers without a token
            more["max_tokens"] = 1
        return replace(ask, sampling={**ask.sampling, **more}) if more else ask

    async def _prompts(self, ask: Ask) -> list[Sequence[int]]:
        if ask.messages is not None:
            return [await self.tokenizer.encode_chat(ask.messages)]
        if len(ask.prompts) > MAX_PROMPTS:
            what = f"prompt has {len(ask.prompts)} entries"
            raise InvalidRequestError(what, why=f"at most {MAX_PROMPTS} are allowed", param="prompt")
        prompts: list[Sequence[int]] = []
        for prompt in ask.prompts:
            if isinstance(prompt, str):
                prompts.append(await self.tokenizer.encode(prompt))
            else:
                self._check_ids(prompt)
                prompts.append(prompt)
        return prompts

    def _check_ids(self, prompt: Sequence[int]) -> None:
        size = self.tokenizer.vocab_size
        if prompt and not 0 <= min(prompt) <= max(prompt) < size:
            wrong = next(token for token in prompt if not 0 <= token < size)
            why = f"the vocabulary has ids 0 to {size - 1}"
            raise InvalidRequestError(f"prompt has the token id {wrong}", why=why, param="prompt")

    def _work(self, ask: Ask, prompt: Sequence[int], seed: int) -> Work:
        param = "messages" if ask.messages is not None else "prompt"
        if not prompt:
            raise InvalidRequestError("the prompt is empty", why="it has no token", param=param)
        context = self.context_tokens
        if context and len(prompt) >= context:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens",
                why=f"this model's context is {context} tokens, prompt and answer together",
                todo="shorten the prompt",
                param=param,
            )
        room = context - len(prompt) if context else _NO_LIMIT
        max_tokens = ask.sampling.get("max_tokens")
        if max_tokens is None:
            max_tokens = room if ask.default_max_tokens is None else min(room, ask.default_max_tokens)
        if max_tokens > room:
            raise ContextLengthError(
                f"{ask.max_tokens_param} is {max_tokens} and the prompt has {len(prompt)} tokens",
                why=f"this model's context is {context} tokens, prompt and answer together",
                todo=f"ask for at most {room} tokens",
                param=ask.max_tokens_param,
            )
        return Work(
            prompt=prompt,
            sampling=self._sampling(ask, max_tokens=max_tokens, seed=seed),
            timeout_s=self._timeout_s,
            salt=self._salt_of(ask.caller.tenant),
        )

    def _sampling(self, ask: Ask, *, max_tokens: int, seed: int) -> SamplingParams:
        sampling = SamplingParams(**{"seed": seed, **ask.sampling, **_implied(ask), "max_tokens": max_tokens})
        try:
            sampling.validate(self.tokenizer.vocab_size)
        except InvalidRequestError as error:
            names = {"max_tokens": ask.max_tokens_param, "logprobs": ask.logprobs_param}
            if ask.kept is not None:
                names["n"] = "best_of"
            param = names.get(error.param or "")
            if param is None or param == error.param:
                raise
            what = error.what.replace(str(error.param), param, 1)
            raise InvalidRequestError(what, why=error.why, todo=error.todo, param=param) from None
        return sampling


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(
            f"stop has {len(stops)} strings", why=f"at most {MAX_STOPS} are allowed", param="stop"
        )
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            why = f"each must have 1 to {MAX_STOP_CHARS} characters"
            raise InvalidRequestError(f"stop has a string of {len(stop)} characters", why=why, param="stop")


def _implied(ask: Ask) -> dict[str, int]:
    """What sampling has to report beyond what the client asked for."""
    implied = {}
    logprobs = ask.sampling.get("logprobs")
    if ask.kept is not None and logprobs is None:
        implied["logprobs"] = 0
    if ask.echo and logprobs is not None:
        implied["prompt_logprobs"] = max(logprobs, ask.sampling.get("prompt_logprobs", 0))
    return implied


def _check_scores(works: Sequence[Work], param: str) -> None:
    count = sum(
        len(work.prompt) * (1 + work.sampling.prompt_logprobs) * work.sampling.n
        for work in works
        if work.sampling.prompt_logprobs is not None
    )
    if count > MAX_SCORES:
        raise InvalidRequestError(
            f"{param} would be {count} log-probabilities", why=f"at most {MAX_SCORES} fit one answer",
            todo="shorten the prompt or ask for fewer alternatives", param=param,
        )  # fmt: skip


def kept_choices(n: int, best_of: int | None) -> int | None:
    """How many of `best_of` choices are wanted; None = all that are computed."""
    if best_of is None or best_of == n:
        return None
    if n < 1:
        raise InvalidRequestError(f"n is {n}", why="it must be at least 1", param="n")
    if best_of < n:
        raise InvalidRequestError(f"best_of is {best_of}", why=f"it must be at least n, {n}", param="best_of")
    return n
