"""API keys over both APIs and the admin port: access, visible data, and the messages."""

import itertools
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import openai
import pytest

from tandem.core.config import Anonymous
from tandem.rpc.v1 import inference_pb2 as i
from tandem.rpc.v1 import inference_pb2_grpc as i_grpc
from tests.integration.router.house import ADMIN_KEY, Build, RouterHarness, builder

TEXT: dict[str, Any] = {"model": "tiny", "prompt": "Hi", "max_tokens": 2}
_TENANTS = (f"tenant-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterHarness]:
    """A test router that has keys."""
    with builder(tmp_path_factory.mktemp("router")) as make:
        house = make()
        house.wait_ready()
        create(house)
        yield house


def admin(house: RouterHarness, method: str, path: str, body: object = None, key: str = ADMIN_KEY) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.request(method, f"{house.admin_url}/admin/v1{path}", json=body, headers=headers)


def create(house: RouterHarness, **wish: Any) -> dict[str, Any]:
    answer = admin(house, "POST", "/keys", {"tenant": next(_TENANTS), **wish})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def ask(house: RouterHarness, key: str | None, path: str = "/v1/completions", method: str = "POST") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key is not None else {}
    return httpx.request(method, f"{house.url}{path}", json=TEXT if method == "POST" else None, headers=headers)


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["type"], error["code"]


def test_the_first_key_ends_access_for_everybody(build: Build) -> None:
    house = build()
    house.wait_ready()
    assert ask(house, None).status_code == 200
    assert ask(house, "none").status_code == 200
    key = create(house)["key"]
    refused = ask(house, None)
    assert refusal(refused) == (401, "authentication_error", "invalid_api_key")
    assert refused.headers["www-authenticate"] == "Bearer"
    assert "retry-after" not in refused.headers
    assert ask(house, "none").status_code == 401
    assert ask(house, key).status_code == 200
    counted = httpx.get(f"{house.admin_url}/metrics").text
    assert 'tandem_requests_total{api="any",outcome="invalid_api_key"} 2.0' in counted
    house.call(house.keys.lose())
    house.wait(lambda: not house.router.gate.keys)
    for text in (key, None, "none"):
        assert refusal(ask(house, text))[0] == 401


def test_scopes(keyed: RouterHarness) -> None:
    infer = create(keyed)["key"]
    metrics = create(keyed, scopes=["metrics"])["key"]
    assert ask(keyed, infer).status_code == 200
    for path in ("/v1/models", "/v1/models/tiny"):
        assert ask(keyed, infer, path, "GET").status_code == 200
        assert ask(keyed, metrics, path, "GET").status_code == 403
        assert ask(keyed, None, path, "GET").status_code == 401
    assert refusal(ask(keyed, infer, "/metrics", "GET")) == (403, "permission_error", "insufficient_permissions")
    assert ask(keyed, metrics, "/metrics", "GET").status_code == 200
    assert refusal(ask(keyed, metrics))[0] == 403
    assert ask(keyed, None, "/nowhere", "GET").status_code == 401
    assert ask(keyed, infer, "/nowhere", "GET").status_code == 404


def test_health_needs_no_key(keyed: RouterHarness) -> None:
    for path in ("/livez", "/readyz"):
        assert ask(keyed, None, path, "GET").status_code == 200


def test_an_admin_key_opens_the_admin_port_and_no_other_key_does(keyed: RouterHarness) -> None:
    made = create(keyed, scopes=["admin"])
    assert admin(keyed, "GET", "/status", key=made["key"]).status_code == 200
    assert refusal(ask(keyed, made["key"]))[0] == 403
    infer = create(keyed)["key"]
    assert refusal(admin(keyed, "GET", "/status", key=infer)) == (403, "permission_error", "insufficient_permissions")
    for wrong in ("none", "x" * 32, infer[:-1] + "!"):
        assert refusal(admin(keyed, "GET", "/status", key=wrong))[0] == 401
    assert admin(keyed, "DELETE", f"/keys/{made['id']}").json()["is_revoked"]
    assert admin(keyed, "GET", "/status", key=made["key"]).status_code == 401


def test_the_list_shows_what_may_be_shown(keyed: RouterHarness) -> None:
    made = create(keyed, scopes=["infer", "metrics"], lifetime_s=600, priority=-2, name="Ann's laptop")
    answer = admin(keyed, "GET", "/keys")
    (row,) = [row for row in answer.json()["keys"] if row["id"] == made["id"]]
    assert row == {key: value for key, value in made.items() if key != "key"}
    assert row["scopes"] == ["infer", "metrics"]
    assert row["expires_s"] == row["created_s"] + 600
    assert (row["priority"], row["name"], row["is_expired"]) == (-2, "Ann's laptop", False)
    assert made["key"].rpartition("-")[2] not in answer.text
    assert all(made["key"] not in key.digest for key in keyed.keys.kept.values())


def test_revoking_counts_at_once_and_names_what_it_did(keyed: RouterHarness) -> None:
    made = create(keyed)
    assert ask(keyed, made["key"]).status_code == 200
    done = {"id": made["id"], "is_revoked": True}
    assert admin(keyed, "DELETE", f"/keys/{made['id']}").json() == {**done, "is_changed": True}
    assert refusal(ask(keyed, made["key"]))[0] == 401
    assert admin(keyed, "DELETE", f"/keys/{made['id']}").json() == {**done, "is_changed": False}
    assert made["id"] in admin(keyed, "GET", "/keys").json()["revoked"]
    nobody = {"id": "tdk-0123456789ab", "is_revoked": False, "is_changed": False}
    assert admin(keyed, "DELETE", "/keys/tdk-0123456789ab").json() == nobody


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "tenant"),
        ({"tenant": "a b"}, "tenant"),
        ({"tenant": "a", "scopes": []}, "scopes"),
        ({"tenant": "a", "scopes": ["root"]}, "scopes[0]"),
        ({"tenant": "a", "slo": "no-such-class"}, "slo"),
        ({"tenant": "a", "priority": 1000}, "priority"),
        ({"tenant": "a", "lifetime_s": -1}, "lifetime_s"),
        ({"tenant": "a", "secret": "mine"}, "secret"),
    ],
)
def test_wrong_wishes_name_the_field(keyed: RouterHarness, body: dict[str, Any], param: str) -> None:
    answer = admin(keyed, "POST", "/keys", body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_the_openai_client_raises_what_it_should(keyed: RouterHarness) -> None:
    made = create(keyed, scopes=["metrics"])
    for key, kind in (("none", openai.AuthenticationError), (made["key"], openai.PermissionDeniedError)):
        with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=key) as client, pytest.raises(kind) as caught:
            client.completions.create(**TEXT)
        assert made["key"] not in str(caught.value)


