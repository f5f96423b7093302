"""A layer's few rows in two calls against the same parts one by one."""

from dataclasses import replace

import pytest
import torch

from tandem.core.cpu_level import CpuLevel, cpu_level
from tandem.kernels.fused_layer import fuse
from tandem.kernels.fused_layer import row as rows
from tandem.kernels.fused_layer.row import MOST_ROWS
from tandem.kernels.prepacked_linear import PrepackedLinear
from tandem.kernels.rms_norm import rms_norm
from tandem.kernels.rope import rotate
from tandem.kernels.silu_mul import silu_mul
from tests.unit.kernels.dense_parts import HEAD_DIM, HEADS, INNER, WIDTH, fused, parts


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=3e-2, rtol=1.6e-2)


@pytest.mark.parametrize("count", [1, 2, 7, MOST_ROWS])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("bits", "row_bits"), [(16, 16), (8, 8), (8, 16), (4, 8)])
def test_rows_are_what_their_parts_make_of_them(randn, bits, row_bits, has_bias, threads, count) -> None:
    layer = parts(randn, has_bias=has_bias, bits=bits, row_bits=row_bits)
    row = fused(layer)
    torch.set_num_threads(threads)
    for _ in range(3):
        x, mixed = randn(count, WIDTH, dtype=torch.bfloat16), randn(count, HEADS, HEAD_DIM, dtype=torch.bfloat16)
        cos, sin = randn(count, 2, HEAD_DIM, dtype=torch.bfloat16).unbind(1)
        before_attention, kept = row.before(x, cos, sin), x.clone()
        qkv = layer.qkv(rms_norm(x, layer.input_norm, layer.eps))  # type: ignore[operator]
        turning = layer.turning * HEAD_DIM
        turned = rotate(qkv[:, :turning].view(count, layer.turning, HEAD_DIM), cos, sin)
        close(before_attention[:, :turning], turned.reshape(count, -1))
        close(before_attention[:, turning:], qkv[:, turning:])
        assert torch.equal(x, kept)

        normed = rms_norm(x, layer.mlp_norm, layer.eps, added=layer.o(mixed.flatten(1)))  # type: ignore[operator]
        expected = x + layer.down(silu_mul(layer.gate_up(normed)))  # type: ignore[operator]
        assert row.behind(kept, mixed) is kept
        close(kept, expected)


@pytest.mark.parametrize("more", [1, 32, 269])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("bits", "row_bits"), [(8, 8), (8, 16), (4, 8), (4, 16)])
def test_any_number_of_rows_passes_quantised_weights_to_the_last_bit(
    randn, bits, row_bits, has_bias, threads, more
) -> None:  # fmt: skip
    layer = parts(randn, has_bias=has_bias, bits=bits, row_bits=row_bits)
    row = fused(layer)
    count = row.few_rows + more
    assert row.most_rows >= count > row.few_rows
    torch.set_num_threads(threads)
    for rows_now in (count, 5, count + 1):
        x, mixed = (
            randn(rows_now, WIDTH, dtype=torch.bfloat16),
            randn(rows_now, HEADS * HEAD_DIM, dtype=torch.bfloat16),
        )
        cos, sin = randn(rows_now, 2, HEAD_DIM, dtype=torch.bfloat16).unbind(1)
        qkv = layer.qkv(rms_norm(x, layer.input_norm, layer.eps))  # type: ignore[operator]
        rotate(qkv.view(rows_now, -1, HEAD_DIM)[:, : layer.turning], cos, sin)
        assert torch.equal(row.before(x, cos, sin), qkv)
        expected = x.clone()
        normed = rms_norm(expected, layer.mlp_norm, layer.eps, added=layer.o(mixed))  # type: ignore[operator]
        expected += layer.down(silu_mul(layer.gate_up(normed)))  # type: ignore[operator]
        assert torch.equal(row.behind(x, mixed), expected)


def test_more_rows_than_it_takes_are_refused(randn) -> None:
    row = fused(parts(randn, has_bias=False, bits=16))
    x = randn(row.most_rows + 1, WIDTH, dtype=torch.bfloat16)
    cos, sin = randn(row.most_rows + 1, 2, HEAD_DIM, dtype=torch.bfloat16).unbind(1)
    with pytest.raises(ValueError, match=f"{row.most_rows + 1} rows, this layer takes {row.most_rows} at most"):
        row.before(x, cos, sin)
    with pytest.raises(ValueError, match=f"takes {row.most_rows} at most"):
        row.behind(x, randn(row.most_rows + 1, HEADS, HEAD_DIM, dtype=torch.bfloat16))


def test_only_some_layers_take_many_rows(randn) -> None:
    """Weights must be quantised, and gates whole strips."""
    for layer in (parts(randn, has_bias=False), parts(randn, has_bias=False, bits=8, inner=INNER + 32)):
        row = fuse(layer)
        assert row is None or row.most_rows == row.few_rows


def test_wide_rows_are_fewer_for_the_stack(randn, monkeypatch) -> None:
    monkeypatch.setattr(rows, "_MOST_TOGETHER", 3 * max(WIDTH, INNER) + 1)
    row = fused(parts(randn, has_bias=False))
    assert row.most_rows == 3


@pytest.mark.parametrize("row_bits", [8, 16])
def test_the_widest_rows_fit_the_stack_of_a_thread(randn, row_bits) -> None:
    """Rows as bytes with sums of groups, on AVX2 from some rows on also widened, in tiles of 6, beside a panel of 16
    columns. The results are those of the parts."""
    layer, inner = parts(randn, has_bias=False, bits=8, row_bits=row_bits, inner=28_672), 28_672
    row = fused(layer)
    count = row.few_rows
    needed = count * row_bits // 8 * inner * 9 // 8
    if cpu_level() is CpuLevel.AVX2 and count >= {8: 14, 16: 4}[row_bits]:
        needed += 2 * inner * (-(-count // 6) * 6 + 16)
    assert needed <= 2 << 20
    torch.set_num_threads(3)
    x, mixed = randn(count, WIDTH, dtype=torch.bfloat16), randn(count, HEADS * HEAD_DIM, dtype=torch.bfloat16)
    found = row.behind(x.clone(), mixed)
    normed = rms_norm(x, layer.mlp_norm, layer.eps, added=layer.o(mixed))  # type: ignore[operator]
    close(found, x + layer.down(silu_mul(layer.gate_up(normed))))  # type: ignore[operator]


def test_other_layers_are_not_fused(randn) -> None:
    layer = parts(randn, has_bias=False)
    for other in (
        replace(layer, o=lambda x: x), replace(layer, head_dim=48), replace(layer, gate_up=layer.qkv),
        replace(layer, input_norm=layer.input_norm.float()),
        replace(layer, down=PrepackedLinear(torch.zeros(WIDTH, INNER))),
    ):  # fmt: skip
        assert fuse(other) is None
