"""The program of a pod: what it takes, what it ends with, and how little it brings along."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.controlplane.container_entrypoints import __main__ as program
from tandem.controlplane.container_entrypoints.__main__ import main

CONFIG = '[redis]\nurl = "redis://store:6379/0"\n'


SITE = ["--api", "https://kubernetes", "--account", "/none", "--namespace", "n", "--selector", "a=b", "--deployments",
        "w", "--pool", "d=decode", "--pool", "p=prefill"]  # fmt: skip


def flags(folder: Path, config: str = CONFIG) -> list[str]:
    (folder / "cluster.toml").write_text(config)
    (folder / "secret").write_text("sixteen bytes or more")
    return ["--config", str(folder / "cluster.toml"), "--name", "a", "--folder", str(folder / "run"),
            "--cluster-secret", str(folder / "secret"), "--check-config"]  # fmt: skip


def test_what_is_right_ends_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", *flags(tmp_path)]) == 0
    assert main(["worker", *flags(tmp_path), "--pool", "p", "--role", "prefill", "--host", "10.0.0.1"]) == 0
    assert main(["controller", *flags(tmp_path), *SITE]) == 0
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--pool", "other=decode"], "two pools have the role decode"),
        (["--autoscaled", "x"], "there is no pool x"),
    ],
)
def test_a_controller_has_a_pool_for_each_role(
    more: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["controller", *flags(tmp_path), *SITE, *more]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("[router]\nprot = 1", "unknown key 'prot' in [router]"),
        ("[router", "is not valid TOML"),
        (CONFIG + 'volatile_url = "redis://other"', "redis.volatile_url cannot be used yet"),
        ('log_level = "LOUD"\n' + CONFIG, "--log-level is 'LOUD'"),
        ('log_format = "xml"\n' + CONFIG, "--log-format is 'xml'"),
        ("", "redis.url is empty"),
    ],
)
def test_what_is_wrong_ends_with_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str, says: str
) -> None:
    assert main(["router", *flags(tmp_path, config)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("tandem pod: ")
    assert told.count("\n") == 1
    assert says in told


@pytest.mark.parametrize(("text", "code"), [("authorization=Bearer%20planted\n", 0), ("authorization planted", 2)])
def test_headers_for_the_receiver_of_traces_are_headers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, code: int
) -> None:
    (tmp_path / "headers").write_text(text)
    assert main(["router", *flags(tmp_path), "--otlp-headers", str(tmp_path / "headers")]) == code
    told = capsys.readouterr()
    assert ("must hold headers" in told.err) is bool(code)
    assert "planted" not in told.out + told.err


def test_a_router_gets_what_the_receiver_of_traces_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []
    waited: list[str] = []

    async def wait_for_redis(url: str, *, within_s: float) -> None:
        waited.append(url)

    monkeypatch.setattr(program, "wait_for_redis", wait_for_redis)
    monkeypatch.setattr("tandem.core.logs.setup", lambda *_, **__: None)
    monkeypatch.setattr(os, "execve", lambda _program, _words, variables: started.append(variables))
    for name, text in (("headers", "authorization=Bearer%20key\n"), ("ca.crt", "an authority\n")):
        (tmp_path / name).write_text(text)
    (tmp_path / "run").mkdir()
    given = [word for word in flags(tmp_path) if word != "--check-config"]
    more = ["--otlp-headers", str(tmp_path / "headers"), "--otlp-ca", str(tmp_path / "ca.crt")]
    main(["router", *given, *more])
    main(["router", *given])
    names = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_CERTIFICATE")
    first, second = ([variables.get(name) for name in names] for variables in started)
    assert first == ["authorization=Bearer%20key", str(tmp_path / "ca.crt")]
    assert second == [None, None]
    assert waited == ["redis://store:6379/0"] * 2


_FILES = ["--cluster-secret", "--redis-password", "--admin-key", "--otlp-headers", "--otlp-ca"]


@pytest.mark.parametrize("missing", _FILES)
def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str) -> None:
    assert main(["router", *flags(tmp_path), missing, str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err


@pytest.mark.slow
def test_it_can_be_stopped_at_whatever_it_is(tmp_path: Path) -> None:
    """Also as the first process of a container, to which the kernel passes no signal without a handler."""
    arguments = flags(tmp_path)
    pipe = tmp_path / "cluster.toml"
    pipe.unlink()
    os.mkfifo(pipe)
    module = "tandem.controlplane.container_entrypoints"
    process = subprocess.Popen([sys.executable, "-m", module, "router", *arguments])
    with pipe.open("w"):  # it has begun to read, and gets nothing
        process.terminate()
        assert process.wait(30) == 143


@pytest.mark.slow
def test_images_of_routers_need_nothing_of_the_command_line() -> None:
    """Nor torch, numpy or Ray, also where the model is looked for. A controller speaks to Kubernetes besides."""
    program = """
import sys
from pathlib import Path
import tandem.controlplane.container_entrypoints.__main__
from tandem.controlplane.container_entrypoints.records import PodIdentity, router_config
from tandem.core.config import ClusterConfig, RedisSection
here = Path.cwd()
pod = PodIdentity(name="a", folder=here, secret_file=here / "secret")
import tandem.controlplane.container_entrypoints.helm_release
assert not router_config(ClusterConfig(redis=RedisSection(url="redis://store:6379/0")), pod, here / "key").has_rollouts
others = {"torch", "numpy", "safetensors", "ray", "typer", "rich", "httpx", "matplotlib", "yaml"}
print(sorted(others & set(sys.modules)))
import tandem.controlplane.container_entrypoints.controller
print(sorted((others - {"rich"}) & set(sys.modules)))  # which httpx imports where it is there
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["[]", "['httpx']"]
