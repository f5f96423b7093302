"""Several models in one cluster: each with a name, workers and settings of its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tandem.controlplane.bundled import bundled_model
from tandem.controlplane.environment import Environment
from tandem.controlplane.models import resolve_models
from tandem.controlplane.resolve import ResolvedCluster, resolve
from tandem.core.config import (
    ClusterConfig,
    Disaggregation,
    FurtherModelSection,
    ModelSection,
    PlannerMode,
    PlannerSection,
    PoolSection,
)
from tandem.core.desired import DesiredState
from tandem.core.errors import ConfigError, ModelError, StartupError
from tandem.core.lifecycle import RoleName
from tandem.engine.model_source import ModelSource

ENVIRONMENT = Environment(state_root=Path("/none"), socket_root=Path("/tmp"), cores=8, variables={})


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The bundled model under another name."""
    folder = tmp_path / "other-tiny"
    folder.mkdir()
    for file in bundled_model().iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def cluster(*models: FurtherModelSection, **more: object) -> ResolvedCluster:
    return resolve(ClusterConfig(models=models, **more), ENVIRONMENT)  # type: ignore[arg-type]


def test_every_model_has_pools_of_its_own(other: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("x")
    more = FurtherModelSection(
        path=str(other),
        served_names=("b", "c"),
        mixed=2,
        dtype="float32",
        max_model_len=64,
        chat_template=str(template),
    )
    resolved = cluster(more, pools=PoolSection(prefill=1, decode=3))
    assert [(pool.name, pool.model, pool.count) for pool in resolved.pools] == [
        ("prefill", "tandem-tiny", 1), ("decode", "tandem-tiny", 3), ("mixed-m2", "other-tiny", 2),
    ]  # fmt: skip
    assert resolved.served_names == ("tandem-tiny", "b", "c")
    second = resolved.model_of(resolved.pools[2])
    assert (second.dtype, second.max_model_len) == ("float32", 64)
    served = second.served()
    assert (served.name, served.model_dir, served.served_names) == ("other-tiny", str(other), ("b", "c"))
    assert served.chat_template == str(template)
    assert {settings.threads for settings in resolved.workers.values()} == {1}  # 8 cores for 6 workers
    assert [pool.name for pool in cluster(FurtherModelSection(path=str(other))).pools] == [
        "prefill", "decode", "prefill-m2", "decode-m2",
    ]  # fmt: skip


def test_two_revisions_of_one_hub_id_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(model: str, *, revision: str, has_weights: bool) -> ModelSource:
        return ModelSource(name="owner/name", path=bundled_model(), commit=revision * 20)

    monkeypatch.setattr("tandem.controlplane.models.resolve_model", found)
    config = ClusterConfig(model=ModelSection(revision="aa"), models=(FurtherModelSection(revision="bb"),))
    first, second = resolve_models(config)
    assert (first.source.name, second.source.name) == ("owner/name", "owner/name@bbbbbbbbbbbb")
    assert {pool.revision for pool in second.pools} == {"b" * 40}
    with pytest.raises(ConfigError, match="two models are called owner/name"):
        resolve_models(dataclasses.replace(config, models=(FurtherModelSection(revision="aa"),)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"served_names": ("tandem-tiny",)}, "tandem-tiny and other-tiny are both served as 'tandem-tiny'"),
        ({"served_names": ("",)}, r"models\[0\].served_names is empty"),
        ({"dtype": "int3"}, r"models\[0\].dtype is 'int3'"),
        ({"max_model_len": 3}, r"models\[0\].max_model_len is 3"),
        ({"mixed": -1}, r"models\[0\].mixed is -1"),
        ({"prefill": 1}, "1 prefill and 0 decode workers of other-tiny cannot serve"),
        ({"chat_template": "/no/such"}, r"models\[0\].chat_template is '/no/such': no such file"),
        ({"path": ""}, "two models are called tandem-tiny"),
    ],
)
def test_what_is_wrong_with_a_further_model_is_named(other: Path, wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cluster(FurtherModelSection(**{"path": str(other), **wrong}))  # type: ignore[arg-type]


def test_a_further_model_must_be_one_and_must_be_servable(other: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        cluster(FurtherModelSection(path=str(tmp_path)))
    config = ClusterConfig(models=(FurtherModelSection(path=str(other), mixed=1),))
    config = dataclasses.replace(
        config, router=dataclasses.replace(config.router, disaggregation=Disaggregation.ALWAYS)
    )
    with pytest.raises(ConfigError, match=r"always cannot work for models\[0\]"):
        resolve(config, ENVIRONMENT)


def test_one_model_must_not_borrow_the_workers_of_another(other: Path) -> None:
    pools = cluster(FurtherModelSection(path=str(other))).pools
    lonely = tuple(pool for pool in pools if (pool.model, pool.role) != ("other-tiny", RoleName.DECODE))
    with pytest.raises(StartupError, match="of other-tiny cannot serve"):
        DesiredState(version=1, pools=lonely).validate()


def test_the_planner_is_refused_a_second_model(other: Path) -> None:
    with pytest.raises(ConfigError, match=r"planner\.mode is act: it plans for one model, and there are 2"):
        cluster(FurtherModelSection(path=str(other)), planner=PlannerSection(mode=PlannerMode.ACT))
