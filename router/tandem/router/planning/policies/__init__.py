"""All policies, by name. Each is a function of the job and the candidates: it keeps nothing and asks no clock."""

from __future__ import annotations

from collections.abc import Callable

from tandem.core.config import Disaggregation, PolicyName
from tandem.router.planning.plan import Policy
from tandem.router.planning.policies import dynamo, least_loaded, llm_d, prefix_only, round_robin, sglang
from tandem.router.planning.policies.by_role import ByRole
from tandem.router.planning.policies.cost import CostPolicy

_MAKERS: dict[PolicyName, Callable[[Disaggregation], Policy]] = {
    PolicyName.COST: CostPolicy,
    PolicyName.LEAST_LOADED: lambda mode: ByRole(PolicyName.LEAST_LOADED, mode, least_loaded),
    PolicyName.ROUND_ROBIN: lambda mode: ByRole(PolicyName.ROUND_ROBIN, mode, round_robin),
    PolicyName.PREFIX_ONLY: lambda mode: ByRole(PolicyName.PREFIX_ONLY, mode, prefix_only),
    PolicyName.DYNAMO: lambda mode: ByRole(PolicyName.DYNAMO, mode, dynamo),
    PolicyName.LLM_D: lambda mode: ByRole(PolicyName.LLM_D, mode, llm_d),
    PolicyName.SGLANG: lambda mode: ByRole(PolicyName.SGLANG, mode, sglang),
}


def create_policy(name: PolicyName, mode: Disaggregation) -> Policy:
    """The policy of that name. `mode` bounds what any of them may choose."""
    return _MAKERS[name](mode)
