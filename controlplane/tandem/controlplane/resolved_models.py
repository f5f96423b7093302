"""Resolves the models that a cluster serves, with the number of workers of each: files, unique names, mistakes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.controlplane.model_catalog import bundled_model
from tandem.controlplane.up_flag_map import name_of
from tandem.controlplane.worker_settings import effective
from tandem.core.config import ClusterConfig, Disaggregation, ModelSection, PoolSection, ServedModel
from tandem.core.desired import INITIAL, Pool
from tandem.core.errors import ConfigError, ModelError
from tandem.core.files import expand_user
from tandem.core.gguf.model_files import folder_of, is_gguf
from tandem.core.output_format_names import ReasoningFormatName, ToolFormatName
from tandem.core.state_enums import RoleName
from tandem.engine.model_config import DTYPES, read_model_config
from tandem.engine.model_source import ModelSource, resolve_model, weight_files
from tandem.engine.weight_formats import QUANTISATIONS

_DTYPES = ("auto", *DTYPES)
_SHORTEST_CONTEXT = 16
"""Tokens; the requests with which workers and routers test themselves have to fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model that can be served: on disk, under a name of its own, with workers that can answer together."""

    source: ModelSource
    served_names: tuple[str, ...]
    chat_template: str
    tool_format: ToolFormatName
    reasoning_format: ReasoningFormatName
    dtype: str
    quantize: str
    quantize_calibration: str
    max_model_len: int
    counts: dict[RoleName, int]
    pools: tuple[Pool, ...]

    def served(self) -> ServedModel:
        """Return the model as routers see it."""
        return ServedModel(
            name=self.source.name,
            model_dir=str(self.source.path),
            served_names=self.served_names,
            chat_template=self.chat_template,
            tool_format=self.tool_format,
            reasoning_format=self.reasoning_format,
        )


def check_models(config: ClusterConfig) -> None:
    """Raise ConfigError for mistakes in `[model]` or `[[models]]` that need no look at files."""
    for number, (section, _) in enumerate(sections(config)):
        if section.dtype not in _DTYPES:
            what = f"{_name('dtype', number)} is {section.dtype!r}"
            raise ConfigError(what, todo=f"Use one of {', '.join(_DTYPES)}")
        if section.quantize not in QUANTISATIONS:
            what = f"{_name('quantize', number)} is {section.quantize!r}"
            raise ConfigError(what, todo=f"Use one of {', '.join(QUANTISATIONS)}")
        if section.quantize_calibration and section.quantize in ("none", "w8a8"):
            flag, kind = _name("quantize_calibration", number), _name("quantize", number)
            todo = "Leave it out, or use int8, int4 or w4a16"
            raise ConfigError(f"{flag} has no use with {kind} {section.quantize}", todo=todo)
        length, name = section.max_model_len, _name("max_model_len", number)
        if 0 < length < _SHORTEST_CONTEXT:
            todo = f"Use {_SHORTEST_CONTEXT} or more, or 0 for what the model allows"
            raise ConfigError(f"{name} is {length}", todo=todo)
        if "" in section.served_names:
            what = f"{_name('served_names', number)} is empty"
            raise ConfigError(what, todo="Give the name that requests will carry")


def counts_of(pools: PoolSection) -> dict[RoleName, int]:
    """Return workers by role; one pair where none are asked for."""
    counts = {role: int(getattr(pools, role)) for role in RoleName}
    return counts if any(counts.values()) else {**counts, RoleName.PREFILL: 1, RoleName.DECODE: 1}


def total(config: ClusterConfig) -> dict[RoleName, int]:
    """Return workers by role, of all models."""
    every = [counts_of(pools) for _, pools in sections(config)]
    return {role: sum(counts[role] for counts in every) for role in RoleName}


def resolve_models(config: ClusterConfig) -> tuple[ResolvedModel, ...]:
    """Return every model of the cluster, `[model]` first; raises StartupError. May download from the hub."""
    has_weights = config.worker.engine != "sim"
    models: list[ResolvedModel] = []
    for number, (section, pools) in enumerate(sections(config)):
        source = resolve_model(section.path or str(bundled_model()), revision=section.revision, has_weights=has_weights)
        check_files(source, has_weights=has_weights)
        source = _told_apart(source, [model.source for model in models])
        counts = counts_of(pools)
        _check_disaggregation(config, counts, number)
        models.append(
            ResolvedModel(
                source=source,
                served_names=section.served_names or (source.name,),
                chat_template=_file("chat_template", section.chat_template, number),
                tool_format=section.tool_format,
                reasoning_format=section.reasoning_format,
                dtype=section.dtype,
                quantize=section.quantize,
                quantize_calibration=_file("quantize_calibration", section.quantize_calibration, number),
                max_model_len=section.max_model_len,
                counts=counts,
                pools=_pools(config, source, counts, number),
            )
        )
    _check_names(models)
    return tuple(models)


def sections(config: ClusterConfig) -> list[tuple[ModelSection, PoolSection]]:
    """Return every configured model with its counts of workers, `[model]` first."""
    return [(config.model, config.pools), *((section, section.pools) for section in config.models)]


def _name(field: str, number: int) -> str:
    """Return how `field` of a model is given: by flag for the first, in the file for further ones."""
    return f"models[{number - 1}].{field}" if number else name_of(f"model.{field}")


def _pools(config: ClusterConfig, source: ModelSource, counts: dict[RoleName, int], number: int) -> tuple[Pool, ...]:
    suffix = f"-m{number + 1}" if number else ""
    return tuple(
        Pool(
            name=f"{role}{suffix}",
            model=source.name,
            role=role,
            count=count,
            revision=source.commit or INITIAL,
            tp=effective(config, role).tp,
            hardware=effective(config, role).hardware,
        )
        for role, count in counts.items()
    )


def _told_apart(source: ModelSource, before: Sequence[ModelSource]) -> ModelSource:
    """Return `source` under a name that no earlier model has: routers distinguish workers by it."""
    same = [other for other in before if other.name.partition("@")[0] == source.name]
    if not same:
        return source
    if not source.commit or source.commit in {other.commit for other in same}:
        raise ConfigError(
            f"two models are called {source.name}", why="workers and requests are told apart by the model's name",
            todo="Rename one folder, name another revision, or give one model more workers",
        )  # fmt: skip
    return dataclasses.replace(source, name=f"{source.name}@{source.commit[:12]}")


def _check_names(models: Sequence[ResolvedModel]) -> None:
    seen: dict[str, str] = {}
    for model in models:
        for name in model.served_names:
            if name in seen and seen[name] != model.source.name:
                raise ConfigError(
                    f"{seen[name]} and {model.source.name} are both served as {name!r}",
                    todo="Give each model names of its own in served_names",
                )
            seen[name] = model.source.name


def _file(field: str, given: str, number: int) -> str:
    if not given:
        return ""
    path = expand_user(given).absolute()
    if not path.is_file():
        raise ConfigError(f"{_name(field, number)} is {given!r}", why="no such file", todo="Check the path")
    return str(path)


def _check_disaggregation(config: ClusterConfig, counts: dict[RoleName, int], number: int) -> None:
    has_pair = counts[RoleName.PREFILL] and counts[RoleName.DECODE]
    if config.router.disaggregation is Disaggregation.ALWAYS and not has_pair:
        raise ConfigError(
            "--disaggregation always cannot work" + (f" for models[{number - 1}]" if number else ""),
            why="every answer has to cross from a prefill to a decode worker, and one of them is missing",
            todo="Add --prefill 1 --decode 1, or use --disaggregation auto",
        )


def check_files(model: ModelSource, *, has_weights: bool) -> None:
    """Raise ModelError if workers could not load it."""
    if not is_gguf(model.path) and not (model.path / "config.json").is_file():
        raise ModelError(
            f"{model.path} is not a model", why="it has no config.json and no GGUF file",
            todo="Give a folder in Hugging Face format, or a GGUF file",
        )  # fmt: skip
    read_model_config(model.path)
    for name in weight_files(model.path) if has_weights else ():
        if not (folder_of(model.path) / name).is_file():
            raise ModelError(f"{model.path} is not complete", why=f"{name} is missing", todo="Download the model again")
