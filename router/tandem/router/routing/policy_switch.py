"""The policy in force, which an operator may change while requests run. Plans in progress are not touched."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.core.config import Disaggregation, PolicyName
from tandem.core.errors import InvalidRequestError
from tandem.router.routing.plan import Candidate, Job, Plan, Policy
from tandem.router.routing.policies import create_policy


class PolicySwitch:
    """Plans by whichever policy was selected last. Belongs to the event loop."""

    def __init__(self, name: PolicyName, mode: Disaggregation) -> None:
        self._mode = mode
        self._policy: Policy = create_policy(name, mode)

    @property
    def name(self) -> PolicyName:
        return self._policy.name

    def plan(self, job: Job, candidates: Sequence[Candidate]) -> Plan:
        return self._policy.plan(job, candidates)

    def select(self, name: str) -> None:
        """Plan by this policy from now on; InvalidRequestError names those that there are."""
        try:
            known = PolicyName(name)
        except ValueError:
            why = f"the policies are {', '.join(PolicyName)}"
            raise InvalidRequestError(f"there is no policy {name[:40]!r}", why=why, param="policy") from None
        self._policy = create_policy(known, self._mode)
