"""Requests of clients, of any API: checked and tokenised by the models that this router serves."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from tandem.core.config import ServedModel
from tandem.core.errors import ContextLengthError, InvalidGrammarError, InvalidRequestError, UnknownModelError
from tandem.core.output_grammar import OutputGrammar
from tandem.core.sampling import MAX_PREDICTION_TOKENS, SamplingParams
from tandem.router.dispatch.inflight_request import Echo, GenerationRequest
from tandem.router.error_quoting import quoted
from tandem.router.output_formats.registry import ModelFormats, formats_of
from tandem.router.output_formats.tool_prompt import with_tools_as_text
from tandem.router.serving.answer_formats import (
    argument_schemas,
    parsing_of,
    thought_budget_of,
    with_call_grammar,
    with_effort,
)
from tandem.router.serving.grammar_check import check_grammar
from tandem.router.tenancy.authenticator import request_salt
from tandem.router.tokenization.chat_template import Rendering, check_variables
from tandem.router.tokenization.detokenizer import Decode, IncrementalDetokenizer
from tandem.router.tokenization.tokenizer import Tokenizer
from tandem.router.workers.table import WorkerTable

Messages = Sequence[Mapping[str, Any]]
MAX_MESSAGES = 8192
"""Messages of a chat: each takes time, however short it is."""
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_PROMPTS = 32
MAX_CACHE_SALT_CHARS = 1024
MAX_CACHE_KEY_CHARS = 512
MAX_FAULT_CHECKS = 64
"""Schemas of tools that are checked one by one, to tell where the fault is."""
MAX_SCORES = 1 << 18
"""Log-probabilities of prompt tokens in one answer, alternatives included."""
MAX_ANSWER_SCORES = 1 << 19
"""Log-probabilities of an answer that is given when it is complete: choices x tokens x (1 + alternatives). It takes
about 250 bytes for each until it has been sent."""
_NO_LIMIT = 2**31 - 1
MAX_WORDS = 256
MAX_WORD_CHARS = 256
_MANY_WORDS = 32
"""From here on they are tokenised in a thread: the event loop has other streams to feed."""
_MANY_ECHOED_TOKENS = 512
"""From here on offsets are looked for in a thread: the event loop has other streams to feed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedModel:
    """`name` is the one that its workers report; requests name one of `served_names`."""

    name: str
    served_names: tuple[str, ...]
    tokenizer: Tokenizer
    formats: ModelFormats = field(default_factory=ModelFormats)


class ModelRegistry:
    """The models that this router serves, by the names that clients use for them: at least one, distinct names."""

    def __init__(self, models: Sequence[TokenizedModel]) -> None:
        self._models = tuple(models)
        self._by_name = {name: model for model in models for name in model.served_names}

    @classmethod
    def load(cls, configured: Sequence[ServedModel]) -> ModelRegistry:
        """Read the tokenizers; raises ModelError."""
        return cls([_load(model) for model in configured])

    def __iter__(self) -> Iterator[TokenizedModel]:
        return iter(self._models)

    @property
    def served_names(self) -> tuple[str, ...]:
        """All names, model by model."""
        return tuple(self._by_name)

    def find(self, name: str) -> TokenizedModel:
        """The model of that name; UnknownModelError if there is none."""
        model = self._by_name.get(name)
        if model is None:
            raise UnknownModelError(
                f"the model {quoted(name)} does not exist",
                why=f"this cluster serves {', '.join(self._by_name)}",
                param="model",
            )
        return model

    def only(self) -> TokenizedModel:
        """The one model, for requests that need not name it; InvalidRequestError if there are several."""
        if len(self._models) > 1:
            why, todo = "this cluster serves several", f"name one of {', '.join(self._by_name)}"
            raise InvalidRequestError("the model is missing", why=why, todo=todo, param="model")
        return self._models[0]


