"""Pictures of the operators' page for its documentation: light, dark and narrow, of a cluster under load that answers.

.venv/bin/python -m tools.page_pictures
"""

from __future__ import annotations

import argparse
import base64
import random
import threading
from pathlib import Path

from tandem.controlplane.environment import Environment
from tandem.controlplane.model_catalog import SMOLLM2, root_of
from tandem.controlplane.model_download import pull
from tools.browser import Browser, browsing
from tools.running_cluster import Cluster, running

ROOT = Path(__file__).resolve().parents[1]
CONFIG = """
[slo.chat]
ttft_s = 2.0
itl_s = 0.1
[admission]
default_slo = "chat"
[planner]
mode = "advise"
"""
CLIENTS, MEASURED, SHARED_TOKENS = 2, 16, 200
"""`MEASURED` slots of five seconds are shown."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "operate", help="where page-*.png are written")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    model = pull(SMOLLM2, root_of(Environment.read().models_root))
    flags = ("--model", str(model), "--disaggregation", "always", "--threads", "1", "--kv-memory", "256MiB")
    pools = ("--prefill", "2", "--decode", "3")
    with running(*flags, *pools, config=CONFIG) as cluster, browsing() as browser:
        _take(browser, cluster, out)


def _take(browser: Browser, cluster: Cluster, out: Path) -> None:
    is_over = threading.Event()
    clients = [threading.Thread(target=_ask, args=(cluster, number, is_over)) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        browser.set_size(1280, 1000)
        browser.enter(cluster)
        slots = f"document.querySelector('.figure path')?.getAttribute('d')?.split(/[ML]/).length > {MEASURED}"
        browser.wait(slots, timeout_s=10.0 * MEASURED, what="the curves have some length")
        browser.click("#send")
        browser.wait("document.querySelector('#talk .answer .request')", what="the chat was answered")
        for name, width, is_dark in (("light", 1280, False), ("dark", 1280, True), ("narrow", 360, False)):
            browser.set_size(width, 1000 if width > 1000 else 1600)
            browser.set_dark(is_dark)
            browser.driver.execute_script("document.activeElement.blur(); window.scrollTo(0, 0);")
            shown = browser.driver.execute_cdp_cmd(
                "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": width > 1000}
            )
            (out / f"page-{name}.png").write_bytes(base64.b64decode(shown["data"]))
    finally:
        is_over.set()
        for client in clients:
            client.join()


def _ask(cluster: Cluster, seed: int, is_over: threading.Event) -> None:
    """Send one request after the other; some have a common beginning."""
    draw = random.Random(seed)
    shared = [[600 + (31 * number + place) % 3000 for place in range(SHARED_TOKENS)] for number in range(3)]
    while not is_over.is_set():
        prompt = draw.choice(shared) + [draw.randrange(600, 3600) for _ in range(draw.randrange(20, 200))]
        body = {"model": SMOLLM2.name, "prompt": prompt, "max_tokens": draw.randrange(20, 120), "ignore_eos": True}
        cluster.post("/v1/completions", body)
        is_over.wait(draw.expovariate(2.0))


if __name__ == "__main__":
    main()
