"""All policies, by name. Each is a function of the job and the candidates: it keeps nothing and asks no clock."""

from __future__ import annotations

from tandem.core.config import Disaggregation, PolicyName
from tandem.router.routing.plan import Policy
from tandem.router.routing.policies import dynamo, llm_d, sglang
from tandem.router.routing.policies.by_role import LEAST_LOADED, PREFIX_ONLY, ROUND_ROBIN, ByRole, Formula
from tandem.router.routing.policies.cost import CostPolicy

_BY_ROLE: dict[PolicyName, Formula] = {
    PolicyName.LEAST_LOADED: LEAST_LOADED,
    PolicyName.ROUND_ROBIN: ROUND_ROBIN,
    PolicyName.PREFIX_ONLY: PREFIX_ONLY,
    PolicyName.DYNAMO: dynamo,
    PolicyName.LLM_D: llm_d,
    PolicyName.SGLANG: sglang,
}


def create_policy(name: PolicyName, mode: Disaggregation) -> Policy:
    """The policy of that name. `mode` bounds what any of them may choose."""
    return CostPolicy(mode) if name is PolicyName.COST else ByRole(name, mode, _BY_ROLE[name])
