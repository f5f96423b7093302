"""Output grammars: compiled once each, beside the step loop, and followed token by token.

A choice's place in its grammar is a function of the grammar and of its tokens, so nothing of it travels or is kept.
Compiling and masks have a thread each, which llguidance lets run without the interpreter's lock.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tandem.core import metric_names as names
from tandem.core.errors import InvalidGrammarError
from tandem.core.gguf.model_files import GgufModel, folder_of, is_gguf
from tandem.core.gguf.tokenizer_json import tokenizer_json
from tandem.core.output_grammar import GRAMMAR_LIMITS, usually_spaced

MAX_COMPILED = 128
MAX_CHARS = 4 << 20
"""Characters of all grammars that are kept."""


class OutputMatcher:
    """The place of one choice in its grammar. Belongs to the step loop's thread, save for masks on their way.

    `stop_token_ids` end the answer as the tokenizer's own end of sequence does: where it is complete. `usual`: a
    grammar of less freedom (`usually_spaced`), which `drafts` takes tokens from while the answer follows it.
    `is_complete`: the end has come. `error`: the reason why the grammar cannot be followed any further; "" = it can.
    """

    __slots__ = ("_drafts", "_ends", "_masks", "_matcher", "_specials", "_stops", "_usual", "error", "is_complete")

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: LLTokenizer,
        stop_token_ids: Sequence[int] = (),
        usual: LLMatcher | None = None,
    ) -> None:
        self._matcher, self._usual = matcher, usual
        self._ends = tokenizer.eos_tokens
        own = [token for token in stop_token_ids if token not in self._ends]
        self._specials = [token for token in own if tokenizer.is_special_token(token)]
        self._stops = [token for token in own if token not in self._specials]
        self._masks: Callable[[], list[bytes]] | None = None
        self._drafts: tuple[int, ...] = ()
        self.is_complete = False
        self.error = ""

    def advance(self, token: int) -> None:
        """Take in the next output token."""
        self._settle()
        if token in self._specials and self._matcher.is_accepting():
            self.is_complete = True
            return
        self._matcher.consume_token(token)
        self.error = self._matcher.get_error()
        self.is_complete = not self.error and token in self._ends
        if self._usual is not None and not self._usual.consume_token(token):
            self._usual = None

    def replay(self, tokens: Sequence[int]) -> None:
        """Take in tokens that were chosen elsewhere."""
        for token in tokens:
            self.advance(token)

    def drafts(self, most: int) -> tuple[int, ...]:
        """At most `most` tokens that probably come next, because the grammar leaves no other text, or none with the
        usual spacing of JSON. All of them are allowed; none ends the answer."""
        self._settle()
        if self.error or self.is_complete:
            return ()
        found = (self._usual or self._matcher).compute_ff_tokens()[:most]
        ending = {*self._ends, *self._specials, *self._stops}
        count = next((place for place, token in enumerate(found) if token in ending), len(found))
        return tuple(found[: self._matcher.validate_tokens(found[:count])])

    def mask(self, drafts: Sequence[int] = ()) -> bytes:
        """Tokens that may come next, behind `drafts`: a bit each, the lowest of the first byte is token 0. Waits if it
        is on its way."""
        if self._masks is None or self._drafts[: len(drafts)] != tuple(drafts):
            masks = self.compute(drafts)
            self.expect(drafts, lambda: masks)
        assert self._masks is not None
        return self._masks()[len(drafts)]

    def expect(self, drafts: Sequence[int], masks: Callable[[], list[bytes]]) -> None:
        """Use `masks`, which another thread computes by `compute`, for the next token and those behind drafts."""
        self._drafts, self._masks = tuple(drafts), masks

    def has_masks(self, drafts: Sequence[int]) -> bool:
        """True if the masks of the next token, and behind `drafts`, are known or on their way."""
        return self._masks is not None and self._drafts == tuple(drafts)

    def compute(self, drafts: Sequence[int] = ()) -> list[bytes]:
        """Compute the mask of the next token, and that behind each of `drafts`. Any thread, one at a time."""
        masks = [self._mask()]
        for draft in drafts:
            self._matcher.consume_token(draft)
            masks.append(self._mask())
        self._matcher.rollback(len(drafts))
        self.error = self._matcher.get_error()
        return masks

    def _mask(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        if not self._specials and not self._stops:
            return mask
        bits = bytearray(mask)
        is_accepting = self._matcher.is_accepting()
        for token in self._specials:
            _put(bits, token, is_accepting)
        for token in self._stops:
            if _has(bits, token):
                _put(bits, token, self._completes(token))
        return bytes(bits)

    def _settle(self) -> None:
        """Wait for masks on their way, which are out of date then: llguidance allows one call at a time."""
        if self._masks is not None:
            self._masks()
            self._masks, self._drafts = None, ()

    def _completes(self, token: int) -> bool:
        """True if the answer would be complete with `token`, which may come next."""
        self._matcher.consume_token(token)
        is_accepting = self._matcher.is_accepting()
        self._matcher.rollback(1)
        return is_accepting


class CompiledGrammar(NamedTuple):
    """A grammar at its beginning, and one of less freedom for drafts; shared, to be copied for each choice."""

    matcher: LLMatcher
    usual: LLMatcher | None


def load_tokenizer(model: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Read the tokenizer.json of a model's folder, or the tokenizer of a GGUF file that has none beside it. Raises
    ModelError or ValueError."""
    file = folder_of(model) / "tokenizer.json"
    is_beside = file.is_file() or not is_gguf(model)
    source = str(file) if is_beside else tokenizer_json(GgufModel(model).metadata)
    return LLTokenizer(source, vocab_size, list(eos_token_ids) or None)


