"""One machine needs no Ray: a cluster serves and goes down where `import ray` fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tandem.engine.sim.arithmetic import expected_tokens
from tests.integration.worker.pair import MODEL
from tools.running_cluster import STOP_TIMEOUT_S, is_alive, started
from tools.waiting import wait_for

PROMPT = [(7 * k) % 3000 + 600 for k in range(40)]
ORACLE = expected_tokens(PROMPT, 10, 4096, eos_token_ids=(1,))
BROKEN = 'raise ImportError("this Ray is broken")\n'


def test_a_cluster_of_one_machine_serves_and_goes_down_without_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packages" / "ray"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")]))
    tried = subprocess.run([sys.executable, "-c", "import ray"], capture_output=True, text=True, check=False)
    assert "this Ray is broken" in tried.stderr
    folder = tmp_path / "state"
    folder.mkdir()
    with started("--engine", "sim", "--threads", "1", "--model", str(MODEL), folder=folder) as cluster:
        answer = cluster.complete(PROMPT, 10)
        assert answer["choices"][0]["text"] == Tokenizer.from_file(str(MODEL / "tokenizer.json")).decode(ORACLE)
        pids = [pid for worker in cluster.pids().values() for pid in worker]
        assert len(pids) >= 2
        code, _, error = cluster.clusterctl("down", "--yes")
        assert code == 0, error
        assert cluster.process.wait(STOP_TIMEOUT_S) == 0, cluster.output + cluster.logs()
        wait_for(lambda: not [pid for pid in pids if is_alive(pid)])
        assert "this Ray is broken" not in cluster.output + cluster.logs()
