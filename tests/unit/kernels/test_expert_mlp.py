"""The reference of experts against a loop over tokens, and what is refused."""

import math

import pytest
import torch
from torch.nn import functional

from tandem.kernels.expert_mlp import ExpertWeights, GateActivation, expert_mlp

COUNT, FEATURES, HIDDEN = 5, 12, 10
SILU = GateActivation()
GATES = [SILU, GateActivation(kind="gelu_tanh"), GateActivation(kind="clamped", alpha=1.7, limit=0.8)]


def weights(randn, gate=SILU, *, has_biases: bool) -> ExpertWeights:
    return ExpertWeights(
        count=COUNT, gate_up=randn(COUNT * 2 * FEATURES, HIDDEN), down=randn(COUNT * HIDDEN, FEATURES), gate=gate,
        gate_up_bias=randn(COUNT * 2 * FEATURES) if has_biases else None,
        down_bias=randn(COUNT * HIDDEN) if has_biases else None,
    )  # fmt: skip


def activated(gate: float, up: float, by: GateActivation) -> float:
    if by.kind == "silu":
        return gate / (1 + math.exp(-gate)) * up
    if by.kind == "gelu_tanh":
        return 0.5 * gate * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    gate, up = min(gate, by.limit), max(-by.limit, min(up, by.limit))
    return (up + 1) * gate / (1 + math.exp(-by.alpha * gate))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("has_biases", [False, True])
def test_the_reference_is_the_loop_over_tokens_and_numbers(randn, gate, has_biases) -> None:
    experts, x = weights(randn, gate, has_biases=has_biases), randn(7, HIDDEN)
    shares, chosen = torch.softmax(randn(7, COUNT), -1).topk(3, -1)
    found = expert_mlp(x, chosen, shares, experts)
    for token in range(7):
        expected = torch.zeros(HIDDEN, dtype=torch.float64)
        for share, number in zip(shares[token].tolist(), chosen[token].tolist(), strict=True):
            rows = slice(number * 2 * FEATURES, (number + 1) * 2 * FEATURES)
            both = experts.gate_up[rows].double() @ x[token].double()
            if experts.gate_up_bias is not None:
                both += experts.gate_up_bias[rows]
            pairs = zip(both[:FEATURES].tolist(), both[FEATURES:].tolist(), strict=True)
            inner = torch.tensor([activated(*pair, gate) for pair in pairs], dtype=torch.float64)
            answer = experts.down[number * HIDDEN : (number + 1) * HIDDEN].double() @ inner
            if experts.down_bias is not None:
                answer += experts.down_bias[number * HIDDEN : (number + 1) * HIDDEN]
            expected += share * answer
        torch.testing.assert_close(found[token].double(), expected, atol=5e-5, rtol=1e-5)


def test_no_tokens_have_no_answers(randn) -> None:
    chosen = torch.zeros(0, 2, dtype=torch.int64)
    assert expert_mlp(torch.zeros(0, HIDDEN), chosen, chosen.float(), weights(randn, has_biases=False)).shape == (0, 10)


def test_what_does_not_fit_is_refused(randn) -> None:
    experts = weights(randn, has_biases=True)
    assert experts.gate_up_bias is not None
    x, chosen, shares = torch.zeros(2, HIDDEN), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3)
    with pytest.raises(ValueError, match="x must be"):
        expert_mlp(x[:, 1:], chosen, shares, experts)
    with pytest.raises(ValueError, match="chosen and shares must be"):
        expert_mlp(x, chosen, shares[:, 1:], experts)
    with pytest.raises(TypeError, match=r"the experts are torch\.float32"):
        expert_mlp(x.half(), chosen, shares, experts)
    with pytest.raises(TypeError, match="chosen must be int64"):
        expert_mlp(x, chosen.int(), shares, experts)
    with pytest.raises(ValueError, match="4 experts cannot be"):
        ExpertWeights(count=4, gate_up=experts.gate_up, down=experts.down)
    with pytest.raises(ValueError, match="gate_up_bias must be"):
        ExpertWeights(count=COUNT, gate_up=experts.gate_up, down=experts.down, gate_up_bias=experts.gate_up_bias[1:])
    with pytest.raises(TypeError, match=r"down is torch\.float16"):
        ExpertWeights(count=COUNT, gate_up=experts.gate_up, down=experts.down.half())
    with pytest.raises(ValueError, match="down must be contiguous"):
        ExpertWeights(count=COUNT, gate_up=experts.gate_up, down=functional.pad(experts.down, (0, 1))[:, :-1])
    with pytest.raises(ValueError, match="unknown gate 'relu'"):
        GateActivation(kind="relu")
