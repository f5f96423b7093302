"""SLO terms that a request may set itself, and those that it gets."""

from __future__ import annotations

import math

import pytest

from tandem.core.config import SloSection
from tandem.core.errors import InvalidRequestError, PermissionDeniedError
from tandem.router.admission.slo import ANONYMOUS, Caller, SloClasses, SloRequest, SloTerms

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
