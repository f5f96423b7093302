"""Subjects of comparison: every policy of the router, and queue orders."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.core.config import Disaggregation, PolicyName
from tandem.core.prefill_queue import FIRST_COME, QueueRules
from tandem.router.routing.plan import Policy
from tandem.router.routing.policies import create_policy

POLICIES: Mapping[str, Policy] = {name.value: create_policy(name, Disaggregation.AUTO) for name in PolicyName}
QUEUES: Mapping[str, QueueRules] = {"srf": QueueRules(), "fifo": FIRST_COME}
_OTHERS = [name.value for name in PolicyName if name is not PolicyName.COST]
DEFAULT_CASES = ("cost+srf", "cost+fifo", *(f"{name}+fifo+nofetch" for name in _OTHERS))
BASE = "least_loaded+fifo+nofetch"
