"""docs/failure-handling.md against the code: the figures that it names, and its anchors that other pages link to."""

from __future__ import annotations

import re
from pathlib import Path

from tandem.controlplane.control_orders import SILENT_S
from tandem.core.config import RouterSection
from tandem.core.lease_timing import BEAT_S, LEASE_S, PROOF_OF_LIFE, STAND_S
from tandem.router.admission.admission_controller import _LEAST_S, _MOST_S
from tandem.router.api.request_pacing import MAX_WAITING
from tandem.router.dispatch.circuit_breaker import BURST_S, LONGEST_OPEN_S
from tandem.router.dispatch.retry_policy import SECOND_CHANCE_S, Cause
from tandem.workercore.deferred_messages import MAX_BYTES, MAX_MESSAGES

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "failure-handling.md").read_text()
LINKING = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def figures(pattern: str) -> list[float]:
    """The groups of `pattern` as numbers; it is on the page once."""
    (found,) = re.findall(pattern, " ".join(PAGE.split()))
    return [float(one.replace(",", "")) for one in ([found] if isinstance(found, str) else found)]


def test_the_causes_are_those_of_the_retry_policy() -> None:
    table = PAGE.split("## Retry policy")[1].split("| cause |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == set(Cause)


def test_the_limits_on_retries() -> None:
    section = RouterSection()
    assert figures(r"`max_attempts` \((\S+)\)") == [section.max_attempts]
    budget = [section.retry_burst, section.retry_ratio, section.retry_per_s]
    assert figures(r"`retry_burst` \((\S+)\), `retry_ratio` \((\S+)\), `retry_per_s` \((\S+)\)") == budget
    breaker = [section.breaker_failures, section.breaker_open_s]
    assert figures(r"`breaker_failures` \((\S+)\), `breaker_open_s` \((\S+) s\)") == breaker
    assert figures(r"failures within (\S+) s count once") == [BURST_S]
    assert figures(r"twice as long, (\S+) s at most") == [LONGEST_OPEN_S]
    assert figures(r"died\), (\S+) s after the failure, then (\S+) s") == [SECOND_CHANCE_S, 2 * SECOND_CHANCE_S]
    assert figures(r"the last `worker_wait_s` \((\S+) s\)") == [section.worker_wait_s]
    assert figures(r"`stall_s`, (\S+) s \|") == [section.stall_s]


def test_the_bounds_of_silence() -> None:
    given = dict(PROOF_OF_LIFE)
    pings_s = [given["grpc.keepalive_time_ms"] / 1000, given["grpc.keepalive_timeout_ms"] / 1000, LEASE_S]
    assert figures(r"asked after (\S+) s of silence, answered within (\S+) s \| .*? lock \| (\S+) s") == pings_s
    assert figures(r"event loops, every (\S+) s \| .*? ends \| (\S+) s") == [BEAT_S, STAND_S]
    assert figures(r"no answer to a probe for (\S+) s") == [SILENT_S]
    assert figures(r"up to (\S+) or (\S+) MiB") == [MAX_MESSAGES, MAX_BYTES >> 20]


def test_load_shedding() -> None:
    assert figures(r"more than (\S+) requests wait to be read") == [MAX_WAITING]
    assert figures(r"from (\S+) s to one minute") == [_LEAST_S]
    assert _MOST_S == 60.0


def test_other_pages_link_to_headings_that_exist() -> None:
    headings = {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in re.findall(r"^#+ (.+)$", PAGE, re.M)}
    linked = {anchor for page in LINKING for anchor in re.findall(r"failure-handling\.md#([\w-]+)", page.read_text())}
    assert linked
    assert linked <= headings
