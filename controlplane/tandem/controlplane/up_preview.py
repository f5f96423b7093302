"""Preview of `up`, made without starting, writing or fetching anything."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from tandem.controlplane.environment import Environment
from tandem.controlplane.kv_plan import KVPlan, kv_plan
from tandem.controlplane.model_catalog import located, with_default
from tandem.controlplane.ray.launcher import check_installed
from tandem.controlplane.resolve import check, check_ports, resolve
from tandem.controlplane.resolved_models import counts_of, sections, total
from tandem.controlplane.state_dir import StateDir, state_of
from tandem.controlplane.worker_settings import divide_cores
from tandem.core.config import ClusterConfig, LauncherName, ModelSection, RouterSection, WorkerSection
from tandem.core.state_enums import RoleName
from tandem.engine.model_source import local_model
from tandem.statestore.connection import connect


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewedModel:
    """`path` None: it would be fetched, and was not looked for. `counts`: workers by role."""

    name: str
    path: Path | None
    served_names: tuple[str, ...]
    counts: dict[RoleName, int]
    kv: dict[RoleName, KVPlan]
    """Of workers of each role with any; empty where the model is not here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """A cluster that could be started, as far as can be checked; `state` is its state directory."""

    config: ClusterConfig
    state: StateDir
    cores: int
    router: RouterSection
    models: tuple[PreviewedModel, ...]
    workers: dict[RoleName, WorkerSection]

    @property
    def is_complete(self) -> bool:
        """True if all checks of `up` before its first start were made: not for a model that it would fetch."""
        return all(model.path is not None for model in self.models)


def preview(config: ClusterConfig, environment: Environment, *, fetches: bool = False) -> Preview:
    """Return the preview of `config`; raises the errors with which `up` would refuse it at once: StartupError,
    ConfigError, ModelError. A Redis that is named has to answer. `fetches`: as of `UpOptions`."""
    state = state_of(config, environment)
    state.check_free()
    router = check(config)
    check_ports(router)
    if config.launcher is LauncherName.RAY:
        check_installed()
    if config.redis.url:
        asyncio.run(_look_at_redis(config.redis.url))
    root = environment.models_root
    wanted = located(with_default(config, root, fetches=fetches), root)
    workers = divide_cores(wanted, total(wanted), environment.cores, environment.free_bytes)
    models = tuple(_model(section, counts_of(pools), workers) for section, pools in sections(wanted))
    found = Preview(
        config=config, state=state, cores=environment.cores, router=router, models=models, workers=workers
    )  # fmt: skip
    if found.is_complete:
        resolve(config, environment)
    return found


async def _look_at_redis(url: str) -> None:
    await (await connect(url)).aclose()


def _model(
    section: ModelSection, counts: dict[RoleName, int], workers: dict[RoleName, WorkerSection]
) -> PreviewedModel:
    found = local_model(section.path, revision=section.revision)
    kv: dict[RoleName, KVPlan] = {}
    if found is not None:
        kv = {
            role: kv_plan(
                found.path,
                workers[role],
                dtype=section.dtype,
                quantize=section.quantize,
                max_model_len=section.max_model_len,
            )
            for role, count in counts.items()
            if count
        }
    name = found.name if found is not None else section.path
    path, served_names = found.path if found is not None else None, section.served_names or (name,)
    return PreviewedModel(name=name, path=path, served_names=served_names, counts=counts, kv=kv)
