"""A machine, or a container, with 2 GiB free: one prefill and one decode worker start there, and report their
memory."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.controlplane.model_catalog import bundled_model
from tandem.engine.memory_plan import free_host_bytes
from tests.integration.engine.real_model import smollm2
from tools.running_cluster import started, stop

FREE_BYTES = 2 << 30
MODELS: dict[str, Callable[[], Path]] = {"bundled": bundled_model, "SmolLM2": smollm2}


def machine(folder: Path) -> str:
    """Shell words that leave the machine so much."""
    lines = Path("/proc/meminfo").read_text()
    (folder / "meminfo").write_text(re.sub(r"(MemAvailable: +)\d+", rf"\g<1>{FREE_BYTES >> 10}", lines))
    return f"mount --bind {folder}/meminfo /proc/meminfo"


def container(folder: Path) -> str:
    """The same of a container, by version 2 of control groups: 3 GiB, of which 1 GiB is taken."""
    (folder / "memory.max").write_text(f"{FREE_BYTES + (1 << 30)}\n")
    (folder / "memory.current").write_text(f"{1 << 30}\n")
    (folder / "memory.stat").write_text("anon 1073741824\n")
    return f"mount --bind {folder} /sys/fs/cgroup"


def number(words: str) -> int:
    return int(words.replace(",", ""))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("limit", [machine, container])
def test_two_workers_share_what_is_free_and_say_what_they_hold(
    tmp_path: Path, limit: Callable[[Path], str], model: str
) -> None:
    path = MODELS[model]()
    free = free_host_bytes()
    if free is None or free < FREE_BYTES:
        pytest.skip("this machine has not so much itself")
    (tmp_path / "limit").mkdir()
    (tmp_path / "state").mkdir()
    prefix = ("unshare", "-rm", "/bin/sh", "-ec", f'{limit(tmp_path / "limit")}\nexec "$@"', "sh")
    flags = ("--kv-memory", "auto", "--model", str(path))
    with started(*flags, folder=tmp_path / "state", prefix=prefix) as cluster:
        said = cluster.output
        planned = dict(re.findall(r"(prefill|decode): about \d+MiB of KV, ([\d,]+) tokens", said))
        held = dict(re.findall(r"(prefill|decode)-0 +KV of ([\d,]+) tokens", said))
        assert planned.keys() == held.keys() == {"prefill", "decode"}
        needed = [int(size) for size in re.findall(r"memory of a rank: (\d+)MiB", said)]
        for role, tokens in held.items():
            assert number(planned[role]) == pytest.approx(number(tokens), rel=0.01)
        assert len(needed) == 2
        assert sum(needed) <= FREE_BYTES >> 20
        name = json.loads(cluster.get("/v1/models")[1])["data"][0]["id"]
        code, body = cluster.post("/v1/completions", {"model": name, "prompt": "A list is", "max_tokens": 4})
        assert code == 200, body
        stop(cluster)
