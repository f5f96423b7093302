"""A cluster's status as text on one screen. All of it is in `status --json`."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from tandem.clusterctl import rich_output
from tandem.clusterctl.output import Record, ms
from tandem.clusterctl.rich_output import say
from tandem.core.kv_compatibility import ALWAYS_BYTES_PER_S
from tandem.core.urls import host_port

_SHOWN_PAIRS = 4


def show(status: Record, console: Console) -> None:
    """Print the status; a value that a younger or older router does not report is a dash."""
    _show_first(status, console)
    _show_warnings(status, console)


def show_wide(status: Record, console: Console) -> None:
    """Print the same, with the pairs of workers and the form of each."""
    _show_first(status, console)
    console.print(_kv(status.get("workers") or []))
    for text in _paired(status.get("pairs") or []):
        say(console, text)
    _show_warnings(status, console)


def pools(status: Record) -> Table:
    """Return a row for every model and role."""
    found: list[Record] = status.get("pools") or []
    has_models = len({pool["model"] for pool in found}) > 1
    is_wished = any("wanted" in pool for pool in found)
    figures = (*(["WANTED"] if is_wished else []), "READY", "RUNNING", "QUEUED", "QUEUED TOKENS", "KV")
    table = rich_output.table("POOL", *(["MODEL"] if has_models else []), *figures, right=figures, fixed=("POOL",))
    for pool in found:
        table.add_row(
            pool["role"] or "–",
            *([pool["model"]] if has_models else []),
            *([str(pool.get("wanted", "–"))] if is_wished else []),
            f"{pool['ready']}/{pool['workers']}",
            *(str(pool[key]) for key in ("running_requests", "queued_requests", "queued_tokens")),
            share(pool["kv_share"]),
        )
    return table


def figures(found: Record) -> str:
    """Format latencies and hits in a line."""
    ttft = f"TTFT p50 {ms(found['ttft_p50_s'])}, p99 {ms(found['ttft_p99_s'])}"
    itl = f"ITL p50 {ms(found['itl_p50_s'])}, p99 {ms(found['itl_p99_s'])}"
    return f"{ttft}; {itl}; prefix hits {share(found['hit_share'])}; {found['requests']} requests"


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _show_first(status: Record, console: Console) -> None:
    for name, value in _summary(status).items():
        say(console, f"{name:<15} {value}")
    if status.get("pools"):
        console.print(pools(status))
    console.print(_workers(status.get("workers") or []))


def _show_warnings(status: Record, console: Console) -> None:
    for warning in status.get("warnings") or []:
        say(console, f"warning: {warning['what']} ({warning['fix']})")


def _summary(status: Record) -> dict[str, str]:
    router: Record = status.get("router") or {}
    host = router.get("host", "–")
    ready = "yes" if status.get("is_ready") else f"no, missing: {_list(status.get('missing'))}"
    models: list[Record] = status.get("models") or [status]
    lines = {
        **({"health": _health(status)} if status.get("health") else {}),
        "cluster": f"{_text(status.get('cluster'))} (Tandem {_text(status.get('version'))})",
        "model": "; ".join(f"{_text(m.get('model'))}, served as {_list(m.get('served_names'))}" for m in models),
        "ready": ready,
        "disaggregation": _text(status.get("disaggregation")),
        "policy": _text(status.get("policy")),
        "router": f"{_text(router.get('id'))}, {_text(router.get('in_flight'))} in flight",
        "waiting": _waiting(status.get("admission") or {}),
        "refused": _counts((status.get("admission") or {}).get("refused")),
        "HTTP": host_port(host, _text(router.get("http"))),
        "gRPC": host_port(host, _text(router.get("grpc"))),
    }
    if status.get("registry_trouble"):
        lines["registry"] = _text(status["registry_trouble"])
    if status.get("figures"):
        lines["figures"] = figures(status["figures"])
    return lines


def _health(status: Record) -> str:
    count = len(status.get("warnings") or [])
    return f"{status['health']}, {count} warning{'s' if count > 1 else ''} below" if count else str(status["health"])


def _waiting(admission: Record) -> str:
    """Format the queue, such as "3 (acme 2, beta 1; class chat 3), a new one about 0.4 s"."""
    lanes: list[Record] = [lane for lane in admission.get("models") or [] if lane.get("waiting")]
    if not lanes:
        return _text(admission.get("waiting"))
    tenants: dict[str, int] = {}
    classes: dict[str, int] = {}
    for lane in lanes:
        for row in lane.get("tenants") or []:
            tenants[str(row.get("tenant"))] = tenants.get(str(row.get("tenant")), 0) + int(row.get("waiting") or 0)
        for name, count in (lane.get("classes") or {}).items():
            classes[name or "none"] = classes.get(name or "none", 0) + int(count)
    shown = _some([f"{name} {count}" for name, count in sorted(tenants.items(), key=lambda item: -item[1])])
    waits_s = [lane["predicted_wait_s"] for lane in lanes if lane.get("predicted_wait_s") is not None]
    predicted = f", a new one about {max(waits_s):.1f} s" if waits_s else ""
    return f"{_text(admission.get('waiting'))} ({shown}; class {_counts(classes)}){predicted}"


def _counts(counts: Mapping[str, int] | None) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted((counts or {}).items())) or "–"


def _workers(workers: list[Record]) -> Table:
    has_models = len({worker.get("model") for worker in workers if worker.get("model")}) > 1
    names, place = ("WORKER", "ROLE", *(["MODEL"] if has_models else [])), ("ADDRESS", "PID")
    figures = ("RUNNING", "QUEUED", "KV IN USE", "CACHED", "BLOCKS")
    table = rich_output.table(*names, "STATE", *place, *figures, right=figures, fixed=(*names, *place))
    for worker in workers:
        groups = worker.get("blocks") or []
        total, free, cached = (sum(int(group.get(key, 0)) for group in groups) for key in ("total", "free", "cached"))
        table.add_row(
            *(_text(worker.get(key)) for key in ("worker", "role", *(["model"] if has_models else []))),
            state(worker),
            *(_text(worker.get(key)) for key in ("address", "pid", "running_requests", "queued_requests")),
            *map(str, (total - free - cached, cached, total)),
        )
    return table


def _kv(workers: list[Record]) -> Table:
    """Build the table of the properties that decide which workers pair, and in which form blocks travel."""
    columns = ("KV OF", "TP", "BLOCK TOKENS", "DTYPE", "PROTOCOL", "TRANSPORTS", "CODECS", "WIRE CODEC")
    table = rich_output.table(*columns, right=("TP", "BLOCK TOKENS"))
    for worker in workers:
        if "tp" in worker:
            table.add_row(
                *(_text(worker.get(key)) for key in ("worker", "tp", "block_tokens", "kv_dtype", "protocol")),
                *(_list(worker.get(key)) for key in ("transports", "codecs")),
                _wire_codec(worker),
            )
    return table


def _wire_codec(worker: Record) -> str:
    """Format a wire codec, such as "int8 below 125 MB/s"."""
    if not worker.get("wire_codec"):
        return "–"
    below = float(worker.get("wire_codec_below_bytes_per_s") or 0.0)
    when = "always" if below >= ALWAYS_BYTES_PER_S else f"below {below / 1e6:g} MB/s"
    return f"{worker['wire_codec']} {when}"


def _paired(pairs: list[Record]) -> list[str]:
    """Return one line for every form in which blocks travel, with its pairs."""
    by_form: dict[str, list[str]] = {}
    for pair in pairs:
        by_form.setdefault(str(pair.get("form")), []).append(f"{pair.get('prefill')} to {pair.get('decode')}")
    return [f"paired, {form}: {_some(names)}" for form, names in sorted(by_form.items())]


def _some(names: list[str]) -> str:
    rest = len(names) - _SHOWN_PAIRS
    return ", ".join(names[:_SHOWN_PAIRS]) + (f" and {rest} more" if rest > 0 else "")


def state(worker: Record) -> str:
    if worker.get("trouble"):
        return str(worker["trouble"])
    if not worker.get("is_registered", True):
        return "lapsed"
    if worker.get("state", "ready") != "ready":
        return str(worker["state"])
    if worker.get("breaker") == "open" and worker.get("is_connected", True):
        return "breaker open"
    return "up" if worker.get("is_connected", True) else "connecting"


def _list(values: object) -> str:
    return ", ".join(map(str, values)) if isinstance(values, list) and values else "–"


def _text(value: object) -> str:
    return "–" if value is None or value == "" else str(value)
