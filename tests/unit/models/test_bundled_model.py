"""The bundled model: a complete folder of the promised shape, and weights that learned to write."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

FOLDER = Path(__file__).parents[3] / "models" / "tandem-tiny"
FILES = {
    "NOTICE",
    "README.md",
    "config.json",
    "generation_config.json",
    "loss_curve.png",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}

# Written for this test, so it is in no training text.
UNSEEN = '''\
def read_header(path, encoding="utf-8"):
    """Return the first line of the file as a string.

    The file is opened in text mode with the given encoding.  If the file is
    empty, return an empty string.  The optional encoding argument specifies
    the name of the encoding used to decode the file; the default is 'utf-8'.

    Raise FileNotFoundError if the path does not exist, and ValueError if the
    encoding is not known.  The returned string does not include the newline
    at the end of the line.
    """
'''
MEASURED_PERPLEXITY = 9.2


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


def test_folder_holds_what_it_promises_and_is_small() -> None:
    files = [p for p in FOLDER.iterdir() if p.is_file()]
    assert {p.name for p in files} == FILES
    assert sum(p.stat().st_size for p in files) <= 12 * 1024 * 1024


def test_config_has_the_shape_the_kernels_are_tested_on() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_attention_heads"] == 8
    assert config["num_key_value_heads"] == 4
    assert config["head_dim"] == 32
    assert config["hidden_size"] == 256
    assert config["max_position_embeddings"] >= 4096
    assert config["tie_word_embeddings"] is True


def test_weights_are_finite_bfloat16() -> None:
    with safe_open(FOLDER / "model.safetensors", framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 (the handle is not iterable)
            tensor = weights.get_tensor(name)
            assert tensor.dtype == torch.bfloat16, name
            assert tensor.isfinite().all(), name


def test_special_tokens_agree_between_the_files(tokenizer: PreTrainedTokenizerBase) -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    for role in ("bos", "eos", "pad"):
        number = getattr(tokenizer, f"{role}_token_id")
        assert config[f"{role}_token_id"] == generation[f"{role}_token_id"] == number
    assert len(tokenizer) == config["vocab_size"]


def test_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "if x:\n\treturn  'naïve 東京 🚲'\n"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_chat_template_renders(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What does os.path.join do?"},
        {"role": "assistant", "content": "It joins paths."},
        {"role": "user", "content": "And split?"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|bos|><|system|>\nBe brief.\n<|user|>\nWhat does os.path.join do?\n"
        "<|assistant|>\nIt joins paths.<|eos|><|user|>\nAnd split?\n<|assistant|>\n"
    )


@torch.inference_mode()
def test_unseen_docstring_is_far_less_surprising_than_its_words_shuffled(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    ids = tokenizer(UNSEEN, return_tensors="pt")["input_ids"]
    order = torch.randperm(ids.shape[1] - 1, generator=torch.Generator().manual_seed(0)) + 1
    shuffled = torch.cat((ids[:, :1], ids[:, order]), dim=1)
    perplexity = math.exp(model(input_ids=ids, labels=ids).loss)
    assert perplexity < 1.3 * MEASURED_PERPLEXITY
    assert math.exp(model(input_ids=shuffled, labels=shuffled).loss) > 5 * perplexity


@torch.inference_mode()
def test_far_positions_still_read_as_text(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer(UNSEEN)["input_ids"][1:]
    repeated = torch.tensor([[tokenizer.bos_token_id, *ids * (4000 // len(ids))]])
    logits = model(input_ids=repeated).logits[0, :-1]
    losses = torch.nn.functional.cross_entropy(logits, repeated[0, 1:], reduction="none")
    # A model that breaks down past its training windows comes near the log of the vocabulary, 8.3.
    assert losses[-len(ids) :].mean() < losses[: len(ids)].mean() + 1.0
