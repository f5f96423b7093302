"""Output grammars: compiled once each, beside the step loop, and followed token by token.

A choice's place in its grammar is a function of the grammar and of its tokens, so nothing of it travels or is kept.
Compiling and masks have a thread each, which llguidance lets run without the interpreter's lock.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tandem.core import metric_names as names
from tandem.core.errors import InvalidGrammarError
from tandem.core.gguf.model_files import GgufModel, folder_of, is_gguf
from tandem.core.gguf.tokenizer_json import tokenizer_json
from tandem.core.output_grammar import GRAMMAR_LIMITS

MAX_COMPILED = 128
MAX_CHARS = 4 << 20
"""Characters of all grammars that are kept."""


class OutputMatcher:
    """The place of one choice in its grammar. Belongs to the step loop's thread, save for a mask on its way.

    `stop_token_ids` end the answer as the tokenizer's own end of sequence does: where it is complete. `is_complete`:
    one of these has come. `error`: the reason why the grammar cannot be followed any further; "" = it can.
    """

    __slots__ = ("_ends", "_mask", "_matcher", "_specials", "_stops", "error", "is_complete")

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, stop_token_ids: Sequence[int] = ()) -> None:
        self._matcher = matcher
        self._ends = tokenizer.eos_tokens
        own = [token for token in stop_token_ids if token not in self._ends]
        self._specials = [token for token in own if tokenizer.is_special_token(token)]
        self._stops = [token for token in own if token not in self._specials]
        self._mask: Callable[[], bytes] | None = None
        self.is_complete = False
        self.error = ""

    def advance(self, token: int) -> None:
        """Take in the next output token."""
        if self._mask is not None:  # llguidance allows one call at a time
            self._mask()
            self._mask = None
        if token in self._specials and self._matcher.is_accepting():
            self.is_complete = True
            return
        self._matcher.consume_token(token)
        self.error = self._matcher.get_error()
        self.is_complete = not self.error and token in self._ends

    def replay(self, tokens: Sequence[int]) -> None:
        """Take in tokens that were chosen elsewhere."""
        for token in tokens:
            self.advance(token)

    def mask(self) -> bytes:
        """Tokens that may come next: a bit each, the lowest of the first byte is token 0. Waits if it is on its way."""
        if self._mask is None:
            mask = self.compute()
            self._mask = lambda: mask
        return self._mask()

    def expect(self, mask: Callable[[], bytes]) -> None:
        """Use `mask`, which another thread computes by `compute`, for the next token."""
        self._mask = mask

    @property
    def has_mask(self) -> bool:
        """True if the mask of the next token is known or on its way."""
        return self._mask is not None

    def compute(self) -> bytes:
        """Compute `mask`. Any thread, one at a time."""
        mask = self._matcher.compute_bitmask()
        self.error = self._matcher.get_error()
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

    def _completes(self, token: int) -> bool:
        """True if the answer would be complete with `token`, which may come next."""
        self._matcher.consume_token(token)
        is_accepting = self._matcher.is_accepting()
        self._matcher.rollback(1)
        return is_accepting


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
    the threads, and `reused` grammars that were here already.
    """

    def __init__(self, load: Callable[[], LLTokenizer]) -> None:
        self._compiling = ThreadPoolExecutor(1, "grammars")
        self._masking = ThreadPoolExecutor(1, "masks")
        self._limits = LLParserLimits(**GRAMMAR_LIMITS, verbose_errors=False)
        self._tokenizer = self._compiling.submit(load)
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._chars = 0
        self.compiled = self.masks = self.reused = 0
        self.compile_s = self.mask_s = 0.0

    def __len__(self) -> int:
        return len(self._compiled)

    def compile(self, grammar: str) -> Future[LLMatcher]:
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

    def matcher(self, compiled: LLMatcher, stop_token_ids: Sequence[int]) -> OutputMatcher:
        """Start a choice at the beginning of a grammar."""
        return OutputMatcher(compiled.deep_copy(), self._tokenizer.result(), stop_token_ids)

    def begin_masks(self, matchers: Sequence[OutputMatcher]) -> None:
        """Compute the masks of these in the background; each waits for its own when it is asked for it."""
        due = [matcher for matcher in matchers if not matcher.has_mask]
        if not due:
            return
        job = self._masking.submit(self._masks, due)
        for place, matcher in enumerate(due):
            matcher.expect(lambda place=place: job.result()[place])  # type: ignore[misc]

    def counters(self) -> dict[str, float]:
        """Counts so far, by the names of their metrics. Any thread."""
        return {
            names.GRAMMARS_COMPILED: float(self.compiled),
            names.GRAMMAR_COMPILE_SECONDS: self.compile_s,
            names.GRAMMARS_REUSED: float(self.reused),
            names.GRAMMAR_MASKS: float(self.masks),
            names.GRAMMAR_MASK_SECONDS: self.mask_s,
        }

    def close(self) -> None:
        self._compiling.shutdown(cancel_futures=True)
        self._masking.shutdown(cancel_futures=True)

    def _compile(self, grammar: str) -> LLMatcher:
        tokenizer, begun_s = self._tokenizer.result(), time.perf_counter()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=self._limits)
        self.compile_s += time.perf_counter() - begun_s
        self.compiled += 1
        if error := matcher.get_error():
            raise InvalidGrammarError("the output grammar cannot be used", why=error, param="grammar")
        return matcher

    def _masks(self, matchers: Sequence[OutputMatcher]) -> list[bytes]:
        begun_s = time.perf_counter()
        masks = [matcher.compute() for matcher in matchers]
        self.mask_s += time.perf_counter() - begun_s
        self.masks += len(masks)
        return masks


def _has(bits: bytearray, token: int) -> bool:
    return bool(bits[token >> 3] >> (token & 7) & 1)


def _put(bits: bytearray, token: int, is_set: bool) -> None:
    if is_set:
        bits[token >> 3] |= 1 << (token & 7)
    else:
        bits[token >> 3] &= ~(1 << (token & 7))
