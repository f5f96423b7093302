"""Inspecting commands on a real cluster: their output for programs fits its schemas."""

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from tandem.clusterctl.schemas.kinds import KINDS, schema
from tools.running_cluster import Cluster, running
from tools.waiting import wait_for

PROMPT = list(range(600, 700))
REQUEST = "the id of the answer"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running("--engine", "sim", "--prefill", "1", "--decode", "1", "--disaggregation", "always") as cluster:
        cluster.context["answer"] = cluster.complete(PROMPT, 8)["id"]
        yield cluster


def clusterctl(cluster: Cluster, *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    arguments = tuple(cluster.context["answer"] if one == REQUEST else one for one in arguments)
    command = [sys.executable, "-m", "tandem.clusterctl", *arguments]
    if arguments[:2] not in (("config", "explain"), ("config", "validate")):  # which want no cluster
        command += ["--state-dir", str(cluster.folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


def check(document: dict[str, Any], kind: str) -> None:
    """Check that a document fits the schema of its kind."""
    assert document["kind"] == kind
    errors = [str(error) for error in jsonschema_rs.Draft202012Validator(schema(kind)).iter_errors(document)]
    assert errors == []


DOCUMENTS = {
    "Version": ["version"],
    "Status": ["status"],
    "Top": ["top"],
    "Trace": ["trace", REQUEST],
    "Chat": ["chat", "Hi", "--max-tokens", "8", "--temperature", "0", "-q"],
    "LogRecord": ["logs", "router"],
    "Config": ["config", "view"],
    "ConfigKeys": ["config", "explain", "router"],
    "Net": ["net"],
    "KvAudit": ["kv", "audit"],
    "RoutingPolicy": ["route", "policy"],
    "RoutingDecision": ["route", "explain", "--tokens", ",".join(map(str, PROMPT))],
    "SloClasses": ["slo", "set", "chat", "--ttft", "2.5", "--yes"],
    "ApiKeys": ["key", "list"],
    "Effect": ["down", "--dry-run"],
    "Change": ["scale", "--decode", "2", "--dry-run"],
    "PoolList": ["get", "pools"],
    "RolloutList": ["rollout", "status"],
    "WorkerList": ["get", "workers"],
    "Worker": ["describe", "decode-0"],
    "Event": ["events"],
    "LivePlan": ["plan", "--live"],
}
"""The command that prints each kind, but those that other tests look at."""
STREAMS = {"LogRecord", "Event"}
ELSEWHERE = {
    "ApiKey",
    "ConfigCheck",
    "Doctor",
    "Bench",
    "Replay",
    "Plan",
    "SplitSweep",
    "DisaggregationMap",
    "Start",
    "Join",
    "Models",
}


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_document_is_what_its_schema_says(cluster: Cluster, kind: str) -> None:
    code, text, error = clusterctl(cluster, *DOCUMENTS[kind], "-o", "json")
    assert (code, error) == (0, "")
    lines = text.splitlines() if kind in STREAMS else [text]
    assert lines
    for line in lines:
        check(json.loads(line), kind)
    code, text, _ = clusterctl(cluster, *DOCUMENTS[kind], "-o", "yaml")
    assert code == 0
    found = list(yaml.safe_load_all(text))
    assert len(found) == len(lines)
    for document in found:
        check(document, kind)


@pytest.mark.parametrize("form", ["table", "wide"])
@pytest.mark.parametrize("kind", DOCUMENTS)
def test_people_are_shown_plain_text_where_there_is_no_terminal(cluster: Cluster, kind: str, form: str) -> None:
    code, text, error = clusterctl(cluster, *DOCUMENTS[kind], "-o", form)
    assert (code, error) == (0, "")
    assert text.strip()
    assert "\x1b" not in text
    assert "apiVersion" not in text


def test_a_key_is_shown_in_a_document_this_one_time(cluster: Cluster) -> None:
    wish = ("--tenant", "acme", "--expires", "30d", "--yes")
    code, text, error = clusterctl(cluster, "key", "create", "-o", "json", *wish)
    made = json.loads(text)
    check(made, "ApiKey")
    assert code == 0
    assert "not shown again" in error
    assert made["key"] not in error
    code, text, error = clusterctl(cluster, "key", "revoke", made["id"])
    assert (code, text) == (2, "")
    assert "cannot be confirmed" in error
    code, text, _ = clusterctl(cluster, "key", "revoke", made["id"], "--yes")
    assert (code, text) == (0, f"revoked {made['id']}\n")
    code, text, _ = clusterctl(cluster, "key", "revoke", made["id"])
    assert (code, text) == (0, f"{made['id']} is revoked already\n")
    code, text, error = clusterctl(cluster, "key", "revoke", "tdk-0123456789ab")
    assert (code, text) == (3, "")
    assert "there is no key tdk-0123456789ab. `clusterctl key list` shows" in error.replace(sys.argv[0], "clusterctl")


def test_a_file_that_is_right(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text("[pools]\nmixed = 1\n")
    code, text, _ = clusterctl(cluster, "config", "validate", str(tmp_path / "cluster.toml"), "-o", "json")
    found = json.loads(text)
    check(found, "ConfigCheck")
    assert (code, found["changed"]) == (0, ["pools.mixed"])


def test_the_time_line_of_a_request_that_crossed(cluster: Cluster) -> None:
    found = json.loads(clusterctl(cluster, "trace", REQUEST, "-o", "json")[1])
    assert (found["outcome"], found["is_over"], found["attempts"], found["error"]) == ("finished", True, 1, "")
    assert (found["prompt_tokens"], found["output_tokens"]) == (len(PROMPT), 8)
    spans = found["spans"]
    order = ["wait", "queue", "prefill", "transfer", "decode"]
    assert [span["span"] for span in spans] == [name for name in order if name in {span["span"] for span in spans}]
    assert {"prefill", "decode"} <= {span["span"] for span in spans}
    assert spans[0]["start_s"] == 0
    assert spans[-1]["end_s"] == pytest.approx(found["duration_s"], abs=1e-5)
    for span, after in itertools.pairwise(spans):
        assert span["end_s"] == pytest.approx(after["start_s"], abs=1e-5), "without a gap"
    workers = {span["span"]: span["worker"] for span in spans}
    assert (workers["prefill"], workers["decode"]) == ("prefill-0", "decode-0")
    assert {"sent", "prefill", "first_token", "decode"} <= {moment["what"] for moment in found["moments"]}
    assert found["handoff"]["overhead_s"] >= 0
    code, _, error = clusterctl(cluster, "trace", "cmpl-nobody")
    assert code == 3
    assert "request 'cmpl-nobody' is not known here" in error


def test_logs_of_one_request_and_what_follows(cluster: Cluster) -> None:
    command = [sys.executable, "-m", "tandem.clusterctl", "logs", "-f", "-o", "json"]
    command += ["--state-dir", str(cluster.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
        try:
            assert follower.stdout is not None
            first = json.loads(follower.stdout.readline())
            check(first, "LogRecord")
            log = next(cluster.folder.glob("*/logs/decode-0.log"))
            with log.open("a") as file:
                file.write("2099-01-01T00:00:00.000Z INFO    worker planted request=cmpl-planted\n")
            for line in follower.stdout:
                if "planted" in line:
                    break
            found = json.loads(line)
            assert (found["member"], found["text"]) == ("decode-0", "planted request=cmpl-planted")
            follower.send_signal(signal.SIGINT)
            assert follower.wait(30) == 130
        finally:
            follower.kill()
    code, text, _ = clusterctl(cluster, "logs", "--request-id", "cmpl-planted")
    assert (code, len(text.splitlines())) == (0, 1)


@pytest.mark.parametrize("form", ["json", "yaml", "table"])
def test_looks_follow_each_other_where_there_is_no_terminal(cluster: Cluster, form: str) -> None:
    """For programs each is a document; in JSON a line. The first is of all time, the others of the time between."""
    command = [sys.executable, "-m", "tandem.clusterctl", "top", "-f", "--every", "0.1", "-o", form]
    command += ["--state-dir", str(cluster.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
        try:
            assert follower.stdout is not None
            if form == "json":
                looks = [json.loads(follower.stdout.readline()) for _ in range(4)]
            else:
                begins = "---\n" if form == "yaml" else f"{looked(cluster)['cluster']}: "
                starts = (line for line in follower.stdout if line.startswith(begins))
                assert len(list(itertools.islice(starts, 4))) == 4
            follower.send_signal(signal.SIGINT)
            assert follower.wait(30) == 130
        finally:
            follower.kill()
    if form == "json":
        for look in looks:
            check(look, "Top")
        assert looks[0]["window_s"] is None
        assert all(look["window_s"] >= 0.1 for look in looks[1:])
        assert [look["requests_per_s"] for look in looks[1:]] == [0.0] * 3
    assert looked(cluster)["window_s"] is None, "without it: one document, and the end"


def looked(cluster: Cluster) -> dict[str, Any]:
    """Return one document of `top`."""
    code, text, _ = clusterctl(cluster, "top", "-o", "json")
    assert code == 0
    found: dict[str, Any] = json.loads(text)
    return found


def test_status_is_told_as_an_exit_code(cluster: Cluster) -> None:
    def healthy() -> dict[str, Any] | None:
        code, text, _ = clusterctl(cluster, "status", "--exit-code", "-o", "json")
        found: dict[str, Any] = json.loads(text)
        assert (code == 0) == (found["health"] == "ok")
        return found if found["health"] == "ok" and not found["warnings"] else None

    found = wait_for(healthy)
    assert {pool["role"]: pool["ready"] for pool in found["pools"]} == {"prefill": 1, "decode": 1}
    assert found["figures"]["requests"] >= 1
    assert found["figures"]["ttft_p50_s"] > 0
    (version,) = {worker["version"] for worker in found["workers"]}
    assert version == found["version"]
    assert all(abs(worker["clock_skew_s"]) < 60 for worker in found["workers"])


def test_a_doctor_finds_nothing_wrong_with_a_cluster_that_is_well(cluster: Cluster) -> None:
    """Its facts of the machine are the machine's."""
    code, text, _ = clusterctl(cluster, "doctor", "-o", "json")
    found = json.loads(text)
    check(found, "Doctor")
    assert code == (7 if found["errors"] else 0)
    verdicts = {one["check"]: one["verdict"] for one in found["findings"]}
    of_cluster = ("configuration", "secrets", "redis", "redis-eviction", "redis-memory", "redis-persistence",
                  "redis-clock", "registry", "cluster", "versions", "addresses", "pairs", "autoscalers")  # fmt: skip
    assert {name: verdicts[name] for name in of_cluster} == dict.fromkeys(of_cluster, "ok")
    assert verdicts["ports"] == "skipped"
    assert verdicts["clocks"] in ("ok", "warning")  # what is seen of a clock has the way of a greeting in it


def test_every_kind_is_printed_by_a_command_here() -> None:
    assert set(KINDS) == {*DOCUMENTS, *ELSEWHERE}


def test_a_schema_refuses_what_it_does_not_know() -> None:
    document = {"apiVersion": "tandem/v1", "kind": "Version", "client": "1", "python": "3.12", "cluster": None}
    check(document, "Version")
    for wrong in ({"more": 1}, {"client": 1}, {"apiVersion": "tandem/v2"}):
        with pytest.raises(AssertionError):
            check(document | wrong, "Version")
