"""What steps of a dense decoder compute and read, by arithmetic of the model's shape. Imports no torch.

    FLOPs    2 · matrices · tokens, and 4 · layers · heads · head_dim for each pair of a token and one it attends to
    bytes    the matrices once a step, and the KV of every sequence's context once

Behind the last attention only tokens whose logits are wanted go on (models/decoder.py), so the last layer's output
projection and MLP, and the head, count by logit rows. Sliding windows count as the whole context. Left out: embeddings,
which are looked up, norms and biases (less than a thousandth of the matrices), activations, and everything that is
written.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.kvlayout import DTYPE_BYTES, KVLayout
from tandem.engine.model_config import ModelConfig
from tandem.engine.request import StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """Of the whole model, each number of it once, however many ranks share it or hold copies.

    `token_flops` and `token_weight_bytes` are of what every token passes, `row_…` of what only logit rows pass.
    """

    token_flops: int
    row_flops: int
    pair_flops: int
    token_weight_bytes: int
    row_weight_bytes: int
    kv_token_bytes: int

    def flops(self, step: StepResult) -> float:
        """Floating-point operations; a multiplication and an addition are two."""
        tokens = step.prefill_tokens + step.decode_tokens
        pairs = step.attended + tokens / 2  # a token attends to itself, too
        return self.token_flops * tokens + self.row_flops * step.logit_rows + self.pair_flops * pairs

    def bytes_read(self, step: StepResult) -> float:
        """Of weights and KV."""
        if not step.prefill_tokens and not step.decode_tokens:
            return 0.0
        weights = self.token_weight_bytes + (self.row_weight_bytes if step.logit_rows else 0)
        return float(weights + self.kv_token_bytes * step.context_tokens)


def model_work(config: ModelConfig, *, dtype: str, layout: KVLayout) -> ModelWork:
    """Of a model whose weights are `dtype` in memory and whose KV lies in `layout`."""
    attention, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    before = config.hidden * (attention + 2 * kv)
    behind = config.hidden * (attention + 3 * config.intermediate)
    every = config.layers * before + (config.layers - 1) * behind
    wanted = behind + config.hidden * config.vocab_size
    size = DTYPE_BYTES[dtype]
    return ModelWork(
        token_flops=2 * every,
        row_flops=2 * wanted,
        pair_flops=4 * config.layers * attention,
        token_weight_bytes=every * size,
        row_weight_bytes=wanted * size,
        kv_token_bytes=KVLayout(groups=layout.groups).token_bytes(),
    )
