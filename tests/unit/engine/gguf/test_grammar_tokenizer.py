"""Tokenizers of GGUF files, as output grammars need them."""

from pathlib import Path
from typing import Any

import gguf
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as HubTokenizer

from tandem.core.gguf.tokens import TokenType
from tandem.engine.output_grammars import load_tokenizer
from tests.unit.engine.bundled import MODEL
from tools.gguf_model import write_gguf


def test_a_file_has_the_bytes_of_its_tokenizer_json(tmp_path: Path) -> None:
    write_gguf(MODEL, tmp_path / "tiny.gguf")
    own, other = (load_tokenizer(model, 4096, (1,)) for model in (MODEL, tmp_path / "tiny.gguf"))
    assert other.eos_tokens == own.eos_tokens
    for token in range(own.vocab_size):
        assert other.is_special_token(token) == own.is_special_token(token), token
        assert other.decode_bytes([token]) == own.decode_bytes([token]), token


def test_a_grammar_is_followed_alike(tmp_path: Path) -> None:
    write_gguf(MODEL, tmp_path / "tiny.gguf")
    grammar = LLMatcher.grammar_from_json_schema({"type": "object"})
    own, other = (load_tokenizer(model, 4096, (1,)) for model in (MODEL, tmp_path / "tiny.gguf"))
    masks: list[list[Any]] = []
    for tokenizer in (own, other):
        matcher, found = LLMatcher(tokenizer, grammar), []
        for token in own.tokenize_str('{"é": [1, "b\\n"]}'):
            found.append(matcher.compute_bitmask())
            matcher.consume_token(token)
        masks.append(found)
    assert masks[0] == masks[1]


def test_forced_text_is_cut_as_in_training(tmp_path: Path) -> None:
    """In single bytes a model would read text that it has never seen."""
    write_gguf(MODEL, tmp_path / "tiny.gguf")
    hub = HubTokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tiny.gguf", 4096, (1,))
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex("The temperature of the following, please: [0-9]"))
    want = hub.encode("The temperature of the following, please:", add_special_tokens=False).ids
    assert len(want) < 20
    assert matcher.compute_ff_tokens()[: len(want)] == want


def test_sentence_piece(tmp_path: Path) -> None:
    kinds = {
        "<unk>": TokenType.UNKNOWN, "</s>": TokenType.CONTROL, "<0x0A>": TokenType.BYTE, "▁the": TokenType.NORMAL,
        "<0x41>": TokenType.NORMAL, "▁▁": TokenType.USER_DEFINED,
    }  # fmt: skip
    writer = gguf.GGUFWriter(tmp_path / "made.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(kinds))
    writer.add_token_types([int(kind) for kind in kinds.values()])
    writer.add_token_scores([0.0] * len(kinds))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = load_tokenizer(tmp_path / "made.gguf", len(kinds), (1,))
    assert [tokenizer.decode_bytes([token]) for token in (2, 3, 5)] == [b"\n", b" the", b"  "]
    assert [token for token in range(len(kinds)) if tokenizer.is_special_token(token)] == [1]


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path, 16, (1,))
    assert isinstance(load_tokenizer(MODEL, 4096, ()), LLTokenizer)
