"""Workers with different settings: pairs that fit serve, others are never planned, and status gives the reason."""

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.controlplane.model_catalog import bundled_model
from tandem.core.parent_death_signal import tied
from tools.running_cluster import Cluster, running
from tools.waiting import wait_for

BODY = {
    "model": "tandem-tiny", "prompt": "The list of the things that I have to do today is long, and so is the day. " * 4,
    "max_tokens": 12, "temperature": 0, "ignore_eos": True,
}  # fmt: skip
ALWAYS = ("--prefill", "1", "--decode", "1", "--disaggregation", "always", "--dtype", "float32", "--threads", "1")


def answer(cluster: Cluster) -> str:
    code, body = cluster.post("/v1/completions", BODY)
    assert code == 200, body
    return str(body["choices"][0]["text"])


def skipped_blocks(cluster: Cluster) -> float:
    """Blocks that decode-0 already had in the form in which they would have come."""
    counters = {w["worker"]: w["counters"] for w in cluster.status()["workers"]}
    return float(counters["decode-0"].get("kv_skipped_blocks", 0))


def shown(cluster: Cluster) -> str:
    """`clusterctl status` as a person sees it."""
    code, out, error = cluster.clusterctl("status", "-o", "wide")
    assert code == 0, error
    return out


@contextlib.contextmanager
def another_worker(cluster: Cluster, like: str, name: str, folder: Path, **changes: object) -> Iterator[None]:
    """A worker beside those that the cluster started, as an operator of an older release might leave one running."""
    config = json.loads(next(cluster.folder.rglob(f"{like}.json")).read_text())
    file = folder / f"{name}.json"
    file.write_text(json.dumps({**config, "worker_id": name, **changes}))
    command = tied([sys.executable, "-m", "tandem.worker", "--config", str(file)])
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        wait_for(lambda: name in str(cluster.status()["workers"]), 60, f"{name} is registered")
        yield
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> str:
    """Return the answer of a cluster with equal workers."""
    return answer(cluster)


@pytest.mark.parametrize(("prefill", "decode"), [(16, 8), (8, 24)])
def test_block_sizes_that_differ_are_served_exactly(expected: str, prefill: int, decode: int) -> None:
    sizes = ("--prefill-block-tokens", str(prefill), "--decode-block-tokens", str(decode))
    with running(*ALWAYS, *sizes) as cluster:
        assert answer(cluster) == expected
        assert answer(cluster) == expected  # from the caches of both
        status = cluster.status()
        assert {w["worker"]: w["block_tokens"] for w in status["workers"]} == {
            "prefill-0": prefill, "decode-0": decode,
        }  # fmt: skip
        form = f"re-blocked {prefill} to {decode}"
        assert status["pairs"] == [{"prefill": "prefill-0", "decode": "decode-0", "form": form}]
        assert status["refused_pairs"] == []
        assert f"paired, {form}: prefill-0 to decode-0" in shown(cluster)
        wait_for(lambda: skipped_blocks(cluster) > 0, what="the decode worker had blocks of the second request")


@pytest.mark.parametrize(
    ("flags", "form"),
    [
        (("--decode-kv-dtype", "bfloat16"), "converted float32 to bfloat16"),
        (("--wire-codec", "int8", "--wire-codec-below", "always"), "codec int8"),
    ],
)
def test_changed_bytes_are_served_from_blocks_of_their_own(flags: tuple[str, ...], form: str) -> None:
    with running(*ALWAYS, *flags) as cluster:
        first = answer(cluster)
        assert first
        assert answer(cluster) == first
        status = cluster.status()
        assert status["pairs"] == [{"prefill": "prefill-0", "decode": "decode-0", "form": form}]
        assert f"paired, {form}: prefill-0 to decode-0" in shown(cluster)
        wait_for(lambda: skipped_blocks(cluster) > 0, what="the decode worker had blocks of the second request")


def test_another_revision_is_refused_by_name_and_the_others_go_on(expected: str, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(bundled_model(), changed)
    weights = changed / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with running(*ALWAYS) as cluster:
        with another_worker(cluster, "decode-0", "decode-x", tmp_path, model_dir=str(changed), revision=""):
            wait_for(lambda: cluster.status()["refused_pairs"], what="the pair is refused")
            status = cluster.status()
            (refused,) = status["refused_pairs"]
            assert (refused["prefill"], refused["decode"]) == ("prefill-0", "decode-x")
            assert refused["why"].startswith("revision differs: ")
            assert refused["why"].endswith("both must serve the same model")
            assert status["pairs"] == [{"prefill": "prefill-0", "decode": "decode-0", "form": "exact"}]
            assert "never paired: prefill-0 and decode-x: revision differs: " in shown(cluster)
            assert status["is_ready"]
            for _ in range(3):
                assert answer(cluster) == expected
            admitted = {w["worker"]: w["counters"].get("requests_received", 0) for w in cluster.status()["workers"]}
            assert admitted["decode-x"] == 0
        wait_for(lambda: not cluster.status()["refused_pairs"], what="the other worker is gone")
