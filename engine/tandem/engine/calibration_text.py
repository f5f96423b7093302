"""Reads the text of `--quantize-calibration`, which tells a start what inputs a model's matrices meet."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path

from tandem.core.errors import ConfigError
from tandem.core.files import expand_user

PIECE = 512
"""Tokens that pass the layers as one sequence."""
LEAST_TOKENS = 2 * PIECE
MOST_TOKENS = 18 * PIECE
"""Twice as many tokens gain little (ADR 61), and take twice as long."""
_MOST_BYTES = 1 << 22


def read_calibration_text(file: str, model: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Tokens of a UTF-8 `file`: all, or pieces of PIECE tokens from all over its first 4 MiB, MOST_TOKENS together.
    Special tokens in the text are those of the `model`, so that chats may be given as its template renders them.

    Raises ConfigError for a file that cannot be read, and for one of fewer than LEAST_TOKENS tokens.
    """
    from tandem.engine.output_grammars import load_tokenizer  # takes 0.3 s, and few start with a text

    what = f"--quantize-calibration {file} cannot be used"
    try:
        with expand_user(file).open("rb") as opened:
            found = opened.read(_MOST_BYTES)
        text = found.decode(errors="strict" if len(found) < _MOST_BYTES else "ignore")
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error.strerror).lower()
        raise ConfigError(what, why=why, todo="give a text file that workers can read") from error
    tokens = load_tokenizer(model, vocab_size, eos_token_ids).tokenize_str(text)
    if len(tokens) < LEAST_TOKENS:
        raise ConfigError(
            what, why=f"it has {len(tokens):,} tokens, and less than {LEAST_TOKENS:,} tell too little",
            todo=f"give up to {MOST_TOKENS:,} tokens of what the model will read and write",
        )  # fmt: skip
    pieces = len(tokens) // PIECE
    kept = range(min(pieces, MOST_TOKENS // PIECE))
    starts = [PIECE * (one * pieces // len(kept)) for one in kept]
    return tuple(token for start in starts for token in tokens[start : start + PIECE])


def calibration_digest(tokens: Sequence[int]) -> str:
    """Eight hex digits that name a text's tokens."""
    return hashlib.sha256(struct.pack(f"<{len(tokens)}I", *tokens)).hexdigest()[:8]
