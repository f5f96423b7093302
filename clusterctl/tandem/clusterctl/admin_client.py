"""Client of a cluster's admin port: finds it by flags or the context file, authenticates with the admin key."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from tandem.clusterctl.paths import find_state
from tandem.core.errors import AuthError, ConfigError, InternalError, UnavailableError, from_code
from tandem.core.files import expand_user

_TIMEOUT_S = 10.0
_POLL_S = 0.1


class AdminClient:
    """One cluster's admin port. Every call has a timeout; errors are TandemErrors that state what to do."""

    def __init__(self, endpoint: str, key_file: Path, *, is_gone: Callable[[], bool] | None = None) -> None:
        try:
            key = key_file.read_bytes().strip().decode("ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read the admin key {key_file}",
                why=(error.strerror or str(error)) if isinstance(error, OSError) else "it holds no key",
                todo="Check --admin-key-file",
            ) from error
        self.endpoint, self._is_gone = endpoint.rstrip("/"), is_gone
        headers = {"Authorization": f"Bearer {key}"}
        try:
            self._http = httpx.Client(base_url=self.endpoint, headers=headers, timeout=_TIMEOUT_S, trust_env=False)
        except httpx.InvalidURL as error:
            raise ConfigError(
                f"--endpoint is {endpoint!r}", why=str(error), todo="Write it like http://127.0.0.1:8002"
            ) from error

    @classmethod
    def find(cls, *, endpoint: str, admin_key_file: str, name: str, state_dir: str) -> AdminClient:
        """Connect to `endpoint` with `admin_key_file` if given, else by the context file of cluster `name`."""
        state = find_state(name, state_dir)
        given = expand_user(admin_key_file) if admin_key_file else None
        if endpoint:
            if given is None and not _is_loopback(endpoint):
                raise ConfigError(
                    f"--endpoint {endpoint} is on another machine",
                    why="the admin key of the cluster that runs here is not for it",
                    todo="Give the key of that cluster with --admin-key-file",
                )
            return cls(endpoint, given or state.admin_key_file)
        context = state.read_context()
        return cls(context.admin, given or Path(context.admin_key_file), is_gone=lambda: not state.is_held())

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def status(self) -> dict[str, Any]:
        """Return the cluster's status."""
        return self._record("GET", "/admin/v1/status", "cluster")

    def trace(self, request: str) -> dict[str, Any]:
        """Return the time line of a request; NotFoundError if the router does not know it."""
        return self._record("GET", f"/admin/v1/requests/{quote(request, safe='', errors='surrogateescape')}", "spans")

    def metrics(self) -> str:
        """Return the metrics that Prometheus scrapes."""
        return self._call("GET", "/metrics").text

    def audit(self) -> dict[str, Any]:
        """Return one snapshot of every worker's KV ledger."""
        return self._record("GET", "/admin/v1/kv/audit", "holds")

    def net(self) -> dict[str, Any]:
        """Return measured links between hosts, and those in use between workers."""
        return self._record("GET", "/admin/v1/net", "measured")

    def policy(self) -> dict[str, Any]:
        """Return the routing policy in force and all available ones: {"policy", "policies"}."""
        return self._record("GET", "/admin/v1/route/policy", "policies")

    def set_policy(self, name: str) -> dict[str, Any]:
        """Route by this policy from now on; return `policy` as it is afterwards."""
        return self._record("POST", "/admin/v1/route/policy", "policies", {"policy": name})

    def explain(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return where a prompt would go now, and why."""
        return self._record("POST", "/admin/v1/route/explain", "options", dict(body))

    def slo(self) -> dict[str, Any]:
        """Return the SLO classes in force: {"classes", "default_slo"}."""
        return self._record("GET", "/admin/v1/slo", "classes")

    def set_slo(self, wish: Mapping[str, Any]) -> dict[str, Any]:
        """Promise {"slo", "ttft_s", "itl_s"} from now on; return `slo` as it is afterwards."""
        return self._record("POST", "/admin/v1/slo", "classes", dict(wish))

    def repair(self, holds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Ask for the release of holds of `audit`; {"released": […], "refused": […]}."""
        body = {"holds": [dict(hold) for hold in holds]}
        return self._record("POST", "/admin/v1/kv/repair", "released", body)

    def desired(self) -> dict[str, Any]:
        """Return the desired state: {"desired"}, with pools and members."""
        return self._record("GET", "/admin/v1/desired", "desired")

    def propose(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Return the effect of a change without applying it: {"is_changed", "before", "after", "changes"}."""
        return self._record("POST", "/admin/v1/desired/propose", "changes", dict(wanted))

    def write_desired(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Make the `after` of a proposal the desired state; ConflictError if it was changed in between."""
        return self._record("POST", "/admin/v1/desired", "desired", {"state": dict(state)})

    def events(self, *, after: str = "", count: int = 50) -> dict[str, Any]:
        """Return the events after that place, "" = the last `count`: {"events", "next"}."""
        return self._record("GET", f"/admin/v1/events?after={quote(after)}&count={count}", "events")

    def planned(self) -> dict[str, Any]:
        """Return the planner's last report: {"mode", "plan"}, None = no recent one."""
        return self._record("GET", "/admin/v1/plan", "plan")

    def keys(self) -> dict[str, Any]:
        """Return every API key without its secret, ids of the last revoked ones, and the anonymous-access setting."""
        return self._record("GET", "/admin/v1/keys", "keys")

    def create_key(self, wish: Mapping[str, Any]) -> dict[str, Any]:
        """Create an API key; `key` holds it this one time."""
        return self._record("POST", "/admin/v1/keys", "key", dict(wish))

    def revoke_key(self, key_id: str) -> dict[str, Any]:
        """Revoke a key by its id; `is_revoked` is false if there never was one."""
        name = quote(key_id, safe="", errors="surrogateescape")
        return self._record("DELETE", f"/admin/v1/keys/{name}", "is_revoked")

    def _record(self, method: str, path: str, key: str, body: object = None) -> dict[str, Any]:
        """Return the response, which has `key` in it; InternalError if not."""
        answer = self._call(method, path, body)
        try:
            found = answer.json()
        except ValueError:
            found = None
        if not isinstance(found, dict) or key not in found:
            raise InternalError(f"{self.endpoint} does not answer {path} like an admin port", todo="Check --endpoint")
        return found

    def down(self) -> None:
        """Ask the whole cluster to stop; returns once the request is accepted."""
        try:
            self._call("POST", "/admin/v1/down")
        except UnavailableError as error:
            # The router may be stopped before its response is out: the following polls show if it worked.
            if not isinstance(error.__cause__, httpx.RemoteProtocolError | httpx.ReadError):
                raise

    def wait_gone(self, timeout_s: float) -> bool:
        """True once the cluster has stopped: its lock is free, or without a state directory its port is closed."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._is_gone() if self._is_gone is not None else self._is_closed():
                return True
            time.sleep(_POLL_S)
        return False

    def _is_closed(self) -> bool:
        try:
            self._http.get("/admin/v1/status", timeout=1.0)
        except httpx.ConnectError:
            return True
        except httpx.HTTPError:
            return False
        return False

    def _call(self, method: str, path: str, body: object = None) -> httpx.Response:
        try:
            answer = self._http.request(method, path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnavailableError(
                f"no cluster answers at {self.endpoint}",
                why=str(error) or type(error).__name__,
                todo="Check that it runs, or say where it is with --endpoint",
            ) from error
        except UnicodeEncodeError as error:  # the command line was not
            raise ConfigError("cannot send the given text", why="it is not UTF-8 text") from error
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise AuthError(f"{self.endpoint} refuses the admin key", todo="Name its key with --admin-key-file")
        if answer.is_error:
            raise _error_of(answer)
        return answer


def _error_of(answer: httpx.Response) -> Exception:
    try:
        error = answer.json()["error"]
        return from_code(str(error.get("code", "")), str(error["message"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return InternalError(f"{answer.request.url} answers {answer.status_code}")


def _is_loopback(endpoint: str) -> bool:
    try:
        host = urlsplit(endpoint).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name, or no URL
        return False
