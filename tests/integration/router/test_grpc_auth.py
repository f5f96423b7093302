"""The gRPC API: a client without a key is refused unread, and the size of a message is bounded before it is decoded."""

import contextlib
import gc
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.core.config import Anonymous
from tandem.router.api import grpc_auth, grpc_service
from tandem.router.api.grpc_service import SERVICE
from tandem.router.serving.request_parser import MAX_MESSAGES
from tandem.rpc.v1 import inference_pb2 as i
from tandem.rpc.v1 import inference_pb2_grpc as i_grpc
from tests.integration.router.house import ADMIN_KEY, Build, RouterHarness
from tests.plugins.costs import Cost, measured

LARGEST = (4 << 20) - 100
METHODS = [method.name for method in i.DESCRIPTOR.services_by_name["Inference"].methods]


def varint(number: int) -> bytes:
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*digits, number])


def nested(field: int, inner: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(inner)) + inner


MODEL = nested(1, b"tiny")
HOSTILE: dict[str, bytes] = {
    "messages": b"\x0a\x00" * (LARGEST // 2),
    "parts": nested(1, b"\x1a\x00" * (LARGEST // 2)),
    "messages of a chat": nested(4, b"\x0a\x00" * (LARGEST // 2)),
    "some messages of a chat": nested(4, b"\x0a\x00" * 40_000),
    "messages of a chat to tokenise": nested(3, b"\x0a\x00" * (LARGEST // 2)),
    "parts of a message": nested(4, nested(1, b"\x1a\x00" * (LARGEST // 2))),
    "some parts of a message": nested(4, nested(1, nested(1, b"user") + b"\x1a\x00" * 40_000)),
    "stops": b"\x32\x00" * (LARGEST // 2),
    "some stops": nested(2, b"a") + b"\x32\x00" * 40_000,
    "biases": nested(5, b"\x6a\x00" * (LARGEST // 2)),
    "some biases": nested(2, b"a") + nested(5, b"".join(nested(13, b"\x08" + varint(n)) for n in range(13_000))),
    "words": nested(5, b"\x82\x01\x00" * (LARGEST // 3)),
    "some words": nested(2, b"a") + nested(5, b"\x82\x01\x00" * 40_000),
    "token ids": nested(3, nested(1, b"\x01" * (LARGEST - 20))),
    "some token ids": nested(3, nested(1, b"\x01" * 786_000)),
    "long token ids": nested(3, nested(1, b"\xff\xff\xff\xff\x0f" * (LARGEST // 6))),
    "token ids to decode": nested(2, b"\x01" * (LARGEST - 20)),
    "token ids, not packed": nested(3, b"\x08\x01" * (LARGEST // 2 - 20)),
    "allowed ids": nested(2, b"a") + nested(5, nested(17, b"\x01" * (LARGEST - 100))),
    "a text": nested(2, b"a" * (LARGEST - 20)),
    "variables": nested(4, nested(1, nested(1, b"user")) + nested(4, b'{"a":[' + b"[]," * 1_000_000 + b"1]}")),
    "what nobody knows": nested(100, b"\x0a\x00" * (LARGEST // 2 - 20)),
    "numbers nobody knows": b"\x98\x06\x01" * (LARGEST // 3),
    "a group": b"\x9b\x06" * (LARGEST // 2),
    "no message": b"\xff" * LARGEST,
}


@pytest.mark.parametrize("method", [name for name in METHODS if name != "ListModels"])
@pytest.mark.parametrize("value", HOSTILE)
def test_a_message_up_to_each_bound_costs_little(shared: RouterHarness, method: str, value: str) -> None:
    raw = MODEL + HOSTILE[value]
    costs, codes = [], set()
    for _ in range(3):  # the memory of the whole process is measured: the least is the nearest to that of the call
        with measured(shared.loop) as cost:
            codes.add(call(shared, method, raw))
        costs.append(cost)
    cost = Cost(min(one.longest_turn_s for one in costs), min(one.grown_bytes for one in costs))
    assert len(codes) == 1
    if (code := codes.pop()) is grpc.StatusCode.OK:
        cost.check_turn()
    else:
        assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.OUT_OF_RANGE)
        cost.check_refusal(len(raw))


REFUSED = {
    "with too many fields": (MODEL + nested(4, b"\x0a\x00" * 50_000), ()),
    "of an unknown model": (nested(1, b"other") + nested(2, b"a"), ()),
    "with an unknown key": (MODEL, (("authorization", "Bearer unknown"),)),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("method", METHODS)
def test_a_refused_call_leaves_no_cycle(shared: RouterHarness, method: str, name: str) -> None:
    """A frame in a cycle keeps its message until the oldest generation is collected: minutes later, or never."""
    raw, metadata = REFUSED[name]
    assert (code := call(shared, method, raw, metadata)) is not grpc.StatusCode.UNKNOWN
    with frames_in_garbage() as found:
        assert call(shared, method, raw, metadata) is code
    assert not [frame for frame in found if "tandem/router" in frame]


@contextlib.contextmanager
def frames_in_garbage() -> Iterator[list[str]]:
    """Collect frames made in the context that only a garbage collection frees."""
    found: list[str] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += [f"{one.f_code.co_filename}:{one.f_lineno}" for one in gc.garbage if isinstance(one, FrameType)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("method", METHODS)
def test_a_call_without_a_key_is_refused_unread(build: Build, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    house = build(anonymous=Anonymous.NEVER)
    read: list[int] = []
    monkeypatch.setattr(grpc_auth, "check_wire", lambda raw, *_: read.append(len(raw)))
    raw = HOSTILE["messages of a chat"]
    with measured(house.loop) as cost:
        codes = [call(house, method, raw) for _ in range(5)]
    assert set(codes) == {grpc.StatusCode.UNAUTHENTICATED}
    assert read == []
    cost.check_refusal(5 * len(raw))
    key = httpx.post(f"{house.admin_url}/admin/v1/keys", json={"tenant": "acme"},
                     headers={"authorization": f"Bearer {ADMIN_KEY}"}).json()["key"]  # fmt: skip
    assert call(house, method, b"", (("authorization", f"Bearer {key}"),)) is not grpc.StatusCode.UNAUTHENTICATED


def test_what_a_refusal_says(shared: RouterHarness) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{shared.ports['grpc']}") as channel:
        stub: Any = i_grpc.InferenceStub(channel)
        for request, param, what in (
            (i.GenerateRequest(model="tiny", text="a", stop=["a"] * 17), "stop", "at most 16"),
            (i.GenerateRequest(model="tiny", chat=i.ChatMessages(messages=[i.ChatMessage()] * (MAX_MESSAGES + 1))),
             "messages", f"at most {MAX_MESSAGES}"),
            (i.GenerateRequest(model="tiny", chat=i.ChatMessages(messages=[i.ChatMessage()] * 50_000)), None,
             f"at most {grpc_auth.MAX_FIELDS}"),
            (i.GenerateRequest(model="tiny", chat=i.ChatMessages(
                messages=[i.ChatMessage(role="user")], chat_template_kwargs='{"a":"' + "b" * 20_000 + '"}')),
             "chat_template_kwargs", "at most 16384"),
        ):  # fmt: skip
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Generate(request, timeout=60))
            error: Any = caught.value
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert what in error.details()
            assert dict(error.trailing_metadata()).get("tandem-param") == param


def test_few_calls_without_a_key_are_open_at_a_time(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_auth, "MAX_OPEN_STREAMS", 3)
    house = build(anonymous=Anonymous.NEVER)

    with grpc.insecure_channel(f"127.0.0.1:{house.ports['grpc']}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches: list[Any] = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(3)]
        for watch in watches:
            next(watch)
        with pytest.raises(grpc.RpcError) as caught:
            next(iter(stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)))
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
        watches[0].cancel()
        again = next(watch for watch in open_again(stub))
        assert again is not None


def open_again(stub: Any) -> Iterator[Any]:
    """Try until a place is free: the server learns of a cancel a little later."""
    ends_s = time.monotonic() + 60
    while time.monotonic() < ends_s:
        with contextlib.suppress(grpc.RpcError):
            yield next(iter(stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)))


def test_calls_at_a_time_are_bounded(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_service, "MAX_CALLS", 2)
    house = build()
    house.wait_ready()
    with grpc.insecure_channel(f"127.0.0.1:{house.ports['grpc']}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches: list[Any] = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(2)]
        for watch in watches:
            next(watch)
        assert call(house, "ListModels", b"") is grpc.StatusCode.RESOURCE_EXHAUSTED
        for watch in watches:
            watch.cancel()


def call(house: RouterHarness, method: str, raw: bytes, metadata: Any = ()) -> grpc.StatusCode:
    options = [("grpc.max_receive_message_length", 64 << 20)]
    with grpc.insecure_channel(f"127.0.0.1:{house.ports['grpc']}", options=options) as channel:
        send: Any = channel.unary_stream(f"/{SERVICE}/{method}", None, None)
        answers = send(raw, metadata=metadata, timeout=60)
        with contextlib.suppress(grpc.RpcError):
            for _ in answers:
                continue
        code: grpc.StatusCode = answers.code()
        return code
