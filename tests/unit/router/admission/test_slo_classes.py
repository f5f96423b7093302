"""Test SLO terms of requests, and admission status."""

import math
from typing import Any

import pytest

from tandem.core.clock import ManualClock
from tandem.core.config import AdmissionSection, SloSection
from tandem.core.errors import InvalidRequestError, PermissionDeniedError, TandemError
from tandem.router.admission.admission_controller import AdmissionController, QueuedRequest
from tandem.router.admission.slo_classes import ANONYMOUS, Caller, SloClasses, SloRequest, SloTerms
from tandem.router.admission.status import added_up, view

CLASSES = SloClasses(
    {"chat": SloSection(ttft_s=0.5, itl_s=0.05), "batch": SloSection(ttft_s=30.0)}, default="", timeout_s=600.0
)


def test_without_a_wish_nothing_is_promised() -> None:
    terms = CLASSES.terms(ANONYMOUS, SloRequest())
    assert (terms.tenant, terms.slo, terms.ttft_s, terms.itl_s) == ("anonymous", "", math.inf, math.inf)
    assert (terms.priority, terms.timeout_s) == (0, 600.0)


def test_a_header_names_a_class_where_the_key_does_not() -> None:
    terms = CLASSES.terms(Caller(tenant="acme"), SloRequest(slo="batch", timeout_s=5.0))
    assert (terms.tenant, terms.slo, terms.ttft_s, terms.itl_s, terms.timeout_s) == ("acme", "batch", 30.0, math.inf, 5)


def test_a_key_has_its_own_class_and_no_other() -> None:
    caller = Caller(tenant="acme", slo="chat")
    assert CLASSES.terms(caller, SloRequest()).ttft_s == 0.5
    assert CLASSES.terms(caller, SloRequest(slo="chat")).slo == "chat"
    with pytest.raises(PermissionDeniedError, match="of the SLO class chat") as caught:
        CLASSES.terms(caller, SloRequest(slo="batch"))
    assert caught.value.param == "X-SLO-Class"


def test_an_unknown_class_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidRequestError, match="there are: batch, chat"):
        CLASSES.terms(ANONYMOUS, SloRequest(slo="gold"))


def test_a_class_of_a_key_that_the_configuration_lost_promises_nothing() -> None:
    assert CLASSES.terms(Caller(tenant="a", slo="old"), SloRequest()).ttft_s == math.inf


def test_a_batch_has_time_and_no_promise() -> None:
    caller = Caller(tenant="acme", slo="chat", priority=-3, is_background=True)
    assert CLASSES.terms(caller, SloRequest(timeout_s=5.0)) == SloTerms(
        tenant="acme", timeout_s=5.0, is_background=True
    )
    with pytest.raises(PermissionDeniedError, match="of the SLO class chat"):
        CLASSES.terms(caller, SloRequest(slo="batch"))


def test_the_default_class() -> None:
    classes = SloClasses({"chat": SloSection(ttft_s=0.5)}, default="chat", timeout_s=600.0)
    assert classes.terms(ANONYMOUS, SloRequest()).slo == "chat"


def test_the_strictest_promise_between_tokens() -> None:
    assert CLASSES.least_itl_s == 0.05
    assert SloClasses({}, default="", timeout_s=1.0).least_itl_s == math.inf


def test_a_key_bounds_how_urgent_its_requests_may_be() -> None:
    caller = Caller(tenant="acme", priority=-3)
    assert CLASSES.terms(caller, SloRequest()).priority == -3
    assert CLASSES.terms(caller, SloRequest(priority=7)).priority == 7
    with pytest.raises(PermissionDeniedError, match="the most urgent that is allowed here is -3"):
        CLASSES.terms(caller, SloRequest(priority=-4))
    with pytest.raises(InvalidRequestError, match="between -100 and 100"):
        CLASSES.terms(caller, SloRequest(priority=101))


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan, math.inf])
def test_a_timeout_is_a_number_of_seconds(timeout_s: float) -> None:
    with pytest.raises(InvalidRequestError, match="number of seconds above 0") as caught:
        CLASSES.terms(ANONYMOUS, SloRequest(timeout_s=timeout_s, timeout_param="X-Request-Timeout"))
    assert caught.value.param == "X-Request-Timeout"


def test_nobody_gets_more_time_than_the_router_gives() -> None:
    assert CLASSES.terms(ANONYMOUS, SloRequest(timeout_s=10_000.0)).timeout_s == 600.0


