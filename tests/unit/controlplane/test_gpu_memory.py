"""Leftovers on a GPU are found and named in what `nvidia-smi` lists. The listings have the form that it documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tandem.controlplane.gpu_memory import GpuMemoryWait, HeldGpuError, count, occupied
from tandem.core.clock import ManualClock

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
