"""Test the text of `--quantize-calibration`: what is read, what is refused, and what a model gains."""

import argparse
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import ConfigError
from tandem.engine.calibration_text import MOST_TOKENS, NO_TEXT, PIECE, CalibrationText, given_text, usual_text
from tandem.engine.linear import format_of
from tandem.engine.model_config import read_model_config
from tandem.engine.runner import ModelRunner
from tests.unit.engine.model.driver import Driver


def read(file: Path, model: Path) -> CalibrationText:
    config = read_model_config(model)
    return given_text(str(file), model, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids)


@pytest.fixture
def model(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("bundled")


def test_pieces_come_from_all_over_the_file(model: Path, tmp_path: Path) -> None:
    """Read both halves of a long text; the second half has another word."""
    file = tmp_path / "text"
    file.write_text("red " * 40_000 + "blue " * 40_000)
    tokens = read(file, model).tokens
    assert len(tokens) == MOST_TOKENS
    file.write_text("red " * PIECE * 3)
    red = set(read(file, model).tokens)
    pieces = [set(tokens[start : start + PIECE]) <= red for start in range(0, MOST_TOKENS, PIECE)]
    assert pieces == sorted(pieces, reverse=True)
    assert 3 < sum(pieces) < len(pieces) - 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        (b"\xff\xfe" * 5_000, "not UTF-8"),
        (b"a few words", "less than 1,024 tell too little"),
        (b"\xff" * (5 << 20), "not UTF-8"),
    ],
)
def test_a_text_that_tells_nothing_is_refused_with_what_to_do(
    content: bytes | None, said: str, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"(?is)--quantize-calibration .*text cannot be used.*{said}.*give "):
        read(file, model)


def test_a_character_that_the_bound_cuts_is_no_error(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a" + "é " * (2 << 20))
    assert read(tmp_path / "text", model).tokens


@pytest.mark.parametrize("tokenizer", [None, "{}"])
def test_a_model_whose_tokenizer_cannot_be_read_starts_without_a_text(
    tokenizer: str | None, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "tokenizer.json").unlink()
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(tokenizer)
    made = ModelRunner(model_dir=folder, quantize="w4a16", num_blocks=4, max_model_len=64)
    assert made.weight_format == "w4a16"
    with pytest.raises(ConfigError, match=r"tokenizer cannot be read.*Leave --quantize-calibration out"):
        read(Path(argparse.__file__), folder)


def test_a_text_for_weights_that_are_not_quantised_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="--quantize-calibration has no use here"):
        ModelRunner(model_dir=model, calibration=CalibrationText((1, 2)), num_blocks=4, max_model_len=64)


def test_kv_is_never_shared_with_workers_of_another_text() -> None:
    texts = NO_TEXT, CalibrationText((1, 2)), CalibrationText((2, 1)), CalibrationText((1, 2), is_given=True)
    assert len({format_of("w4a16", text.digest) for text in texts}) == 4
    assert format_of("w4a16", NO_TEXT.digest) == "w4a16"
    assert format_of("none", "1234abcd") == "none"


def test_without_a_file_4_bits_take_the_usual_text_and_8_bits_random_tokens(model: Path, tmp_path: Path) -> None:
    config = read_model_config(model)
    usual = usual_text(model, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids)
    assert len(usual.tokens) > 500
    assert not usual.is_given
    for kind, text in (("w4a16", usual), ("int8", NO_TEXT)):
        made = ModelRunner(model_dir=model, quantize=kind, num_blocks=4, max_model_len=64)
        assert made.weight_format == format_of(kind, text.digest)
    assert usual_text(tmp_path, vocab_size=8, eos_token_ids=()) == NO_TEXT, "a model without a tokenizer"


def test_a_text_makes_4_bits_answer_more_like_the_plain_model(model: Path) -> None:
    """Logits over another text of the same kind: the documentation of modules, which this model was trained on."""
    sizes: dict[str, Any] = {"num_blocks": 80, "max_model_len": 256, "dtype": "float32"}
    text = read(Path(argparse.__file__), model)
    plain = ModelRunner(model_dir=model, **sizes)
    with_text, without = (
        ModelRunner(model_dir=model, quantize="w4a16", calibration=one, **sizes) for one in (text, NO_TEXT)
    )
    tokens = list(read(Path(statistics.__file__), model).tokens[:250])
    exact, found, usual = (Driver(one).chunked("a", tokens, 250) for one in (plain, with_text, without))
    assert (found - exact).norm() < 0.9 * (usual - exact).norm()
