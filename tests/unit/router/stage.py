"""A dispatcher among real links without peers: its messages stay in them, and tests deliver the replies."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tandem.core.clock import ManualClock
from tandem.core.config import Disaggregation, RouterSection
from tandem.core.errors import TandemError
from tandem.core.ids import Incarnation, RouterId, WorkerId
from tandem.core.sampling import SamplingParams
from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import Phase, RoleName
from tandem.router.admission.slo_classes import SloTerms
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.dispatch.inflight_request import GenerationRequest
from tandem.router.dispatch.readiness import Readiness
from tandem.router.dispatch.retry_policy import RetryPolicy
from tandem.router.routing.plan import Plan
from tandem.router.routing.policies import create_policy
from tandem.router.workers.connection import Identity, WorkerAddress, WorkerLink
from tandem.router.workers.prefix_lookup import PrefixFinder
from tandem.router.workers.proto_convert import TokenChunk
from tandem.router.workers.table import WorkerTable
from tandem.rpc.v1 import worker_pb2 as w
from tests.unit.router.facts import worker_facts

ROLES = {"p": RoleName.PREFILL, "d": RoleName.DECODE, "m": RoleName.MIXED}
IDENTITY = Identity(router=RouterId("r"), incarnation=Incarnation(1), secret=ClusterSecret(b"0123456789abcdef"))


class Meter:
    """Counts by event."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def planned(self, plan: Plan) -> None:
        self._count(f"planned {plan.reason}")

    def dropped(self, reason: str) -> None:
        self._count(f"dropped {reason}")

    def attempted_again(self, cause: str) -> None:
        self._count(f"again {cause}")

    def gave_up(self, reason: str) -> None:
        self._count(f"gave up {reason}")

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


class NoQueue:
    """No request waits in front of the dispatcher, and every plan is in time."""

    def waiting_for(self, model: str) -> int:
        return 0

    def check_slo(self, terms: SloTerms, arrived_s: float, first_token_s: float, compute_s: float) -> None:
        return


FinderOf = Callable[[ManualClock], PrefixFinder]


def _no_index(clock: ManualClock) -> PrefixFinder:
    return PrefixFinder(None, b"")


class Stage:
    """The first letter of a worker's name is its role's. Answers have to cross unless set otherwise. Needs a running
    event loop for its timers only."""

    def __init__(self, *workers: str, finder: FinderOf = _no_index, **settings: Any) -> None:
        self.clock, self.meter = ManualClock(100.0), Meter()
        self.prefixes = finder(self.clock)
        nobody: Any = None
        self.table = WorkerTable(nobody)
        section = replace(RouterSection(disaggregation=Disaggregation.ALWAYS), **settings)
        self.retry_policy = RetryPolicy(create_policy(section.policy, section.disaggregation), section, self.clock)
        self.readiness = Readiness(self.table, section.disaggregation, self.clock, {"m": (1, 2)})
        self.queue = NoQueue()
        self.dispatcher = Dispatcher(
            self.table, self.retry_policy, self.prefixes, self.clock, self.meter, self.readiness, self.queue
        )
        self._incarnations = 0
        for worker in workers:
            self.come(worker)

    def link(self, worker: str) -> WorkerLink:
        link = self.table.link(WorkerId(worker))
        assert link is not None
        return link

    def come(self, worker: str) -> None:
        """A worker connects, in an incarnation of its own."""
        self._incarnations += 1
        facts = worker_facts(worker, ROLES[worker[0]], self._incarnations)
        where = WorkerAddress(worker=facts.worker, incarnation=facts.incarnation, address="")
        link = WorkerLink(where, IDENTITY, self.dispatcher, self.clock)
        link.facts = facts
        self.table._links[facts.worker] = link
        self.dispatcher.on_up(link)

    def go(self, worker: str) -> WorkerLink:
        """Kill the worker; return the link that was to it."""
        link = self.link(worker)
        del self.table._links[link.worker]
        link._close("it was killed")
        return link

    def sent(self, worker: str) -> list[w.RouterMessage]:
        """Return the messages sent to a worker since the last look."""
        messages = list(self.link(worker)._unsent)
        self.link(worker)._unsent.clear()
        return messages

    def submitted(self, worker: str) -> list[w.Submit]:
        return [message.submit for message in self.sent(worker) if message.HasField("submit")]

    def say(self, worker: str, *chunks: TokenChunk) -> None:
        self.dispatcher.on_tokens(self.link(worker), chunks)

    def goes_on(self, worker: str, request: str, attempt: int) -> None:
        """Report from a decode worker that the sequence lives there now."""
        self.dispatcher.on_phase(self.link(worker), request, attempt, Phase.DECODE)

    def fail(self, worker: str, request: str, attempt: int, error: TandemError) -> None:
        self.dispatcher.on_failed(self.link(worker), request, attempt, error)

    def wake(self) -> None:
        """Look at all waiting requests, later."""
        self.clock.advance(1.0)
        for request in list(self.dispatcher._waiting):
            self.dispatcher._try(self.dispatcher._flights[request])


def work(n: int = 2, max_tokens: int = 9, timeout_s: float = 60.0) -> GenerationRequest:
    return GenerationRequest(prompt=[1, 2, 3], sampling=SamplingParams(max_tokens=max_tokens, n=n), timeout_s=timeout_s)


def chunk(choice: int, index: int, *tokens: int, attempt: int = 1, **more: Any) -> TokenChunk:
    return TokenChunk(request="r", attempt=attempt, choice=choice, index=index, tokens=tokens, **more)
