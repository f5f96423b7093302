"""SLO classes and budgets of a configuration file, through `clusterctl up` to the answers of clients."""

import urllib.request

from tests.integration.worker.pair import MODEL
from tools.running_cluster import running
from tools.waiting import wait_for

CONFIG = """
[slo.chat]
ttft_s = 30.0

[budget.anonymous]
requests_per_minute = 12
"""
BODY = {"model": "tandem-tiny", "prompt": "Hi", "max_tokens": 2}


def test_what_the_configuration_promises_and_bounds() -> None:
    with running("--engine", "sim", "--model", str(MODEL), config=CONFIG) as cluster:
        request = urllib.request.Request(
            f"{cluster.api}/v1/completions", b'{"model": "tandem-tiny", "prompt": "Hi", "max_tokens": 2}',
            {"Content-Type": "application/json", "X-SLO-Class": "chat"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.status == 200
        counted = "tandem_slo_requests_total"  # once the answer has been sent
        wait_for(lambda: cluster.metric(counted, slo="chat", outcome="met") == 1, what="a promise was kept")
        statuses = [cluster.post("/v1/completions", BODY) for _ in range(6)]
        refused = [answer for status, answer in statuses if status == 429]
        assert refused, "ten seconds' worth of twelve a minute are two"
        assert refused[0]["error"]["code"] == "rate_limit_exceeded"
        assert "12 requests a minute" in refused[0]["error"]["message"]
