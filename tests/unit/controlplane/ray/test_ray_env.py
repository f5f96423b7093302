"""The use of tokens is always set, independent of the environment; workers never see the token."""

from __future__ import annotations

from tandem.controlplane.ray.ray_env import ray_variables, without_ray

AROUND = {"PATH": "/bin", "RAY_AUTH_TOKEN": "theirs", "RAY_ADDRESS": "elsewhere:1", "RAY_AUTH_MODE": "disabled"}


def test_a_token_file_turns_tokens_on() -> None:
    made = ray_variables(AROUND, "/s/ray.token")
    assert made["RAY_AUTH_MODE"] == "token"
    assert made["RAY_AUTH_TOKEN_PATH"] == "/s/ray.token"
    assert made["PATH"] == "/bin"
    assert not {"RAY_AUTH_TOKEN", "RAY_ADDRESS"} & made.keys()


def test_without_one_they_are_off_and_not_guessed() -> None:
    made = ray_variables({**AROUND, "RAY_AUTH_MODE": "token"}, "")
    assert made["RAY_AUTH_MODE"] == "disabled"
    assert "RAY_AUTH_TOKEN_PATH" not in made


def test_tls_is_for_those_who_run_it_to_turn_on() -> None:
    tls = {"RAY_USE_TLS": "1", "RAY_TLS_SERVER_CERT": "/s/a.crt", "RAY_TLS_SERVER_KEY": "/s/a.key"}
    assert ray_variables({**AROUND, **tls, "RAY_TLSX": "1"}, "") == {**ray_variables(AROUND, ""), **tls}


def test_nothing_of_ray_reaches_a_worker() -> None:
    assert without_ray(ray_variables({**AROUND, "RAY_USE_TLS": "1"}, "/s/ray.token")) == {
        "PATH": "/bin",
        "PYTHONUNBUFFERED": "1",
    }
