"""Test the loader of configuration files and the bounds of settings."""

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core import config_loader
from tandem.core.bounds import Bound, bound_of, out_of_bounds
from tandem.core.config import (
    ClusterConfig,
    Disaggregation,
    ModelSection,
    RoleSection,
    RouterConfig,
    SloSection,
    WorkerConfig,
    WorkerSection,
)
from tandem.core.desired import DesiredState, Pool
from tandem.core.errors import ConfigError
from tandem.core.state_enums import RoleName

WORKER = WorkerConfig(
    cluster="c", worker_id="prefill-0", role=RoleName.PREFILL, pool="prefill", model="m", model_dir="/m",
    revision="r", dtype="auto", max_model_len=0, redis_url="unix:///r", secret_file="s", runtime_dir="/r",
)  # fmt: skip


def _load(tmp_path: Path, text: str, name: str = "cluster.toml") -> ClusterConfig:
    path = tmp_path / name
    path.write_text(text)
    return config_loader.load(path, ClusterConfig)


def _error(tmp_path: Path, text: str, name: str = "cluster.toml") -> str:
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, text, name)
    assert "\n" not in caught.value.message.strip()
    return caught.value.message


def test_toml_fills_sections_and_keeps_defaults(tmp_path: Path) -> None:
    config = _load(tmp_path, 'name = "x"\n[pools]\nprefill = 2\n[router]\ndisaggregation = "always"\n')
    assert (config.name, config.pools.prefill, config.pools.decode) == ("x", 2, 0)
    assert config.router.disaggregation is Disaggregation.ALWAYS
    assert config.worker == WorkerSection()


@pytest.mark.parametrize("value", [WORKER, ClusterConfig(name="y")])
def test_dump_is_read_back_equal(tmp_path: Path, value: WorkerConfig | ClusterConfig) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(config_loader.dump(value))
    assert config_loader.load(path, type(value)) == value


def test_what_is_no_text_is_not_handed_over() -> None:
    with pytest.raises(ConfigError, match=r"hand over the configuration: '/m\\udce9' is no UTF-8 text"):
        config_loader.dump(ClusterConfig(model=ModelSection(path="/m\udce9")))


def test_records_in_tuples_are_read_and_checked(tmp_path: Path) -> None:
    state = DesiredState(version=3, pools=(Pool(name="p", model="m", role=RoleName.MIXED, count=1),))
    path = tmp_path / "c.json"
    path.write_bytes(config_loader.dump(state))
    assert config_loader.load(path, DesiredState) == state
    path.write_text('{"version": 1, "pools": [{"name": "p", "model": "m", "role": "mixed", "cuont": 1}]}')
    with pytest.raises(ConfigError, match=r"unknown key 'cuont' in \[pools.0\].*The nearest known key is 'count'"):
        config_loader.load(path, DesiredState)


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("[worker]\nkv_memory_byte = 1\n", "'kv_memory_byte' in [worker]", "'kv_memory_bytes'"),
        ("[worker]\nkv-memory-bytes = 1\n", "'kv-memory-bytes' in [worker]", "'kv_memory_bytes'"),
        ("[worker]\nkv_memory = 1\n", "'kv_memory' in [worker]", "'kv_memory_bytes'"),
        ("[worker]\ndeterministic = true\n", "'deterministic' in [worker]", "'is_deterministic'"),
        ("[wroker]\n", "'wroker'", "'worker'"),
        ("[router]\nPort = 1\n", "'Port' in [router]", "'port'"),
    ],
)
def test_unknown_key_names_the_nearest_right_one(tmp_path: Path, text: str, key: str, nearest: str) -> None:
    message = _error(tmp_path, text)
    assert f"unknown key {key}" in message
    assert f"The nearest known key is {nearest}" in message


def test_sections_that_the_user_names(tmp_path: Path) -> None:
    assert _load(tmp_path, "[slo.chat]\nttft_s = 0.5\n").slo == {"chat": SloSection(ttft_s=0.5)}
    message = _error(tmp_path, "[slo.chat]\nttft_ms = 500\n")
    assert "unknown key 'ttft_ms' in [slo.chat]" in message
    assert "The nearest known key is 'ttft_s'" in message


