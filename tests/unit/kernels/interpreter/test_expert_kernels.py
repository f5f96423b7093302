"""The Triton kernels of experts against the torch reference, in the interpreter."""

import pytest
import torch

from tandem.kernels.expert_mlp import ExpertWeights, GateActivation, expert_mlp

TOLERANCE = {torch.float32: 2e-5, torch.float16: 8e-3}
SILU, CLAMPED = GateActivation(), GateActivation(kind="clamped", alpha=1.7, limit=1.5)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch) -> None:
    """Few rows, columns and numbers, so that tiny experts have several tiles of each."""
    from tandem.kernels import triton_tiles
    from tandem.kernels.expert_mlp import triton as kernels

    monkeypatch.setattr(triton_tiles, "EXPERT_TILES", {16: (16, 16, 4, 2), 32: (32, 16, 4, 2)})
    monkeypatch.setattr(triton_tiles, "WIDE_EXPERT_TILE", (16, 16, 16, 4, 2))
    monkeypatch.setattr(kernels, "SORT_TILE", 16)


@pytest.fixture
def make(randn):
    def made(count, features, hidden, *, dtype=torch.float32, gate=SILU, has_biases=False) -> ExpertWeights:
        gate_up_bias = randn(count * 2 * features, dtype=dtype) if has_biases else None
        return ExpertWeights(
            count=count, gate_up=(randn(count * 2 * features, hidden) * hidden**-0.5).to(dtype),
            down=(randn(count * hidden, features) * features**-0.5).to(dtype), gate=gate, gate_up_bias=gate_up_bias,
            down_bias=randn(count * hidden, dtype=dtype) if has_biases else None,
        )  # fmt: skip

    return made


def check(x, scores, experts, per_token) -> None:
    shares, chosen = torch.softmax(scores, -1).topk(per_token, -1)
    expected = expert_mlp(x, chosen, shares, experts, backend="reference")
    actual = expert_mlp(x, chosen, shares, experts, backend="triton")
    tolerance = TOLERANCE[x.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("gate", "has_biases"), [(SILU, False), (GateActivation(kind="gelu_tanh"), False), (CLAMPED, True)]
)
def test_gates_and_biases(make, randn, dtype, gate, has_biases) -> None:
    experts = make(4, 16, 32, dtype=dtype, gate=gate, has_biases=has_biases)
    check(randn(5, 32, dtype=dtype), randn(5, 4), experts, 2)


@pytest.mark.parametrize(("count", "features", "hidden", "per_token"), [(5, 24, 20, 3), (3, 7, 33, 1), (6, 16, 16, 6)])
def test_shapes_that_are_no_multiples_of_tiles(make, randn, count, features, hidden, per_token) -> None:
    check(randn(9, hidden), randn(9, count), make(count, features, hidden), per_token)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 40])
def test_all_tokens_choose_one_expert(make, randn, tokens) -> None:
    """More tiles of one expert than its share, and experts without a row before and behind it."""
    scores = torch.zeros(tokens, 4)
    scores[:, 2] = 5.0
    check(randn(tokens, 16), scores, make(4, 16, 16), 1)


def test_many_rows_of_an_expert(make, randn) -> None:
    """Tiles of 32 rows, in numbers of two bytes."""
    check(randn(45, 16, dtype=torch.float16), randn(45, 2), make(2, 16, 16, dtype=torch.float16), 2)


def test_rows_may_be_a_slice(make, randn) -> None:
    check(randn(6, 48)[:, 16:32], randn(6, 4), make(4, 16, 16), 2)


def test_a_tokens_sum_does_not_depend_on_the_others(make, randn) -> None:
    experts, x, scores = make(6, 24, 32), randn(20, 32), randn(20, 6)
    shares, chosen = torch.softmax(scores, -1).topk(3, -1)
    together = expert_mlp(x, chosen, shares, experts, backend="triton")
    alone = expert_mlp(x[13:14], chosen[13:14], shares[13:14], experts, backend="triton")
    torch.testing.assert_close(together[13:14], alone, atol=1e-6, rtol=1e-6)


def test_pairs_are_sorted_by_expert_and_stay_in_order() -> None:
    from tandem.kernels.expert_mlp.triton import _sort_kernel

    chosen = torch.tensor([3, 0, 3, 1, 0, 5, 3] * 6)
    order, starts = torch.empty(42, dtype=torch.int32), torch.empty(7, dtype=torch.int32)
    _sort_kernel[(6,)](chosen, order, starts, 42, COUNT=6, TILE=16)
    assert torch.equal(order.long(), chosen.argsort(stable=True))
    assert starts.tolist() == [0, 12, 18, 18, 36, 36, 42]
