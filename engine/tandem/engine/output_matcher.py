"""The place of one choice in its output grammar: masks and drafts for what comes next, computed beside the step loop.

Only the masks of llguidance run without the interpreter's lock. So they come first, in a thread: what the grammar
forces is known then, and drafts cost little. A mask that is not there in time is not waited for: its row is computed
again once it is.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from tandem.engine.mask_threads import Masks, MaskThreads

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

QUICK_S = 0.002
"""CPU time of a mask. If the last one took longer, the scheduler plans no row until the next mask is there."""
MAX_FORCED = 256
"""Bytes that drafts are made of: a grammar may force as much as it is long, and all of it would be tokenized."""


class OutputMatcher:
    """The place of one choice in its grammar. Belongs to the step loop's thread, save for masks on their way.

    `stop_token_ids` end the answer as the tokenizer's own end of sequence does: where it is complete. `usual`: a
    grammar of less freedom (`usually_spaced`), which `drafts` takes tokens from while the answer follows it.
    `is_complete`: the end has come. `error`: the reason why the grammar cannot be followed any further; "" = it can.
    `patience_s`: how long masks are waited for at least. `note` takes how many were computed in which time.
    """

    __slots__ = (
        "_begun_s", "_behind", "_drafts", "_ends", "_everything", "_is_held", "_is_late", "_masks", "_matcher", "_note",
        "_patience_s", "_specials", "_stops", "_threads", "_tokenizer", "_took_s", "_usual", "_wants_drafts", "error",
        "is_complete",
    )  # fmt: skip

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: LLTokenizer,
        stop_token_ids: Sequence[int] = (),
        usual: LLMatcher | None = None,
        *,
        threads: MaskThreads,
        mask_bytes: int,
        patience_s: float,
        note: Callable[[int, float], None],
    ) -> None:
        self._matcher, self._usual, self._tokenizer = matcher, usual, tokenizer
        self._threads, self._patience_s, self._note = threads, patience_s, note
        self._everything = b"\xff" * mask_bytes
        self._ends = tokenizer.eos_tokens
        own = [token for token in stop_token_ids if token not in self._ends]
        self._specials = [token for token in own if tokenizer.is_special_token(token)]
        self._stops = [token for token in own if token not in self._specials]
        self._masks: Future[Masks] | None = None
        """The mask of the next token."""
        self._behind: Future[Masks] | None = None
        """Those behind `_drafts`."""
        self._drafts: tuple[int, ...] = ()
        self._begun_s = self._took_s = 0.0
        self._is_held = self._is_late = False
        self._wants_drafts = usual is not None
        self.is_complete = False
        self.error = ""

    @property
    def is_held(self) -> bool:
        """True while its next row is not to be planned, because the mask takes long."""
        self._is_held = self._is_held and not all(future.done() for future in self.pending)
        return self._is_held

    @property
    def pending(self) -> list[Future[Masks]]:
        """Masks that are computed, or known."""
        return [future for future in (self._masks, self._behind) if future is not None]

    def take_late(self) -> bool:
        """True if masks were given up since the last call."""
        is_late, self._is_late = self._is_late, False
        return is_late

    def advance(self, token: int) -> None:
        """Take in the next output token, and begin with the next mask."""
        self._consume(token)
        if not self.error and not self.is_complete:
            self.begin()
            self._is_held = self._took_s > max(QUICK_S, self._patience_s)

    def replay(self, tokens: Sequence[int]) -> None:
        """Take in tokens that were chosen elsewhere."""
        for token in tokens:
            self._consume(token)

    def start(self) -> None:
        """Begin with the first mask, which no row is planned without."""
        self.begin()
        self._is_held = True

    def drafts(self, most: int) -> tuple[int, ...]:
        """At most `most` tokens that probably come next, because the grammar leaves no other text, or none with the
        usual spacing of JSON. All of them are allowed; none ends the answer. None where the mask takes long."""
        self._wants_drafts = True
        if self.error or self.is_complete:
            return ()
        if not _is_done(self._asked(()), self._patience_s) or self._took_s > max(QUICK_S, self._patience_s):
            return ()
        self._settle()
        found = self._forced()[:most]
        ending = {*self._ends, *self._specials, *self._stops}
        count = next((place for place, token in enumerate(found) if token in ending), len(found))
        return tuple(found[: self._matcher.validate_tokens(found[:count])])

    def mask(self, drafts: Sequence[int] = ()) -> bytes:
        """Tokens that may come next, behind `drafts`: a bit each, the lowest of the first byte is token 0. Waits if it
        is on its way."""
        masks = self._asked(drafts).result()
        return masks[len(drafts) - 1] if drafts else masks[0]

    def _asked(self, drafts: Sequence[int]) -> Future[Masks]:
        """The masks behind drafts, or the next one, which have begun."""
        self.begin()
        if drafts and self._drafts[: len(drafts)] != tuple(drafts):
            self.begin(drafts)
        future = self._behind if drafts else self._masks
        assert future is not None
        return future

    def begin(self, drafts: Sequence[int] = ()) -> None:
        """Compute the mask of the next token, and those behind `drafts`, in another thread, unless that has begun."""
        if self._masks is None:
            self._begun_s = time.monotonic()
            next_one = functools.partial(self._compute_next, self._wants_drafts)
            self._masks = self._threads.submit(next_one, is_slow=self._took_s > QUICK_S)
            self._wants_drafts = False
        if drafts and self._drafts != tuple(drafts):
            self._settle()
            self._drafts, self._begun_s = tuple(drafts), time.monotonic()
            self._behind = self._threads.submit(self._compute_behind, is_slow=False)

    def give_up(self) -> bytes:
        """Wait no longer for masks on their way, and discard the token of this step's row (`take_late`). Returns the
        mask that allows all tokens. No row is to be planned while `is_held`."""
        for future in self.pending:
            self._threads.pass_by(future)
        self._is_held = self._is_late = True
        return self._everything

    def compute(self, drafts: Sequence[int] = ()) -> Masks:
        """Compute the mask of the next token, and that behind each of `drafts`. Any thread, one at a time."""
        masks = [self._mask()]
        for draft in drafts:
            self._matcher.consume_token(draft)
            masks.append(self._mask())
        self._matcher.rollback(len(drafts))
        self.error = self._matcher.get_error()
        return masks

    def _consume(self, token: int) -> None:
        self._settle()
        self._masks, self._behind, self._drafts = None, None, ()
        if token in self._specials and self._matcher.is_accepting():
            self.is_complete = True
            return
        self._matcher.consume_token(token)
        self.error = self._matcher.get_error()
        self.is_complete = not self.error and token in self._ends
        if self._usual is not None and not self._usual.consume_token(token):
            self._usual = None

    def _compute_next(self, wants_drafts: bool) -> Masks:
        begun_s = time.thread_time()  # the wait for a core tells nothing about the grammar
        masks = self.compute()
        if self._usual is not None and wants_drafts:
            self._usual.compute_bitmask()  # so that what it forces is known, too
        self._took_s = time.thread_time() - begun_s
        self._note(1, self._took_s)
        return masks

    def _compute_behind(self) -> Masks:
        begun_s = time.thread_time()
        masks = self.compute(self._drafts)[1:]
        self._note(len(masks), time.thread_time() - begun_s)
        return masks

    def _forced(self) -> list[int]:
        """Tokens of what has to follow, or of its beginning."""
        source = self._usual or self._matcher
        forced = source.compute_ff_bytes()
        if len(forced) <= MAX_FORCED:
            return source.compute_ff_tokens()
        return self._tokenizer.tokenize_partial(forced[:MAX_FORCED])[0]

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
        """Wait for masks on their way: llguidance allows one call at a time."""
        for future in self.pending:
            future.result()

    def _completes(self, token: int) -> bool:
        """True if the answer would be complete with `token`, which may come next."""
        self._matcher.consume_token(token)
        is_accepting = self._matcher.is_accepting()
        self._matcher.rollback(1)
        return is_accepting


def timely_masks(asked: Sequence[tuple[OutputMatcher, Sequence[int]]]) -> list[bytes]:
    """The masks of a step's rows, by matcher and drafts. They are waited for at most as long again as they have been on
    their way, so that none delays the others by more than a step; those that have not come are given up."""
    futures = [matcher._asked(drafts) for matcher, drafts in asked]
    now_s, wait_s = time.monotonic(), 0.0
    for (matcher, _), future in zip(asked, futures, strict=True):
        if not future.done():
            took_s = now_s - matcher._begun_s
            wait_s = max(wait_s, matcher._patience_s, took_s)
            if took_s > matcher._patience_s:
                matcher._threads.pass_by(future)  # so that those behind it come in time
    until_s = now_s + wait_s
    return [
        matcher.mask(drafts) if _is_done(future, until_s - time.monotonic()) else matcher.give_up()
        for (matcher, drafts), future in zip(asked, futures, strict=True)
    ]


def _is_done(future: Future[Masks], seconds: float) -> bool:
    """True if masks are there, after a wait of at most that long."""
    if future.done():
        return True
    try:
        future.exception(max(0.0, seconds))
    except TimeoutError:
        return False
    return True


def _has(bits: bytearray, token: int) -> bool:
    return bool(bits[token >> 3] >> (token & 7) & 1)


def _put(bits: bytearray, token: int, is_set: bool) -> None:
    if is_set:
        bits[token >> 3] |= 1 << (token & 7)
    else:
        bits[token >> 3] &= ~(1 << (token & 7))