def test_grpc_asks_for_the_same_keys(keyed: RouterHarness) -> None:
    def generate(*metadata: tuple[str, str]) -> Any:
        request = i.GenerateRequest(model="tiny", text="Hi", sampling=i.GenerateSampling(max_tokens=2))
        with grpc.insecure_channel(f"127.0.0.1:{keyed.ports['grpc']}") as channel:
            return list(i_grpc.InferenceStub(channel).Generate(request, timeout=15, metadata=metadata))

    assert generate(("authorization", f"Bearer {create(keyed)['key']}"))[-1].finished
    metrics = create(keyed, scopes=["metrics"])["key"]
    cases: list[tuple[tuple[tuple[str, str], ...], grpc.StatusCode, str]] = [
        ((), grpc.StatusCode.UNAUTHENTICATED, "invalid_api_key"),
        ((("authorization", "Bearer none"),), grpc.StatusCode.UNAUTHENTICATED, "invalid_api_key"),
        ((("authorization", f"Bearer {metrics}"),), grpc.StatusCode.PERMISSION_DENIED, "insufficient_permissions"),
    ]
    for metadata, status, code in cases:
        with pytest.raises(grpc.RpcError) as caught:
            generate(*metadata)
        error: Any = caught.value
        assert error.code() is status
        assert dict(error.trailing_metadata())["tandem-code"] == code


def test_tenants_share_no_blocks_and_keys_of_one_tenant_do(keyed: RouterHarness) -> None:
    keys = [create(keyed, tenant=tenant)["key"] for tenant in ("red", "red", "blue")]
    prompt = {**TEXT, "prompt": "word " * 60}
    for key in keys:
        headers = {"authorization": f"Bearer {key}", "x-tenant": "red"}
        assert httpx.post(f"{keyed.url}/v1/completions", json=prompt | {"user": "red"}, headers=headers).is_success
    prefill = keyed.workers["prefill-0"]
    red, again, blue = prefill.submitted[-3:]
    assert red.salt == again.salt != blue.salt
    assert red.last_block_hash == again.last_block_hash != blue.last_block_hash
    assert red.last_block_hash
    assert not prefill.hash_mismatches


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:8000", 200), ("127.0.0.1:1", 200), ("127.1.2.3", 200), ("[::1]:8000", 200),
        ("a.localhost", 200), ("", 200), ("evil.example", 403), ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403), ("10.0.0.1", 403), ("[2001:db8::1]", 403), ("x" * 5000, 403),
    ],
)  # fmt: skip
def test_an_open_router_is_asked_as_this_machine(
    shared: RouterHarness, keyed: RouterHarness, host: str, status: int
) -> None:
    """A page under a name that points to this machine is of the same origin to a browser."""
    answer = httpx.post(f"{shared.url}/v1/completions", json=TEXT, headers={"host": host})
    assert answer.status_code == status
    if status == 403:
        assert refusal(answer) == (403, "permission_error", "insufficient_permissions")
        assert httpx.get(f"{shared.url}/livez", headers={"host": host}).status_code == 200
    headers = {"host": host, "authorization": f"Bearer {create(keyed)['key']}"}
    assert httpx.post(f"{keyed.url}/v1/completions", json=TEXT, headers=headers).status_code == 200


def test_who_lets_everybody_in_is_asked_by_any_name(build: Build) -> None:
    house = build(anonymous=Anonymous.ALWAYS)
    house.wait_ready()
    answer = httpx.post(f"{house.url}/v1/completions", json=TEXT, headers={"host": "api.example"})
    assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_only_who_may_see_metrics_is_told_what_workers_have_to_do(
    shared: RouterHarness, keyed: RouterHarness, path: str
) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}

    def told(house: RouterHarness, scopes: list[str] | None) -> bool:
        headers = {"x-tandem-route": "1"}
        if scopes is not None:
            headers["authorization"] = f"Bearer {create(house, scopes=scopes)['key']}"
        answer = httpx.post(f"{house.url}{path}", json=chat if "chat" in path else TEXT, headers=headers)
        assert answer.status_code == 200
        return "x-tandem-route" in answer.headers

    assert told(shared, None)
    assert told(keyed, ["infer", "metrics"])
    assert not told(keyed, ["infer"])
