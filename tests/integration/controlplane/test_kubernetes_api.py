"""The client of the Kubernetes API against an emulated server: what it asks, and what it makes of each refusal."""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.controlplane.kubernetes import api as api_module
from tandem.controlplane.kubernetes import pods
from tandem.controlplane.kubernetes.api import ExpiredError, KubernetesApi, PodChange
from tandem.core.errors import ConfigError, ConflictError, NotFoundError, UnavailableError
from tests.integration.deploy.emulated import TOKEN, Cluster, serving

SELECTOR = "app=worker"
LABELS = {"app": "worker", pods.POOL: "decode", pods.ROLE: "decode", pods.REVISION: "r1"}


@pytest.fixture
def cluster() -> Cluster:
    found = Cluster()
    found.add_deployment("demo-decode", 3, {"labels": LABELS})
    found.add_deployment("other", 1, {"labels": {"app": "other"}})
    found.settle_replicas()
    return found


@pytest.fixture
def url(cluster: Cluster) -> Iterator[str]:
    with serving(cluster) as found:
        yield found


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    return tmp_path


def ask(
    url: str, account: Path, scene: Callable[[KubernetesApi], Coroutine[Any, Any, Any]], *, space: str = "",
    timeout_s: float = 30.0,
) -> Any:  # fmt: skip
    async def run() -> Any:
        async with KubernetesApi(url, account, space or "serving", timeout_s=timeout_s) as api:
            return await asyncio.wait_for(scene(api), 60)

    return asyncio.run(run())


def test_pods_are_listed_page_by_page(
    url: str, account: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "PAGE_PODS", 2)
    found = ask(url, account, lambda api: api.pods(SELECTOR))
    assert [pods.read(pod).name for pod in found.pods] == cluster.live("demo-decode")
    assert {pods.read(pod).pool for pod in found.pods} == {"decode"}


def test_a_watch_tells_what_comes_changes_and_goes(url: str, account: Path, cluster: Cluster) -> None:
    first, second, _ = cluster.live("demo-decode")

    async def scene(api: KubernetesApi) -> list[PodChange]:
        listed = await api.pods(SELECTOR)
        cluster.delete_pod(first)
        cluster.remove_pod(first)
        cluster.touch("other-7d9f-00003", lambda pod: pod["status"].update(phase="Running"))
        seen: list[PodChange] = []
        async for change in api.watch_pods(SELECTOR, listed.version):
            seen.append(change)
            if len(seen) == 2:
                await api.patch_pod(second, labels={pods.ROLE: "prefill"}, annotations={pods.MEMBER: "7"})
            if pods.read(change.pod).name == second:
                return seen
        return seen

    seen = ask(url, account, scene)
    assert [(pods.read(change.pod).name, change.is_gone) for change in seen[:2]] == [(first, False), (first, True)]
    assert pods.read(seen[0].pod).is_leaving
    marked = pods.read(seen[-1].pod)
    assert (marked.name, marked.role, marked.member_since, marked.is_victim) == (second, "prefill", 7, False)
    assert seen[-1].pod["metadata"]["labels"]["app"] == "worker", "a patch leaves other labels alone"


def test_a_version_that_is_known_no_more_has_to_be_listed_anew(url: str, account: Path, cluster: Cluster) -> None:
    async def watch(api: KubernetesApi, version: str) -> None:
        async for _ in api.watch_pods(SELECTOR, version):
            cluster.forget()
            cluster.add_deployment("third", 1, {"labels": {"app": "third"}})  # the server notices at the next look

    version = ask(url, account, lambda api: api.pods(SELECTOR)).version
    cluster.delete_pod(cluster.live("demo-decode")[0])
    cluster.forget()
    with pytest.raises(ExpiredError, match="too old"):
        ask(url, account, lambda api: watch(api, version))
    later = ask(url, account, lambda api: api.pods(SELECTOR)).version
    cluster.delete_pod(cluster.live("demo-decode")[0])
    with pytest.raises(ExpiredError, match="too old"):
        ask(url, account, lambda api: watch(api, later))


def test_of_two_who_set_a_scale_one_wins(url: str, account: Path, cluster: Cluster) -> None:
    async def scene(api: KubernetesApi) -> None:
        scale = await api.scale("demo-decode")
        assert scale.replicas == 3
        after = await api.set_scale("demo-decode", 0, version=scale.version)
        assert after.replicas == 0
        with pytest.raises(ConflictError, match="has been modified"):
            await api.set_scale("demo-decode", 5, version=scale.version)
        assert (await api.scale("demo-decode")).replicas == 0

    ask(url, account, scene)
    assert cluster.writes == [("demo-decode", "0")]