def _load(model: ServedModel) -> TokenizedModel:
    template = Path(model.chat_template) if model.chat_template else None
    tokenizer = Tokenizer.load(Path(model.model_dir), template)
    formats = formats_of(
        tokenizer.chat_source, tokenizer.added_tokens, tools=model.tool_format, reasoning=model.reasoning_format
    )
    served = model.served_names or (model.name,)
    return TokenizedModel(name=model.name, served_names=served, tokenizer=tokenizer, formats=formats)


class RequestParser:
    """Turns asks into work; every complaint names the field."""

    def __init__(
        self,
        models: ModelRegistry,
        table: WorkerTable,
        timeout_s: float,
        random_seed: Callable[[], int],
        salt_of: Callable[[str], bytes] = lambda tenant: b"",
    ) -> None:
        self.models = models
        self._table, self._timeout_s, self._random_seed = table, timeout_s, random_seed
        self._salt_of = salt_of

    def context_tokens(self, model: TokenizedModel) -> int:
        """The longest prompt and answer together that can be served now; 0 = not known."""
        limits = (self._table.context_tokens(model.name), model.tokenizer.context_tokens)
        return min((limit for limit in limits if limit), default=0)

    async def read(self, ask: GenerationRequest) -> list[GenerationRequest]:
        """One work a prompt; raises InvalidRequestError and its kinds."""
        model = self.models.find(ask.served_model)
        _check_stops(ask.stop)
        _check_length("cache_salt", ask.cache_salt, MAX_CACHE_SALT_CHARS)
        _check_length("prompt_cache_key", ask.cache_key, MAX_CACHE_KEY_CHARS)
        ask = await self._prepared(self._formatted(ask, model), model)
        seed = ask.options.get("seed")
        seed = self._random_seed() if seed is None else seed
        # Checked before the prompt is tokenised; a limit that was not given follows once the prompt's length is known.
        sampling = self._sampling(ask, model, max_tokens=ask.options.get("max_tokens", _NO_LIMIT), seed=seed)
        works = [self._work(ask, model, prompt, sampling) for prompt in await self._prompts(ask, model)]
        _check_scores(works, "prompt_logprobs" if "prompt_logprobs" in ask.options else "logprobs")
        if ask.is_whole:
            _check_answer_scores(works, ask.logprobs_param)
        if not ask.echoes:
            return works
        for work, prompt in zip(works, ask.prompts, strict=True):
            work.echo = await echo_of(prompt, work.prompt, model.tokenizer, "logprobs" in ask.options)
        return works

    async def count_tokens(self, ask: GenerationRequest) -> int:
        """The number of tokens of a chat's prompt; raises as `read`."""
        model = self.models.find(ask.served_model)
        chat = self._formatted(ask, model)
        return len(await self.encode_chat(model, chat.messages or (), chat.rendering))

    def _formatted(self, ask: GenerationRequest, model: TokenizedModel) -> GenerationRequest:
        """With what tools, effort and reasoning mean in the formats of the model."""
        if ask.effort is None and ask.tools is None and ask.output_grammar is None:
            return ask
        return with_call_grammar(with_effort(ask, model.tokenizer), model.tokenizer, model.formats)

    async def _prepared(self, ask: GenerationRequest, model: TokenizedModel) -> GenerationRequest:
        """With everything in `options` as sampling takes it."""
        more: dict[str, Any] = {}
        if ask.bad_words:
            check_words(ask.bad_words)
            more["bad_words"] = await word_tokens(ask.bad_words, model.tokenizer)
        if predicted := ask.options.get("prediction"):
            more["prediction"] = await _predicted_tokens(predicted, model.tokenizer, self.context_tokens(model))
        for given in ask.tools.customs.values() if ask.tools is not None else ():
            if given is not None:
                await check_grammar(OutputGrammar(given.lark, f"{given.param}.definition", is_written=True))
                await asyncio.sleep(0)  # other streams go on meanwhile
        if ask.output_grammar is not None:
            more["grammar"] = await _checked_grammar(ask, ask.output_grammar)
        is_echo_alone = ask.echoes and ask.options.get("max_tokens") == 0
        if is_echo_alone:  # no worker answers without a token
            more["max_tokens"] = 1
        return replace(ask, options={**ask.options, **more}, is_echo_alone=is_echo_alone) if more else ask

    async def encode_chat(
        self, model: TokenizedModel, messages: Messages, rendering: Rendering, *, most_tokens: int = 0
    ) -> list[int]:
        """Token ids of a chat; raises InvalidRequestError. `most_tokens`: see Tokenizer.encode."""
        _check_rendering(rendering, messages)
        form = model.formats.tools
        if form is not None and not model.tokenizer.knows_tools and _has_tools(rendering, messages):
            messages = with_tools_as_text(messages, rendering.tools, form.shape)
            rendering = replace(rendering, tools=())
        return await model.tokenizer.encode_chat(messages, rendering, most_tokens=most_tokens)

    async def _prompts(self, ask: GenerationRequest, model: TokenizedModel) -> list[Sequence[int]]:
        """Packed as they are hashed and sent: a long list is walked once."""
        most = self.context_tokens(model)
        if ask.messages is not None:
            return [array("I", await self.encode_chat(model, ask.messages, ask.rendering, most_tokens=most))]
        if len(ask.prompts) > MAX_PROMPTS:
            what = f"prompt has {len(ask.prompts)} entries"
            raise InvalidRequestError(what, why=f"at most {MAX_PROMPTS} are allowed", param="prompt")
        prompts: list[Sequence[int]] = []
        for prompt in ask.prompts:
            if isinstance(prompt, str):
                prompts.append(array("I", await model.tokenizer.encode(prompt, most_tokens=most)))
            else:
                _check_fits("prompt", len(prompt), most)  # before they are copied
                prompts.append(_packed("prompt", prompt, model.tokenizer.vocab_size))
        return prompts

    def _work(
        self, ask: GenerationRequest, model: TokenizedModel, prompt: Sequence[int], sampling: SamplingParams
    ) -> GenerationRequest:
        param = "messages" if ask.messages is not None else "prompt"
        if not prompt:
            raise InvalidRequestError("the prompt is empty", why="it has no token", param=param)
        context = self.context_tokens(model)
        _check_fits(param, len(prompt), context)
        formats = model.formats
        room = context - len(prompt) if context else _NO_LIMIT
        max_tokens = ask.options.get("max_tokens")
        if max_tokens is None:
            default = _NO_LIMIT if ask.default_max_tokens is None else ask.default_max_tokens
            max_tokens = min(room, default, _scored_tokens(ask, sampling))
            sampling = self._sampling(ask, model, max_tokens=max_tokens, seed=sampling.seed)
        if max_tokens > room:
            raise ContextLengthError(
                f"{ask.max_tokens_param} is {max_tokens} and the prompt has {len(prompt)} tokens",
                why=f"this model's context is {context} tokens, prompt and answer together",
                todo=f"ask for at most {room} tokens",
                param=ask.max_tokens_param,
            )
        if ask.thought_limit is not None:
            budget = thought_budget_of(ask, ask.thought_limit, prompt, model.tokenizer, formats)
            sampling = replace(sampling, thoughts=budget)
        return replace(
            ask,
            prompts=(),
            messages=None,
            prompt=prompt,
            sampling=sampling,
            timeout_s=self._timeout_s,
            model=model.name,
            salt=request_salt(self._salt_of(ask.caller.tenant), ask.cache_salt),
            hashes={},
            parsing=parsing_of(ask, prompt, model.tokenizer, formats) if formats.tools or formats.reasoning else None,
        )

    def _sampling(self, ask: GenerationRequest, model: TokenizedModel, *, max_tokens: int, seed: int) -> SamplingParams:
        sampling = SamplingParams(**{"seed": seed, **ask.options, **_implied(ask), "max_tokens": max_tokens})
        try:
            sampling.validate(model.tokenizer.vocab_size)
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


