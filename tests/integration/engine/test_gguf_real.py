"""SmolLM2-135M-Instruct in Q4_1 and Q8_0 against transformers, where it can be had: weights, logits, token ids."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.core.ids import BlockId
from tandem.engine.runner import ModelRunner
from tandem.engine.runner_protocol import SeqSlice, StepBatch
from tandem.engine.weights import open_checkpoint
from tandem.router.tokenization.tokenizer import Tokenizer
from tests.integration.engine.real_model import smollm2

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris, which lies on the Seine and has about two million people."
TEXTS = [
    "", "Hello world", "  two  spaces ", "\n\n\t tab\r\n", "don't I'LL they're", "1234567890 3.14 v2.0",
    "日本語、中文。",
    "한국어 العربية עברית हिन्दी ไทย Ελληνικά Русский", "🙂👨‍👩‍👧‍👦🏳️‍🌈 e\u0301 é",
    "½ ² Ⅷ ٣", "def f(x):\n    return x**2  # ok\n",
    "<|im_start|>user\nhi<|im_end|>\n", "<|endoftext|>", "text<repo_name><empty_output>", "a" * 300, " " * 50,
    "\u200b\ufeff\x00", '{"a": [1, 2]}', "https://x.y/z?a=b&c=d%20",
]  # fmt: skip


@pytest.fixture(scope="module")
def file() -> Path:
    return smollm2()


@pytest.fixture(scope="module")
def reference(file: Path) -> Any:
    """transformers' Llama with the numbers that its own reader makes of the file."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    library: Any = AutoModelForCausalLM
    load: Any = load_gguf_checkpoint
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = library.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    tensors = load(file, return_tensors=True, model_to_load=model)["tensors"]
    assert model.load_state_dict(tensors, strict=False).missing_keys == ["lm_head.weight"]
    model.tie_weights()
    return model


def test_every_weight_is_the_same_to_the_bit(file: Path, reference: Any) -> None:
    want = reference.state_dict()
    with open_checkpoint(file) as checkpoint:
        assert set(checkpoint.file_of) == set(want) - {"lm_head.weight"}
        for key in checkpoint.file_of:
            shape = tuple(want[key].shape)
            found = checkpoint.slice_of(key, shape)[tuple(slice(0, size) for size in shape)]
            assert found.float().equal(want[key]), key


def test_logits_are_as_far_from_float64_as_those_of_transformers(file: Path, reference: Any) -> None:
    """Logits reach 34 here, where a number of fp32 is exact to 2e-6."""
    tokenizer = Tokenizer.load(file)
    tokens = tokenizer.encode_now(tokenizer.render_chat(QUESTION) + ANSWER)
    runner = ModelRunner(model_dir=file, dtype="float32", num_blocks=8, max_model_len=128)
    count = len(tokens)
    blocks = [BlockId(block) for block in range(-(-count // 16))]
    sequence = SeqSlice(count, count, (blocks,))
    found = runner.forward(StepBatch(tokens, list(range(count)), [sequence], list(range(count))))
    with torch.no_grad():
        theirs = reference(torch.tensor([tokens])).logits[0]
        exact = reference.double()(torch.tensor([tokens])).logits[0]
    reference.float()
    assert (found.argmax(-1) == theirs.argmax(-1)).all()
    assert (found - theirs).abs().max() < 1e-4
    assert (found - exact).abs().max() < 1e-4
    probabilities = found.log_softmax(-1) - theirs.log_softmax(-1)
    assert probabilities.abs().max() < 1e-4


def test_token_ids_and_chats_are_those_of_transformers(file: Path) -> None:
    """Its reader cuts texts as GPT-2 does; the model was trained with each digit by itself."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.load(file), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    same = [text for text in TEXTS if ours.encode_now(text) == theirs(text)["input_ids"]]
    assert set(TEXTS) - set(same) <= {"½ ² Ⅷ ٣"}
    digits, rest = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    for text in [*TEXTS, *Path(__file__).read_text("utf-8").splitlines()]:
        ids = theirs(text)["input_ids"]
        assert ours.encode_now(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    rendered = theirs.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(QUESTION) == rendered