class OutputGrammars:
    """Compiled grammars of one tokenizer. `compile`, `matcher` and `begin_masks` are the step loop's; `close` ends the
    threads.

    `load` makes the tokenizer, in the background. Counts: `compiled`, `compile_s`, `masks`, `mask_s` of
    the threads, `reused` grammars that were here already, and the step loop's `drafts` and `accepted_drafts`.
    """

    def __init__(self, load: Callable[[], LLTokenizer]) -> None:
        self._compiling = ThreadPoolExecutor(1, "grammars")
        self._masking = ThreadPoolExecutor(1, "masks")
        self._limits = LLParserLimits(**GRAMMAR_LIMITS, verbose_errors=False)
        self._tokenizer = self._compiling.submit(load)
        self._compiled: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()
        self._chars = 0
        self.compiled = self.masks = self.reused = self.drafts = self.accepted_drafts = 0
        self.compile_s = self.mask_s = 0.0

    def __len__(self) -> int:
        return len(self._compiled)

    def compile(self, grammar: str) -> Future[CompiledGrammar]:
        """Begin to compile, unless that is done or under way. The future raises InvalidGrammarError for a grammar that
        cannot be used; what it returns is shared, and for `matcher` alone."""
        known = self._compiled.get(grammar)
        if known is not None:
            self._compiled.move_to_end(grammar)
            self.reused += 1
            return known
        future = self._compiling.submit(self._compile, grammar)
        self._compiled[grammar] = future
        self._chars += len(grammar)
        while len(self._compiled) > MAX_COMPILED or (self._chars > MAX_CHARS and len(self._compiled) > 1):
            self._chars -= len(self._compiled.popitem(last=False)[0])
        return future

    def matcher(self, compiled: CompiledGrammar, stop_token_ids: Sequence[int]) -> OutputMatcher:
        """Start a choice at the beginning of a grammar."""
        usual = None if compiled.usual is None else compiled.usual.deep_copy()
        return OutputMatcher(compiled.matcher.deep_copy(), self._tokenizer.result(), stop_token_ids, usual)

    def begin_masks(self, drafts: Mapping[OutputMatcher, Sequence[int]]) -> None:
        """Compute the masks of these in the background, behind each of their drafts, too; each waits for its own when
        it is asked for it."""
        due = [(matcher, some) for matcher, some in drafts.items() if not matcher.has_masks(some)]
        if not due:
            return
        job = self._masking.submit(self._masks, due)
        for place, (matcher, some) in enumerate(due):
            matcher.expect(some, lambda place=place: job.result()[place])  # type: ignore[misc]

    def counters(self) -> dict[str, float]:
        """Counts so far, by the names of their metrics. Any thread."""
        return {
            names.GRAMMARS_COMPILED: float(self.compiled),
            names.GRAMMAR_COMPILE_SECONDS: self.compile_s,
            names.GRAMMARS_REUSED: float(self.reused),
            names.GRAMMAR_MASKS: float(self.masks),
            names.GRAMMAR_MASK_SECONDS: self.mask_s,
            names.GRAMMAR_DRAFTS: float(self.drafts),
            names.GRAMMAR_ACCEPTED_DRAFTS: float(self.accepted_drafts),
        }

    def close(self) -> None:
        self._compiling.shutdown(cancel_futures=True)
        self._masking.shutdown(cancel_futures=True)

    def _compile(self, grammar: str) -> CompiledGrammar:
        tokenizer, begun_s = self._tokenizer.result(), time.perf_counter()
        matcher, usual = self._matcher(tokenizer, grammar), None
        if not matcher.is_error() and (spaced := usually_spaced(grammar)) != grammar:
            usual = self._matcher(tokenizer, spaced)
        self.compile_s += time.perf_counter() - begun_s
        self.compiled += 1
        if error := matcher.get_error():
            raise InvalidGrammarError("the output grammar cannot be used", why=error, param="grammar")
        return CompiledGrammar(matcher, None if usual is None or usual.is_error() else usual)

    def _matcher(self, tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
        return LLMatcher(tokenizer, grammar, log_level=0, limits=self._limits)

    def _masks(self, due: Sequence[tuple[OutputMatcher, Sequence[int]]]) -> list[list[bytes]]:
        begun_s = time.perf_counter()
        masks = [matcher.compute(drafts) for matcher, drafts in due]
        self.mask_s += time.perf_counter() - begun_s
        self.masks += sum(map(len, masks))
        return masks


def _has(bits: bytearray, token: int) -> bool:
    return bool(bits[token >> 3] >> (token & 7) & 1)


def _put(bits: bytearray, token: int, is_set: bool) -> None:
    if is_set:
        bits[token >> 3] |= 1 << (token & 7)
    else:
        bits[token >> 3] &= ~(1 << (token & 7))
