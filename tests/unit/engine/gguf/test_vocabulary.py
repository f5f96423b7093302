"""Token bytes of GGUF vocabularies, as output grammars need them."""

from pathlib import Path
from typing import Any

import gguf
import pytest
from llguidance import LLMatcher, LLTokenizer

from tandem.core.errors import ModelError
from tandem.core.gguf.file import GgufFile
from tandem.core.gguf.tokens import TokenType
from tandem.engine.gguf.vocabulary import GgufVocabulary
from tandem.engine.output_grammars import load_tokenizer
from tests.unit.engine.bundled import MODEL
from tools.gguf_model import write_gguf


def written(path: Path, kind: str, tokens: list[str], types: list[int]) -> GgufFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GgufFile(path)


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


def test_sentence_piece(tmp_path: Path) -> None:
    kinds = {
        "<unk>": TokenType.UNKNOWN, "</s>": TokenType.CONTROL, "<0x0A>": TokenType.BYTE, "▁the": TokenType.NORMAL,
        "<0x41>": TokenType.NORMAL, "▁▁": TokenType.USER_DEFINED,
    }  # fmt: skip
    file = written(tmp_path / "made.gguf", "llama", list(kinds), [int(kind) for kind in kinds.values()])
    vocabulary = GgufVocabulary(file.metadata, (1,))
    assert vocabulary.tokens == [b"<unk>", b"</s>", b"\n", b" the", b"<0x41>", b"  "]
    assert vocabulary.special_token_ids == [1]
    assert vocabulary("\nA") == [2]


def test_an_incomplete_file_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "made.gguf", "llama", ["a", "b"], [1])
    with pytest.raises(ModelError):
        GgufVocabulary(file.metadata, (1,))
    whole = written(tmp_path / "whole.gguf", "llama", ["a", "b"], [1, 1])
    with pytest.raises(ModelError):
        GgufVocabulary(whole.metadata, ())


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path, 16, (1,))
    assert isinstance(load_tokenizer(MODEL, 4096, ()), LLTokenizer)