def test_every_refusal_is_told_apart(url: str, account: Path, cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="gone"):
        ask(url, account, lambda api: api.patch_pod("gone", labels={}, annotations={}))
    with pytest.raises(UnavailableError, match=r"403 forbidden\. See that the controller's Role"):
        ask(url, account, lambda api: api.pods(SELECTOR), space="elsewhere")
    cluster.is_away = True
    with pytest.raises(UnavailableError, match="503"):
        ask(url, account, lambda api: api.pods(SELECTOR))
    cluster.is_away = False
    (account / "token").write_text("another")
    with pytest.raises(UnavailableError, match="401"):
        ask(url, account, lambda api: api.pods(SELECTOR))
    (account / "token").unlink()
    with pytest.raises(UnavailableError, match="token"):
        ask(url, account, lambda api: api.pods(SELECTOR))
    with pytest.raises(ConfigError, match=r"ca\.crt"):
        ask("https://127.0.0.1:1", tmp_path / "none", lambda api: api.pods(SELECTOR))


def answering(*parts: bytes, then_wait: bool = False) -> tuple[str, Callable[[], None]]:
    """A server that answers every request with these bytes, and the function that ends it."""
    listening = socket.create_server(("127.0.0.1", 0))
    is_over = threading.Event()

    def serve() -> None:
        with listening, listening.accept()[0] as connection:
            connection.recv(65536)
            try:
                for part in parts:
                    connection.sendall(part)
            except OSError:
                return
            if then_wait:
                is_over.wait(30)

    thread = threading.Thread(target=serve)
    thread.start()

    def end() -> None:
        is_over.set()
        thread.join(30)

    return f"http://127.0.0.1:{listening.getsockname()[1]}", end


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("parts", "is_waiting", "says"),
    [
        ((), True, "does not answer"),
        ((HEAD, b"{"), True, "does not answer"),
        ((HEAD, b"<html>"), False, "not understood"),
        ((HEAD, b"[]"), False, "not understood: no object"),
        ((HEAD, b'{"items": {}, "metadata": {}}'), False, "a list without objects"),
        ((HEAD, b'{"items": []}'), False, "no metadata"),
        ((HEAD, *[b" " * (1 << 20)] * 3), False, "an answer above"),
    ],
    ids=["silence", "half an answer", "no JSON", "no object", "no list", "no version", "too much"],
)
def test_what_is_no_answer_is_over_in_time(
    parts: tuple[bytes, ...], is_waiting: bool, says: str, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "MAX_ANSWER_BYTES", 1 << 20)
    url, end = answering(*parts, then_wait=is_waiting)
    try:
        with pytest.raises(UnavailableError, match=says):
            ask(url, account, lambda api: api.pods(SELECTOR), timeout_s=2.0)
    finally:
        end()


def test_a_line_of_a_watch_is_bounded_and_half_a_one_is_left_out(
    account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def watch(api: KubernetesApi) -> list[PodChange]:
        return [change async for change in api.watch_pods(SELECTOR, "7")]

    line = b'{"type": "MODIFIED", "object": {"metadata": {"name": "a"}}}\n'
    bookmark = b'{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}}\n'
    url, end = answering(HEAD, line[:20], line[20:] + bookmark + line[:30])
    assert [change.pod["metadata"]["name"] for change in ask(url, account, watch)] == ["a"]
    end()
    monkeypatch.setattr(api_module, "MAX_LINE_BYTES", 1 << 16)
    url, end = answering(HEAD, b" " * (1 << 18))
    with pytest.raises(UnavailableError, match="a line above"):
        ask(url, account, watch)
    end()
    url, end = answering(HEAD, b'{"type": "MODIFIED"}\n')
    with pytest.raises(UnavailableError, match="a change without an object"):
        ask(url, account, watch)
    end()


def test_what_is_no_worker_s_pod_is_none() -> None:
    for pod in ({}, {"metadata": {"name": "x"}}, {"metadata": {"labels": {pods.ROLE: "cook"}}}):
        with pytest.raises(ValueError):
            pods.read(pod)
    failed = {"metadata": {"name": "x", "labels": LABELS}, "status": {"phase": "Failed"}}
    assert pods.read(failed).is_leaving, "an evicted pod stays as an object, and does not come back"
