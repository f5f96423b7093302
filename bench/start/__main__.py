"""How long a worker takes to be ready, process start included, what each second goes to; and a user's first starts.

Warm: clusters with one mixed worker are started in turns over the models: the bundled one, and a billion parameters
with random weights. `limit` of the whole is the time allowed; that of a model's own part (torch, weights, packing) is
what a bare process takes to import torch and read the same files once. Files are in the page cache: every model is
started once before it is measured. First starts are those of `cold.py`.
"""

from __future__ import annotations

import itertools
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.models import model_1b
from bench.report import Row, arguments_of, publish
from bench.start import cold
from tandem.kernels.installing import install
from tools.random_model import BUNDLED
from tools.running_cluster import running

READY_LIMIT_S = {"bundled": 4.0, "1B": 8.0}
BARE = "import pathlib, sys, torch; [p.read_bytes() for p in pathlib.Path(sys.argv[1]).glob('*.safetensors')]"
OF_THE_MODEL = ("torch_s", "weights_s")


def started(model: Path) -> dict[str, float]:
    """Phase → seconds, `took_s` of all, as the worker reports them."""
    with running("--mixed", "1", "--prefill", "0", "--decode", "0", "--model", str(model)) as cluster:
        logs = "\n".join(file.read_text(errors="replace") for file in cluster.folder.rglob("*.log"))
    (line,) = [line for line in logs.splitlines() if " worker started " in line and "took_s=" in line]
    return {name: float(value) for name, value in re.findall(r"(\w+_s)=([\d.]+)", line)}


def bare(model: Path) -> float:
    """Seconds of a process that imports torch and reads the model's files."""
    began_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", BARE, str(model)], check=True)
    return time.perf_counter() - began_s


def warm(starts: int) -> list[Row]:
    """Starts of one mixed worker, by its own times."""
    models = {"bundled": BUNDLED, "1B": model_1b()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in models}
    beside: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(starts + 1):
        for name, model in models.items():
            print(f"start {turn} of {starts}, {name}", flush=True)
            took, bare_s = started(model), bare(model)
            if turn:
                found[name].append(took)
                beside[name].append(bare_s)
    rows = []
    for name, taken in found.items():
        median = {phase: statistics.median(start[phase] for start in taken) for phase in taken[0]}
        rows.append(Row(name, "ready", median.pop("took_s"), "s", READY_LIMIT_S[name]))
        own_s = sum(median[phase] for phase in OF_THE_MODEL)
        rows.append(Row(name, "torch and weights", own_s, "s", statistics.median(beside[name])))
        rows += [Row(name, phase.removesuffix("_s"), seconds, "s") for phase, seconds in median.items()]
    return rows


def first(starts: int) -> list[Row]:
    """Of whole clusters, by the clock of the launching process; a cache is empty in each start of a case that has it
    so."""
    models: dict[str, Path | None] = {"tiny": None}
    if (found := cold.smollm2()) is not None:
        models["SmolLM2"] = found
    else:
        print("SmolLM2 cannot be fetched: the bundled model alone")
    install(lambda line: print(f"kernels: {line}", flush=True))
    taken: dict[str, list[cold.Took]] = {}
    limits: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory(prefix="td-cold-") as folder:
        cases = cold.cases(Path(folder))
        for turn, case, (name, model) in itertools.product(range(starts), cases, models.items()):
            key = f"{name}, {case.name}"
            print(f"start {turn + 1} of {starts}, {key}", flush=True)
            taken.setdefault(key, []).append(cold.took(case, model))
            limits[key] = None if case.name == cold.COMPILES else cold.READY_LIMIT_S[name]
    rows = []
    for key, every in taken.items():
        rows.append(Row(key, "ready", statistics.median(one.ready_s for one in every), "s", limits[key]))
        rows.append(Row(key, "CPU time", statistics.median(one.cpu_s for one in every), "s"))
    return rows


def main() -> int:
    parser = arguments_of("start", __doc__)
    parser.add_argument("--starts", type=int, default=5, help="of each model and case (default: 5)")
    parser.add_argument("--part", choices=("all", "warm", "first"), default="all", help="which starts (default: all)")
    arguments = parser.parse_args()
    rows = warm(arguments.starts) if arguments.part != "first" else []
    if arguments.part != "warm":
        rows += first(arguments.starts)
    publish("start", rows, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
