"""`clusterctl bench` and `replay` against real routers: figures, SLO gates, documents, pictures, wrong usage."""

import asyncio
import itertools
import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tandem.clusterctl import main as program
from tandem.clusterctl.loadgen.client import CHAT, Due, Target, TimedAnswer, send_all
from tandem.clusterctl.loadgen.requests import RequestForm, plan_of, poisson
from tandem.clusterctl.loadgen.results import Slo, report
from tandem.clusterctl.schemas.kinds import schema
from tandem.controlplane.simulator.traces import RequestLog, TraceRequest
from tests.integration.router.house import RouterHarness, builder

TLS = Path(__file__).parents[1] / "router" / "tls"
TRACE = [
    {"timestamp": at_ms, "input_length": 1000, "output_length": 6, "hash_ids": ids}
    for at_ms, ids in ((0, [1, 2]), (100, [1, 3]), (150, [4, 5]))
]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterHarness]:
    with builder(tmp_path_factory.mktemp("router")) as make:
        made = make()
        made.wait_ready()
        yield made


class OpenAi(BaseHTTPRequestHandler):
    """One model, one token."""

    def do_GET(self) -> None:
        self.answer(b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(b'data: {"choices": [{"text": "x"}]}\n\ndata: [DONE]\n\n')

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def secure_url() -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
    with ThreadingHTTPServer(("127.0.0.1", 0), OpenAi) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"https://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = program.run(list(arguments))
    return code, *capsys.readouterr()


def check(found: dict[str, Any], kind: str) -> None:
    assert found["kind"] == kind
    assert [str(error) for error in jsonschema_rs.Draft202012Validator(schema(kind)).iter_errors(found)] == []


@pytest.mark.parametrize("flags", [[], ["--chat"]])
def test_a_load_and_its_figures(
    capsys: pytest.CaptureFixture[str], house: RouterHarness, tmp_path: Path, flags: list[str]
) -> None:
    out, picture = tmp_path / "bench.json", tmp_path / "bench.svg"
    load = ["--rate", "200", "--requests", "20", "--prompt-tokens", "32,200", "--output-tokens", "8"]
    wish = ["--ttft", "30", "--attain", "1", "--out", str(out), "--plot", str(picture)]
    code, text, error = run(capsys, "bench", "--url", house.url, *load, *wish, "-o", "json", *flags)
    assert code == 0, error
    found = json.loads(text)
    check(found, "Bench")
    assert json.loads(out.read_text()) == found
    assert picture.read_text().startswith("<?xml")
    assert (found["requests"], found["failed"], found["errors"], found["model"]) == (20, 0, [], "tandem-tiny")
    assert found["output_tokens"] == 160
    assert (found["slo"]["share"], found["slo"]["is_met"]) == (1.0, True)
    assert [row["prompt_tokens"] for row in found["ttft_by_prompt"]] == [64, 256]
    assert sum(row["requests"] for row in found["ttft_by_prompt"]) == 20
    spread = found["ttft_s"]
    assert 0 < spread["p50"] <= spread["p90"] <= spread["p99"] <= spread["max"]
    assert "20 requests in" in error
    assert f"drawn: {picture}" in error


def test_a_file_that_cannot_be_written_loses_no_figures(
    capsys: pytest.CaptureFixture[str], house: RouterHarness
) -> None:
    load = ["--rate", "200", "--requests", "5", "--output-tokens", "4", "-o", "json"]
    code, text, error = run(capsys, "bench", "--url", house.url, *load, "--out", "/dev/full")
    assert (code, json.loads(text)["requests"]) == (1, 5)
    assert "No space left" in error


def test_no_proxy_is_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, house: RouterHarness
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    code, _, error = run(capsys, "bench", "--url", house.url, "--rate", "200", "--requests", "2")
    assert code == 0, error


def test_an_https_endpoint_is_trusted_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, secure_url: str
) -> None:
    """Trusted certificates are read before the first request, outside every time to first token."""
    made: list[ssl.SSLContext] = []
    real = ssl.create_default_context

    def counted() -> ssl.SSLContext:
        made.append(real())
        return made[-1]

    monkeypatch.setenv("SSL_CERT_FILE", str(TLS / "cert.pem"))
    monkeypatch.setattr(ssl, "create_default_context", counted)
    code, text, error = run(capsys, "bench", "--url", secure_url, "--rate", "200", "--requests", "5", "-o", "json")
    assert code == 0, error
    found = json.loads(text)
    assert (found["model"], found["requests"], found["failed"]) == ("m", 5, 0)
    assert len(made) == 1


def test_an_slo_that_is_missed_ends_with_8(capsys: pytest.CaptureFixture[str], house: RouterHarness) -> None:
    few = ["--rate", "200", "--requests", "5", "--output-tokens", "4"]
    code, text, error = run(capsys, "bench", "--url", house.url, *few, "--ttft", "0.000001", "--attain", "0.5")
    assert code == 8
    assert "the SLO was kept by 0.0% of the requests, not 50.0%" in error
    assert "goodput     TTFT 1e-06 s kept by 0.0%: 0.00 requests/s" in text
    assert run(capsys, "bench", "--url", house.url, *few, "--ttft", "0.000001")[0] == 0, "nothing was asked of it"