def check_count(param: str, count: int, most: int) -> None:
    """InvalidRequestError for more entries in the field `param` than there may be."""
    if count > most:
        raise InvalidRequestError(f"{param} has {count} entries", why=f"at most {most} are allowed", param=param)


def _check_fits(param: str, tokens: int, context: int) -> None:
    """ContextLengthError for a prompt that leaves no room for a token; a context of 0 is not known."""
    if context and tokens >= context:
        raise ContextLengthError(
            f"the prompt has {tokens} tokens",
            why=f"this model's context is {context} tokens, prompt and answer together",
            todo="shorten the prompt",
            param=param,
        )


def check_ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    """InvalidRequestError when one of the token ids in the field `param` is none."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise _no_id(param, ids, vocab_size)


def _packed(param: str, ids: Sequence[int], vocab_size: int) -> Sequence[int]:
    """The ids, packed if they are not; InvalidRequestError as `check_ids`. Millions are walked as few times as can be,
    and kept once."""
    try:
        packed = ids if isinstance(ids, array) and ids.typecode == "I" else array("I", ids)
    except OverflowError:
        raise _no_id(param, ids, vocab_size) from None
    if packed and max(packed) >= vocab_size:
        raise _no_id(param, packed, vocab_size)
    return packed


def _no_id(param: str, ids: Sequence[int], vocab_size: int) -> InvalidRequestError:
    """About the first of `ids` that is none."""
    wrong = next(token for token in ids if not 0 <= token < vocab_size)
    why = f"the vocabulary has ids 0 to {vocab_size - 1}"
    return InvalidRequestError(f"{param} has the token id {wrong}", why=why, param=param)


async def _checked_grammar(ask: GenerationRequest, grammar: OutputGrammar) -> str:
    """The text of a request's grammar for workers. InvalidGrammarError, with the place of the fault in a tool if it is
    in one."""
    try:
        return (await check_grammar(grammar)).text
    except InvalidGrammarError:
        for schema in islice(argument_schemas(ask), MAX_FAULT_CHECKS):
            await check_grammar(schema)
        raise


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(
            f"stop has {len(stops)} strings", why=f"at most {MAX_STOPS} are allowed", param="stop"
        )
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            why = f"each must have 1 to {MAX_STOP_CHARS} characters"
            raise InvalidRequestError(f"stop has a string of {len(stop)} characters", why=why, param="stop")


def _implied(ask: GenerationRequest) -> dict[str, int]:
    """Sampling fields to report beyond those that the client asked for."""
    implied = {}
    logprobs = ask.options.get("logprobs")
    if ask.kept is not None and logprobs is None:
        implied["logprobs"] = 0
    if ask.echoes and logprobs is not None:
        implied["prompt_logprobs"] = max(logprobs, ask.options.get("prompt_logprobs", 0))
    return implied


def _check_scores(works: Sequence[GenerationRequest], param: str) -> None:
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


def _scored_tokens(ask: GenerationRequest, sampling: SamplingParams) -> int:
    """As many tokens of each choice as may have log-probabilities."""
    if not ask.is_whole or sampling.logprobs is None:
        return _NO_LIMIT
    return max(1, MAX_ANSWER_SCORES // (sampling.n * (1 + sampling.logprobs) * max(1, len(ask.prompts))))


def _check_answer_scores(works: Sequence[GenerationRequest], param: str) -> None:
    count = sum(
        work.sampling.n * work.sampling.max_tokens * (1 + work.sampling.logprobs)
        for work in works
        if work.sampling.logprobs is not None
    )
    if count > MAX_ANSWER_SCORES:
        raise InvalidRequestError(
            f"the answer would have up to {count} log-probabilities",
            why=f"at most {MAX_ANSWER_SCORES} fit one that is not streamed",
            todo="stream it, or ask for fewer tokens, choices or alternatives", param=param,
        )  # fmt: skip


def kept_choices(n: int, best_of: int | None) -> int | None:
    """Return how many of `best_of` choices are wanted; None = all that are computed."""
    if best_of is None or best_of == n:
        return None
    if n < 1:
        raise InvalidRequestError(f"n is {n}", why="it must be at least 1", param="n")
    if best_of < n:
        raise InvalidRequestError(f"best_of is {best_of}", why=f"it must be at least n, {n}", param="best_of")
    return n


def _check_length(param: str, text: str | None, most: int) -> None:
    if text is not None and not 1 <= len(text) <= most:
        why = f"it must have 1 to {most}"
        raise InvalidRequestError(f"{param} has {len(text)} characters", why=why, param=param)


def _has_tools(rendering: Rendering, messages: Messages) -> bool:
    return bool(rendering.tools) or any(one["role"] == "tool" or one.get("tool_calls") for one in messages)


def _check_rendering(rendering: Rendering, messages: Messages) -> None:
    check_variables(rendering.variables)
    if not rendering.continues_last:
        return
    if rendering.adds_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt are both true", why="only one of them can end the prompt",
            todo="leave add_generation_prompt out", param="add_generation_prompt",
        )  # fmt: skip
    role = messages[-1]["role"]
    if role != "assistant":
        raise InvalidRequestError(
            "the last message cannot be continued", why=f"its role is {role}, not assistant",
            param="continue_final_message",
        )  # fmt: skip


async def echo_of(
    prompt: str | Sequence[int], tokens: Sequence[int], tokenizer: Tokenizer, wants_offsets: bool
) -> Echo:
    """`prompt` as the client gave it: token ids are shown as text, special ones too."""
    text = prompt if isinstance(prompt, str) else tokenizer.decode_all(tokens)
    if not wants_offsets:
        return Echo(text, tokens)
    if len(tokens) < _MANY_ECHOED_TOKENS:
        return Echo(text, tokens, offsets_in(text, tokens, tokenizer.decode_all))
    return Echo(text, tokens, await asyncio.to_thread(offsets_in, text, tokens, tokenizer.decode_all))


def offsets_in(text: str, tokens: Sequence[int], decode: Decode) -> list[int]:
    """Return where each token begins in `text`; tokens that the tokenizer puts around a text begin at its ends.

    A token that completes no character begins where that character does.
    """
    shift = max(0, decode(tokens).find(text))
    detokenizer, at, offsets = IncrementalDetokenizer(decode), 0, []
    for token in tokens:
        offsets.append(min(max(0, at - shift), len(text)))
        at += len(detokenizer.add([token]))
    return offsets


def check_words(words: Sequence[str]) -> None:
    """Raise InvalidRequestError for too many words, and for empty or long ones."""
    if len(words) > MAX_WORDS:
        what = f"bad_words has {len(words)} words"
        raise InvalidRequestError(what, why=f"at most {MAX_WORDS} are allowed", param="bad_words")
    for word in words:
        if not 1 <= len(word) <= MAX_WORD_CHARS:
            why = f"each must have 1 to {MAX_WORD_CHARS} characters"
            raise InvalidRequestError(f"bad_words has a word of {len(word)} characters", why=why, param="bad_words")


async def _predicted_tokens(text: str, tokenizer: Tokenizer, context: int) -> tuple[int, ...]:
    """No more than a context: each choice keeps a table of them, in worker and router."""
    most = min(context or MAX_PREDICTION_TOKENS, MAX_PREDICTION_TOKENS)
    try:
        return tuple(await tokenizer.encode(text, add_special_tokens=False, most_tokens=most))
    except ContextLengthError:
        what, why = "prediction is too long", f"it must have at most {most} tokens"
        raise InvalidRequestError(what, why=why, todo="leave out what will change", param="prediction") from None


async def word_tokens(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences of every word as it is written at the beginning of a text and behind a space."""
    if len(words) < _MANY_WORDS:
        return _word_tokens(words, tokenizer)
    return await asyncio.to_thread(_word_tokens, words, tokenizer)


def _word_tokens(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        for text in (bare, f" {bare}") if bare else (word,):
            found[tuple(tokenizer.encode_now(text, add_special_tokens=False))] = None
    return tuple(tokens for tokens in found if tokens)
