"""The OpenAI endpoint that a command sends requests to: the flags that name it, its API key, the models it serves."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from tandem.clusterctl.flags import Name, StateFolder
from tandem.clusterctl.paths import find_state
from tandem.core.config import DEFAULT_CLUSTER
from tandem.core.errors import AuthError, ConfigError, UnavailableError
from tandem.core.files import expand_user

KEY_TODO = "Name its file with --api-key-file"
_MODELS_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointFlags:
    """Flags that choose the endpoint, its model, and the key."""

    url: Annotated[str, typer.Option(help="An OpenAI endpoint. Without it, the cluster that runs here.")] = ""
    model: Annotated[str, typer.Option(help="Served model. Without it, the first one.")] = ""
    api_key_file: Annotated[
        str, typer.Option("--api-key-file", "--key-file", help="File with the API key [env: OPENAI_API_KEY].")
    ] = ""
    name: Name = DEFAULT_CLUSTER
    state_dir: StateFolder = ""

    def address(self) -> str:
        """Return the endpoint's URL; UnavailableError where none is named and no cluster of that name runs here."""
        return self.url or find_state(self.name, self.state_dir).read_context().api

    def headers(self) -> dict[str, str]:
        """Return the authorization header, {} without a key; ConfigError for a file that holds none."""
        key = os.environ.get("OPENAI_API_KEY", "")
        if self.api_key_file:
            try:
                key = expand_user(self.api_key_file).read_bytes().strip().decode("ascii")
            except OSError as error:
                raise ConfigError(f"cannot read {self.api_key_file}", why=error.strerror or str(error)) from error
            except UnicodeDecodeError as error:
                raise ConfigError(f"{self.api_key_file} holds no API key", todo="Check --api-key-file") from error
        return {"Authorization": f"Bearer {key}"} if key else {}


def path_of(url: str, path: str) -> str:
    """Return the URL of `path`, which begins with /v1, at an endpoint; the endpoint's own URL may end with /v1."""
    return url.rstrip("/").removesuffix("/v1") + path


def first_model(url: str, headers: dict[str, str], tls: ssl.SSLContext | None) -> str:
    """Return the first of /v1/models; asked as requests are sent: without a proxy, with the same trusted certificates.

    AuthError where it wants another key, UnavailableError where nothing answers, or names no model.
    """
    import httpx

    place = path_of(url, "/v1/models")
    try:
        answer = httpx.get(place, headers=headers, timeout=_MODELS_TIMEOUT_S, trust_env=False, verify=tls or True)
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise AuthError(f"{place} requires an API key", todo=KEY_TODO)
        answer.raise_for_status()
        return str(_models(answer.json())[0])
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnavailableError(f"no OpenAI endpoint answers at {url}", why=str(error), todo="Check --url") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise UnavailableError(f"{place} names no model", todo="Name one with --model") from error


def _models(found: Any) -> list[str]:
    return [one["id"] for one in found["data"]]
