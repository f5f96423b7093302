"""A container's probe of itself: of a router by HTTP or TLS, of a worker by gRPC's health service."""

import json
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tandem.controlplane.container_entrypoints.readiness_probe import main, probe

TLS = Path(__file__).resolve().parents[3] / "integration" / "router" / "tls"


class _Answers(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/readyz" else 404)
        self.end_headers()
        self.wfile.write(b"nobody computes prompts")

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""


@contextmanager
def router(folder: Path, status: int, *, is_tls: bool = False) -> Iterator[None]:
    """A server that answers /readyz so, and the file by which it is found."""
    handler = type("_Handler", (_Answers,), {"status": status})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        if is_tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        (folder / "router").mkdir()
        url = f"{'https' if is_tls else 'http'}://127.0.0.1:{server.server_port}"
        (folder / "router" / "router.ready.json").write_text(json.dumps({"http": url}))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "tls"])
def test_a_router_is_ready_when_it_says_so(is_tls: bool, tmp_path: Path) -> None:
    """Its certificate is not for 127.0.0.1, and its name is not checked."""
    with router(tmp_path, 200, is_tls=is_tls):
        assert probe(tmp_path, 5) == ""


def test_why_a_router_is_not_ready(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with router(tmp_path, 503):
        assert main(["--folder", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "503: nobody computes prompts\n"


def test_a_proxy_of_the_environment_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with router(tmp_path, 200):
        assert probe(tmp_path, 5) == ""


def test_a_worker_is_ready_when_its_health_service_says_so(tmp_path: Path) -> None:
    server, servicer = grpc.server(ThreadPoolExecutor(2)), health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    (tmp_path / "worker").mkdir()
    (tmp_path / "worker" / "worker.json").write_text(json.dumps({"host": "127.0.0.1", "port": port}))
    server.start()
    try:
        servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        assert probe(tmp_path, 5) == ""
        servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert probe(tmp_path, 5) == "NOT_SERVING"
    finally:
        server.stop(None).wait()
    assert probe(tmp_path, 5).startswith("it does not answer: ")


@pytest.mark.parametrize("content", ["{", "{}", '{"http": "http://127.0.0.1:1"}'])
def test_a_file_that_says_nothing_is_no_router(content: str, tmp_path: Path) -> None:
    (tmp_path / "router").mkdir()
    (tmp_path / "router" / "router.ready.json").write_text(content)
    assert probe(tmp_path, 5).startswith("it does not answer: ")


def test_nothing_runs_in_an_empty_folder(tmp_path: Path) -> None:
    assert probe(tmp_path, 5) == f"nothing runs yet in {tmp_path}"
