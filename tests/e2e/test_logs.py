"""Logs of a whole cluster as JSON: lines of a request are found by its id, nothing that a client sent is in them."""

import concurrent.futures
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tools.otlp_receiver import Receiver, receiving
from tools.running_cluster import Cluster, kill, running
from tools.waiting import wait_for

PROMPT = "planted-prompt " * 30
TOKENS = [613 + 11 * k for k in range(120)]
HEADERS = {"x-custom": "planted-header", "cookie": "planted-cookie", "baggage": "k=planted-baggage"}
SLOW = "[worker.sim]\ndecode_step_s = 0.05\n"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=planted-for-the-receiver")
        patch.setenv("TANDEM_LOG_FORMAT", "json")
        yield receiver


@pytest.fixture(scope="module")
def cluster(receiver: Receiver) -> Iterator[Cluster]:
    config = f'log_level = "DEBUG"\n[tracing]\nendpoint = "{receiver.url}"\n{SLOW}'
    flags = ("--engine", "sim", "--prefill", "1", "--decode", "2", "--disaggregation", "always")
    with running(*flags, config=config) as cluster:
        yield cluster


def logs_of(cluster: Cluster) -> dict[str, str]:
    """Return the output of its processes, Redis apart, by file."""
    folder = cluster.folder / "tandem" / "logs"
    return {path.name: path.read_text() for path in folder.glob("*.log") if "redis" not in path.name}


def clusterctl(cluster: Cluster, *words: str) -> str:
    code, out, error = cluster.clusterctl(*words)
    assert code == 0, error
    return out


def struck(cluster: Cluster, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
    """Return an answer with a decode worker that is killed in the midst of it."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx.post, f"{cluster.api}/v1/completions", json=body, headers=headers, timeout=60)

        def victim() -> str:
            rows = cluster.admin("/admin/v1/requests")["requests"]
            return next((str(row["decode"]) for row in rows if row["output_tokens"] > 2), "")

        kill(cluster.pids()[wait_for(victim)][0])
        return waiting.result(60)


@pytest.fixture(scope="module")
def asked(cluster: Cluster) -> tuple[httpx.Response, list[str]]:
    """A struck answer, after requests of every kind with secrets wherever a client can write; and the secrets."""
    key = clusterctl(cluster, "key", "create", "--tenant", "me", "--yes").strip()
    headers = {**HEADERS, "authorization": f"Bearer {key}"}
    body = {"model": "tandem-tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True,
            "stop": "planted-stop", "user": "planted-user", "cache_salt": "planted-salt"}  # fmt: skip
    chat = {"model": "tandem-tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
    kept = {"model": "tandem-tiny", "input": PROMPT, "max_output_tokens": 4}
    with httpx.Client(base_url=cluster.api, headers=headers, timeout=60) as client:
        sent = {
            "/v1/completions": [body | wrong for wrong in ({"prompt": TOKENS}, {"model": "planted"}, {"n": "planted"})],
            "/v1/chat/completions": [chat, chat | {"messages": "planted-messages"}],
            "/v1/responses": [kept],
        }
        codes = [client.post(path, json=one).status_code for path, bodies in sent.items() for one in bodies]
        assert codes == [200, 404, 400, 200, 400, 200]
        wrong = {"authorization": "Bearer planted-key"}
        assert client.post("/v1/completions", json=body, headers=wrong).status_code == 401
    answer = struck(cluster, body, headers)
    assert answer.status_code == 200, answer.text
    state = cluster.folder / "tandem"
    secrets = [path.read_text().strip() for path in (state / "admin.key", state / "secret")]
    return answer, [key, *secrets, answer.json()["choices"][0]["text"]]


def test_lines_of_a_request_are_found_by_its_id(
    cluster: Cluster, receiver: Receiver, asked: tuple[httpx.Response, list[str]]
) -> None:
    request = asked[0].headers["x-request-id"]
    root = receiver.root(request)
    documents = [json.loads(line) for text in logs_of(cluster).values() for line in text.splitlines()]
    assert {key for one in documents if "event" not in one for key in one} <= {"progress", "ready"}, "of its launcher"
    lines = [one for one in documents if "event" in one]
    assert {"router", "prefill-0", "decode-0", "decode-1", "up"} <= {line["component"] for line in lines}
    assert all({"time", "level"} <= set(line) for line in lines)
    (failed,) = [line for line in lines if line.get("request") == request and line["event"] == "attempt failed"]
    assert (failed["component"], failed["trace"], failed["attempt"], failed["cause"]) == (
        "router", root.trace, 1, "lost",
    )  # fmt: skip
    shown = clusterctl(cluster, "logs", "--request-id", request)
    assert f"attempt failed request={request} trace={root.trace} attempt=1 cause=lost" in shown


def test_nothing_that_a_client_sent_is_in_logs_or_spans(
    cluster: Cluster, receiver: Receiver, asked: tuple[httpx.Response, list[str]]
) -> None:
    receiver.root(asked[0].headers["x-request-id"])
    posted = b"".join(receiver.bodies)
    assert {"api-key": "planted-for-the-receiver"}.items() <= receiver.headers[-1].items()
    for name, text in {**logs_of(cluster), "spans": posted.decode("latin-1")}.items():
        assert text, name
        assert "planted" not in text, name
        assert ", ".join(map(str, TOKENS[:3])) not in text.replace(",", ", ").replace("  ", " "), name
        for secret in asked[1]:
            assert secret not in text, name