def test_a_class_may_promise_something_else_while_requests_run() -> None:
    classes = SloClasses({"chat": SloSection(ttft_s=0.5, itl_s=0.1)}, default="chat", timeout_s=60.0)
    before = classes.terms(Caller(tenant="t"), SloRequest())
    classes.set("chat", SloSection(ttft_s=2.0))
    classes.set("fast", SloSection(itl_s=0.01))
    assert before.ttft_s == 0.5, "what was promised holds"
    assert classes.terms(Caller(tenant="t"), SloRequest()).ttft_s == 2.0
    assert classes.terms(Caller(tenant="t"), SloRequest(slo="fast")).itl_s == 0.01
    assert classes.least_itl_s == 0.01
    assert classes.names == ("chat", "fast")


class Nobody:
    def waited(self, seconds: float) -> None:
        return

    def refused(self, reason: str) -> None:
        return


class Hall:
    """Takes one request whenever `has_room` is set."""

    def __init__(self) -> None:
        self.clock, self.has_room = ManualClock(50.0), False
        self.admission = AdmissionController(AdmissionSection(saved_tokens=0), self.clock, self._take, Nobody())

    def _take(self, model: str, need: QueuedRequest) -> bool:
        taken, self.has_room = self.has_room, False
        return taken

    def enter(self, tenant: str, slo: str = "", model: str = "m") -> None:
        def refuse(error: TandemError) -> None:
            raise error

        self.admission.enter(
            QueuedRequest(
                terms=SloTerms(tenant=tenant, slo=slo), prompt_tokens=1, choices=1, cost=100, deadline_s=1000.0,
                arrived_s=self.clock.now_s(), model=model, grant=lambda: None, refuse=refuse, compute_time=lambda: 0.01,
            )
        )  # fmt: skip

    def view(self, **refused: int) -> dict[str, Any]:
        return view(self.admission, refused, self.clock.now_s())


def test_nobody_waits() -> None:
    assert Hall().view() == {"waiting": 0, "refused": {}, "models": []}


def test_who_waits_by_tenant_and_class() -> None:
    hall = Hall()
    for tenant, slo in (("acme", "chat"), ("acme", ""), ("beta", "chat")):
        hall.enter(tenant, slo)
        hall.clock.advance(1.0)
    seen = hall.view(late=3)
    (lane,) = seen["models"]
    assert (seen["waiting"], seen["refused"]) == (3, {"late": 3})
    assert (lane["model"], lane["waiting"], lane["waiting_tokens"]) == ("m", 3, 300)
    assert lane["classes"] == {"": 1, "chat": 2}
    assert lane["tokens_per_s"] is lane["predicted_wait_s"] is None, "nothing was sent yet"
    assert [(row["tenant"], row["waiting"], row["longest_s"]) for row in lane["tenants"]] == [
        ("acme", 2, 3.0), ("beta", 1, 1.0),
    ]  # fmt: skip


def test_the_wait_is_predicted_from_what_was_worked_off() -> None:
    hall = Hall()
    for _ in range(30):
        hall.enter("acme")
    for _ in range(20):
        hall.clock.advance(0.5)
        hall.has_room = True
        hall.admission.pump()
    (lane,) = hall.view()["models"]
    assert lane["waiting"] == 10
    assert 190.0 <= lane["tokens_per_s"] <= 240.0
    (row,) = lane["tenants"]
    assert 4.1 <= row["predicted_wait_s"] <= 5.3, "ten of 100 tokens, 200 a second"
    assert 0.0 < lane["predicted_wait_s"] < 1.0, "another tenant is next but one"


def test_several_routers_as_one() -> None:
    one, other = Hall(), Hall()
    one.enter("acme", "chat")
    one.clock.advance(2.0)
    for model in ("m", "n"):
        other.enter("acme", "chat", model)
    other.enter("beta")
    both = added_up([one.view(late=1), other.view(late=2, full=4)])
    assert (both["waiting"], both["refused"]) == (4, {"full": 4, "late": 3})
    first, second = both["models"]
    assert (first["model"], first["waiting"], first["classes"]) == ("m", 3, {"": 1, "chat": 2})
    assert [(row["tenant"], row["waiting"], row["longest_s"]) for row in first["tenants"]] == [
        ("acme", 2, 2.0), ("beta", 1, 0.0),
    ]  # fmt: skip
    assert (second["model"], second["waiting"], second["tokens_per_s"]) == ("n", 1, None)
