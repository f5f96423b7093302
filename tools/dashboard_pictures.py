"""Draw the dashboards from a real run: a simulated cluster under load that loses a worker, scraped by Prometheus.

    python -m tools.dashboard_pictures --prometheus PATH [--seconds 150] [--out docs/operate]

`--prometheus` is the program, such as `usr/bin/prometheus` out of Debian's package.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tools.dashboards import COLUMNS, DASHBOARDS, Panel
from tools.running_cluster import Cluster, kill, running
from tools.waiting import wait_for

STEP_S: Final = 2
CONFIG: Final = """
[slo.fast]
ttft_s = 0.5
itl_s = 0.05
[admission]
default_slo = "fast"
[planner]
mode = "advise"
[price]
prefill = 2.0
decode = 1.0
[worker.sim]
prefill_tokens_per_s = 8000.0
decode_step_s = 0.01
"""
FLAGS: Final = ("--engine", "sim", "--prefill", "2", "--decode", "2", "--disaggregation", "always")
_UNITS: Final = {"s": "s", "Bps": "bytes/s", "reqps": "a second", "percentunit": "share", "short": ""}


def ask(cluster: Cluster, seconds: float, seed: int, calm_s: float) -> None:
    """One client for so long, with `calm_s` on average between two requests. Failures show in the metrics."""
    rng, end_s = random.Random(seed), time.monotonic() + seconds
    shared = [[rng.randrange(600, 3000) for _ in range(400)] for _ in range(3)]
    while time.monotonic() < end_s:
        prompt = rng.choice(shared) + [rng.randrange(600, 3000) for _ in range(rng.randrange(50, 600))]
        body = {"model": "tandem-tiny", "prompt": prompt, "max_tokens": rng.randrange(10, 80), "temperature": 0}
        with contextlib.suppress(OSError):
            cluster.post("/v1/completions", body)
        threading.Event().wait(rng.expovariate(1 / calm_s))


@contextlib.contextmanager
def prometheus(program: Path, cluster: Cluster) -> Iterator[str]:
    """Start a Prometheus server that scrapes the cluster every second; yields its URL."""
    target = urllib.parse.urlsplit(cluster.context["admin"]).netloc
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        config = Path(folder) / "prometheus.yml"
        jobs = [{"job_name": "tandem", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}]
        config.write_text(json.dumps({"scrape_configs": jobs}))
        command = [str(program), f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
        command += [f"--web.listen-address={address}", "--log.level=error"]
        process = subprocess.Popen(command)
        try:
            wait_for(lambda: _is_up(address), 30, "Prometheus answers")
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait(timeout=30)


def series(url: str, query: str, start_s: float, end_s: float) -> list[dict[str, Any]]:
    """Values that Prometheus returns for an expression over that time."""
    text = query.replace("$__rate_interval", "20s")
    wanted = urllib.parse.urlencode({"query": text, "start": start_s, "end": end_s, "step": STEP_S})
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{wanted}", timeout=30) as response:
        return list(json.load(response)["data"]["result"])


def draw(name: str, url: str, start_s: float, end_s: float, path: Path) -> list[str]:
    """Draw one picture; returns the titles of panels without data."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    title, panels = DASHBOARDS[name]
    rows = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(15, 3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    empty = [
        panel.title for panel, axis in zip(panels, axes, strict=False) if not _plot(axis, panel, url, start_s, end_s)
    ]
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    figure.suptitle(title)
    figure.savefig(path, dpi=70)
    return empty


def _plot(axis: Any, panel: Panel, url: str, start_s: float, end_s: float) -> int:
    count = 0
    for query, legend in panel.queries:
        for found in series(url, query, start_s, end_s):
            label = legend
            for key, value in found["metric"].items():
                label = label.replace("{{" + key + "}}", value)
            times, values = zip(*((float(at) - start_s, float(value)) for at, value in found["values"]), strict=True)
            axis.plot(times, values, label=label, linewidth=1.2)
            count += 1
    axis.set_title(panel.title, fontsize=10)
    axis.set_ylabel(_UNITS[panel.unit], fontsize=8)
    axis.set_xlim(0, end_s - start_s)
    axis.set_ylim(0, 1.15 * max([1e-3, *(max(line.get_ydata()) for line in axis.lines)]))
    if count:
        axis.legend(fontsize=6, ncols=2)
    return count


def _is_up(address: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/-/ready", timeout=2) as response:
        return bool(response.status == 200)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prometheus", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--out", type=Path, default=Path("docs/operate"))
    wants = parser.parse_args()
    with running(*FLAGS, config=CONFIG) as cluster, prometheus(wants.prometheus, cluster) as url:
        start_s = time.time()
        clients = [threading.Thread(target=ask, args=(cluster, wants.seconds, seed, 0.3)) for seed in range(4)]
        for client in clients:
            client.start()
        threading.Event().wait(wants.seconds / 2)
        kill(cluster.pids()["decode-1"][0])
        for client in clients:
            client.join()
        end_s = time.time()
        for name in DASHBOARDS:
            empty = draw(name, url, start_s, end_s, wants.out / f"dashboard-{name}.png")
            sys.stdout.write(f"{name}: nothing to show in {', '.join(empty) or 'no panel'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
