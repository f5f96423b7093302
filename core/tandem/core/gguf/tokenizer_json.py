"""The tokenizer that a GGUF file describes, in the form of a tokenizer.json: byte-level BPE, or SentencePiece.

    gpt2    tokens in GPT-2's alphabet of bytes, merges by rank, a split by `tokenizer.ggml.pre`
    llama   tokens with ▁ for a blank, a score each, and 256 tokens of bytes

Routers cut text by it, and workers follow output grammars. Values that the file leaves unclear are refused: a text that
is cut otherwise than in training gives worse answers, and the cause would not be seen. A tokenizer.json beside the file
is always right.
"""

from __future__ import annotations

import json
from typing import Any

from tandem.core.gguf.metadata import Metadata
from tandem.core.gguf.text_splits import SPLITTINGS, Splitting
from tandem.core.gguf.tokens import TOKENS, TYPES, TokenType

MAX_TOKEN_CHARS = 1024
"""Of a token that may be merged: each of its halves is looked up."""
_KEY = "tokenizer.ggml."
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_BLANK = "▁"
BESIDE = "put the model's tokenizer.json beside the file"


def tokenizer_json(metadata: Metadata) -> str:
    """Return the tokenizer of the file. Raises ModelError for what it lacks, and for kinds that are not read."""
    kind = metadata.text(f"{_KEY}model")
    if kind not in ("gpt2", "llama"):
        why = f"it is {kind[:64]!r}, and gpt2 and llama are read" if kind else "it is missing"
        raise metadata.error(f"{_KEY}model", why, BESIDE)
    tokens = _tokens(metadata)
    types = metadata.wholes(TYPES) or [int(TokenType.NORMAL)] * len(tokens)
    if len(types) != len(tokens):
        raise metadata.error(TYPES, f"it has {len(types)} elements, and there are {len(tokens)} tokens", BESIDE)
    if kind == "gpt2":
        splitting = _splitting(metadata)
        parts, adds_bos = _byte_level(metadata, tokens, splitting), splitting.adds_bos
    else:
        parts, adds_bos = _sentence_piece(metadata, tokens, types), True
    has_blanks = kind == "llama" and parts["normalizer"]["type"] == "Replace"
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": _added_tokens(tokens, types, is_after_blanks=has_blanks),
        "post_processor": _ends(metadata, tokens, adds_bos=adds_bos), **parts,
    })  # fmt: skip


def special_tokens(metadata: Metadata) -> dict[str, str]:
    """Special tokens by their names in chat templates, of those that the file names."""
    tokens = metadata.texts(TOKENS)
    found = {name: _token_id(metadata, key, len(tokens)) for name, key in _SPECIAL.items()}
    return {name: tokens[token] for name, token in found.items() if token is not None}


def _tokens(metadata: Metadata) -> list[str]:
    """Every token's text; one without any has a name instead."""
    tokens = [text or f"[EMPTY_{number}]" for number, text in enumerate(metadata.texts(TOKENS))]
    if not tokens:
        raise metadata.error(TOKENS, "there is no token", BESIDE)
    if len(set(tokens)) != len(tokens):
        raise metadata.error(TOKENS, "some of them are the same", BESIDE)
    return tokens


def _splitting(metadata: Metadata) -> Splitting:
    name = metadata.text(f"{_KEY}pre")
    if name not in SPLITTINGS:
        why = f"it is {name[:64]!r}, and says nothing of how text is cut" if name else "it is missing"
        raise metadata.error(f"{_KEY}pre", why, BESIDE)
    return SPLITTINGS[name]


def _byte_level(metadata: Metadata, tokens: list[str], splitting: Splitting) -> dict[str, Any]:
    merges: list[tuple[str, str]] = []
    for text in metadata.texts(f"{_KEY}merges"):
        left, _, right = text.partition(" ")
        if not left or not right or " " in right:
            raise metadata.error(f"{_KEY}merges", "one of them has not two parts", BESIDE)
        merges.append((left, right))
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return {
        "normalizer": splitting.normalizer(), "pre_tokenizer": splitting.pre_tokenizer(), "decoder": decoder,
        "model": _bpe(tokens, merges, ignore_merges=splitting.takes_whole),
    }  # fmt: skip


