"""Three routers on one Redis over the same simulated workers, and what is left of the state when one is killed."""

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tests.chaos.index_scene import WORKERS
from tests.chaos.router_beside import router_beside
from tests.chaos.shared_prompts import NO_ANSWER, SharedPrompts
from tests.integration.worker.pair import MODEL
from tools.running_cluster import Cluster, is_free, kill, running
from tools.waiting import wait_for

ROUTERS = 3
FLAGS = (
    "--engine", "sim", "--prefill", "2", "--decode", "2", "--disaggregation", "always", "--model", str(MODEL),
    "--max-model-len", "512", "--kv-memory", "8MiB",
)  # fmt: skip
_ASKED, _KILLED_AT, _CLIENTS = 60, 30, 6
"""Prompts that are asked while a router dies, after how many of them it does, and how many are asked at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """After a router was killed: of the prompts `asked` meanwhile, `failed` had no answer from it; another one answered
    them. Of `probes` prompts that the killed router had sent just before, `hits` had a prefix by the others' index."""

    asked: int
    failed: int
    probes: int
    hits: int


class RouterScene:
    """Every method leaves the cluster without load. `routers[0]` is the one that the launcher keeps alive."""

    def __init__(self, cluster: Cluster, stack: contextlib.ExitStack) -> None:
        self._cluster, self._stack = cluster, stack
        self._names = (f"beside-{number}" for number in itertools.count(1))
        self.prompts = SharedPrompts()
        self.routers = [cluster]
        while len(self.routers) < ROUTERS:
            self.routers.append(self._start())

    def hit_rate(self, routers: Sequence[Cluster], requests: int, questions: int, clients: int = 4) -> float:
        """Return the fraction of prompt tokens that were reused, of all that were asked for; the routers take turns.

        The prompts are the same every time, up to their questions, which differ with the seed `questions`.
        """
        rng, own = random.Random(1), random.Random(questions)
        asked = [(routers[n % len(routers)], self.prompts.prompt(rng, own)) for n in range(requests)]
        answers = self._ask_all(asked, clients)
        assert all(status == 200 for status, _ in answers), "a request failed though nothing is wrong"
        self.await_equal(routers)
        return sum(int(timing["cached_tokens"]) for _, timing in answers) / sum(len(prompt) for _, prompt in asked)

    def kill_router(self, number: int, rng: random.Random, probes: int = 8) -> Left:
        """kill -9 of `routers[number]` under load. AssertionError if anything is lost; then it is started again."""
        victim = self.routers[number]
        others = [router for router in self.routers if router is not victim]
        known = [self.prompts.prompt(rng) for _ in range(probes)]
        stored, pid = _respond(victim, "The sky is"), _pid(victim)

        def ask_known() -> None:
            for prompt in known:
                assert self.prompts.ask(victim.api, prompt)[0] == 200

        asked = [(self.routers[n % ROUTERS], self.prompts.prompt(rng)) for n in range(_ASKED)]
        answers = self._ask_all(asked, _CLIENTS, {_KILLED_AT - _CLIENTS: ask_known, _KILLED_AT: lambda: kill(pid)})
        failed = [number for number, (status, _) in enumerate(answers) if status != 200]
        assert all(asked[n][0] is victim for n in failed), "a router failed that nobody killed"
        again = [(others[n % len(others)], asked[n][1]) for n in failed]
        assert all(status == 200 for status, _ in self._ask_all(again, _CLIENTS)), "others do not go on"
        self.await_equal(others)
        wait_for(self._is_quiet, 30, "nothing of the dead router's requests is left")
        hits = 0
        for prompt, router in zip(known, itertools.cycle(others)):
            status, timing = self.prompts.ask(router.api, prompt)
            assert status == 200
            is_stale = timing["predicted_cached_tokens"] > timing["cached_tokens"]
            assert not is_stale or timing["prediction_basis"] != "index", f"a stale hit: {timing}"
            hits += timing["cached_tokens"] > 0
            self.await_equal(others)
        for router in others:
            assert router.get(f"/v1/responses/{stored}")[0] == 200, "a stored response is lost"
        self._start_again(number, pid)
        self.await_equal()
        return Left(asked=len(asked), failed=len(failed), probes=probes, hits=hits)

    def await_equal(self, routers: Sequence[Cluster] = ()) -> None:
        """Wait until the index of each of these routers (by default all) equals the workers' blocks."""
        for router in routers or self.routers:
            wait_for(lambda router=router: _is_equal(router), 60, "the index equals what the workers hold")  # type: ignore[misc]

    def _ask_all(
        self,
        asked: Sequence[tuple[Cluster, list[int]]],
        clients: int,
        events: Mapping[int, Callable[[], None]] = MappingProxyType({}),
    ) -> list[tuple[int, dict[str, Any]]]:
        """Answers in the order of `asked`; `clients` threads. Before the prompts of these numbers are asked, `events`
        happen, and nothing is asked meanwhile."""
        answers: list[tuple[int, dict[str, Any]]] = [(0, {})] * len(asked)
        numbers, lock = iter(range(len(asked))), threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    number = next(numbers, -1)
                    if number in events:
                        events[number]()
                if number < 0:
                    return
                router, prompt = asked[number]
                answers[number] = self.prompts.ask(router.api, prompt)

        threads = [threading.Thread(target=work) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        return answers

    def _start(self) -> Cluster:
        return self._stack.enter_context(router_beside(self._cluster, next(self._names)))

    def _start_again(self, number: int, pid: int) -> None:
        if number:
            self.routers[number] = self._start()
        else:
            wait_for(lambda: _pid(self._cluster) not in (0, pid), 60, "the launcher started its router again")
        wait_for(lambda: self.routers[number].get("/readyz")[0] == 200, 60, "the router is ready")

    def _is_quiet(self) -> bool:
        with contextlib.suppress(*NO_ANSWER):
            for router in self.routers:
                with contextlib.suppress(*NO_ANSWER):
                    return len(router.status()["workers"]) == WORKERS and is_free(router)
        return False


@contextlib.contextmanager
def router_scene() -> Iterator[RouterScene]:
    """Three running routers; those that live at the end have to stop in order."""
    with running(*FLAGS) as cluster, contextlib.ExitStack() as stack:
        yield RouterScene(cluster, stack)


def _pid(router: Cluster) -> int:
    """0 = it does not answer."""
    with contextlib.suppress(*NO_ANSWER):
        return int(router.status()["router"]["pid"])
    return 0


def _is_equal(router: Cluster) -> bool:
    with contextlib.suppress(*NO_ANSWER):
        found = router.admin("/admin/v1/kv/audit")
        indexes = [one["index"] for one in found["workers"]]
        return not found["unanswered"] and len(indexes) == WORKERS and all(one["is_equal"] for one in indexes)
    return False


def _respond(router: Cluster, text: str) -> str:
    """Id of an answer that is kept."""
    status, answer = router.post("/v1/responses", {"model": "tandem-tiny", "input": text, "max_output_tokens": 5})
    assert status == 200, answer
    return str(answer["id"])
