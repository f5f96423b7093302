"""docs/questions.md against the code: its sources define their names, and its answers have the figures of the code."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tandem.clusterctl.exit_codes import Exit
from tandem.clusterctl.kv.audit import WAIT_S, Findings, exit_code, find_unexplained
from tandem.controlplane.control_orders import SILENT_S, ControlOrders
from tandem.controlplane.resolve import resolve_ports
from tandem.controlplane.supervised_worker import WorkerStatus
from tandem.core.backoff import LAST_S, RAN_WELL_S, RestartBackoff
from tandem.core.block_hash import HashRoot, chain
from tandem.core.clock import ManualClock
from tandem.core.config import (
    AdmissionSection,
    ClusterConfig,
    Disaggregation,
    PolicyName,
    RouterSection,
    WorkerConfig,
    WorkerSection,
)
from tandem.core.errors import STATUS, CapacityError, DeadlineError, PairRefusedError, TransferError, WorkerLostError
from tandem.core.ids import Attempt, GroupId, Incarnation, Rank, RequestId, TransferId, WorkerId
from tandem.core.kv_compatibility import KVProfile, agree, refusal
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.core.lease_timing import BEAT_S, LEASE_S, STAND_S
from tandem.core.prefill_queue import PrefillSpeed, QueuedWork, QueueRules
from tandem.core.sampling import SamplingParams
from tandem.core.state_enums import RoleName, WorkerState
from tandem.decode_worker.ticket_grants import UNUSED_S
from tandem.kvtransfer.leases import TransferLeases
from tandem.kvtransfer.link_speeds import MARGIN, fastest
from tandem.kvtransfer.state import NEXT, TransferPhase
from tandem.kvtransfer.ticket import Endpoint
from tandem.kvtransfer.transports.dialer import candidates
from tandem.kvtransfer.transports.registry import AUTO, TRANSPORTS
from tandem.prefill_worker.push_plan import PlannedPush, PushPlan
from tandem.router.admission.admission_controller import AdmissionController
from tandem.router.admission.slo_classes import SloTerms
from tandem.router.api.http.errors import retry_headers
from tandem.router.dispatch.inflight_request import ArrivalQueue, GenerationRequest, InFlightRequest
from tandem.router.dispatch.retry_policy import (
    BURST_S,
    LONGEST_OPEN_S,
    AttemptHistory,
    Breakers,
    BreakerState,
    RetryBudget,
    RetryLater,
    RetryPolicy,
    judge,
    lost,
)
from tandem.router.routing.cost_model import FETCH_SETUP_S, MAX_SOURCES, Estimates, with_sources
from tandem.router.routing.plan import Candidate, Job, Plan
from tandem.router.routing.policies import create_policy
from tandem.router.routing.policies.cost import CostPolicy
from tandem.workercore.heartbeat import Pulse
from tandem.workercore.peer_block_quota import SHARE, is_over
from tandem.workercore.prefix_client import CEILING_S, FLOOR_S, PATIENCE
from tandem.workerhost.membership import Membership
from tandem.workerhost.watchdog import LOADING_LOOKS, SILENT_LOOKS, WATCH_EVERY_S, RankWatch
from tests.unit.router.flying import chunk

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGE = (DOCS / "questions.md").read_text()
PARTS = re.split(r"^## (\d+)\. (.+)$", PAGE, flags=re.MULTILINE)
BODIES = {int(number): body for number, body in zip(PARTS[1::3], PARTS[3::3], strict=True)}
SOURCES = [
    (number, path, symbol)
    for number, body in BODIES.items()
    for line in re.findall(r"^Source: ((?:`[^`]+`,?\s)+)", body, re.MULTILINE)
    for path, symbol in re.findall(r"`([\w/]+\.py):([\w.]+)`", line)
]
LINKS = re.findall(r"\]\(([^)#]+)(?:#([\w-]+))?\)", PAGE)


def has(number: int, *phrases: str) -> None:
    """Assert that an answer has these phrases, none of them inside a longer word or figure."""
    answer = " ".join(BODIES[number].partition("\nSource: ")[0].split())
    for phrase in phrases:
        assert re.search(rf"(?<![\w.]){re.escape(phrase)}(?![\w])", answer), f"answer {number} lacks {phrase!r}"


def seconds(value: float) -> str:
    return f"{value:.3f} s"


# ---- the page --------------------------------------------------------------------------------------------------------


def test_twenty_questions_have_an_answer_a_source_and_a_page() -> None:
    assert list(BODIES) == list(range(1, 21))
    assert {number for number, _, _ in SOURCES} == set(BODIES)
    for body in BODIES.values():
        paragraphs = body.strip().split("\n\n")
        assert [paragraph.partition(": ")[0] for paragraph in paragraphs[1:]] == ["Source", "Page"]
        assert len(paragraphs[0]) > 150
        assert not paragraphs[0].endswith("?")


@pytest.mark.parametrize(("number", "path", "symbol"), SOURCES)
def test_a_source_defines_its_symbol(number: int, path: str, symbol: str) -> None:
    body: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
    for part in symbol.split("."):
        defined = dict(_definitions(body))
        assert part in defined, f"question {number}: {path} does not define {symbol}"
        body = defined[part]


def _definitions(body: list[ast.stmt]) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Yield the names that `body` defines: classes and functions with their bodies, variables without one."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.body
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, []) for target in targets if isinstance(target, ast.Name))


@pytest.mark.parametrize(("target", "anchor"), LINKS)
def test_a_link_leads_to_a_heading(target: str, anchor: str) -> None:
    headings = re.findall(r"^#+ (.+)$", (DOCS / target).read_text(), re.MULTILINE)
    assert not anchor or anchor in {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}


# ---- routing ---------------------------------------------------------------------------------------------------------

SPEC = KVGroupSpec(
    group=GroupId(0), layers=tuple(range(32)), planes=2, heads=8, width=128, block_tokens=16, dtype="bfloat16"
)
KV = KVProfile(fingerprint="example", identity=(), layout=KVLayout(groups=(SPEC,)))
TOKEN_BYTES = SPEC.block_bytes() // SPEC.block_tokens
JOB = Job(prompt_tokens=3000, max_tokens=256)
HELD = 2000
TOKENS_PER_S, BYTES_PER_S = 5000.0, 1e9


def worker(name: str, role: RoleName, held: int = 0, queue: tuple[QueuedWork, ...] = ()) -> Candidate:
    is_decode = role is RoleName.DECODE
    return Candidate(
        worker=WorkerId(name), incarnation=Incarnation(1), role=role, held_tokens=held, reusable_tokens=held,
        queue=queue, queued_tokens=sum(row.tokens for row in queue), rules=QueueRules(), free_blocks=10_000,
        total_blocks=10_000, profile=KV, link_speed=lambda to: BYTES_PER_S,
        prefill_speed=PrefillSpeed(tokens_per_s=TOKENS_PER_S), in_flight=8 * is_decode, running=8 * is_decode,
        decode_step_s=0.02 * is_decode, decode_sequence_s=0.0005 * is_decode,
    )  # fmt: skip


Queue = tuple[QueuedWork, ...]


def cluster(*, first: int = 0, decode: int = 0, queues: tuple[Queue, Queue] = ((), ())) -> list[Candidate]:
    """Return two prefill workers, of which the first holds `first` tokens, and a decode worker that holds `decode`."""
    return [
        worker("prefill-0", RoleName.PREFILL, first, queues[0]),
        worker("prefill-1", RoleName.PREFILL, 0, queues[1]),
        worker("decode-0", RoleName.DECODE, decode),
    ]


def planned(workers: list[Candidate], mode: Disaggregation = Disaggregation.AUTO) -> tuple[Plan, dict[str, str]]:
    """Return the plan, and the cost of each pair by its prefill worker, "" for the decode worker alone."""
    plan = with_sources(CostPolicy(mode).plan(JOB, workers), JOB, workers)
    costs = {
        option.prefill or "": seconds(option.score) for option in plan.options if option.decode.startswith("decode")
    }
    return plan, costs


def test_1_where_a_prompt_with_a_cached_prefix_goes() -> None:
    idle, costs = planned(cluster(first=HELD))
    assert (idle.prefill, idle.decode, idle.sources) == ("prefill-0", "decode-0", ())
    has(1, f"{costs['prefill-0']} against {costs['prefill-1']} for `prefill-1`")
    due = QueuedWork(due_s=0.5, tokens=1500), QueuedWork(due_s=20.0, tokens=8000)
    busy, later = planned(cluster(first=HELD, queues=(due, ())))
    assert (busy.prefill, busy.decode, [one.worker for one in busy.sources]) == ("prefill-1", "decode-0", ["prefill-0"])
    has(1, f"would cost {later['prefill-0']}", f"`prefill-1` and `decode-0` at {later['prefill-1']}")
    has(1, f"{TOKENS_PER_S:,.0f} tokens/s, {BYTES_PER_S / 1e9:g} GB/s, {TOKEN_BYTES:,} bytes of KV a token")
    has(1, "1,500 tokens due earlier and a prompt of 8,000 tokens due later", f"the first {HELD:,} tokens from")


def test_2_when_a_decode_worker_computes_a_prompt() -> None:
    cached, costs = planned(cluster(decode=2900))
    assert (cached.prefill, cached.decode) == (None, "decode-0")
    has(2, "holds 2,900 of the 3,000 tokens", f"{costs['']} against {costs['prefill-0']} for a pair")
    new, costs = planned(cluster())
    assert new.prefill is not None
    has(2, f"a pair takes the prompt, at {costs['prefill-0']} against {costs['']}", "about 27,000 tokens wait at each")
    for tokens, is_alone in ((26_000, False), (27_000, True)):
        queue = (QueuedWork(due_s=0.0, tokens=tokens),)
        plan, _ = planned(cluster(queues=(queue, queue)))
        assert (plan.prefill is None) is is_alone
    assert planned(cluster(decode=2900), Disaggregation.ALWAYS)[0].prefill is not None
    assert planned(cluster(), Disaggregation.NEVER)[0].decode == "decode-0"


def test_3_how_long_short_prompts_delay_a_long_one() -> None:
    section = WorkerSection()
    rules = QueueRules(stretch=section.queue_stretch, max_overtake_s=section.queue_max_overtake_s)
    has(3, f"`queue_stretch` ({rules.stretch:g})", f"`queue_max_overtake_s` ({rules.max_overtake_s:g} s)")
    short_s, long_s = (rules.due_s(arrived_s=0.0, remaining_s=n / TOKENS_PER_S, now_s=0.0) for n in (10_000, 50_000))
    has(3, f"10,000 tokens is due after {short_s:g} s, one of 50,000 tokens after {long_s:g} s")
    assert rules.due_s(arrived_s=0.0, remaining_s=10.0, now_s=0.0, deadline_s=30.0) == 30.0
    assert rules.due_s(arrived_s=0.0, remaining_s=10.0, now_s=0.0, deadline_s=9.0) == float("inf")
    assert QueueRules(stretch=0.0).due_s(arrived_s=7.0, remaining_s=10.0, now_s=7.0) == 7.0


# ---- failures --------------------------------------------------------------------------------------------------------

MEMBER = (WorkerId("d0"), Incarnation(1))
OTHER = (WorkerId("p0"), Incarnation(1))
SECTION = RouterSection()


def test_4_when_a_stopped_worker_is_given_up() -> None:
    has(4, f"after {LEASE_S:g} s without a sign of life", f"event loop stalls, that takes {STAND_S:g} s")
    replace_s = ClusterConfig().replace_silent_s
    has(4, f"a probe for {SILENT_S:g} s", f"`replace_silent_s` ({replace_s:g} s) more")
    clock = ManualClock()
    orders = ControlOrders(cast(Any, None), cast(Any, None), clock, lambda: None, replace_silent_s=replace_s)
    slot = WorkerStatus(WorkerId("d0"), RestartBackoff(clock), RestartBackoff(clock), silent_at_s=0.0)
    clock.advance(replace_s - 0.1)
    assert not orders.is_lost(slot)
    clock.advance(0.1)
    assert orders.is_lost(slot)


def test_5_a_decode_worker_dies_after_50_tokens() -> None:
    inbox = ArrivalQueue(1 << 20)
    work = GenerationRequest(prompt=range(1000), sampling=SamplingParams(max_tokens=256), timeout_s=60.0)
    request = InFlightRequest(id=RequestId("r"), slot=0, work=work, inbox=inbox, started_s=0.0)
    request.accept(chunk(0, list(range(50))), 1.0)
    failure = lost(WorkerLostError("it died"), MEMBER)
    assert not failure.charged
    request.begin_attempt(failure.cause)
    job, (forced,) = request.job(2.0), request.forced()
    assert request.attempt == Attempt(2)
    assert request.accept(chunk(50, [7]), 2.0) == "attempt"
    has(5, f"attempt {request.attempt}", f"The {len(forced.tokens)} tokens go along as forced", f"`{failure.cause}`")
    has(5, "a prompt of 1,000 tokens and `max_tokens` 256", f"D extends the {len(forced.tokens)} tokens")
    has(5, f"{job.prompt_tokens:,} tokens to compute", f"{job.max_tokens} tokens to generate")
    assert request.accept(chunk(49, [9], attempt=2), 2.0) == "duplicate"
    assert request.accept(chunk(50, [7], attempt=2), 2.0) == ""
    has(5, f"has index {request.output_tokens - 1}")


def test_6_how_often_a_request_is_tried_again() -> None:
    clock = ManualClock()
    policy = RetryPolicy(create_policy(PolicyName.COST, Disaggregation.AUTO), SECTION, clock)
    has(6, f"`max_attempts` ({SECTION.max_attempts})")
    assert policy.denial(AttemptHistory(failures=SECTION.max_attempts - 1)) == ""
    assert policy.denial(AttemptHistory(failures=SECTION.max_attempts)) == "attempts"
    has(6, f"full with {SECTION.retry_burst:,} tokens")
    has(6, f"{SECTION.retry_ratio:g} with each request and {SECTION.retry_per_s:g} with each second")
    budget = RetryBudget(SECTION.retry_burst, SECTION.retry_ratio, SECTION.retry_per_s, clock)
    assert sum(budget.take() for _ in range(2 * SECTION.retry_burst)) == SECTION.retry_burst
    clock.advance(1.0)
    assert budget.tokens == pytest.approx(SECTION.retry_per_s)
    budget.deposit()
    assert budget.tokens == pytest.approx(SECTION.retry_per_s + SECTION.retry_ratio)
    history = AttemptHistory()
    for nth in ("first failure", "second", "third"):
        policy.note(history, lost(WorkerLostError("it died"), (WorkerId("decode-0"), Incarnation(1))))
        later = policy.choose(JOB, cluster(), history)
        assert isinstance(later, RetryLater)
        has(6, f"{later.until_s - clock.now_s():.1f} s after the {nth}")


def test_7_when_a_circuit_breaker_opens() -> None:
    clock = ManualClock()
    breakers = Breakers(SECTION.breaker_failures, SECTION.breaker_open_s, clock)
    has(7, f"After {SECTION.breaker_failures} failures in a row", f"failures within {BURST_S:g} s count once")
    for _ in range(SECTION.breaker_failures):
        assert breakers.state(MEMBER) is BreakerState.CLOSED
        clock.advance(BURST_S)
        breakers.failed(MEMBER)
        breakers.failed(MEMBER)
    opened: list[float] = []
    for _ in range(6):
        start_s = clock.now_s()
        while not breakers.allows(MEMBER):
            clock.advance(BURST_S)
        opened.append(clock.now_s() - start_s)
        breakers.sent(MEMBER, "trial")
        assert not breakers.allows(MEMBER)
        breakers.failed(MEMBER)
    assert opened[-2:] == [LONGEST_OPEN_S] * 2
    has(7, f"For {opened[0]:g} s requests")
    has(7, f"opens for {opened[1]:g} s, then {opened[2]:g} s, {opened[-1]:g} s at most")
    errors = TransferError("t"), CapacityError("c"), PairRefusedError("p")
    failures = [judge(error, MEMBER, OTHER) for error in errors]
    assert [one.charged for one in failures if one] == [{MEMBER, OTHER}, frozenset(), frozenset()]


class Meter:
    def waited(self, seconds: float) -> None: ...
    def refused(self, reason: str) -> None: ...


def test_8_what_an_overloaded_cluster_answers() -> None:
    limit = AdmissionSection().max_waiting
    has(8, f"`max_waiting` ({limit:,})")
    for error in (CapacityError, DeadlineError):
        has(8, f"{STATUS[error.code][0]} `{error.code}`")
    admission = AdmissionController(AdmissionSection(), ManualClock(), lambda model, need: False, Meter())
    terms, waits = SloTerms(slo="chat", ttft_s=1.0), []
    for first_token_s in (0.901, 1000.0):
        with pytest.raises(CapacityError) as refused:
            admission.check_slo(terms, 0.0, first_token_s, compute_s=0.1)
        waits.append(refused.value.retry_after_s)
        headers = retry_headers(refused.value, 503)
    has(8, f"from {waits[0]:g} s to {waits[1]:g} s")
    assert headers["retry-after"] == "60"
    assert retry_headers(CapacityError("full", retry_after_s=waits[0]), 503) == {
        "retry-after": "1", "retry-after-ms": "100", "x-should-retry": "true",
    }  # fmt: skip
    admission.check_slo(terms, 0.0, 1000.0, compute_s=2.0)  # too long for its class on an idle worker: served


def test_9_a_step_that_does_not_end() -> None:
    section = WorkerSection()
    has(9, f"`step_slow_s` ({section.step_slow_s:g} s)", f"`step_watchdog_s` ({section.step_watchdog_s:g} s)")
    has(9, f"`{WorkerState.STALLED}`", f"`stall_s` ({SECTION.stall_s:g} s)")


def test_10_routers_hold_the_leases_of_workers() -> None:
    clock, leases = ManualClock(100.0), list[float]()
    config = WorkerConfig(
        cluster="test", worker_id="w0", role=RoleName.DECODE, pool="decode", model="m", model_dir="", revision="",
        dtype="auto", max_model_len=0, redis_url="", secret_file="", runtime_dir="",
    )  # fmt: skip
    membership = Membership(config, leases.append, lambda incarnation: None, clock)
    membership._grant(clock.now_s())
    clock.advance(2.0)
    membership.acknowledged()  # a router's ping
    assert leases == [100.0 + LEASE_S, 102.0 + LEASE_S]
    clock.advance(LEASE_S)
    membership.acknowledged()
    assert membership.has_lapsed
    has(10, f"runs until {LEASE_S:g} s after", f"routers ping every {BEAT_S:g} s")


# ---- transfer --------------------------------------------------------------------------------------------------------


def test_11_what_frees_a_reserved_block() -> None:
    phase = TransferPhase
    before = {to: {one for one, following in NEXT.items() if to in following} for to in phase}
    assert before[phase.RELEASED] == {phase.FENCED}
    assert before[phase.FENCED] == {phase.CANCELLED, phase.FAILED}
    has(11, f"`{phase.CANCELLED}` or `{phase.FAILED}`, then `{phase.FENCED}`, then `{phase.RELEASED}`")
    has(11, f"{LEASE_S:g} s without a sign of life", f"{LEASE_S:g} s or more after the first such list")
    leases, peer = TransferLeases(), (WorkerId("p0"), Incarnation(1))
    leases.open(TransferId(7), *peer)
    overdue = []
    for now_s in (0.0, LEASE_S - 0.1, LEASE_S):
        leases.hear(*peer, [], now_s)
        overdue.append(leases.overdue())
    assert overdue == [[], [], [7]]


def test_12_which_transport_two_workers_of_one_host_use() -> None:
    endpoints = [Endpoint(transport=name, address="", rank=Rank(0), host="a") for name in TRANSPORTS]
    order = [one.endpoint.transport for one in candidates(endpoints, "a", AUTO, on_device=True)]
    has(12, f"The one of {', '.join(f'`{name}`' for name in order)}", f"a factor of {MARGIN:g}")
    *most, last = [f"`{name}`" for name in TRANSPORTS if name not in order]
    assert f"{', '.join(most)} and {last} are used only if" in " ".join(BODIES[12].split())
    assert order[:2] == ["shm", "tcp"]
    assert [fastest([3.0e9, tcp, 1e9]) for tcp in (3.7e9, 4.0e9)] == [0, 1]
    has(12, "`shm` at 3.0 GB/s", "`tcp` at 3.7 GB/s", "takes `tcp` at 4.0 GB/s")


def of_groups(tp: int = 1, **changes: Any) -> KVLayout:
    return KVLayout(groups=(dataclasses.replace(SPEC, **changes),), tp=tp)


MAY_DIFFER: list[dict[str, Any]] = [
    {"layout": of_groups(block_tokens=32)}, {"layout": of_groups(dtype="float32")}, {"layout": of_groups(tp=2)},
    {"codecs": ()}, {"transports": ("shm", "tcp")}, {"protocol": (KV.protocol[0], KV.protocol[1] + 1)},
]  # fmt: skip
MUST_BE_EQUAL: list[dict[str, Any]] = [
    {"fingerprint": "another"}, {"layout": of_groups(width=64)}, {"layout": of_groups(heads=4)},
    {"protocol": (KV.protocol[0] + 1, 0)}, {"revision": "b"}, {"transports": ("grpc",)},
]  # fmt: skip


def test_13_which_settings_of_a_pair_may_differ() -> None:
    sender = dataclasses.replace(KV, revision="a", transports=("tcp",))
    assert [refusal(sender, dataclasses.replace(sender, **one)) for one in MAY_DIFFER] == [""] * len(MAY_DIFFER)
    assert all(refusal(sender, dataclasses.replace(sender, **one)) for one in MUST_BE_EQUAL)
    form = agree(dataclasses.replace(KV, layout=of_groups(dtype="float32")), dataclasses.replace(KV, **MAY_DIFFER[0]))
    has(13, f"float32 in blocks of {SPEC.block_tokens} tokens to {SPEC.dtype} in blocks of 32", f"`{form.lossy}`")


def test_14_a_decode_worker_short_of_blocks() -> None:
    has(14, f"granted {UNUSED_S:g} s ago or earlier", "at most a quarter of each pool")
    assert SHARE == 4
    assert [is_over([200], [more], [1000]) for more in (50, 60)] == [False, True]
    assert not is_over([0], [900], [1000])
    has(14, "of 1,000 blocks a peer with 200 reserved ones gets 50 more, but not 60")


def test_15_bytes_of_a_push() -> None:
    root = HashRoot(fingerprint="example", block_tokens=SPEC.block_tokens).digest()
    held = len(chain(root, range(1000), SPEC.block_tokens))
    plan = PushPlan(SPEC, 3000, 0)
    plan.open(held, SPEC.block_tokens)
    plan.computed(0, len(SPEC.layers), 3000)
    needed = SPEC.blocks_for(3000)
    assert plan.take() == [PlannedPush(held, needed, 0, len(SPEC.layers))]
    has(15, f"In blocks of {SPEC.block_tokens} tokens the 1,000 tokens are {held} blocks with a hash")
    has(15, f"takes {needed} blocks", f"{needed - held} blocks are pushed")
    has(15, f"{TOKEN_BYTES:,} bytes a token", f"{(needed - held) * SPEC.block_bytes():,} bytes")


def test_16_when_a_prefix_is_fetched() -> None:
    workers = cluster(first=HELD)
    estimates = Estimates(JOB, workers)
    [(saved_s, source)] = estimates.sources(workers[1])
    fetch_s, compute_s = estimates.fetch_s(workers[1], source, HELD), HELD / TOKENS_PER_S
    assert saved_s == pytest.approx(compute_s - fetch_s)
    has(16, f"{TOKEN_BYTES:,} bytes a token, {HELD:,} tokens take {seconds(fetch_s)} over {BYTES_PER_S / 1e9:g} GB/s")
    has(16, f"against {seconds(compute_s)} to compute them at {TOKENS_PER_S:,.0f} tokens/s")
    has(16, f"if {1000 * FETCH_SETUP_S:g} ms and the time of the bytes", f"{MAX_SOURCES} sources at most")
    has(16, f"after {FLOOR_S:g} s and {PATIENCE:g} times the expected wire time", f"{CEILING_S:g} s at most")


Holds = list[dict[str, Any]]
HOLD: dict[str, Any] = {
    "worker": "d0", "incarnation": "22", "group": 0, "kind": "reserved", "key": "r#1/7", "since_s": 5.0,
    "blocks": [3, 4], "verdict": "suspect", "is_fenced": True,
}  # fmt: skip


def code(first: Holds, second: Holds, *, unanswered: int = 0, workers: int = 1) -> int:
    look = {"holds": second, "workers": [{}] * workers, "unanswered": [{}] * unanswered}
    return exit_code(Findings(look=look, unexplained=find_unexplained({"holds": first}, look)))


def test_17_exit_codes_of_an_audit() -> None:
    has(17, f"`--wait` ({WAIT_S:g} s) apart")
    assert f"exit code {Exit.UNHEALTHY:d} of" in PAGE
    has(17, f"{Exit.UNHEALTHY:d} comes before {Exit.FAILED:d}", f"before {Exit.NOT_FOUND:d}, no worker that reported")
    assert code([HOLD], [HOLD], unanswered=1) == Exit.UNHEALTHY
    assert code([HOLD], [{**HOLD, "since_s": 6.0}]) == Exit.OK
    assert code([], [HOLD]) == Exit.OK
    assert code([], [], unanswered=1, workers=0) == Exit.FAILED
    assert code([], [], workers=0) == Exit.NOT_FOUND


# ---- processes -------------------------------------------------------------------------------------------------------


def test_18_how_soon_a_dead_worker_is_restarted() -> None:
    clock = ManualClock()
    backoff = RestartBackoff(clock)
    delays = [backoff.died() for _ in range(7)]
    has(18, f"restarted after {delays[0]:g} s", f"{', '.join(f'{one:g}' for one in delays[:6])} s")
    has(18, f"and {delays[6]:g} s from then on")
    assert delays[6] == LAST_S
    backoff.ready()
    clock.advance(RAN_WELL_S)
    has(18, f"ready for {RAN_WELL_S:g} s, they begin at {backoff.died():g} s again")


def test_19_a_rank_that_stops() -> None:
    pulse = Pulse.create("test-questions")
    try:
        watch = RankWatch([pulse])
        silent = [watch.look() for _ in range(SILENT_LOOKS)]
    finally:
        pulse.close()
    assert silent == [[]] * (SILENT_LOOKS - 1) + [[0]]
    has(19, f"every {WATCH_EVERY_S:g} s", f"{SILENT_LOOKS} checks in a row ({SILENT_LOOKS * WATCH_EVERY_S:g} s)")
    has(19, f"in {LOADING_LOOKS} ({LOADING_LOOKS * WATCH_EVERY_S:g} s)")


def test_20_the_ports_of_a_cluster() -> None:
    ports = resolve_ports(SECTION)
    has(20, f"HTTP API on port {ports.port}, gRPC on {ports.grpc_port} and the admin port on {ports.admin_port}")
    has(20, f"listen on {SECTION.host} until `host` is set")
    free = resolve_ports(dataclasses.replace(SECTION, port=0))
    assert (free.port, free.grpc_port, free.admin_port) == (0, 0, 0)
