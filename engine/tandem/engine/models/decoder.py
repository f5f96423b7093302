"""The decoder: one forward graph for all families of `engine/families.py`, driven by `ModelConfig`.

Owns weights and arithmetic of a token's way through the layers. It knows no blocks, no batching and no cache: keys,
values and queries go to the `attend` function that the caller passes in. Inference only.

Over several ranks (Megatron-LM, Shoeybi et al. 2019, section 3): vocabulary, heads and intermediate features are split,
the residual stream is whole on every rank; ranks add up behind the embedding, o and down, and rank 0 collects logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from tandem.core.errors import ModelError
from tandem.engine.experts_config import BiasedExpertsConfig
from tandem.engine.latent_config import NORM_EPS, LatentShape
from tandem.engine.linear import Linear, Quantizer, make_linear
from tandem.engine.model_config import ModelConfig, check_tp
from tandem.engine.models.calibration import WeightCalibration, attend_causally
from tandem.engine.models.experts import (
    ExpertParameters,
    Experts,
    expert_parameters,
    grouped_experts,
    pack_experts,
)
from tandem.engine.models.gpt_oss_experts import biased_expert_parameters, clamped_gate
from tandem.engine.models.joined_layers import JoinedStep, pass_layers
from tandem.engine.models.latent import LatentAttention, LatentParameters
from tandem.engine.models.mlp import ACTIVATE, REPEATABLE, Mlp, MlpParameters, beside, mlp_parameters
from tandem.engine.models.norms import HeadNorm, Norm
from tandem.engine.models.quantized_weights import QuantisedWeights
from tandem.engine.models.rope import rotation_table
from tandem.engine.models.routing import ROUTERS
from tandem.engine.parallel import SingleRank, TensorGroup
from tandem.engine.weights import Parameter, TensorPart, TensorSplit, load_weights
from tandem.kernels.attention_reference import AttentionSpec
from tandem.kernels.backend import REFERENCE, uses_triton
from tandem.kernels.fused_layer import DenseLayers, DenseRow, LayerParts, fuse, join
from tandem.kernels.rope import rotate

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q [T, heads, head_dim], k, v [T, kv_heads, head_dim]) -> [T, heads, head_dim].

Where a latent is cached, k and v are the same tensor of one head, as wide as its rows, and so is q; of the answer the
latent's numbers, which come first, are enough. k and v are of the new tokens only and rotated; attend stores them
before it answers.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParameters:
    """The tensors of one layer; qkv is q, k, v on top of each other.

    `input_norm` and `mlp_norm` stand before attention and feed-forward, the `…_out_norm`s of some families behind them.
    """

    input_norm: Parameter
    qkv: Parameter
    qkv_bias: Parameter | None
    q_norm: Parameter | None
    k_norm: Parameter | None
    o: Parameter
    o_bias: Parameter | None
    attention_out_norm: Parameter | None
    mlp_norm: Parameter
    feed_forward: MlpParameters | ExpertParameters
    mlp_out_norm: Parameter | None
    sinks: Parameter | None
    latent: LatentParameters | None = None

    def members(self) -> list[Parameter]:
        every = [getattr(self, name) for name in self.__slots__]
        found = [member for member in every if isinstance(member, Parameter)] + self.feed_forward.members()
        return found if self.latent is None else found + self.latent.members()


class Decoder:
    """Built on the meta device; `load` gives it memory. Not thread-safe: the step loop owns it.

    `max_positions` bounds the positions that may be asked for. `group` has the ranks that share the model: all of them
    call `forward` with the same tokens. Raises ModelError if they cannot split it.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, max_positions: int, is_deterministic: bool = False,
        group: TensorGroup | None = None, quantizer: Quantizer | None = None,
    ) -> None:  # fmt: skip
        self.config, self.dtype, self.max_positions = config, dtype, max_positions
        self._group = SingleRank() if group is None else group
        self._tp_size, self._is_deterministic = self._group.size, is_deterministic
        self._quantizer = quantizer
        self._backend = REFERENCE if is_deterministic else None
        check_tp(config, self._tp_size)
        split = TensorSplit.PADDED_ROWS
        self.embedding = self._parameter(("model.embed_tokens", config.vocab_size), columns=config.hidden, split=split)
        self.norm = self._parameter(("model.norm", config.hidden))
        self.head = self.embedding
        if not config.is_tied:
            self.head = self._parameter(("lm_head", config.vocab_size), columns=config.hidden, split=split)
        self.layers = [self._layer_parameters(index) for index in range(config.layers)]
        self._quantised: QuantisedWeights | None = None
        if quantizer is not None:
            every = (layer.feed_forward for layer in self.layers)
            experts = [one for one in every if isinstance(one, ExpertParameters)]
            count = 0 if config.experts is None else config.experts.count
            self._quantised = QuantisedWeights(quantizer, self.embedding, experts, count)
        self._calibration: WeightCalibration | None = None
        self._steps: list[_Layer] = []
        self._joined: DenseLayers | None = None
        self.sinks: tuple[Tensor | None, ...] = (None,) * config.layers
        """Of every layer, fp32 [this rank's heads], once `load` has read them: `attend` needs them."""

    def parameters(self) -> list[Parameter]:
        """Every tensor once, in the order in which tokens meet them, but the final norm early."""
        found = [self.embedding, self.norm]
        for layer in self.layers:
            found += layer.members()
        return found if self.head is self.embedding else [*found, self.head]

    def weight_bytes(self, device: torch.device) -> int:
        """Memory of this rank's weights once `load` has put them on `device`."""
        if (quantised := self._quantised) is not None:
            products = [parameter for parameter in self.parameters() if quantised.takes(parameter)]
            tied = [self.embedding] if self.head is self.embedding else []
            plain = sum(one.tensor.nbytes for one in self.parameters() if not quantised.takes(one))
            return quantised.bytes_of(products + tied) + plain
        size = sum(parameter.tensor.nbytes for parameter in self.parameters())
        is_packed = not self._is_deterministic or self.dtype is torch.bfloat16
        is_copied = self.head is self.embedding and device.type == "cpu" and is_packed
        return size + self.embedding.tensor.nbytes if is_copied else size  # packed for the head, and as a table

    def load(self, model_dir: Path, *, device: str = "cpu", on_read: Callable[[], None] = lambda: None) -> None:
        """Read this rank's weights, call `on_read`, and prepare them for `device`. Raises ModelError (see
        `load_weights`). Layers are no longer joined, because they are new ones."""
        self._joined = None
        ignored, layers = ["lm_head.weight"] if self.config.is_tied else [], self.config.layers
        unused = tuple(f"model.layers.{layer}." for layer in range(layers, layers + self.config.unused_layers))
        with torch.inference_mode():
            self._ropes = list(dict.fromkeys(self.config.rope_of(layer) for layer in range(self.config.layers)))
            tables = [
                rotation_table(rope, self.config.head_dim, self.max_positions, self.dtype) for rope in self._ropes
            ]
            self._rotations = [table.to(device) for table in tables]
            # In the model's dtype, as transformers has it: in bf16 that is another number.
            self._embedding_scale = float(torch.tensor(self.config.embedding_scale, dtype=self.dtype))
            if self._quantised is not None and self._quantised.calibration_tokens:
                ends = {id(layer.members()[-1]): index for index, layer in enumerate(self.layers)}
                self._calibration = WeightCalibration(self._quantised, ends, self.config.vocab_size, self.max_positions)
            load_weights(
                model_dir, self.parameters(), device=device, tp_rank=self._group.rank,
                tp_size=self._tp_size, ignored_keys=ignored, ignored_prefixes=unused,
                stored=self.config.stored, on_loaded=self._quantize,
            )  # fmt: skip
            on_read()
            self._final_norm = self._norm(self.norm)
            self.sinks = tuple(None if layer.sinks is None else layer.sinks.tensor.float() for layer in self.layers)
            self._steps = [self._prepare(index, layer) for index, layer in enumerate(self.layers)]
            self._to_logits = self._linear(self.head, None)
            self._calibration = None

    def join_layers(self, views: Sequence[Tensor], scale: float) -> bool:
        """Let steps pass all layers in one call, over `views` of one pool (see `paged_decode`). True where there is
        code for that and all layers attend to everything with this `scale`. Call it after `load`."""
        has_one_rope = len({layer.rope for layer in self._steps}) == 1
        self._joined = join([layer.row for layer in self._steps], views, scale) if has_one_rope else None
        return self._joined is not None

    def joins(self, tokens: int, *, has_chunks: bool) -> bool:
        """True if a step of so many tokens passes joined layers. `has_chunks`: some have another of their sequence."""
        few = self._joined is not None and not has_chunks and tokens <= self._joined.most_rows
        return few or (self._joined is not None and self._joined.takes_chunks)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rows: Tensor | None,
        attend: Attend,
        joined: JoinedStep | None = None,
    ) -> Tensor:
        """Logits, fp32 [len(rows), vocab], of the tokens at `rows`; of all tokens where `rows` is None.

        token_ids, positions: int64 [T] on the model's device, T ≥ 1; rows: int64. Calls `attend` once a layer, in
        order, except for `joined`, a step that passes joined layers, which only those have that `joins` allows. The
        result is an ordinary tensor that the caller may change; ranks above 0 get [0, vocab]. Raises ModelError before
        `load` and WorkerLostError when another rank is gone.
        """
        if not self._steps:
            raise ModelError("the model has no weights yet", todo="call load() first")
        with torch.inference_mode():
            x = self._hidden(token_ids, positions, rows, attend, joined)
        # Outside inference mode, or a sampler could not write over the logits.
        if self._tp_size == 1:
            return self._capped(self._to_logits(self._final_norm(x)).float())
        if not len(x):
            return torch.empty((0, self.config.vocab_size), device=x.device)
        logits = self._group.gather_columns(self._to_logits(self._final_norm(x)))
        return self._capped(logits[:, : self.config.vocab_size].float())

    def _hidden(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor | None, attend: Attend, joined: JoinedStep | None
    ) -> Tensor:
        """The residual stream behind the last layer, [len(rows), hidden]."""
        x = self._embedded(token_ids)
        turns = [table.index_select(0, positions).unbind(1) for table in self._rotations]
        if self._joined is not None and joined is not None:
            return pass_layers(self._joined, joined, x, turns[0], rows, self._steps[-1].finish)
        last = len(self._steps) - 1
        for index, layer in enumerate(self._steps):
            q, k, v = layer.project(x, *turns[layer.rope])
            mixed = attend(index, q, k, v)
            if index == last and rows is not None:
                # Behind the last attention nothing looks at other tokens: only the wanted rows go on.
                if not rows.numel():
                    return x[:0]
                x, mixed = x.index_select(0, rows), mixed.index_select(0, rows)
            x = layer.finish(x, mixed)
        return x

    def _capped(self, logits: Tensor) -> Tensor:
        """The soft cap on logits, which are written over, where the family has one."""
        cap = self.config.final_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """Scaled embeddings [T, hidden]; every rank looks up the tokens of its slice of the vocabulary."""
        table = self.embedding.tensor
        if self._tp_size == 1:
            x = functional.embedding(token_ids, table)
        else:
            local = token_ids - self._group.rank * table.shape[0]
            elsewhere = (local < 0) | (local >= table.shape[0])
            x = functional.embedding(local.masked_fill_(elsewhere, 0), table)
            x = self._group.all_reduce_(x.masked_fill_(elsewhere[:, None], 0))
        return x if self._embedding_scale == 1.0 else x.mul_(self._embedding_scale)

    def _parameter(
        self, *named: tuple[str, int], columns: int | None = None, split: TensorSplit = TensorSplit.WHOLE,
        kind: str = "weight", replicas: int = 1,
    ) -> Parameter:  # fmt: skip
        """A parameter of tensors `name.kind`; all but the first are replicated `replicas` times (K and V heads)."""
        parts = tuple(
            TensorPart(key=f"{name}.{kind}", rows=rows, replicas=replicas if place else 1)
            for place, (name, rows) in enumerate(named)
        )
        return Parameter.on_meta(parts, columns=columns, split=split, dtype=self.dtype, tp_size=self._tp_size)

    def _layer_parameters(self, index: int) -> LayerParameters:
        c, name = self.config, f"model.layers.{index}"
        mlp_norm = "pre_feedforward_layernorm" if c.has_output_norms else "post_attention_layernorm"
        attention = f"{name}.self_attn"
        mixed = c.heads * (c.latent.value if c.latent else c.head_dim)
        wide, narrow = c.heads * c.head_dim, c.kv_heads * c.head_dim
        qkv = ((f"{attention}.q_proj", wide), (f"{attention}.k_proj", narrow), (f"{attention}.v_proj", narrow))
        copies = max(1, self._tp_size // c.kv_heads)
        rows, columns, make = TensorSplit.ROWS, TensorSplit.COLUMNS, self._parameter
        latent = None if c.latent is None else LatentParameters.of(c, attention, make, self._tp_size)
        qkv_bias = make(*qkv, split=rows, kind="bias", replicas=copies) if c.has_qkv_bias else None
        return LayerParameters(
            input_norm=make((f"{name}.input_layernorm", c.hidden)),
            qkv=latent.down if latent else make(*qkv, columns=c.hidden, split=rows, replicas=copies),
            qkv_bias=latent.down_bias if latent else qkv_bias,
            q_norm=make((f"{attention}.q_norm", c.head_dim)) if c.has_qk_norm else None,
            k_norm=make((f"{attention}.k_norm", c.head_dim)) if c.has_qk_norm else None,
            o=make((f"{attention}.o_proj", c.hidden), columns=mixed, split=columns),
            o_bias=make((f"{attention}.o_proj", c.hidden), kind="bias") if c.has_o_bias else None,
            attention_out_norm=make((f"{name}.post_attention_layernorm", c.hidden)) if c.has_output_norms else None,
            mlp_norm=make((f"{name}.{mlp_norm}", c.hidden)),
            feed_forward=self._feed_forward_parameters(index),
            mlp_out_norm=make((f"{name}.post_feedforward_layernorm", c.hidden)) if c.has_output_norms else None,
            sinks=make((attention, c.heads), split=rows, kind="sinks") if c.has_sinks else None,
            latent=latent,
        )

    def _feed_forward_parameters(self, index: int) -> MlpParameters | ExpertParameters:
        c, make = self.config, self._parameter
        if isinstance(c.experts, BiasedExpertsConfig):
            stack = partial(Parameter.on_meta, dtype=self.dtype, tp_size=self._tp_size)
            return biased_expert_parameters(c.experts, f"model.layers.{index}", c.hidden, make, stack)
        if c.experts is not None and index in c.experts.layers:
            return expert_parameters(c.experts, f"model.layers.{index}", c.hidden, make)
        return mlp_parameters(
            f"model.layers.{index}.mlp", make, hidden=c.hidden, intermediate=c.intermediate, has_bias=c.has_mlp_bias
        )

    def _prepare(self, index: int, layer: LayerParameters) -> _Layer:
        c = self.config
        heads, kv_heads = c.heads // self._tp_size, max(1, c.kv_heads // self._tp_size)
        qk_norm = None
        if layer.q_norm is not None and layer.k_norm is not None:
            tables = (layer.q_norm.tensor.expand(heads, -1), layer.k_norm.tensor.expand(kv_heads, -1))
            qk_norm = HeadNorm(torch.cat(tables), c.norm_eps, has_unit_offset=c.has_unit_offset_norms)
        latent = self._latent(c.latent, layer.latent, heads) if c.latent and layer.latent else None
        made = _Layer(
            rope=self._ropes.index(c.rope_of(index)), heads=heads, kv_heads=kv_heads, head_dim=c.head_dim,
            input_norm=self._norm(layer.input_norm), qkv=self._linear(layer.qkv, layer.qkv_bias), qk_norm=qk_norm,
            o=self._normed(self._summed(layer.o, layer.o_bias), layer.attention_out_norm),
            mlp_norm=self._norm(layer.mlp_norm), feed_forward=self._feed_forward(layer), backend=self._backend,
            latent=latent,
        )  # fmt: skip
        return made if latent is not None else replace(made, row=self._row(layer, made))

    def _feed_forward(self, layer: LayerParameters) -> Linear:
        """Build the feed-forward behind `mlp_norm`, on all ranks together."""
        of = layer.feed_forward
        activate = (REPEATABLE if self._is_deterministic else ACTIVATE)[self.config.activation]
        if isinstance(of, MlpParameters):
            down = self._normed(self._summed(of.down, of.down_bias), layer.mlp_out_norm)
            return Mlp(gate_up=self._linear(of.gate_up, of.gate_up_bias), activate=activate, down=down)
        experts = self.config.experts
        assert experts is not None
        if isinstance(experts, BiasedExpertsConfig):
            activate = clamped_gate(experts, is_deterministic=self._is_deterministic)
        correction = None if of.correction is None else of.correction.tensor
        router = ROUTERS[experts.routing](experts, self._linear(of.router, of.router_bias), correction)
        has_down_bias = self._group.rank == 0  # the ranks' answers are added up
        if uses_triton(of.gate_up.tensor.device, self._backend):
            part = grouped_experts(router, of, experts, self.config.activation, has_down_bias=has_down_bias)
        else:
            down_bias = of.down_bias if has_down_bias else None
            linears = self._expert_linears(of.gate_up, of.gate_up_bias), self._expert_linears(of.down, down_bias)
            part = Experts(router, list(zip(*linears, strict=True)), activate)
        if of.shared is not None:
            up, down = (self._linear(weight, None) for weight in (of.shared.gate_up, of.shared.down))
            part = beside(part, Mlp(gate_up=up, activate=activate, down=down))
        return self._normed(self._added_up(part), layer.mlp_out_norm)

    def _expert_linears(self, weight: Parameter, bias: Parameter | None) -> list[Linear]:
        assert self.config.experts is not None
        if self._calibration is not None and self._calibration.is_running:
            return self._calibration.linears(weight, bias)
        if self._quantised is not None:
            return self._quantised.linears(weight, bias)
        make = partial(make_linear, is_deterministic=self._is_deterministic)
        tensor = None if bias is None else bias.tensor
        linears = pack_experts(weight.tensor, self.config.experts.count, make, tensor)
        weight.tensor = weight.tensor.to("meta")
        return linears

    def _latent(self, shape: LatentShape, made_of: LatentParameters, heads: int) -> LatentAttention:
        """Attention between the layer's first product and its output; brings the first one's weights into order."""
        made_of.arrange(shape, heads)
        make_queries = None
        if made_of.q_norm is not None and made_of.q_up is not None:
            norm, up = self._norm(made_of.q_norm, NORM_EPS), self._linear(made_of.q_up, None)
            make_queries = lambda x: up(norm(x))  # noqa: E731
        into, out_of = made_of.head_products(shape, heads, is_deterministic=self._is_deterministic)
        return LatentAttention(
            shape=shape, heads=heads, make_queries=make_queries, norm=self._norm(made_of.kv_norm, NORM_EPS),
            into_latent=into, out_of_latent=out_of, backend=self._backend,
        )  # fmt: skip

    def _row(self, layer: LayerParameters, made: _Layer) -> DenseRow | None:
        """The code for few rows, which has norms of plain weights before attention and MLP alone, and SiLU."""
        c, mlp = self.config, made.feed_forward
        has_plain_norms = not (c.has_unit_offset_norms or c.has_float_norms or c.has_qk_norm or c.has_output_norms)
        is_plain = has_plain_norms and c.activation == "silu"
        if self._tp_size > 1 or self._is_deterministic or not is_plain or not isinstance(mlp, Mlp):
            return None
        return fuse(LayerParts(
            input_norm=layer.input_norm.tensor, qkv=made.qkv, o=made.o, mlp_norm=layer.mlp_norm.tensor,
            gate_up=mlp.gate_up, down=mlp.down, turning=made.heads + made.kv_heads, head_dim=c.head_dim,
            eps=c.norm_eps,
        ))  # fmt: skip

    def _summed(self, weight: Parameter, bias: Parameter | None) -> Linear:
        """Build a product with input features split over the ranks; one of them adds the bias."""
        if self._tp_size == 1:
            return self._linear(weight, bias)
        return self._added_up(self._linear(weight, bias if self._group.rank == 0 else None))

    def _added_up(self, part: Linear) -> Linear:
        """Sum `part` over the ranks."""
        if self._tp_size == 1:
            return part
        add_up = self._group.all_reduce_
        return lambda x: add_up(part(x))

    def _quantize(self, parameter: Parameter) -> None:
        """As soon as it is loaded; where errors are weighted, once its layer is and random tokens have passed."""
        if self._quantised is None:
            return
        if (calibration := self._calibration) is None:
            self._quantised.quantise(parameter)
        elif parameter is self.embedding:
            calibration.states = self._embedded(calibration.tokens)
        elif parameter is self.head:
            calibration.quantise_head(parameter, self._norm(self.norm))
        else:
            calibration.waits(parameter)
            if (index := calibration.ends.get(id(parameter))) is not None:
                calibration.run(index, partial(self._plain_layer, index, self.layers[index]))

    def _plain_layer(self, index: int, layer: LayerParameters) -> Callable[[Tensor], Tensor]:
        """Build a loaded layer before it is quantised: from a sequence's states [T, hidden] to those behind it."""
        made = self._prepare(index, layer)
        spec = AttentionSpec(
            scale=self.config.attention_scale, window=self.config.window_of(index),
            softcap=self.config.attention_softcap, sinks=None if layer.sinks is None else layer.sinks.tensor.float(),
        )  # fmt: skip

        def passed(x: Tensor) -> Tensor:
            q, k, v = made.project(x, *self._rotations[made.rope].index_select(0, torch.arange(len(x))).unbind(1))
            return made.finish(x, attend_causally(q, k, v, spec))

        return passed

    def _normed(self, linear: Linear, weight: Parameter | None) -> Linear:
        """`linear` and the norm behind it, if the family has one."""
        if weight is None:
            return linear
        norm = self._norm(weight)
        return lambda x: norm(linear(x))

    def _norm(self, weight: Parameter, eps: float | None = None) -> Norm:
        c = self.config
        return Norm(
            weight.tensor, eps or c.norm_eps, self._backend, has_unit_offset=c.has_unit_offset_norms,
            is_float=c.has_float_norms,
        )  # fmt: skip

    def _linear(self, weight: Parameter, bias: Parameter | None) -> Linear:
        if self._calibration is not None and self._calibration.is_running:
            return self._calibration.linears(weight, bias)[0]
        if self._quantised is not None and self._quantised.takes(weight):
            (linear,) = self._quantised.linears(weight, bias)
            return linear
        tensor, quantizer, importance = None if bias is None else bias.tensor, None, None
        if weight is self.head:
            quantizer = self._quantizer
            if self._calibration is not None:
                importance = self._calibration.importance_of_head(self._final_norm)
        linear = make_linear(
            weight.tensor, tensor, is_deterministic=self._is_deterministic, quantize=quantizer, importance=importance
        )
        if weight is not self.embedding:
            weight.tensor = weight.tensor.to("meta")  # packing copied it; two copies of a model would not fit
        return linear


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One layer ready to run: everything before attention, and everything after it.

    `rope` is which of the decoder's rotations it has; `o` and `feed_forward` include the norms behind them.
    """

    rope: int
    heads: int
    kv_heads: int
    head_dim: int
    input_norm: Norm
    qkv: Linear
    qk_norm: Callable[[Tensor], Tensor] | None
    o: Linear
    mlp_norm: Norm
    feed_forward: Linear
    backend: str | None
    row: DenseRow | None = None
    """The same for few rows, where there is such code."""
    latent: LatentAttention | None = None

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden] to rotated q [T, heads, head_dim] and k, and v [T, kv_heads, head_dim].

        q and k lie side by side in the fused projection and turn together; cos, sin: [T, head_dim].
        """
        if self.latent is not None:
            return self.latent.project(self.qkv(self.input_norm(x)), cos, sin)
        tokens = x.shape[0]
        if self.row is not None and tokens <= self.row.most_rows:
            fused = self.row.before(x, cos, sin).view(tokens, self.heads + 2 * self.kv_heads, self.head_dim)
            q, k, v = fused.split_with_sizes((self.heads, self.kv_heads, self.kv_heads), 1)
            return q, k, v
        turning = self.heads + self.kv_heads
        fused = self.qkv(self.input_norm(x)).view(tokens, turning + self.kv_heads, self.head_dim)
        qk, v = fused.split_with_sizes((turning, self.kv_heads), 1)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        q, k = rotate(qk, cos, sin, backend=self.backend).split_with_sizes((self.heads, self.kv_heads), 1)
        return q, k, v

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The residual stream after this layer, written over `x` [T, hidden]; `mixed` is attention's answer."""
        if self.row is not None and x.shape[0] <= self.row.most_rows:
            return self.row.behind(x, mixed)
        answers = mixed.flatten(1) if self.latent is None else self.latent.answers(mixed)
        normed = self.mlp_norm(x, added=self.o(answers))
        return x.add_(self.feed_forward(normed))
