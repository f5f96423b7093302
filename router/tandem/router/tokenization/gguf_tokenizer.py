"""The tokenizer that a GGUF file describes, as the tokenizers library has it: byte-level BPE, or SentencePiece.

    gpt2    tokens in GPT-2's alphabet of bytes, merges by rank, a split by `tokenizer.ggml.pre`
    llama   tokens with ▁ for a blank, a score each, and 256 tokens of bytes

Values that the file leaves unclear are refused: a text that is cut otherwise than in training gives worse answers, and
the cause would not be seen. A tokenizer.json beside the file is always right.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as HubTokenizer

from tandem.core.errors import ModelError
from tandem.core.gguf.metadata import Metadata
from tandem.core.gguf.tokens import TOKENS, TYPES, TokenType
from tandem.router.tokenization.gguf_splits import SPLITTINGS, Splitting

MAX_TOKEN_CHARS = 1024
"""Of a token that may be merged: each of its halves is looked up."""
_KEY = "tokenizer.ggml."
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_BLANK = "▁"
_BESIDE = "put the model's tokenizer.json beside the file"


def build_tokenizer(metadata: Metadata) -> HubTokenizer:
    """Build the tokenizer of the file. Raises ModelError for what it lacks, and for kinds that are not read."""
    kind = metadata.text(f"{_KEY}model")
    if kind not in ("gpt2", "llama"):
        why = f"it is {kind[:64]!r}, and gpt2 and llama are read" if kind else "it is missing"
        raise metadata.error(f"{_KEY}model", why, _BESIDE)
    tokens = _tokens(metadata)
    types = metadata.wholes(TYPES) or [int(TokenType.NORMAL)] * len(tokens)
    if len(types) != len(tokens):
        raise metadata.error(TYPES, f"it has {len(types)} elements, and there are {len(tokens)} tokens", _BESIDE)
    try:
        if kind == "gpt2":
            splitting = _splitting(metadata)
            hub, adds_bos = _byte_level(metadata, tokens, splitting), splitting.adds_bos
        else:
            hub, adds_bos = _sentence_piece(metadata, tokens, types), True
        _add_tokens(hub, tokens, types)
        _add_ends(hub, metadata, adds_bos=adds_bos)
    except ModelError:
        raise
    except Exception as error:  # the library raises plain Exception for what does not fit together
        raise metadata.error(TOKENS, f"they make no tokenizer: {_line(error)}", _BESIDE) from error
    return hub


def special_tokens(metadata: Metadata) -> dict[str, str]:
    """Special tokens by their names in chat templates, of those that the file names."""
    tokens = metadata.texts(TOKENS)
    found = {name: _token_id(metadata, key, len(tokens)) for name, key in _SPECIAL.items()}
    return {name: tokens[token] for name, token in found.items() if token is not None}


def _tokens(metadata: Metadata) -> list[str]:
    """Every token's text; one without any has a name instead."""
    tokens = [text or f"[EMPTY_{number}]" for number, text in enumerate(metadata.texts(TOKENS))]
    if not tokens:
        raise metadata.error(TOKENS, "there is no token", _BESIDE)
    if len(set(tokens)) != len(tokens):
        raise metadata.error(TOKENS, "some of them are the same", _BESIDE)
    return tokens


def _splitting(metadata: Metadata) -> Splitting:
    name = metadata.text(f"{_KEY}pre")
    if name not in SPLITTINGS:
        why = f"it is {name[:64]!r}, and says nothing of how text is cut" if name else "it is missing"
        raise metadata.error(f"{_KEY}pre", why, _BESIDE)
    return SPLITTINGS[name]


def _byte_level(metadata: Metadata, tokens: list[str], splitting: Splitting) -> HubTokenizer:
    merges: list[tuple[str, str]] = []
    for text in metadata.texts(f"{_KEY}merges"):
        left, _, right = text.partition(" ")
        if not left or not right or " " in right:
            raise metadata.error(f"{_KEY}merges", "one of them has not two parts", _BESIDE)
        merges.append((left, right))
    vocab = {text: number for number, text in enumerate(tokens)}
    hub = HubTokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=splitting.takes_whole))
    if splitting.is_composed:
        hub.normalizer = splitting.normalizer()
    hub.pre_tokenizer = splitting.pre_tokenizer()
    hub.decoder = decoders.ByteLevel()
    return hub


def _sentence_piece(metadata: Metadata, tokens: list[str], types: list[int]) -> HubTokenizer:
    scores = metadata.numbers(f"{_KEY}scores")
    if len(scores) != len(tokens):
        why = f"it has {len(scores)} elements, and there are {len(tokens)} tokens"
        raise metadata.error(f"{_KEY}scores", why, _BESIDE)
    vocab = {text: number for number, text in enumerate(tokens)}
    unknown = _token_id(metadata, "unknown", len(tokens))
    if unknown is None and TokenType.UNKNOWN in types:
        unknown = types.index(TokenType.UNKNOWN)
    hub = HubTokenizer(models.BPE(
        vocab=vocab, merges=_merges(metadata, vocab, scores, types), fuse_unk=True, byte_fallback=True,
        unk_token=None if unknown is None else tokens[unknown],
    ))  # fmt: skip
    blanks, has_prefix = normalizers.Replace(" ", _BLANK), metadata.flag(f"{_KEY}add_space_prefix", True)
    hub.normalizer = normalizers.Sequence([normalizers.Prepend(_BLANK), blanks]) if has_prefix else blanks
    steps: list[Any] = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    hub.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return hub


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


def _add_tokens(hub: HubTokenizer, tokens: list[str], types: list[int]) -> None:
    """Tokens that are found in a text before anything else: control tokens, and those of users.

    SentencePiece looks for the latter once blanks are ▁, so that runs of them in a vocabulary match a ▁ of a text, too.
    """
    is_after_blanks = isinstance(hub.normalizer, normalizers.Replace)
    for kind, is_special in ((TokenType.CONTROL, True), (TokenType.USER_DEFINED, False)):
        added = [
            AddedToken(text, normalized=is_after_blanks and not is_special, special=is_special)
            for text, one in zip(tokens, types, strict=True)
            if one == kind
        ]
        (hub.add_special_tokens if is_special else hub.add_tokens)(added)


def _add_ends(hub: HubTokenizer, metadata: Metadata, *, adds_bos: bool) -> None:
    """The tokens around a text."""
    count = hub.get_vocab_size()
    bos = _token_id(metadata, "bos", count) if metadata.flag(f"{_KEY}add_bos_token", adds_bos) else None
    eos = _token_id(metadata, "eos", count) if metadata.flag(f"{_KEY}add_eos_token", False) else None
    if bos is None and eos is None:
        return
    around = {token: hub.id_to_token(token) for token in (bos, eos) if token is not None}
    pattern = ([around[bos]] if bos is not None else []) + ["$A"] + ([around[eos]] if eos is not None else [])
    hub.post_processor = processors.TemplateProcessing(
        single=pattern, pair=[*pattern, "$B:1"], special_tokens=[(text, token) for token, text in around.items()]
    )


def _token_id(metadata: Metadata, name: str, count: int) -> int | None:
    """None where the file names no such token, or −1."""
    key = f"{_KEY}{name}_token_id"
    token = metadata.whole(key)
    if token is None or token in (-1, 0xFFFFFFFF):
        return None
    if not 0 <= token < count:
        raise metadata.error(key, f"it is {token}, and there are {count} tokens")
    return token


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
