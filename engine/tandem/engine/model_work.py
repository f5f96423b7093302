"""Work of decoder steps: operations and bytes read, by arithmetic of the model's shape. Imports no torch.

    FLOPs    2 · matrices · tokens, and 4 · layers · heads · head_dim for each pair of a token and one it attends to; of
             a latent, 2 · layers · heads · (its row and its rank)
    bytes    the matrices once a step, and the KV of every sequence's context once

Of a layer's experts, FLOPs are those that a token uses, and bytes those that the step's tokens use together, which
are as many as if each token drew its own at random.

Behind the last attention only tokens with requested logits go on (models/decoder.py), so the last layer's output
projection and MLP, and the head, count by logit rows. Sliding windows count as the whole context. Left out: embeddings,
which are looked up, norms and biases (less than a thousandth of the matrices), activations, and everything that is
written.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.kv_layout import DTYPE_BYTES, KVLayout
from tandem.engine.model_config import ModelConfig
from tandem.engine.request import StepResult
from tandem.engine.weight_formats import WEIGHT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWork:
    """Layers with `count` experts of `expert_bytes` each: `token_layers` that all tokens pass, `row_layers` that only
    logit rows do."""

    count: int
    per_token: int
    expert_bytes: int
    token_layers: int
    row_layers: int

    def bytes_read(self, tokens: int, rows: int) -> float:
        met = self.token_layers * self._met(tokens) + self.row_layers * self._met(rows)
        return met * self.expert_bytes

    def _met(self, tokens: int) -> float:
        """Experts of one layer that at least one of the tokens uses, on average."""
        return self.count * (1 - (1 - self.per_token / self.count) ** tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """Of the whole model, each number of it once, however many ranks share it or hold copies.

    `token_flops` and `token_weight_bytes` are of what every token passes, `row_…` of what only logit rows pass. Weights
    of experts are not in these bytes.
    """

    token_flops: int
    row_flops: int
    pair_flops: int
    token_weight_bytes: int
    row_weight_bytes: int
    kv_token_bytes: int
    experts: ExpertWork | None = None

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
        experts = 0.0
        if self.experts is not None:
            experts = self.experts.bytes_read(step.prefill_tokens + step.decode_tokens, step.logit_rows)
        return weights + experts + self.kv_token_bytes * step.context_tokens


def model_work(config: ModelConfig, *, dtype: str, layout: KVLayout, quantize: str = "none") -> ModelWork:
    """Return the work of a model with weights in `dtype`, or quantised, and KV in `layout`."""
    attention, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    kept = WEIGHT_BYTES.get(quantize, DTYPE_BYTES[dtype])
    experts = _expert_work(config, kept)
    before = config.hidden * (attention + 2 * kv)
    at_o, pair = config.hidden * attention, 4 * attention
    if (latent := config.latent) is not None:
        before, at_o = latent.before(config.hidden, config.heads), latent.behind(config.hidden, config.heads)
        pair = 2 * config.heads * (latent.width + latent.rank)
    behind = [at_o + config.hidden * _shared_features(config, layer) for layer in range(config.layers)]
    every = config.layers * before + sum(behind[:-1])
    wanted = behind[-1] + config.hidden * config.vocab_size
    token_met = row_met = 0
    if experts is not None and config.experts is not None:
        met = experts.per_token * 3 * config.hidden * config.experts.intermediate
        token_met, row_met = experts.token_layers * met, experts.row_layers * met
    return ModelWork(
        token_flops=2 * (every + token_met),
        row_flops=2 * (wanted + row_met),
        pair_flops=config.layers * pair,
        token_weight_bytes=int(every * kept),
        row_weight_bytes=int(wanted * kept),
        kv_token_bytes=KVLayout(groups=layout.groups).token_bytes(),
        experts=experts,
    )


def _shared_features(config: ModelConfig, layer: int) -> int:
    """Rows that every token passes in a layer's feed-forward: the MLP, or the router and shared experts."""
    if config.experts is None or layer not in config.experts.layers:
        return 3 * config.intermediate
    return config.experts.count + 3 * config.experts.shared


def _expert_work(config: ModelConfig, kept: float) -> ExpertWork | None:
    experts = config.experts
    if experts is None:
        return None
    rows = int(config.layers - 1 in experts.layers)
    return ExpertWork(
        count=experts.count, per_token=experts.per_token,
        expert_bytes=int(3 * config.hidden * experts.intermediate * kept), token_layers=len(experts.layers) - rows,
        row_layers=rows,
    )  # fmt: skip
