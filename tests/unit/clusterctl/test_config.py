"""`clusterctl config`: what is set, what is right, what a key means; nothing of it needs a cluster."""

import json
from pathlib import Path

import pytest

from tandem.clusterctl import main as program
from tandem.clusterctl.meta.settings import every_setting, values
from tandem.controlplane.state_dir import StateDir
from tandem.core.config import ClusterConfig, RedisSection, RouterSection, SloSection


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = program.run(["config", *arguments])
    return code, *capsys.readouterr()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(
        'name = "f"\n[router]\nport = 7000\n[redis]\nurl = "redis://u:geheim@h:1/0"\n[slo.chat]\nttft_s = 0.5\n'
        '[[models]]\npath = "m"\n'
    )
    return path


def test_every_setting_says_what_it_means() -> None:
    settings = every_setting()
    assert set(values(ClusterConfig())) <= set(settings)
    assert [key for key, one in settings.items() if not one.text and not key.startswith("models[]")] == []
    assert settings["router.port"].flag == "--port"
    assert settings["router.port"].bound == "0 to 65535"
    assert settings["router.anonymous"].type == "one of loopback, always, never"
    assert settings["slo.<class>.ttft_s"].text == "seconds from the arrival of a request to its first token"
    assert settings["decode.tp"].text.startswith("of decode workers: ranks of a worker")
    assert settings["decode.tp"].default is None
    assert "](" not in "".join(one.text for one in settings.values())


def test_values_have_names_and_no_passwords() -> None:
    config = ClusterConfig(
        redis=RedisSection(url="redis://:geheim@h:1/0"), router=RouterSection(port=1), slo={"chat": SloSection()}
    )
    found = values(config)
    assert found["redis.url"] == "redis://h:1/0"
    assert (found["router.port"], found["slo.chat.ttft_s"], found["router.anonymous"]) == (1, 0.0, "loopback")


def test_view_of_a_file(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    code, out, _ = run(capsys, "view", "--config", str(file), "-o", "json")
    found = json.loads(out)
    assert code == 0
    assert set(found["changed"]) >= {"name", "router.port", "slo.chat.ttft_s", "redis.url", "models[0].path"}
    assert "router.host" not in found["changed"]
    assert found["settings"]["router.port"] == 7000
    assert "geheim" not in out
    code, out, _ = run(capsys, "view", "--config", str(file))
    lines = [line.split() for line in out.splitlines()]
    assert ["router.port", "7000", "8000", "--port"] in lines
    assert not any(line[0] == "router.host" for line in lines)
    code, out, _ = run(capsys, "view", "--config", str(file), "-o", "wide")
    assert ["router.host", '"127.0.0.1"', '"127.0.0.1"', "--host"] in [line.split() for line in out.splitlines()]
    assert any(line.split()[:4] == ["decode.tp", "as", "[worker]", "as"] for line in out.splitlines())


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:geheim@h:1/0",
        "redis://h/0?password=geheim",
        "unix:///run/r.sock?password=geheim",
        "redis://:geheim@[::1",
    ],
)
def test_no_form_of_a_url_shows_its_password(capsys: pytest.CaptureFixture[str], tmp_path: Path, url: str) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(f'[redis]\nurl = "{url}"\n')
    for form in ("table", "wide", "json", "yaml"):
        code, out, _ = run(capsys, "view", "--config", str(file), "-o", form)
        assert code == 0
        assert "redis.url" in out
        assert "geheim" not in out


def test_view_of_what_a_cluster_was_started_with(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, error = run(capsys, "view", "--state-dir", str(tmp_path))
    assert code == 3
    assert "cluster 'tandem' was never started here" in error
    with StateDir(tmp_path, "tandem").hold() as held:
        held.write_config("cluster", ClusterConfig(router=RouterSection(port=7001)))
    code, out, _ = run(capsys, "view", "--state-dir", str(tmp_path), "-o", "json")
    assert (code, json.loads(out)["changed"]) == (0, ["router.port"])


def test_validate(capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path) -> None:
    code, out, _ = run(capsys, "validate", str(file))
    assert code == 0
    assert f"{file} is right; it changes name" in out
    assert json.loads(run(capsys, "validate", str(file), "-o", "json")[1])["is_valid"]
    for text, message in {
        "[router]\nprot = 1\n": "unknown key 'prot' in [router]",
        "[router]\nport = 70000\n": "--port is 70000. Use 0 to 65535",
        "[router]\nport = 7\ngrpc_port = 7\n": "two of the router's ports are the same",
        'name = "x\n': "is not valid TOML",
        '[admission]\ndefault_slo = "chat"\n': "admission.default_slo is 'chat'",
    }.items():
        wrong = tmp_path / "wrong.toml"
        wrong.write_text(text)
        code, out, error = run(capsys, "validate", str(wrong))
        assert (code, out) == (2, ""), text
        assert message in error


@pytest.mark.parametrize("key", ["router.port", "port"])
def test_explain_a_setting(capsys: pytest.CaptureFixture[str], key: str) -> None:
    code, out, _ = run(capsys, "explain", key)
    assert code == 0
    assert [" ".join(line.split()) for line in out.splitlines()] == [
        "router.port", "meaning HTTP; 0 = any free one", "type integer", "bounds 0 to 65535", "default 8000",
        "flag clusterctl up --port",
    ]  # fmt: skip


def test_explain_a_section_and_what_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        json.loads(run(capsys, "explain", "kv-memory", "-o", "json")[1])["settings"][0]["key"]
        == "worker.kv_memory_bytes"
    )
    code, out, _ = run(capsys, "explain", "admission", "-o", "json")
    keys = [one["key"] for one in json.loads(out)["settings"]]
    assert code == 0
    assert "admission.max_waiting" in keys
    assert all(key.startswith("admission.") for key in keys)
    code, out, error = run(capsys, "explain", "router.prot")
    assert (code, out) == (3, "")
    assert "there is no setting 'router.prot'. Did you mean 'router.port'" in error
