"""The texts that tell what inputs a model's matrices meet: the usual one, or that of `--quantize-calibration`."""

from __future__ import annotations

import codecs
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.core.errors import ConfigError, ModelError
from tandem.core.files import expand_user

PIECE = 512
"""Tokens that pass the layers as one sequence."""
LEAST_TOKENS = 2 * PIECE
MOST_TOKENS = 18 * PIECE
"""Half of them are as good, unless they lack a kind of text (ADR 61)."""
_USUAL = Path(__file__).parent / "usual_text.txt"
_MOST_USUAL = 3 * PIECE
_MOST_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Tokens, at least LEAST_TOKENS where a user gave the text: then they tell how inputs of layers go together."""

    tokens: tuple[int, ...] = ()
    is_given: bool = False

    @property
    def digest(self) -> str:
        """Eight hex digits that name the tokens and their use; "" of none."""
        if not self.tokens:
            return ""
        return hashlib.sha256(struct.pack(f"<?{len(self.tokens)}I", self.is_given, *self.tokens)).hexdigest()[:8]


NO_TEXT = CalibrationText()


def usual_text(model: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> CalibrationText:
    """Prose, code and chats that come with this package, in the tokens of `model`; none where it has no tokenizer
    that can be read."""
    try:
        tokens = _tokens(_USUAL.read_text(), model, vocab_size, eos_token_ids)
    except (ModelError, ValueError):
        return NO_TEXT
    return CalibrationText(tuple(tokens[:_MOST_USUAL]))


def given_text(file: str, model: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> CalibrationText:
    """Tokens of a UTF-8 `file`: all, or pieces of PIECE tokens from all over its first 4 MiB, MOST_TOKENS together.
    Special tokens in the text are those of the `model`, so that chats may be given as its template renders them.

    Raises ConfigError for a file that cannot be read, one of fewer than LEAST_TOKENS tokens, and a model without a
    tokenizer that can be read.
    """
    what = f"--quantize-calibration {file} cannot be used"
    try:
        with expand_user(file).open("rb") as opened:
            found = opened.read(_MOST_BYTES)
        text = codecs.getincrementaldecoder("utf-8")().decode(found, final=len(found) < _MOST_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error.strerror).lower()
        raise ConfigError(what, why=why, todo="give a text file that workers can read") from error
    try:
        tokens = _tokens(text, model, vocab_size, eos_token_ids)
    except (ModelError, ValueError) as error:
        why = f"the model's tokenizer cannot be read: {error}"
        raise ConfigError(what, why=why, todo="leave --quantize-calibration out") from error
    if len(tokens) < LEAST_TOKENS:
        raise ConfigError(
            what, why=f"it has {len(tokens):,} tokens, and less than {LEAST_TOKENS:,} tell too little",
            todo=f"give up to {MOST_TOKENS:,} tokens of what the model will read and write",
        )  # fmt: skip
    pieces = len(tokens) // PIECE
    kept = range(min(pieces, MOST_TOKENS // PIECE))
    starts = [PIECE * (one * pieces // len(kept)) for one in kept]
    return CalibrationText(tuple(token for start in starts for token in tokens[start : start + PIECE]), is_given=True)


def _tokens(text: str, model: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> list[int]:
    from tandem.engine.output_grammars import load_tokenizer  # takes 0.3 s, and most starts read no text

    found = load_tokenizer(model, vocab_size, eos_token_ids).tokenize_str(text)
    return [token for token in found if token < vocab_size]
