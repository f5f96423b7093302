"""A cluster that cannot start reports so in one line, with exit code 2, soon, and leaves no process behind.

Everything is real: `clusterctl up`, Redis, the router, the workers. Each broken model is a copy with one thing wrong.
"""

import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tandem.engine.families import FAMILIES
from tandem.statestore.embedded_redis import PrivateRedis
from tools.gguf_model import write_gguf
from tools.random_model import RandomModel, make_random_model
from tools.running_cluster import is_alive
from tools.waiting import wait_for

LIMIT_S = 60.0
TINY = RandomModel(family="llama", hidden=32, layers=1, heads=2, kv_heads=1)
Edit = Callable[[Path], object]


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_random_model(TINY, folder)
    return folder


@pytest.fixture
def state() -> Iterator[Path]:
    """A state directory of this test alone. Every process started with it has it in its command line."""
    with tempfile.TemporaryDirectory(prefix="td-start-") as name:
        yield Path(name)
        wait_for(lambda: not left_behind(Path(name)), what="no process is left")


def left_behind(state: Path) -> list[str]:
    """Command lines of living processes that name the state directory or work in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            folder = os.readlink(entry / "cwd")
        except OSError:  # gone, or not ours
            continue
        if (str(state) in line or folder.startswith(str(state))) and is_alive(int(entry.name)):
            found.append(line)
    return found


def clusterctl(state: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tandem.clusterctl", *arguments, "--state-dir", str(state)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    with process:
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            out, err = process.communicate(timeout=LIMIT_S)
            pytest.fail(f"it did not end within {LIMIT_S:g} s:\n{out}\n{err}")
    return process.returncode, out, err


def refusal(state: Path, *flags: str) -> str:
    """The one line with which `up` refuses to start."""
    code, out, err = ended(clusterctl(state, "up", "--port", "0", *flags))
    assert code == 2, out + err
    assert err.startswith("clusterctl: "), err
    assert err.count("\n") == 1, err
    assert err.endswith(".\n"), err
    assert "Traceback" not in out + err
    assert all(re.match(r" +\d+\.\d\d s  \w", line) for line in out.splitlines()), out
    assert left_behind(state) == []
    return err


def reweigh(change: Callable[[dict[str, Any]], object]) -> Edit:
    def edit(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return edit


def reconfigure(**fields: Any) -> Edit:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **fields}))

    return edit


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1000)


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def break_template(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "{% for a in b %}"}))


MODELS: list[tuple[str, Edit, tuple[str, ...]]] = [
    ("config.json gone", lambda folder: (folder / "config.json").unlink(), ("is not a model", "it has no config.json")),
    ("config.json cut", lambda folder: os.truncate(folder / "config.json", 20), ("config.json is not JSON", "again")),
    ("weights gone", lambda folder: (folder / "model.safetensors").unlink(), ("has no safetensors weights", "Give")),
    ("pickled weights only", pickle_only, ("has no safetensors weights", "pickled", "Convert")),
    ("unsupported architecture", reconfigure(architectures=["MambaForCausalLM"]),
     ("unsupported architecture MambaForCausalLM", ", ".join(FAMILIES))),
    # These are found by the workers.
    ("weights cut short", cut, ("model.safetensors is damaged", "cut short")),
    ("a weight missing", reweigh(lambda weights: weights.pop("model.norm.weight")),
     ("is missing", "model.norm.weight")),
    ("a weight too many", reweigh(lambda weights: weights.update(odd=weights["model.norm.weight"].clone())),
     ("has unexpected", "odd")),
    ("shapes that differ", reconfigure(intermediate_size=64), ("has shape", "config.json asks for")),
    # These are found by the router alone, while the workers are fine.
    ("tokenizer.json broken", lambda folder: (folder / "tokenizer.json").write_text("{"),
     ("the router cannot start", "tokenizer.json is no tokenizer")),
    ("tokenizer.json gone", lambda folder: (folder / "tokenizer.json").unlink(),
     ("the router cannot start", "cannot read", "tokenizer.json")),
    ("chat template broken", break_template, ("the router cannot start", "the chat template does not compile")),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "words"), [case[1:] for case in MODELS], ids=[case[0] for case in MODELS])
def test_a_broken_model(intact: Path, tmp_path: Path, state: Path, edit: Edit, words: tuple[str, ...]) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(intact, folder)
    edit(folder)
    line = refusal(state, "--model", str(folder), "--mixed", "1")
    assert [word for word in words if word not in line] == [], line


def cut_gguf(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


def flip_gguf(path: Path) -> None:
    """The number of tensors becomes 2^56 times as many."""
    with path.open("r+b") as file:
        file.seek(15)
        file.write(b"\xff")


GGUF_FILES: list[tuple[str, Edit, tuple[str, ...]]] = [
    ("cut", cut_gguf, ("tiny.gguf cannot be read as GGUF", "it ends at", "Download the file again")),
    ("counts without end", flip_gguf, ("cannot be read as GGUF", "tensors")),
    ("another format", lambda path: path.write_bytes(b"PK" * 100), ("is not a GGUF file", "it begins with b'PKPK'")),
    ("an unknown split of texts", lambda path: path.write_bytes(path.read_bytes().replace(b"gpt-2", b"gpt-9")),
     ("the router cannot start", "it is 'gpt-9'", "Put the model's tokenizer.json beside the file")),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "words"), [case[1:] for case in GGUF_FILES], ids=[case[0] for case in GGUF_FILES])
def test_a_broken_gguf_file(intact: Path, tmp_path: Path, state: Path, edit: Edit, words: tuple[str, ...]) -> None:
    write_gguf(intact, tmp_path / "tiny.gguf")
    edit(tmp_path / "tiny.gguf")
    line = refusal(state, "--model", str(tmp_path / "tiny.gguf"), "--mixed", "1")
    assert [word for word in words if word not in line] == [], line


def test_weights_that_are_no_numbers(intact: Path, tmp_path: Path, state: Path) -> None:
    """They are found when the worker warms up."""
    folder = tmp_path / "nan"
    shutil.copytree(intact, folder)
    reweigh(lambda weights: weights["model.norm.weight"].fill_(float("nan")))(folder)
    line = refusal(state, "--model", str(folder), "--mixed", "1")
    assert "mixed-0 cannot start: the model cannot run here: the logits have no finite maximum" in line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        # found before anything is started; values of flags are tested where they are resolved
        (("--model", "/nowhere/at/all"), ("cannot load the model /nowhere/at/all", "no such folder")),
        (("--port", "70000"), ("--port is 70000", "65535")),
        (("--timeout", "nan"), ("--timeout is nan", "more than 0")),
        (("--served-model-name", ""), ("--served-model-name is empty",)),
        (("--max-model-len", "1"), ("--max-model-len is 1", "16 or more")),
        (("--kv-memory", "much"), ("--kv-memory is 'much'", "256MiB")),
        (("--config", "/nowhere/cluster.toml"), ("cannot read the configuration", "Check the path")),
        (("--prefill-kv-memory", "much"), ("--prefill-kv-memory is 'much'", "256MiB")),
        (("--wire-codec-below", "slow"), ("--wire-codec-below is 'slow'", "such as")),
        (("--redis", "redis.example"), ("is not a Redis URL", "redis://:password@host:port/0")),
        # found by the router
        (("--host", "0.0.0.0"), ("--host is '0.0.0.0', and there is no API key", "clusterctl key create")),
        # found by the workers
        (("--kv-memory", "1KiB"), ("too small for one sequence of 2048 tokens", "Give --kv-memory")),
        (("--max-model-len", "9999"), ("max_model_len 9999", "2048", "Use 2048 or less")),
        (("--block-tokens", "100000"), ("--block-tokens 100000 is too large", "or less")),
        (("--deterministic", "--dtype", "float16"), ("--deterministic cannot run in float16", "--dtype bfloat16")),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_flags_that_cannot_work(intact: Path, state: Path, flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    model = () if "--model" in flags else ("--model", str(intact))
    line = refusal(state, *model, *flags)
    assert [word for word in words if word not in line] == [], line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[worker]\nblock_token = 16\n", ("unknown key 'block_token' in [worker]", "'block_tokens'")),
        ("[modle]\npath = 'x'\n", ("unknown key 'modle'", "'model'")),
        ("[worker]\nblock_tokens = 'many'\n", ("wrong value for worker.block_tokens", "int")),
        ("[worker\n", ("is not valid TOML", "line 1")),
    ],
)
def test_a_wrong_configuration(state: Path, tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    (tmp_path / "cluster.toml").write_text(text)
    line = refusal(state, "--config", str(tmp_path / "cluster.toml"))
    assert [word for word in words if word not in line] == [], line


def test_redis_that_never_answers(intact: Path, state: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        line = refusal(state, "--model", str(intact), "--redis", f"redis://{place}/0")
    assert f"cannot reach Redis at redis://{place}/0" in line


def test_a_wrong_redis_password(intact: Path, state: Path, tmp_path: Path) -> None:
    with PrivateRedis.start(tmp_path / "redis", "right") as redis:
        for login in (":wrong@", ""):
            line = refusal(state, "--model", str(intact), "--redis", f"redis://{login}127.0.0.1:{redis.port}/0")
            assert "refuses this password" in line
            assert "redis://:password@host:port/0" in line
            assert "wrong" not in line


def test_a_hub_model_without_a_network(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    line = refusal(state, "--model", "nonexistent")
    assert "nonexistent is no folder here and cannot be fetched from the hub" in line


def test_commands_when_nothing_runs(state: Path) -> None:
    code, out, err = ended(clusterctl(state, "status"))
    assert (code, out) == (1, "")
    assert err.startswith("clusterctl: no cluster 'tandem' is running here"), err
    assert "Start one with `clusterctl up`" in err
    assert err.count("\n") == 1
    for _ in range(2):
        assert ended(clusterctl(state, "down")) == (0, "no cluster 'tandem' is running here\n", "")


def test_a_second_up_down_and_down_again(intact: Path, state: Path) -> None:
    first = clusterctl(state, "up", "--port", "0", "--model", str(intact), "--mixed", "1")
    context = state / "tandem" / "context.json"
    wait_for(lambda: context.exists() or first.poll() is not None, LIMIT_S, "the router listens")
    code, _, err = ended(clusterctl(state, "up", "--port", "0", "--model", str(intact), "--mixed", "1"))
    assert code == 2
    assert f"cluster 'tandem' is running already: process {first.pid} holds" in err
    assert "clusterctl down --name tandem" in err
    assert err.count("\n") == 1
    assert ended(clusterctl(state, "down"))[0] == 2, "cannot be confirmed"
    assert ended(clusterctl(state, "down", "--yes"))[:2] == (0, "stopped\n")
    code, out, err = ended(first)
    assert (code, err) == (0, ""), out
    assert ended(clusterctl(state, "down")) == (0, "no cluster 'tandem' is running here\n", "")


@pytest.mark.parametrize("moment", ["redis", "importing torch", "ready: it listens"])
def test_ctrl_c_twice_while_starting(intact: Path, state: Path, moment: str) -> None:
    process = clusterctl(state, "up", "--port", "0", "--model", str(intact))
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if moment in line:
            break
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and is_child(entry, state)]
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    # The second one may come before the first was noticed, or when Python is already leaving.
    assert code in (0, 1, 130, -signal.SIGINT), (code, seen, out, err)
    assert "Traceback" not in out + err, err
    for pid in pids:
        wait_for(functools.partial(_is_gone, pid), what=f"process {pid} is gone")


def is_child(entry: Path, state: Path) -> bool:
    try:
        return str(state).encode() in (entry / "cmdline").read_bytes()
    except OSError:
        return False


def _is_gone(pid: int) -> bool:
    return not is_alive(pid)
