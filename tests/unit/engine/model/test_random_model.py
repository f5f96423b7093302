"""The tool that makes random models: repeatable, loadable, and its greedy answers are worth comparing."""

from pathlib import Path
from typing import Any

import pytest

from tandem.engine.runner import ModelRunner
from tests.unit.engine.model.driver import Driver, tool


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    arguments = ["qwen2", "--hidden", "32", "--layers", "1", "--seed", "4", "--dtype", "bfloat16"]
    for name in ("a", "b"):
        assert tool.main([arguments[0], str(tmp_path / name), *arguments[1:]]) == 0
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)


MODELS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral", "qwen3_moe", "gpt_oss")


@pytest.mark.parametrize("name", MODELS)
def test_greedy_answers_vary(name: str, fp32_runner: Any) -> None:
    runner: ModelRunner = fp32_runner(name)
    driver, token, answer = Driver(runner), 17, []
    for _ in range(24):
        token = int(driver.step({"a": [token]})["a"].argmax())
        answer.append(token)
    assert len(set(answer)) >= 8


@pytest.mark.parametrize("vocab", [512, 4096])
def test_its_tokenizer_round_trips(vocab: int, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tool.make_random_model(tool.RandomModel(family="llama", vocab=vocab, layers=1), tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("Tandem, über 2 Räder.").ids
    assert max(ids) < vocab
    assert "über 2 Räder" in tokenizer.decode(ids)