def test_unknown_key_without_a_near_one_lists_what_there_is(tmp_path: Path) -> None:
    assert "Known keys here: prefill, decode, mixed" in _error(tmp_path, "[pools]\nzzzz = 1\n")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('[pools]\nprefill = "two"\n', "pools.prefill"),
        ('[router]\ndisaggregation = "sometimes"\n', "router.disaggregation"),
        ("[worker]\nthreads = 1.5\n", "worker.threads"),
        ("[model]\nserved_names = [1]\n", "model.served_names[0]"),
        ("worker = 3\n", "worker"),
    ],
)
def test_wrong_type_names_its_field(tmp_path: Path, text: str, field: str) -> None:
    assert f"wrong value for {field} in" in _error(tmp_path, text)


def test_missing_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="missing required field cluster"):
        config_loader.load(path, RouterConfig)


def test_unreadable_and_malformed_files_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        config_loader.load(tmp_path / "none.toml", ClusterConfig)
    assert "not valid TOML" in _error(tmp_path, "name = \n")
    assert "not valid JSON" in _error(tmp_path, "{", "c.json")
    assert "named fields" in _error(tmp_path, "[1]", "c.json")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("256MiB", 256 * 2**20),
        ("1.5 GiB", 3 * 2**29),
        ("2g", 2 * 2**30),
        ("10MB", 10_000_000),
        ("64 kib", 2**16),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert config_loader.parse_size(text, field="--kv-memory") == size


@pytest.mark.parametrize("text", ["", "MiB", "12 parsecs", "-1MiB", "0", "1e9", "0.1B", "9999999TiB", "nan"])
def test_bad_sizes_name_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-memory is"):
        config_loader.parse_size(text, field="--kv-memory")


@given(st.integers(min_value=1, max_value=2**62))
def test_whole_numbers_of_bytes_are_exact(size: int) -> None:
    assert config_loader.parse_size(str(size), field="f") == size


@pytest.mark.parametrize(
    ("bound", "inside", "outside", "words"),
    [
        (Bound(0), (0, 1e300), (-1, math.nan, math.inf), "0 or more"),
        (Bound(0, is_above=True), (0.001,), (0.0, math.nan), "more than 0"),
        (Bound(-1, 65535), (-1, 65535), (-2, 65536), "-1 to 65535"),
        (Bound(1024 * 1024), (1048576,), (1048575,), "1048576 or more"),
        (Bound(0, math.inf), (math.inf,), (math.nan,), "0 or more"),
    ],
)
def test_what_is_inside(bound: Bound, inside: tuple[float, ...], outside: tuple[float, ...], words: str) -> None:
    assert all(map(bound.holds, inside))
    assert not any(map(bound.holds, outside))
    assert str(bound) == words


def test_bounds_of_alternatives_are_found() -> None:
    assert bound_of(Annotated[int, "a word", Bound(3)] | None) == Bound(3)
    assert bound_of(int | None) is None


def test_every_number_in_every_section_is_named_by_its_place() -> None:
    config = ClusterConfig(decode=RoleSection(tp=0), slo={"chat": SloSection(itl_s=-1.0)})
    assert [(place, value) for place, value, _ in out_of_bounds(config)] == [
        ("decode.tp", 0),
        ("slo.chat.itl_s", -1.0),
    ]
    assert not list(out_of_bounds(ClusterConfig()))


def test_every_number_has_a_bound() -> None:
    open_ended: list[str] = []
    waiting: list[type[Any]] = [ClusterConfig]
    seen: set[type[Any]] = set()
    while waiting:
        section = waiting.pop()
        if section in seen:
            continue
        seen.add(section)
        for name, kind in get_type_hints(section, include_extras=True).items():
            parts = (kind, *get_args(kind))
            waiting += [part for part in parts if isinstance(part, type) and dataclasses.is_dataclass(part)]
            plain = get_type_hints(section)[name]
            if {int, float} & {plain, *get_args(plain)} and bound_of(kind) is None:
                open_ended.append(f"{section.__name__}.{name}")
    assert open_ended == []
    assert len(seen) > 10