def test_a_trace_is_replayed_as_it_came(
    capsys: pytest.CaptureFixture[str], house: RouterHarness, tmp_path: Path
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in TRACE))
    before = len(house.workers["prefill-0"].submitted)
    flags = ["--url", house.url, "-o", "json"]
    code, text, error = run(capsys, "replay", str(file), "--shrink", "2", "--speed", "2", *flags)
    assert code == 0, error
    found = json.loads(text)
    check(found, "Replay")
    assert (found["requests"], found["failed"], found["prompt_tokens"], found["output_tokens"]) == (3, 0, 1500, 9)
    assert found["load"] == "trace"
    prompts = {tuple(submit.prompt) for submit in house.workers["prefill-0"].submitted[before:]}
    assert {len(prompt) for prompt in prompts} == {500}
    assert len({prompt[:256] for prompt in prompts}) == 2, "two begin with the same block"
    assert len({prompt[256:] for prompt in prompts}) == 3
    code, text, _ = run(capsys, "replay", str(file), "--limit", "1", "--shrink", "4", *flags)
    assert (code, json.loads(text)["requests"]) == (0, 1)


def test_what_nobody_answers_is_a_failure(capsys: pytest.CaptureFixture[str], house: RouterHarness) -> None:
    code, text, error = run(capsys, "bench", "--url", house.url, "--model", "nobody", "--requests", "2", "--rate", "99")
    assert code == 1
    assert "failed 2 times: HTTP/1.1 404 Not Found: model_not_found the model 'nobody' does not exist" in text
    assert "no request was answered" in error
    code, _, error = run(capsys, "bench", "--url", "http://127.0.0.1:1", "--requests", "2")
    assert code == 1
    assert "no OpenAI endpoint answers at http://127.0.0.1:1" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--rate", "0"], "--rate is 0"),
        (["bench", "--requests", "0"], "--requests is 0"),
        (["bench", "--prompt-tokens", "32,many"], "--prompt-tokens is '32,many'"),
        (["bench", "--attain", "2"], "--attain is 2"),
        (["bench", "--attain", "0.9"], "--attain is given without an SLO"),
        (["bench", "--plot", "bench.doc"], "--plot is 'bench.doc'"),
        (["replay", "no-such.csv"], "the trace no-such.csv cannot be read"),
        (["replay", "trace.txt"], "no reader for trace.txt"),
        (["replay", "trace.csv", "--speed", "0"], "--speed is 0"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    code, out, error = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in error
    assert len(error.splitlines()) == 1


# ---- the parts -----------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_requests() -> None:
    def made(seed: int) -> list[Due]:
        trace = poisson(requests=50, rate=10.0, prompts=[8, 16], outputs=[4], seed=seed)
        return plan_of(trace, RequestForm(model="m", headers={}), seed)

    assert made(1) == made(1)
    assert made(1) != made(2)
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(made(1))]
    assert len(set(gaps)) == 49, "not one like the other"
    assert made(1)[0].at_s == 0


def test_figures_of_answers_that_are_known() -> None:
    requests = tuple(TraceRequest(arrival_s=i / 10, prompt_tokens=50 + i, output_tokens=3) for i in range(4))
    answers = [TimedAnswer(due_s=i / 10, token_s=[i / 10 + 0.1 * (i + 1), 5.0, 5.5], sent_s=i / 10) for i in range(3)]
    answers.append(TimedAnswer(due_s=0.3, error="gone"))
    found = report(RequestLog(name="t", requests=requests), answers, Slo(ttft_s=0.25, least_share=0.5))
    assert (found["requests"], found["failed"], found["took_s"]) == (4, 1, 5.5)
    assert found["errors"] == [{"error": "gone", "requests": 1}]
    assert found["ttft_s"] == {"mean": 0.2, "p50": 0.2, "p90": 0.28, "p95": 0.29, "p99": 0.298, "max": 0.3}
    assert found["itl_s"]["max"] == pytest.approx(4.9)
    assert found["slo"]["share"] == 0.5
    assert found["slo"]["is_met"]
    assert found["slo"]["goodput_requests_per_s"] == pytest.approx(2 / 5.5, abs=1e-6)
    nothing = report(RequestLog(name="t", requests=requests[:1]), answers[3:], Slo(itl_s=1.0))
    assert (nothing["ttft_s"], nothing["slo"]["share"]) == (None, 0.0)


def test_what_brings_nothing_to_read_is_no_token(house: RouterHarness) -> None:
    """The role that a chat's stream begins with, its finish and its usage are events too."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "temperature": 0,
            "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}  # fmt: skip
    target = Target.of(f"{house.url}/v1", CHAT, is_strict=True)
    assert target.path == "/v1/chat/completions"
    (answer,) = asyncio.run(send_all(target, [Due(0.0, body)], 30.0))
    assert answer.error == ""
    assert answer.usage is not None
    assert answer.usage["completion_tokens"] == 5
    assert 1 <= len(answer.token_s) <= 5
    loose = Target.of(house.url, CHAT)
    (other,) = asyncio.run(send_all(loose, [Due(0.0, body)], 30.0))
    assert len(other.token_s) > len(answer.token_s)
