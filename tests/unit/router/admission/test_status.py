"""Admission status for operators, of one router and of several."""

from __future__ import annotations

from typing import Any

from tandem.core.clock import ManualClock
from tandem.core.config import AdmissionSection
from tandem.core.errors import TandemError
from tandem.router.admission.admission_controller import AdmissionController, AdmissionRequest
from tandem.router.admission.capacity import ResourceDemand
from tandem.router.admission.slo import SloTerms
from tandem.router.admission.status import added_up, view


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

    def _take(self, model: str, need: ResourceDemand) -> bool:
        taken, self.has_room = self.has_room, False
        return taken

    def enter(self, tenant: str, slo: str = "", model: str = "m") -> None:
        def refuse(error: TandemError) -> None:
            raise error

        arrived = AdmissionRequest(
            terms=SloTerms(tenant=tenant, slo=slo), need=ResourceDemand(prompt_tokens=1, choices=1), cost=100,
            arrived_s=self.clock.now_s(), deadline_s=1000.0, model=model,
        )  # fmt: skip
        self.admission.enter(arrived, lambda: 0.01, lambda: None, refuse)

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
