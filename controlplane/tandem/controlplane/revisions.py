"""Start configuration of a revision's workers: the configuration with the revision's settings and files over it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tandem.controlplane.resolve import ResolvedCluster, check
from tandem.controlplane.resolved_models import ResolvedModel, check_files, total
from tandem.controlplane.worker_settings import check_fit, divide_cores
from tandem.core.config import WorkerSection
from tandem.core.desired import Revision
from tandem.core.errors import ConfigError, ModelError
from tandem.core.revision_overrides import configured
from tandem.core.state_enums import RoleName
from tandem.engine.model_config import read_model_config
from tandem.engine.model_source import ModelSource, local_model, tokenizer_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Revised:
    """The model's files, and the settings of a worker."""

    source: ModelSource
    settings: WorkerSection


def revised(
    resolved: ResolvedCluster, model: ResolvedModel, role: RoleName, revision: Revision | None, cores: int
) -> Revised:
    """Resolve for a worker of `role`; None = as configured. Raises ConfigError or ModelError if it cannot be
    started."""
    if revision is None:
        return Revised(source=model.source, settings=resolved.workers[role])
    config = configured(resolved.config, revision.settings)
    check(config)
    has_weights = config.worker.engine != "sim"
    source = _source(model.source, revision.model_path, has_weights=has_weights)
    check_fit(config, {role: 1}, read_model_config(source.path))
    settings = divide_cores(config, total(resolved.config), cores)[role]
    memory_bytes = settings.memory_bytes or resolved.workers[role].memory_bytes
    settings = dataclasses.replace(settings, memory_bytes=memory_bytes)
    _check_ranks(settings, resolved.workers[role])
    return Revised(source=source, settings=settings)


def _source(configured: ModelSource, path: str, *, has_weights: bool) -> ModelSource:
    if not path:
        return configured
    try:
        source = _found(configured.name, path, has_weights=has_weights)
    except OSError as error:  # a name too long, a folder that may not be read
        why = error.strerror or str(error)
        raise ModelError(f"cannot load the model {path[:80]}", why=why, todo="give a folder") from error
    if tokenizer_digest(source.path) != tokenizer_digest(configured.path):
        raise ModelError(
            f"{path} has another tokenizer than {configured.path}",
            why="routers tokenise for all workers, with the one that was configured",
            todo="start a cluster of its own for it, or add it to the configuration as another model",
        )
    return source


def _found(name: str, path: str, *, has_weights: bool) -> ModelSource:
    found = local_model(path)
    if found is None:
        raise ModelError(f"cannot load the model {path}", why="no such folder here", todo="give a folder or GGUF file")
    source = ModelSource(name=name, path=found.path)
    check_files(source, has_weights=has_weights)
    return source


def _check_ranks(settings: WorkerSection, before: WorkerSection) -> None:
    if (settings.tp, settings.hardware) != (before.tp, before.hardware):
        raise ConfigError("a revision has the TP and hardware of its pool", todo="leave them out")
