"""Writes the model folder: Hugging Face files, the loss curve and the model card. Never writes a pickle."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from tiny import tokenizer as tokens
from tiny.llama import TinyConfig

_NOTICE = """\
NOTICE for tandem-tiny

The weights and the tokenizer in this folder were made from the docstrings of the Python 3.11 standard library and from
the sources of the Python 3.11 documentation. Both are

    Copyright (c) 2001 Python Software Foundation. All Rights Reserved.
    Copyright (c) 2000 BeOpen.com. All Rights Reserved.
    Copyright (c) 1995-2001 Corporation for National Research Initiatives. All Rights Reserved.
    Copyright (c) 1991-1995 Stichting Mathematisch Centrum, Amsterdam. All Rights Reserved.

and are used under the PSF License Agreement for Python 3.11 (SPDX: PSF-2.0, with the code in the documentation also
under Zero-Clause BSD); its text is at https://docs.python.org/3.11/license.html. Summary of changes, as that agreement
asks: the text was stripped of markup, rearranged into documents and conversations, and used to train a language model.
The Python Software Foundation neither made nor endorses this model.

The weights and the tokenizer are offered under the same terms as the text they were made from, as far as those apply,
and otherwise under the licence of this repository.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Contents of the model card; ``curve`` is (step, training loss) and ``heldout`` (step, held-out loss)."""

    corpus: str
    parameters: int
    recipe: str
    curve: Sequence[tuple[int, float]]
    heldout: Sequence[tuple[int, float]]
    samples: Sequence[tuple[str, str]]


def write_folder(
    folder: Path, config: TinyConfig, weights: Mapping[str, Tensor], tokenizer: Tokenizer, card: Card
) -> None:
    """Everything a Hugging Face loader needs, plus the card, the curve and the notice."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {n: w.detach().to(torch.bfloat16).contiguous() for n, w in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "model.safetensors").chmod(0o644)  # written for its owner alone otherwise
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    special = {name: tokens.SPECIAL_TOKENS.index(name) for name in tokens.SPECIAL_TOKENS}
    _write_json(folder / "config.json", _model_config(config, special))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(config, special))
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": special[tokens.BOS],
            "eos_token_id": special[tokens.EOS],
            "pad_token_id": special[tokens.PAD],
            "do_sample": True,
            "temperature": 0.7,
            "top_p": 0.95,
        },
    )
    (folder / "NOTICE").write_text(_NOTICE, encoding="utf-8")
    (folder / "README.md").write_text(_readme(config, card), encoding="utf-8")
    _draw_curve(folder / "loss_curve.png", card)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _model_config(config: TinyConfig, special: Mapping[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": special[tokens.BOS],
        "eos_token_id": special[tokens.EOS],
        "pad_token_id": special[tokens.PAD],
        "torch_dtype": "bfloat16",
    }


def _tokenizer_config(config: TinyConfig, special: Mapping[str, int]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_positions,
        "bos_token": tokens.BOS,
        "eos_token": tokens.EOS,
        "pad_token": tokens.PAD,
        "additional_special_tokens": [tokens.SYSTEM, tokens.USER, tokens.ASSISTANT],
        "added_tokens_decoder": {
            str(number): {
                "content": name, "special": True, "normalized": False,
                "lstrip": False, "rstrip": False, "single_word": False,
            }
            for name, number in special.items()
        },
        "clean_up_tokenization_spaces": False,
        "chat_template": tokens.CHAT_TEMPLATE,
    }  # fmt: skip


def _draw_curve(path: Path, card: Card) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=90)
    axes.plot(*zip(*card.curve, strict=True), linewidth=1, label="training (mean of the last steps)")
    if card.heldout:
        axes.plot(*zip(*card.heldout, strict=True), marker="o", markersize=3, label="held-out documents")
    axes.set(xlabel="step", ylabel="loss, nats a token", title="tandem-tiny")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _readme(config: TinyConfig, card: Card) -> str:
    heldout = card.heldout[-1][1] if card.heldout else float("nan")
    samples = "\n\n".join(f"`{prompt}`\n\n~~~text\n{text.strip()}\n~~~" for prompt, text in card.samples)
    shape = (
        f"{config.layers} layers, hidden {config.hidden}, intermediate {config.intermediate}, {config.heads} query "
        f"heads, {config.kv_heads} KV heads, head size {config.head_dim}, tied embedding"
    )
    return f"""\
---
license: psf-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# tandem-tiny

A Llama with {card.parameters / 1e6:.1f} million parameters that comes with Tandem, so that tests, demonstrations and
failure drills have a real model to serve without downloading one. It writes readable fragments in the style of the
Python documentation. **It knows nothing**: names, arguments and facts in its answers are mostly invented. Use it to
exercise a server, never for what it says.

| | |
|---|---|
| architecture | `LlamaForCausalLM`, {shape} |
| parameters | {card.parameters:,} |
| weights | bfloat16, safetensors |
| positions | {config.max_positions:,}, RoPE with theta {config.rope_theta:g} |
| tokenizer | byte-level BPE, {config.vocab_size:,} tokens, trained on the same text |
| held-out loss | {heldout:.3f} nats a token (perplexity {math.exp(heldout):.1f}) on documents left out of training |

## Data and licence

Docstrings of the Python 3.11 standard library and the sources of the Python 3.11 documentation, under the PSF licence;
see `NOTICE`. {card.corpus}. The conversations pair questions such as "What does os.path.join do?" with the
documented text of that name; eight short exchanges about the model itself were written for this project. A whole
document is held out when the hash of its name says so, about one in forty.

## Training

{card.recipe}

`tools/train_tiny.py` makes the corpus, the tokenizer, the weights and this folder, seeded and resumable:

    apt-get download python3.11-doc && dpkg -x python3.11-doc_*.deb build/python-docs
    python tools/train_tiny.py --docs build/python-docs

The shipped weights came from `--compile --steps 2000 --stop-at 1500`, then `--compile --steps 1570`.

![loss curve](loss_curve.png)

The training loss jumps where the windows grow; the held-out loss is always taken on windows of 512.

## Samples

Temperature 0.7, first try, cut at 80 tokens.

{samples}

## Prompts

Text prompts start with `{tokens.BOS}` (the tokenizer adds it); `{tokens.EOS}` ends a document and an answer. The chat
template writes `{tokens.SYSTEM}`, `{tokens.USER}` and `{tokens.ASSISTANT}` before the turns.

## Limits

- It is far too small to store facts: what it says about a function is often about another one, or about none.
- English in one narrow style, and Python; other languages and topics give fragments of documentation.
- It repeats itself in long answers, most of all with greedy sampling.
- Trained mostly on windows of 512 tokens, only at the end on 2,048 and 4,096: the text stays readable there, but the
  loss rises with the position, by about half a nat a token towards position 4,096.
- No safety training of any kind.
"""
