"""The environment of every process of Ray or that talks to it: its authentication, and settings that we rely on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

TUNED: Final = {
    # A node that hangs is given up after about 24 s, in place of 65. Requests leave it after 3 s, by our own leases, so
    # this is only about the replacement; a node that is merely busy must not be taken for dead.
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "3000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",  # nodes outlive a head that is started again
    "RAY_process_group_cleanup_enabled": "true",  # what an agent started ends with it
    "RAY_memory_monitor_refresh_ms": "0",  # it would kill agents for the memory of their workers
    "RAY_worker_niceness": "0",  # by default 15: anything else on a busy machine would starve a worker
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def ray_variables(inherited: Mapping[str, str], token_file: str) -> dict[str, str]:
    """Return `inherited` for a process of Ray. `token_file` "" = a Ray without tokens.

    The mode is always explicit: Ray guesses differently in `ray.init`, `ray start --head` and `ray start --address`.
    Of the operator's settings for Ray only its TLS is kept.
    """
    kept = {name: value for name, value in inherited.items() if not name.startswith("RAY_") or _is_of_tls(name)}
    if token_file:
        auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token_file}
    else:
        auth = {"RAY_AUTH_MODE": "disabled"}
    return {**kept, **TUNED, **auth, "PYTHONUNBUFFERED": "1"}


def without_ray(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return `inherited` for a process that has nothing to do with Ray and must not learn its token."""
    return {name: value for name, value in inherited.items() if not name.startswith("RAY_")}


def _is_of_tls(name: str) -> bool:
    return name == "RAY_USE_TLS" or name.startswith("RAY_TLS_")