def _sentence_piece(metadata: Metadata, tokens: list[str], types: list[int]) -> dict[str, Any]:
    scores = metadata.numbers(f"{_KEY}scores")
    if len(scores) != len(tokens):
        why = f"it has {len(scores)} elements, and there are {len(tokens)} tokens"
        raise metadata.error(f"{_KEY}scores", why, BESIDE)
    vocab = {text: number for number, text in enumerate(tokens)}
    unknown = _token_id(metadata, "unknown", len(tokens))
    if unknown is None and TokenType.UNKNOWN in types:
        unknown = types.index(TokenType.UNKNOWN)
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}
    ]  # fmt: skip
    normalizer: dict[str, Any] = blanks
    if metadata.flag(f"{_KEY}add_space_prefix", True):
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _BLANK}, blanks]}
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": normalizer, "pre_tokenizer": None, "decoder": {"type": "Sequence", "decoders": steps},
        "model": _bpe(
            tokens, _merges(metadata, vocab, scores, types), fuse_unk=True, byte_fallback=True,
            unk_token=None if unknown is None else tokens[unknown],
        ),
    }  # fmt: skip


def _bpe(tokens: list[str], merges: list[tuple[str, str]], **values: bool | str | None) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, **values,
        "vocab": {text: number for number, text in enumerate(tokens)}, "merges": merges,
    }  # fmt: skip


def _merges(metadata: Metadata, vocab: dict[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, those of the best score first (Kudo and Richardson 2018)."""
    found: list[tuple[float, int, int, int, int, str, str]] = []
    mergeable = (TokenType.NORMAL, TokenType.UNUSED)
    pieces = {text for text, number in vocab.items() if types[number] in mergeable}
    for text in pieces:
        if len(text) > MAX_TOKEN_CHARS:
            raise metadata.error(TOKENS, f"one has {len(text)} characters, and at most {MAX_TOKEN_CHARS} are read")
        score = scores[vocab[text]]
        for place in range(1, len(text)):
            left, right = text[:place], text[place:]
            if left in pieces and right in pieces:
                # Of the same token: the longest left part first, as transformers' converter has it.
                found.append((-score, -len(left), -len(right), vocab[left], vocab[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _added_tokens(tokens: list[str], types: list[int], *, is_after_blanks: bool) -> list[dict[str, Any]]:
    """Tokens that are found in a text before anything else: control tokens, and those of users.

    SentencePiece looks for the latter once blanks are ▁ (`is_after_blanks`), so that runs of them in a vocabulary match
    a ▁ of a text, too.
    """
    return [
        {"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": is_after_blanks and kind == TokenType.USER_DEFINED, "special": kind == TokenType.CONTROL}
        for number, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
    ]  # fmt: skip


def _ends(metadata: Metadata, tokens: list[str], *, adds_bos: bool) -> dict[str, Any] | None:
    """The tokens around a text; None = there are none."""
    count = len(tokens)
    bos = _token_id(metadata, "bos", count) if metadata.flag(f"{_KEY}add_bos_token", adds_bos) else None
    eos = _token_id(metadata, "eos", count) if metadata.flag(f"{_KEY}add_eos_token", False) else None
    if bos is None and eos is None:
        return None
    before = [] if bos is None else [_piece("SpecialToken", tokens[bos])]
    after = [] if eos is None else [_piece("SpecialToken", tokens[eos])]
    around = {
        tokens[token]: {"id": tokens[token], "ids": [token], "tokens": [tokens[token]]}
        for token in (bos, eos)
        if token is not None
    }
    one, other = _piece("Sequence", "A"), _piece("Sequence", "B", 1)
    return {
        "type": "TemplateProcessing", "single": [*before, one, *after], "pair": [*before, one, *after, other],
        "special_tokens": around,
    }  # fmt: skip


def _piece(kind: str, name: str, sequence: int = 0) -> dict[str, Any]:
    return {kind: {"id": name, "type_id": sequence}}


def _token_id(metadata: Metadata, name: str, count: int) -> int | None:
    """None where the file names no such token, or −1."""
    key = f"{_KEY}{name}_token_id"
    token = metadata.whole(key)
    if token is None or token in (-1, 0xFFFFFFFF):
        return None
    if not 0 <= token < count:
        raise metadata.error(key, f"it is {token}, and there are {count} tokens")
    return token
