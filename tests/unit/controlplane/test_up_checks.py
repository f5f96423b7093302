"""Test the checks of `up` before a start: leftovers on GPUs, and the KV plan."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tandem.controlplane import gpu_free_check
from tandem.controlplane.gpu_free_check import GpuMemoryWait, HeldGpuError, count, occupied
from tandem.controlplane.kv_plan import KVPlan, kv_plan
from tandem.controlplane.model_catalog import bundled_model
from tandem.controlplane.worker_settings import divide_cores
from tandem.core.clock import ManualClock
from tandem.core.config import SIM_KV_BYTES, ClusterConfig, LauncherName, RoleSection, WorkerSection
from tandem.core.state_enums import RoleName

GPUS = """0, GPU-aaaa, 4, 81559
1, GPU-bbbb, 61440, 81559
2, GPU-cccc, [N/A], [N/A]
"""
PROCESSES = """GPU-bbbb, 7, 60000
GPU-bbbb, 8, 1400
"""


def answering(gpus: str = GPUS, processes: str = PROCESSES) -> Callable[[Sequence[str]], str]:
    return lambda command: processes if "compute-apps" in command[1] else gpus


@pytest.mark.parametrize("gpu", ["1", "GPU-bbbb"])
def test_what_somebody_holds_is_named_with_its_processes(gpu: str) -> None:
    assert occupied(["0", gpu], answering()) == "GPU 1 has 61440 of 81559 MiB in use (process 7, 8)"


def test_what_a_screen_needs_does_not_go_away() -> None:
    assert occupied(["1"], answering(processes="")) == "GPU 1 has 61440 of 81559 MiB in use"
    assert occupied(["1"], answering(processes=""), only_by_programs=True) == ""
    assert occupied(["1"], answering(), only_by_programs=True) == "GPU 1 has 61440 of 81559 MiB in use (process 7, 8)"


def test_an_empty_gpu_is_free_and_others_do_not_matter() -> None:
    assert occupied(["0", "2"], answering()) == ""


@pytest.mark.slow
def test_a_machine_that_cannot_tell_stands_in_nobodys_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert occupied(["0"]) == ""
    assert count() == 0


def test_what_is_in_the_way_is_told_when_it_changes_but_not_all_the_time() -> None:
    clock = ManualClock()
    patience = GpuMemoryWait(60.0, where="on 10.0.0.2", now_s=clock.now_s)
    told = []
    for second in range(60):
        told.append(patience.note("GPU 0" if second < 30 else f"GPU {second}"))
        clock.advance(1.0)
    heard = {second: text for second, text in enumerate(told) if text}
    assert heard == {s: f"waiting for a place: on 10.0.0.2, GPU {s}" for s in (0, 30, 40, 50)}
    with pytest.raises(HeldGpuError, match="it got no place within 60 s: on "):
        patience.note("GPU 9")


GIB, MIB = 1 << 30, 1 << 20
TOKEN_BYTES = 2560
"""Of the bundled model, in the float32 of its checkpoint."""


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_free_check, "can_tell", lambda: False)


def planned(max_model_len: int = 0, **settings: object) -> KVPlan:
    section = dataclasses.replace(WorkerSection(), **settings)  # type: ignore[arg-type]
    return kv_plan(Path(bundled_model()), section, dtype="auto", quantize="none", max_model_len=max_model_len)


def test_a_size_that_is_given_is_exact() -> None:
    found = planned(kv_memory_bytes=64 * MIB)
    assert (found.is_automatic, found.memory_bytes) == (False, 64 * MIB)
    assert found.tokens == 64 * MIB // TOKEN_BYTES // 16 * 16
    assert found.words() == "64MiB of KV, 26,208 tokens, 6.4 full contexts"


def test_weights_are_counted_in_the_format_that_auto_chooses() -> None:
    section = dataclasses.replace(WorkerSection(), memory_bytes=GIB // 4, automatic_kv_share=0.5)
    tokens = {
        kind: kv_plan(Path(bundled_model()), section, dtype="auto", quantize=kind, max_model_len=0).tokens or 0
        for kind in ("none", "int8", "auto")
    }
    assert tokens["auto"] == tokens["int8"] > tokens["none"]


def test_packed_weights_are_counted_as_what_they_are_read_into(tmp_path: Path) -> None:
    """Plan for an empty file of packed weights; a CPU computes float16 in bfloat16."""
    source = Path(bundled_model())
    section = dataclasses.replace(WorkerSection(), memory_bytes=GIB // 4, automatic_kv_share=0.5)
    config = json.loads((source / "config.json").read_text())
    packed = {"quantization_config": {"quant_method": "awq", "bits": 4}, "torch_dtype": "float16", "dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps({**config, **packed}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    tokens = [
        kv_plan(folder, section, dtype=dtype, quantize=kind, max_model_len=0).tokens or 0
        for folder, dtype, kind in (
            (tmp_path, "auto", "auto"), (tmp_path, "auto", "none"), (source, "bfloat16", "none"),
        )
    ]  # fmt: skip
    assert tokens[0] > tokens[1]
    assert abs(tokens[1] / tokens[2] - 1) < 0.02


def test_one_that_is_too_small_holds_nothing_and_the_worker_says_why() -> None:
    found = planned(kv_memory_bytes=MIB)
    assert (found.tokens, found.contexts, found.words()) == (None, None, "1024KiB of KV")


def test_an_automatic_one_is_what_is_left_and_no_more_than_runs_at_once() -> None:
    half, all_of_it = (planned(memory_bytes=GIB // 2, automatic_kv_share=share) for share in (0.25, 0.5))
    assert half.tokens is not None
    assert all_of_it.tokens is not None
    assert 0 < half.tokens < GIB // 2 // 4 // TOKEN_BYTES
    assert abs(all_of_it.tokens - 2 * half.tokens) <= 32
    most = planned(memory_bytes=64 * GIB)
    assert (most.tokens, most.contexts) == (64 * 4096, 64)
    assert most.words() == "about 640MiB of KV, 262,144 tokens, 64.0 full contexts"
    assert planned(memory_bytes=64 * GIB, max_sequences=8, max_model_len=1024).tokens == 8 * 1024


@pytest.mark.parametrize("settings", [{}, {"device": "cuda", "memory_bytes": GIB}, {"memory_bytes": MIB}])
def test_what_only_the_worker_can_tell(settings: dict[str, object]) -> None:
    """On another machine, on a GPU; and where nothing fits."""
    found = planned(**settings)  # type: ignore[arg-type]
    assert (found.is_automatic, found.memory_bytes, found.tokens) == (True, None, None)
    assert found.words() == "KV as there is room"


def test_a_sim_engine_takes_a_quarter_of_a_gib_or_one_context() -> None:
    assert planned(engine="sim").memory_bytes == SIM_KV_BYTES


COUNTS = {RoleName.PREFILL: 1, RoleName.DECODE: 3, RoleName.MIXED: 0}


def test_a_machines_memory_is_divided_by_its_workers() -> None:
    config = ClusterConfig(decode=RoleSection(kv_memory_bytes=64 * MIB))
    workers = divide_cores(config, COUNTS, 8, 16 * GIB)
    assert {role: one.memory_bytes for role, one in workers.items()} == dict.fromkeys(COUNTS, 4 * GIB)
    assert (workers[RoleName.PREFILL].kv_memory_bytes, workers[RoleName.DECODE].kv_memory_bytes) == (0, 64 * MIB)


def test_what_was_given_stays_and_rays_machines_find_out_themselves() -> None:
    given = ClusterConfig(worker=WorkerSection(memory_bytes=GIB))
    assert divide_cores(given, COUNTS, 8, 16 * GIB)[RoleName.DECODE].memory_bytes == GIB
    ray = ClusterConfig(launcher=LauncherName.RAY)
    assert divide_cores(ray, COUNTS, 8, 16 * GIB)[RoleName.DECODE].memory_bytes == 0
