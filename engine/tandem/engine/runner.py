"""Runs one step of the model over paged KV memory: the engine's only access to weights, pools and kernels.

Owns the decoder and the pools of one rank. It decides nothing: the scheduler chooses the tokens to compute and their
blocks, the sampler the output tokens. One thread, the step loop, calls it; with several ranks, every rank's with the
same steps in the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tandem.core.errors import ConfigError
from tandem.core.logs import event
from tandem.core.start_times import StartPhase
from tandem.engine.calibration_text import NO_TEXT, CalibrationText, usual_text
from tandem.engine.decode_graphs import DecodeGraphs, graph_bytes, graph_sizes
from tandem.engine.kv_pool import KVPools
from tandem.engine.linear import format_of, quantizer_for
from tandem.engine.memory_plan import AutomaticKV, MemoryPlan, StepBounds, free_host_bytes, plan_memory
from tandem.engine.model_config import ModelConfig, check_tp, read_model_config
from tandem.engine.models.decoder import Decoder
from tandem.engine.models.joined_layers import JoinedStep
from tandem.engine.parallel import START_TIMEOUT_S, SingleRank, TensorGroup
from tandem.engine.pool_plan import block_counts, context_length, kv_layout
from tandem.engine.request import TokenOutput
from tandem.engine.runner_protocol import Ahead, Begun, LayersStored, SampleRow, StepBatch
from tandem.engine.sampler import Choosing, choose, sample
from tandem.engine.step_tensors import SequenceTensors, StepTensors, build_step, upload
from tandem.engine.weight_formats import chosen_dtype, chosen_format
from tandem.kernels import warmup
from tandem.kernels.backend import REFERENCE, uses_triton
from tandem.kernels.cpu_memory import keep_freed_memory
from tandem.kernels.deterministic_attention import KEY_TILE, paged_attention_deterministic
from tandem.kernels.dtypes import TORCH_DTYPES
from tandem.kernels.extend_attention import extend_attention
from tandem.kernels.fused_layer import PagedChunks, PagedRows
from tandem.kernels.kv_blocks import copy_blocks
from tandem.kernels.kv_store import kv_store
from tandem.kernels.latent_decode import latent_decode
from tandem.kernels.paged_decode import paged_decode

_log = logging.getLogger(__name__)
_DETERMINISTIC = ("float32", "bfloat16")
"""Compute dtypes of `--deterministic`."""


class ModelRunner:
    """A loaded model with its KV pools. Raises ModelError, ConfigError or StartupError with a remedy.

    `dtype` "auto" takes the checkpoint's, on a CPU bfloat16 in place of float16; exactly one of `kv_bytes`, `automatic`
    and `num_blocks` (a group) is set; `max_model_len` 0 means the model's own limit. `layer_group` is how many layers
    pass between two calls of `on_layers`: a larger one costs less, a smaller one lets a transfer start earlier; a step
    of few sequences with a token each makes one call, where layers are joined. `kv_dtype` "auto" takes the compute
    dtype; attention always computes in the compute dtype. `enter` is called with phases as they begin. `quantize`: one
    of QUANTISATIONS; "auto" as in `chosen_format`; `calibration`: a text for it, else the usual one. `bounds`: the
    largest step, for which `memory` is planned; raises StartupError if that is not free. With `has_graphs` a GPU that
    is the only rank captures decode steps as CUDA graphs, where no layer asks the host. `weight_format`: `format_of`.

    With a `group` of several ranks this is one rank's part: weights, pools and `layout.tp` are its share, loading ends
    when all ranks have loaded, and the smallest block count among them holds for all. A rank that fails in the middle
    of a step aborts the group, for the others wait for its numbers.
    """

    def __init__(
        self, *, model_dir: Path, dtype: str = "auto", device: str = "cpu", block_tokens: int = 16,
        kv_bytes: int | None = None, num_blocks: int | None = None, max_model_len: int = 0,
        is_deterministic: bool = False, layer_group: int = 4, kv_dtype: str = "auto", group: TensorGroup | None = None,
        bounds: StepBounds | None = None, quantize: str = "none", enter: Callable[[StartPhase], None] = lambda _: None,
        has_graphs: bool = True, automatic: AutomaticKV | None = None, calibration: CalibrationText | None = None,
    ) -> None:  # fmt: skip
        for name, value in (("block_tokens", block_tokens), ("layer_group", layer_group)):
            if value < 1:
                raise ConfigError(f"{name} is {value}", why="it must be at least 1")
        self.config: ModelConfig = read_model_config(model_dir)
        self.vocab_size, self.eos_token_ids = self.config.vocab_size, self.config.eos_token_ids
        self.group = SingleRank() if group is None else group
        check_tp(self.config, self.group.size)
        self.device = _device(device)
        self.dtype = _dtype(dtype, self.config, self.device, is_deterministic=is_deterministic)
        self.quantize = chosen_format(
            quantize, self.config.architecture, dtype=self.dtype, is_on_cpu=self.device.type == "cpu"
        )
        quantizer = quantizer_for(self.quantize, self.config, device=self.device, dtype=self.dtype)
        if quantizer is None and calibration is not None:
            raise ConfigError(
                "--quantize-calibration has no use here", why="weights are not quantised", todo="leave it out"
            )
        if quantizer is not None:
            if calibration is None and quantizer.uses_products:
                calibration = usual_text(model_dir, vocab_size=self.vocab_size, eos_token_ids=self.eos_token_ids)
            quantizer.calibration = calibration or NO_TEXT
        self.weight_format = "none" if quantizer is None else format_of(self.quantize, quantizer.calibration.digest)
        self.max_model_len = context_length(max_model_len, self.config)
        self.config = self.config.for_context(self.max_model_len)
        self.layer_group, self.is_deterministic = layer_group, is_deterministic
        if is_deterministic and KEY_TILE % block_tokens:
            raise ConfigError(
                f"--deterministic cannot use blocks of {block_tokens} tokens", why=f"they must divide {KEY_TILE}"
            )
        self.kv_dtype = _kv_dtype(kv_dtype, self.dtype)
        self.layout = kv_layout(self.config, dtype=self.kv_dtype, block_tokens=block_tokens, tp=self.group.size)
        if automatic is None:  # a mistake there is found before anything is built
            counts = block_counts(self.layout, kv_bytes, num_blocks, self.max_model_len)
        self._decoder = Decoder(
            self.config, dtype=TORCH_DTYPES[self.dtype], max_positions=self.max_model_len,
            is_deterministic=is_deterministic, group=self.group, quantizer=quantizer,
        )  # fmt: skip
        bounds = bounds or StepBounds()
        sizes = graph_sizes(bounds.sequences) if has_graphs and self._can_capture() else ()
        if automatic is not None:
            counts = block_counts(
                self.layout, self._automatic_bytes(automatic, bounds, sizes), None, self.max_model_len
            )
        self.memory = self._planned(counts, bounds, sizes)
        self._check_memory()
        if self.config.stored is not None:
            kept = self.dtype if self.quantize == "none" else self.quantize
            event(_log, "weights are unpacked", logging.INFO, stored=self.config.stored.words, kept=kept)
        if self.device.type == "cpu":
            enter(StartPhase.KERNELS)
            warmup.prepare()
            enter(StartPhase.WEIGHTS)
        self._decoder.load(model_dir, device=device, on_read=lambda: enter(StartPhase.PACKING))
        enter(StartPhase.POOL)
        if self.device.type == "cpu":
            keep_freed_memory()
        counts = self.group.smallest(counts, timeout_s=START_TIMEOUT_S)
        self.pools = KVPools(self.layout, counts, self.device)
        self.num_blocks = self.pools.num_blocks
        self.group.barrier()  # a rank without the memory is missed here, not in the first request
        self._block_tokens = tuple(group.block_tokens for group in self.layout.groups)
        self._windows = tuple(self.config.window_of(layer) for layer in range(self.config.layers))
        self._scale, self._softcap = self.config.attention_scale, self.config.attention_softcap
        # The Triton kernel of prompts holds a row in registers, which those of a latent are too wide for.
        self._extend_backend = REFERENCE if self.config.latent is not None and self.device.type == "cuda" else None
        views = self.pools.layer_views
        if self._attends_to_all():
            self._decoder.join_layers(views, self._scale)
        self._graphs: DecodeGraphs | None = None
        if sizes:
            enter(StartPhase.GRAPHS)
            graphs = self.decode_graphs(sizes)
            self._graphs = graphs if graphs.capture() else None

    @property
    def has_joined_layers(self) -> bool:
        """True if few sequences with a token each pass all layers in one call."""
        return self._decoder.joins(1, has_chunks=False)

    @property
    def has_captured(self) -> bool:
        """True if decode steps are replayed as CUDA graphs."""
        return self._graphs is not None

    @property
    def ahead(self) -> Ahead | None:
        """This runner where decode steps are in static buffers."""
        return self if self._graphs is not None else None

    def forward(self, batch: StepBatch, on_layers: LayersStored | None = None) -> Tensor:
        """Store the step's KV and compute logits: fp32 [len(batch.logit_rows), vocab], owned by the caller.

        Ranks above 0 answer [0, vocab]. `on_layers` runs on this thread between layers, or once behind joined ones, and
        must be quick. Raises ValueError if the batch contradicts itself or leaves the model's context, WorkerLostError
        when a rank is gone.
        """
        logits = self._forward(batch, on_layers)
        return logits if self._graphs is None else logits.clone()

    def decode_graphs(self, sizes: tuple[int, ...]) -> DecodeGraphs:
        """Static buffers of this model's decode steps of `sizes` sequences; nothing is captured yet."""
        blocks = tuple(-(-self.max_model_len // tokens) for tokens in self._block_tokens)
        return DecodeGraphs(self._compute, sizes, blocks, self._block_tokens, self.device)

    def _forward(self, batch: StepBatch, on_layers: LayersStored | None) -> Tensor:
        """As `forward`; logits of a captured step are overwritten by the next one."""
        self._check_positions(batch)
        if self._graphs is not None and on_layers is None and self._graphs.takes(batch):
            return self._graphs.run(batch)
        step = build_step(batch, self._block_tokens, self.device, has_decode_kernel=not self.is_deterministic)
        return self._compute(step, on_layers)

    def _compute(self, step: StepTensors, on_layers: LayersStored | None = None) -> Tensor:
        """The model on a step that is on the device; asks the host nothing."""
        pools, done = self.pools, 0

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            nonlocal done
            group, view = pools.group_of_layer[layer], pools.layer_views[layer]
            kv_store(k, v, view, step.slots[group])
            if on_layers is not None and (layer + 1 - done == self.layer_group or layer + 1 == self.config.layers):
                on_layers(done, layer + 1)
                done = layer + 1
            return self._attention(step, layer, group, view, q)

        joined = self._joined_step(step, on_layers)
        try:
            return self._decoder.forward(step.token_ids, step.positions, step.rows, attend, joined)
        except BaseException as error:
            self.group.abort(f"rank {self.group.rank} failed in a step: {error}")
            raise

    def step(
        self, batch: StepBatch, rows: Sequence[SampleRow], on_layers: LayersStored | None = None
    ) -> list[TokenOutput]:
        """`forward`, then one token for every row; ranks above 0 choose none."""
        logits = self._forward(batch, on_layers)
        if rows and self.group.rank == 0:
            return sample(logits, rows, may_change=True)
        if self.device.type == "cuda":  # blocks given away now may be written on another stream: the step must be over
            torch.cuda.current_stream(self.device).synchronize()
        return []

    def begin(
        self, batch: StepBatch, rows: Sequence[SampleRow], before: Begun | None = None, chosen: Sequence[int] = ()
    ) -> Begun | None:
        """See `Ahead.begin`; anything but a plain decode requires waiting."""
        if self._graphs is None or not self._graphs.takes(batch):
            return None
        self._check_positions(batch)
        tokens: Tensor | None = None
        if isinstance(before, Choosing):
            tokens = before.tokens
            if list(chosen) != list(range(len(tokens))):
                tokens = tokens[upload(chosen, torch.int64, self.device)]
        return choose(self._graphs.run(batch, tokens), rows)

    def _check_positions(self, batch: StepBatch) -> None:
        if batch.positions and (max(batch.positions) >= self.max_model_len or min(batch.positions) < 0):
            raise ValueError(f"positions must be from 0 to {self.max_model_len - 1}, got {max(batch.positions)}")

    @torch.inference_mode()
    def copy_blocks(self, group: int, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) inside the pool of `group`; no destination may be a source."""
        if pairs:
            ids = torch.tensor(pairs, dtype=torch.int32).t().contiguous().to(self.device)
            copy_blocks(self.pools.tensors[group], ids[0], ids[1])

    def pool_bytes(self, group: int) -> memoryview:
        """The pool of `group` as writable bytes, without a copy; see `KVPools.pool_bytes`."""
        return self.pools.pool_bytes(group)

    def _joined_step(self, step: StepTensors, on_layers: LayersStored | None) -> JoinedStep | None:
        """The step for joined layers, where they take it."""
        decodes, chunks = step.decodes, step.chunks
        if not self._decoder.joins(len(step.token_ids), has_chunks=chunks is not None):
            return None
        part = decodes or chunks
        assert part is not None
        count = 0 if decodes is None else len(decodes.context_lens)
        paged = PagedRows(
            tables=part.block_tables[0][:count], lengths=part.context_lens[:count], slots=step.slots[0],
            chunks=None if chunks is None else PagedChunks(
                tables=chunks.block_tables[0], lengths=chunks.context_lens, starts=chunks.cu_seqlens
            ),
        )  # fmt: skip
        if on_layers is None:
            return JoinedStep(paged=paged, on_layers=lambda *_: None, together=self.config.layers)
        return JoinedStep(paged=paged, on_layers=on_layers, together=self.layer_group)

    def _attends_to_all(self) -> bool:
        """True on a CPU if all layers attend to the whole context, in one pool, with a scale alone."""
        is_plain = self._softcap is None and not any(self._windows) and all(one is None for one in self._decoder.sinks)
        return self.device.type == "cpu" and is_plain and len(self.layout.groups) == 1 and self.config.latent is None

    def _can_capture(self) -> bool:
        """False where a step asks the host: between ranks, and in references of kernels."""
        asks_host = self.group.size > 1 or not uses_triton(self.device)
        return self.device.type == "cuda" and not asks_host and not self.is_deterministic

    def _planned(self, counts: tuple[int, ...], bounds: StepBounds, sizes: tuple[int, ...]) -> MemoryPlan:
        """Return the plan with pools of so many blocks, and graphs of steps of `sizes`; a token's activations are a
        share of the largest step."""
        plan = plan_memory(
            self.config, self.layout, counts, dtype=self.dtype, weight_bytes=self._decoder.weight_bytes(self.device),
            max_positions=self.max_model_len, bounds=bounds, is_cpu=self.device.type == "cpu",
            is_deterministic=self.is_deterministic,
        )  # fmt: skip
        if not sizes:
            return plan
        blocks = sum(-(-self.max_model_len // group.block_tokens) for group in self.layout.groups)
        each = -(-plan.activations // bounds.tokens)
        number_bytes = TORCH_DTYPES[self.dtype].itemsize
        return replace(plan, graphs=graph_bytes(sizes, each, self.vocab_size, number_bytes, blocks))

    def _automatic_bytes(self, automatic: AutomaticKV, bounds: StepBounds, sizes: tuple[int, ...]) -> int:
        """Bytes of this rank's pools. Ranks of a CPU divide its memory; where free memory is unknown, KV of one
        context."""
        one = self._planned(tuple(group.blocks_for(self.max_model_len) for group in self.layout.groups), bounds, sizes)
        free, ranks = self._free_bytes(), self.group.size if self.device.type == "cpu" else 1
        self.group.barrier()  # a rank that has begun to take memory leaves less to those that still look
        if free is None:
            return one.kv
        return automatic.kv_bytes(
            one, free, ranks=ranks, sequences=bounds.sequences, max_positions=self.max_model_len
        )  # fmt: skip

    def _free_bytes(self) -> int | None:
        """Free bytes on this rank's device, or on the machine that ranks of a CPU share; None = unknown."""
        if self.device.type != "cuda":
            return free_host_bytes()
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(torch.cuda.mem_get_info(self.device)[0]) + kept

    def _check_memory(self) -> None:
        """Check before any of it is taken, on every rank. Ranks of a CPU share its memory, each GPU is one rank's."""
        event(_log, "memory planned", logging.INFO, **self.memory.fields())
        if (free := self._free_bytes()) is not None:
            self.memory.check(free, 1 if self.device.type == "cuda" else self.group.size)
        self.group.barrier()  # a rank that has begun to load leaves less to those that still look

    def _attention(self, step: StepTensors, layer: int, group: int, view: Tensor, q: Tensor) -> Tensor:
        decodes, chunks = step.decodes, step.chunks
        if chunks is None and decodes is not None:
            return self._attend_part(decodes, layer, group, view, q, is_decode=True)
        if decodes is None and chunks is not None:
            return self._attend_part(chunks, layer, group, view, q, is_decode=False)
        assert decodes is not None
        assert chunks is not None
        first = self._attend_part(decodes, layer, group, view, q[: decodes.end], is_decode=True)
        return torch.cat((first, self._attend_part(chunks, layer, group, view, q[chunks.start :], is_decode=False)))

    def _attend_part(
        self, part: SequenceTensors, layer: int, group: int, view: Tensor, q: Tensor, *, is_decode: bool
    ) -> Tensor:
        table, lens, starts = part.block_tables[group], part.context_lens, part.cu_seqlens
        scale, window, cap = self._scale, self._windows[layer], self._softcap
        sinks, backend, latent = self._decoder.sinks[layer], self._extend_backend, self.config.latent
        if self.is_deterministic:
            return paged_attention_deterministic(
                q, view, starts, table, lens, scale=scale, window=window, softcap=cap, sinks=sinks
            )
        if is_decode and latent is not None:
            return latent_decode(q, view, table, lens, rank=latent.rank, scale=scale)
        if is_decode:
            return paged_decode(q, view, table, lens, scale=scale, window=window, softcap=cap, sinks=sinks)
        mixed = extend_attention(
            q, view, starts, table, lens, scale=scale, window=window, softcap=cap, sinks=sinks, backend=backend
        )
        return mixed if latent is None else mixed[..., : latent.rank]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name} is unknown", todo="use cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name} is not supported", todo="use cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here", why=f"device {name} was asked for", todo="use cpu")
    return device


def _dtype(name: str, config: ModelConfig, device: torch.device, *, is_deterministic: bool) -> str:
    if name == "auto":
        automatic = chosen_dtype(config.dtype, is_on_cpu=device.type == "cpu")
        name = "float32" if is_deterministic and config.dtype not in _DETERMINISTIC else automatic
    if name not in TORCH_DTYPES:
        raise ConfigError(f"dtype {name} is unknown", todo=f"use auto, {', '.join(TORCH_DTYPES)}")
    if is_deterministic and (name not in _DETERMINISTIC or device.type != "cpu"):
        raise ConfigError(
            f"--deterministic cannot run in {name} on {device}",
            why="only float32 and bfloat16 on the CPU have kernels whose rows do not depend on each other",
            todo="add --dtype bfloat16 --device cpu, or leave --deterministic out",
        )
    return name


def _kv_dtype(name: str, compute: str) -> str:
    if name == "auto":
        return compute
    if name not in TORCH_DTYPES:
        raise ConfigError(f"KV dtype {name} is unknown", todo=f"use auto, {', '.join(TORCH_DTYPES)}")
    return name
