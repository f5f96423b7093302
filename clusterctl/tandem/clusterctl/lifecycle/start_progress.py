"""Output of `up --dry-run`: the cluster that would be started."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from tandem.clusterctl import rich_output
from tandem.clusterctl.meta.settings import changed, plain, values
from tandem.clusterctl.output import Record
from tandem.clusterctl.rich_output import say
from tandem.controlplane.kv_plan import KVPlan
from tandem.controlplane.up_preview import Preview

_MIB = 2**20


def document(found: Preview) -> dict[str, Any]:
    """Return a document of the kind Start; URLs are without passwords."""
    config, router = found.config, found.router
    settings = values(config)
    return {
        "is_dry_run": True,
        "is_complete": found.is_complete,
        "cluster": config.name,
        "state_dir": str(found.state.path),
        "launcher": config.launcher.value,
        "redis": plain(config.redis.url) or None,
        "host": router.host,
        "port": router.port,
        "grpc_port": router.grpc_port,
        "admin_port": router.admin_port,
        "cores": found.cores,
        "models": [
            {
                "model": model.name,
                "path": str(model.path) if model.path is not None else None,
                "served_names": list(model.served_names),
            }
            for model in found.models
        ],
        "pools": _pools(found),
        "settings": {key: settings[key] for key in changed(settings)},
    }


def show(found: Record, console: Console) -> None:
    """Print a document of the kind Start."""
    ports = f"HTTP {_port(found, 'port')}, gRPC {_port(found, 'grpc_port')}, admin {_port(found, 'admin_port')}"
    say(console, f"cluster   {found['cluster']}, started by {found['launcher']}, state in {found['state_dir']}")
    say(console, f"redis     {found['redis'] or 'a private server'}")
    say(console, f"ports     {ports} on {found['host']}")
    for model in found["models"]:
        where = f"in {model['path']}" if model["path"] else "to be fetched when it starts: its files are not checked"
        say(console, f"model     {model['model']} {where}, served as {', '.join(model['served_names'])}")
    for key, value in found["settings"].items():
        say(console, f"setting   {key} = {json.dumps(value, ensure_ascii=False)}")
    columns = ("WORKERS", "TP", "THREADS A RANK", "KV, MiB", "TOKENS", "FULL CONTEXTS")
    table = rich_output.table("POOL", "MODEL", *columns, "HARDWARE", right=columns)
    for pool in found["pools"]:
        counts = (pool["count"], pool["tp"], pool["threads"])
        table.add_row(pool["role"], pool["model"], *map(str, counts), *_kv(pool), pool["hardware"])
    console.print(table)
    say(console, "nothing was started (--dry-run)")


def _pools(found: Preview) -> list[dict[str, Any]]:
    return [
        {
            "model": model.name,
            "role": role.value,
            "count": count,
            "tp": found.workers[role].tp,
            "threads": found.workers[role].threads,
            "hardware": found.workers[role].hardware,
            "engine": found.workers[role].engine,
            "is_kv_automatic": not found.workers[role].kv_memory_bytes,
            "kv_memory_bytes": found.workers[role].kv_memory_bytes or None,
            **_kv_of(model.kv.get(role)),
        }
        for model in found.models
        for role, count in model.counts.items()
        if count
    ]


def _kv_of(plan: KVPlan | None) -> dict[str, Any]:
    """Return the KV figures known here; nothing for a model that is not here."""
    if plan is None:
        return {"kv_tokens": None, "kv_contexts": None}
    contexts = None if plan.contexts is None else round(plan.contexts, 3)
    return {"kv_memory_bytes": plan.memory_bytes, "kv_tokens": plan.tokens, "kv_contexts": contexts}


def _kv(pool: Record) -> tuple[str, str, str]:
    """Return MiB, tokens and full contexts of a worker; an automatic size is settled when the worker starts."""
    size, tokens, contexts = pool["kv_memory_bytes"], pool["kv_tokens"], pool["kv_contexts"]
    about = "~" if pool["is_kv_automatic"] else ""
    return (
        "auto" if size is None else f"{about}{size // _MIB}",
        "–" if tokens is None else f"{about}{tokens}",
        "–" if contexts is None else f"{about}{contexts:.1f}",
    )


def _port(found: Record, name: str) -> str:
    return str(found[name] or "any free one")
