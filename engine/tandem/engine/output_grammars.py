"""Output grammars: compiled once each, beside the step loop, and followed token by token.

A choice's place in its grammar is a function of the grammar and of its tokens, so nothing of it travels or is kept.
Compiling has a thread, and masks have some, which llguidance lets run without the interpreter's lock.
"""

from __future__ import annotations

import threading
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
from tandem.core.memory import allocated_bytes, return_free_memory
from tandem.core.output_grammar import GRAMMAR_LIMITS, usually_spaced
from tandem.core.thread_priority import yield_cores
from tandem.engine.mask_threads import MaskThreads
from tandem.engine.output_matcher import QUICK_S, OutputMatcher

MAX_COMPILED = 128
MAX_CHARS = 4 << 20
"""Characters of all grammars that are kept."""
MAX_BYTES = 128 << 20
"""Memory that all grammars that are kept have taken: one may take 64 MiB."""
_TRIMMED_BYTES = 32 << 20
"""Memory of forgotten grammars is returned to the system from so many bytes on."""


class CompiledGrammar(NamedTuple):
    """A grammar at its beginning, and one of less freedom for drafts; shared, to be copied for each choice."""

    matcher: LLMatcher
    usual: LLMatcher | None
    mask_bytes: int
    size_bytes: int


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

    def __init__(self, load: Callable[[], LLTokenizer], patience_s: float = QUICK_S) -> None:
        """`patience_s`: how long a step waits for masks at least."""
        self._compiling = ThreadPoolExecutor(1, "grammars")
        self._threads, self.patience_s = MaskThreads(), patience_s
        self._counting = threading.Lock()
        self._limits = LLParserLimits(**GRAMMAR_LIMITS, verbose_errors=False)
        self._tokenizer = self._compiling.submit(load)
        self._compiling.submit(yield_cores)  # not while it loads, with the interpreter's lock
        self._compiled: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()
        self._chars = self._freed_bytes = 0
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
        self._forget()
        return future

    def _forget(self) -> None:
        """Forget the oldest grammars where they are too many or too large; the latest one stays."""
        sizes = {grammar: _size_bytes(future) for grammar, future in self._compiled.items()}
        kept_bytes, freed_bytes = sum(sizes.values()), 0
        while len(self._compiled) > 1 and (
            len(self._compiled) > MAX_COMPILED or self._chars > MAX_CHARS or kept_bytes - freed_bytes > MAX_BYTES
        ):
            grammar, _ = self._compiled.popitem(last=False)
            self._chars -= len(grammar)
            freed_bytes += sizes[grammar]
        self._freed_bytes += freed_bytes
        if self._freed_bytes > _TRIMMED_BYTES:
            self._freed_bytes = 0
            self._compiling.submit(return_free_memory)

    def matcher(self, compiled: CompiledGrammar, stop_token_ids: Sequence[int]) -> OutputMatcher:
        """Start a choice at the beginning of a grammar."""
        usual = None if compiled.usual is None else compiled.usual.deep_copy()
        return OutputMatcher(
            compiled.matcher.deep_copy(), self._tokenizer.result(), stop_token_ids, usual, threads=self._threads,
            mask_bytes=compiled.mask_bytes, patience_s=self.patience_s, note=self._note,
        )  # fmt: skip

    def begin_masks(self, drafts: Mapping[OutputMatcher, Sequence[int]]) -> None:
        """Compute the masks of these in the background, behind each of their drafts, too."""
        for matcher, some in drafts.items():
            matcher.begin(some)

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
        self._threads.close()

    def _compile(self, grammar: str) -> CompiledGrammar:
        tokenizer, begun_s, before_bytes = self._tokenizer.result(), time.perf_counter(), allocated_bytes()
        matcher, usual = self._matcher(tokenizer, grammar), None
        if not matcher.is_error() and (spaced := usually_spaced(grammar)) != grammar:
            usual = self._matcher(tokenizer, spaced)
        mask = matcher.compute_bitmask()  # so that choices begin with what the grammar forces
        if usual is not None and not usual.is_error():
            usual.compute_bitmask()
        self.compile_s += time.perf_counter() - begun_s
        self.compiled += 1
        if error := matcher.get_error():
            raise InvalidGrammarError("the output grammar cannot be used", why=error, param="grammar")
        usual = None if usual is None or usual.is_error() else usual
        return CompiledGrammar(matcher, usual, len(mask), max(0, allocated_bytes() - before_bytes))

    def _matcher(self, tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
        return LLMatcher(tokenizer, grammar, log_level=0, limits=self._limits)

    def _note(self, masks: int, seconds: float) -> None:
        with self._counting:
            self.masks += masks
            self.mask_s += seconds


def _size_bytes(future: Future[CompiledGrammar]) -> int:
    """Memory of a grammar that is compiled; 0 for others."""
    is_compiled = future.done() and not future.cancelled() and future.exception() is None
    return future.result().size_bytes if is_compiled else 0
