"""Names of models become paths: which is the default, what wins, where fetched ones are."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tandem.controlplane import bundled
from tandem.controlplane.entrypoints.records import check_router
from tandem.controlplane.environment import Environment
from tandem.controlplane.named_models import (
    DEFAULT_KV_BYTES,
    FETCHABLE,
    SMOLLM2,
    fetched_file,
    located,
    path_of,
    refuse_unfetched,
    unfetched,
    with_default,
)
from tandem.controlplane.resolve import resolve
from tandem.core.config import (
    ClusterConfig,
    FurtherModelSection,
    LauncherName,
    ModelSection,
    RedisSection,
    WorkerSection,
)
from tandem.core.errors import ConfigError

TALKING = ClusterConfig(model=ModelSection(path="smollm2"))
BUNDLED = str(bundled.bundled_model())


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
        (ClusterConfig(worker=WorkerSection(engine="sim")), bundled.NAME, bundled.NAME),
        (ClusterConfig(launcher=LauncherName.RAY), bundled.NAME, bundled.NAME),
        (ClusterConfig(models=(FurtherModelSection(path="smollm2"),)), bundled.NAME, bundled.NAME),
        (ClusterConfig(model=ModelSection(path="owner/name")), "owner/name", "owner/name"),
    ],
)
def test_the_model_that_talks_is_the_default_where_it_is(
    config: ClusterConfig, here: str, to_come: str, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    nowhere = tmp_path_factory.mktemp("nothing")
    assert with_default(config, root).model.path == here
    assert with_default(config, nowhere, fetches=True).model.path == to_come
    assert with_default(config, nowhere).model.path == (config.model.path or bundled.NAME)
    assert with_default(config, None).model.path == (config.model.path or bundled.NAME)


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
    config = dataclasses.replace(TALKING, models=(FurtherModelSection(path=bundled.NAME),))
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
    (by_name,) = resolve(ClusterConfig(model=ModelSection(path=bundled.NAME)), environment).models
    (by_default,) = resolve(ClusterConfig(), environment).models
    assert by_name.source == by_default.source
    assert by_name.served_names == (bundled.NAME,)


def test_pods_fetch_nothing_by_name() -> None:
    with pytest.raises(ConfigError, match=r"smollm2 cannot be used in a pod: .* Put its GGUF file into the volume"):
        check_router(dataclasses.replace(TALKING, redis=RedisSection(url="redis://r")))
    refuse_unfetched(ClusterConfig(model=ModelSection(path=bundled.NAME)))


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
