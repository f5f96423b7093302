"""`clusterctl logs`: the logged records of a cluster that runs here, or ran here, by time."""

from __future__ import annotations

import dataclasses
import ipaddress
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.flags import Name, StateFolder, duration_s, flagged
from tandem.clusterctl.inspect.log_files import LEVELS, LogFilter, ParsedRecord, Tail, members, records
from tandem.clusterctl.output import Output, Record, note
from tandem.clusterctl.paths import find_state
from tandem.clusterctl.suggestions import did_you_mean
from tandem.controlplane.state_dir import StateDir
from tandem.core.config import DEFAULT_CLUSTER
from tandem.core.errors import ConfigError, NotFoundError, TandemError

_POLL_S = 0.2

app = command_app()


@app.command(
    epilog=examples("logs", "logs prefill-0 --since 10m --level WARNING", "logs -f", "logs --request-id cmpl-0123abcd")
)
@flagged
def logs(
    output: Output,
    member: Annotated[str, typer.Argument(help="A worker, or router-0, or up. Without it, all.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new records, until Ctrl-C.")] = False,
    since: Annotated[str, typer.Option(help="Earliest record: 10m, 2h, 1d ago, or 2026-11-20T14:30:00Z.")] = "",
    request_id: Annotated[str, typer.Option(help="Only records of this request.")] = "",
    level: Annotated[str, typer.Option(help="Lowest level: DEBUG, INFO, WARNING, ERROR, CRITICAL.")] = "",
    name: Name = DEFAULT_CLUSTER,
    state_dir: StateFolder = "",
) -> None:
    """Show what the processes of a cluster on this machine have logged, in the order of time. Workers on other machines
    keep their logs there; they are named on stderr."""
    wanted = LogFilter(since=moment(since, time.time()), level=_level(level), request=request_id)
    state = find_state(name, state_dir)
    folder, away = state.log_dir, elsewhere(state)
    who = _chosen(folder, member, away)
    _tell_of_others({worker: host for worker, host in away.items() if member in ("", worker)})
    tails = [Tail(folder / f"{one}.log") for one in who]
    if follow:
        for tail in tails:  # before the rest is read: nothing is missed, and hardly anything is repeated
            tail.skip()
    for record in records(folder, who):
        if wanted.takes(record):
            _print(output, record)
    while follow:
        known = {tail.path for tail in tails}
        tails += [
            Tail(folder / f"{one}.log") for one in _chosen(folder, member, away) if folder / f"{one}.log" not in known
        ]
        for record in sorted((record for tail in tails for record in tail.read()), key=lambda record: record.time):
            if wanted.takes(record):
                _print(output, record)
        time.sleep(_POLL_S)


def moment(text: str, now_s: float) -> str:
    """Return the ISO time in UTC of `10m` ago, or an ISO time as given; "" of nothing. ConfigError if it is neither."""
    if not text:
        return ""
    ago_s = duration_s(text)
    if ago_s is not None:
        return _iso(now_s - ago_s)
    for form in ("%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S", "%Y-%m-%d"):
        try:
            time.strptime(text, form)
        except ValueError:
            continue
        return text.rstrip("Z").replace(" ", "T")
    raise ConfigError(f"--since is {text!r}", todo="Write a time such as 10m, 2h or 2026-11-20T14:30:00Z")


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"


def _level(text: str) -> str:
    if text and text.upper() not in LEVELS:
        todo = did_you_mean(text.upper(), LEVELS) or f"Use one of {', '.join(LEVELS)}"
        raise ConfigError(f"--level is {text!r}", todo=todo)
    return text.upper()


def elsewhere(state: StateDir) -> dict[str, str]:
    """Return workers that run on other machines now → the address of each; {} if no running cluster can report it."""
    from tandem.clusterctl.admin_client import AdminClient

    try:
        with AdminClient.find(
            endpoint="", admin_key_file="", name=state.name, state_dir=str(state.path.parent)
        ) as admin:
            rows = admin.status()["workers"]
    except TandemError:
        return {}
    hosts = {row["worker"]: row["address"].rpartition(":")[0].strip("[]") for row in rows}
    return {worker: host for worker, host in hosts.items() if not _is_ours(host)}


def _is_ours(host: str) -> bool:
    """True if this machine has that address: only then can a process listen there. A name counts as ours."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    except ValueError:
        return True
    return True


def _tell_of_others(away: Mapping[str, str]) -> None:
    for host in sorted(set(away.values())):
        workers = ", ".join(sorted(worker for worker, home in away.items() if home == host))
        note(f"clusterctl: the logs of {workers} are on {host}; `clusterctl logs` there shows them")


def _chosen(folder: Path, member: str, away: Mapping[str, str]) -> Sequence[str]:
    """Return the log names of `member`; NotFoundError if there are none. `router` is all of its processes."""
    known = members(folder)
    if not known:
        raise NotFoundError(f"there are no logs in {folder}", todo="Check --name and --state-dir")
    if not member:
        return known
    found = [one for one in known if one == member or (member == "router" and one.startswith("router-"))]
    if not found and member in away:
        raise NotFoundError(
            f"the log of {member} is not on this machine",
            why=f"it runs on {away[member]}",
            todo=f"Use `clusterctl logs {member}` there",
        )
    if not found:
        todo = did_you_mean(member, [*known, "router"]) or f"There are {', '.join(known)}"
        raise NotFoundError(f"there is no log of {member!r}", todo=todo)
    return found


def _print(output: Output, record: ParsedRecord) -> None:
    output.stream("LogRecord", dataclasses.asdict(record), _line)


def _line(found: Record) -> str:
    return " ".join(
        part for part in (found["time"], f"{found['level']:<7}", f"{found['member']:<11}", found["text"]) if part
    )
