"""Checks of a model before it is loaded: whether it can be, what it will take, and where it will be slow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tandem.clusterctl.doctor.findings import Check, Finding, SkipError, error, ok, size, warning
from tandem.controlplane.kv_plan import weight_bytes
from tandem.controlplane.model_catalog import path_of
from tandem.controlplane.resolved_models import check_files
from tandem.core.cpu_level import CpuLevel, cpu_level
from tandem.core.errors import StartupError
from tandem.core.gguf.model_files import GgufModel, gguf_files, is_gguf
from tandem.core.kv_layout import KVLayout
from tandem.engine.memory_plan import free_host_bytes
from tandem.engine.model_config import ModelConfig, read_model_config
from tandem.engine.model_source import ModelSource, local_model, weight_files
from tandem.engine.model_work import model_work
from tandem.engine.pool_plan import kv_layout
from tandem.engine.weight_formats import QUANTISATIONS, chosen_dtype, chosen_format

_GB = 1e9
_EXAMPLE_BYTES_PER_S = 20e9


@dataclass(kw_only=True)
class ModelChecks:
    """`model`: a folder, GGUF file, name or hub id; workers compute it on a CPU, with `quantize`."""

    model: str
    models_root: Path | None
    quantize: str = "none"

    def checks(self) -> Sequence[tuple[str, Check]]:
        return (
            ("model", self.found),
            ("model-weights", self.weights),
            ("model-kv", self.kv),
            ("model-speed", self.speed),
            ("model-chat", self.chat),
        )

    @cached_property
    def _source(self) -> ModelSource | None:
        return local_model(path_of(self.model, self.models_root))

    @cached_property
    def _config(self) -> ModelConfig:
        """Raises SkipError where `found` has said why."""
        try:
            if self._source is not None:
                return read_model_config(self._source.path)
        except StartupError as failure:
            raise SkipError("the model cannot be served") from failure
        raise SkipError("its files are not on this machine")

    @property
    def _computed(self) -> str:
        return chosen_dtype(self._config.dtype, is_on_cpu=True)

    @cached_property
    def _layout(self) -> KVLayout:
        return kv_layout(self._config, dtype=self._computed, block_tokens=16, tp=1)

    @cached_property
    def _chosen(self) -> str:
        """Name of the format that `quantize` asks for. Raises SkipError where this family has no products of it."""
        kind = chosen_format(self.quantize, self._config.architecture, dtype=self._computed, is_on_cpu=True)
        if self._name(kind) not in self._formats():
            raise SkipError(f"--quantize {kind} cannot be used with this model")
        return self._name(kind)

    def found(self) -> Iterator[Finding]:
        try:
            if self._source is None:
                what = f"{self.model} is not on this machine, so nothing is known of it"
                yield warning(what, "fetch it: `clusterctl models pull NAME`, or `hf download ID` for a hub id")
                return
            check_files(self._source, has_weights=True)
            config = read_model_config(self._source.path)
        except StartupError as failure:
            yield error(failure.what + (f": {failure.why}" if failure.why else ""), failure.todo or "use another model")
            return
        path, family = self._source.path, _family(config)
        if self._name(self.quantize) not in (*self._formats(), "auto"):
            yield error(f"--quantize {self.quantize} cannot be used with {family}", "leave --quantize out")
        yield ok(
            f"{self._source.name}: {family} of {config.layers} layers, context of {config.max_positions:,} tokens; "
            f"{size(_stored_bytes(path))} in {_form(path, config)}"
        )

    def weights(self) -> Iterator[Finding]:
        chosen, config = self._chosen, self._config
        sizes = {name: weight_bytes(config, self._layout, self._computed, self._kind(name)) for name in self._formats()}
        every = ", ".join(f"{name} {size(found)}" for name, found in sizes.items())
        mine, free = sizes[chosen], free_host_bytes()
        what = f"a worker has {size(mine)} of weights in {chosen} (as {every})"
        if free is not None and mine > free:
            fitting = next((name for name, found in sizes.items() if found < free and name != self._computed), None)
            fix = f"add --quantize {fitting}" if fitting else "use a machine with more memory, or --tp over several"
            yield error(f"{what}, and {size(free)} are free", fix)
            return
        if self._is_packed() and chosen == self._computed and len(sizes) > 1:
            todo = f"add --quantize w4a16 for {size(sizes['w4a16'])}, or auto"
            yield warning(f"{what}: packed numbers are read into plain ones", todo)
            return
        yield ok(what)

    def kv(self) -> Iterator[Finding]:
        each = self._layout.token_bytes()
        whole = each * self._config.max_positions
        what = f"a token takes {each / 1024:,.1f} KiB in {self._computed}, a whole context {size(whole)}"
        free = free_host_bytes()
        if free is not None and whole > free:
            yield warning(f"{what}, and {size(free)} are free", f"add --max-model-len {free // each // 2}")
            return
        yield ok(what)

    def speed(self) -> Iterator[Finding]:
        chosen, formats = self._chosen, self._formats()
        mine = self._token_bytes(chosen)
        most = f"at most {_EXAMPLE_BYTES_PER_S / mine:,.0f} a second where memory reads 20 GB/s"
        what = f"a token of one sequence reads {mine / _GB:.3g} GB of weights: {most}"
        if cpu_level() < CpuLevel.AVX2:
            yield warning(f"{what}; this CPU has no AVX2, and torch computes all", "use a CPU with AVX2 or better")
        elif len(formats) == 1:
            yield warning(
                f"{what}; {_family(self._config)} has no quantised products", "use a GPU, or a model of another family"
            )
        elif chosen == self._computed:
            best = self._token_bytes("int8")
            yield warning(f"{what}; with int8 {best / _GB:.3g} GB", "add --quantize auto, or w4a16 for half of that")
        else:
            yield ok(what)

    def chat(self) -> Iterator[Finding]:
        from tandem.router.tokenization.tokenizer import Tokenizer  # takes a second, and most runs name no model

        _ = self._config
        assert self._source is not None
        try:
            source = Tokenizer.load(self._source.path).chat_source
        except StartupError as failure:
            yield error(failure.what + (f": {failure.why}" if failure.why else ""), failure.todo)
            return
        if source:
            yield ok("it has a chat template")
        else:
            fix = "add --chat-template FILE, or use /v1/completions"
            yield warning("it has no chat template, so chats are refused", fix)

    def _formats(self) -> list[str]:
        """Names of the compute dtype, and of the formats that this model can be quantised to on a CPU."""
        can = chosen_format("auto", self._config.architecture, dtype=self._computed, is_on_cpu=True) != "none"
        return [self._name("none"), *([kind for kind in QUANTISATIONS if kind not in ("none", "auto")] if can else [])]

    def _name(self, kind: str) -> str:
        return self._computed if kind == "none" else kind

    def _kind(self, name: str) -> str:
        return "none" if name == self._computed else name

    def _token_bytes(self, name: str) -> int:
        """Bytes of weights that a token of one sequence reads."""
        work = model_work(self._config, dtype=self._computed, layout=self._layout, quantize=self._kind(name))
        found = work.token_weight_bytes + work.row_weight_bytes
        if (experts := work.experts) is not None:
            found += experts.expert_bytes * experts.per_token * (experts.token_layers + experts.row_layers)
        return found

    def _is_packed(self) -> bool:
        assert self._source is not None
        return self._config.stored is not None or is_gguf(self._source.path)


def _stored_bytes(path: Path) -> int:
    files = gguf_files(path) if is_gguf(path) else [path / name for name in weight_files(path)]
    return sum(file.stat().st_size for file in files)


def _form(path: Path, config: ModelConfig) -> str:
    """The stored form, such as "GGUF (Q4_1, Q8_0)"."""
    if is_gguf(path):
        gguf = GgufModel(path)
        kinds = {gguf.tensor(name).kind.name for name in gguf.file_of} - {"F32"}
        return f"GGUF ({', '.join(sorted(kinds) or ['F32'])})"
    return config.dtype if config.stored is None else config.stored.words


def _family(config: ModelConfig) -> str:
    return config.architecture.removesuffix("ForCausalLM")
