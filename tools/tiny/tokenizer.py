"""Trains the byte-level BPE tokenizer of the bundled model and holds its special tokens and chat template."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (BOS, EOS, PAD, SYSTEM, USER, ASSISTANT)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|>\n' + message['content'] | trim + eos_token }}"
    "{% elif message['role'] in ['system', 'developer'] %}"
    "{{ '<|system|>\n' + message['content'] | trim + '\n' }}"
    "{% else %}"
    "{{ '<|user|>\n' + message['content'] | trim + '\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer with ``SPECIAL_TOKENS`` as its first ids; encoding puts the begin token in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
            ),
        ]
    )
    return tokenizer


def render_chat(messages: list[dict[str, str]]) -> str:
    """Render ``messages`` as ``CHAT_TEMPLATE`` does, without the begin token (encoding adds it)."""
    out = []
    for message in messages:
        content = message["content"].strip()
        if message["role"] == "assistant":
            out.append(f"{ASSISTANT}\n{content}{EOS}")
        else:
            out.append(f"{SYSTEM if message['role'] == 'system' else USER}\n{content}\n")
    return "".join(out)
