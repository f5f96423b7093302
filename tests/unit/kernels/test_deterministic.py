"""Bitwise independence of a row from everything around it: the promise of `--deterministic` on a CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tandem.kernels.deterministic_attention import KEY_TILE, paged_attention_deterministic
from tandem.kernels.deterministic_linear import ROW_TILE, deterministic_linear
from tests.unit.kernels.levels import threads_of

threads = threads_of(1, 2, 3)


def with_threads(count: int, compute: Callable[[], Tensor]) -> Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return compute()
    finally:
        torch.set_num_threads(before)


SHAPES = [
    (64, 64),
    (192, 64),
    (33, 17),
    (1000, 64),
    (256, 688),
    (1024, 256),
    (512, 1024),
    (96, 4096),
    (1, 8),
    (40, 40),
    (257, 256),
    (128, 192),
    (192, 384),
]


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_linear_row_is_independent_of_batch(threads, randn, out_features, in_features) -> None:
    weight, bias = randn(out_features, in_features), randn(out_features)
    x = randn(3 * ROW_TILE + 5, in_features)
    whole = deterministic_linear(x, weight, bias)
    torch.testing.assert_close(whole, functional.linear(x, weight, bias), atol=2e-3, rtol=1e-4)
    order = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(3))
    assert torch.equal(deterministic_linear(x[order], weight, bias), whole[order])
    for low, high in ((0, 1), (4, 5), (3, 11), (ROW_TILE - 1, 2 * ROW_TILE + 1), (x.shape[0] - 1, x.shape[0])):
        assert torch.equal(deterministic_linear(x[low:high], weight, bias), whole[low:high])
    noisy = x * 1e4
    for row in (0, 7, 12):
        noisy[row] = x[row]
        assert torch.equal(deterministic_linear(noisy, weight, bias)[row], whole[row])


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_linear_is_independent_of_threads_and_alignment(randn, out_features, in_features) -> None:
    weight, x = randn(out_features, in_features), randn(ROW_TILE + 1, in_features)
    one = with_threads(1, lambda: deterministic_linear(x, weight))
    for count in (2, 3, 5, 16):
        assert torch.equal(with_threads(count, lambda: deterministic_linear(x, weight)), one)
    shifted = torch.empty(weight.numel() + 1)[1:].view_as(weight).copy_(weight)
    assert torch.equal(deterministic_linear(x, shifted), one)


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_a_row_alone_is_the_row_of_a_batch_on_many_threads(randn, out_features, in_features) -> None:
    x, weight = randn(13, in_features), randn(out_features, in_features)
    for count in (2, 3):
        whole = with_threads(count, lambda: deterministic_linear(x, weight))
        assert torch.equal(with_threads(count, lambda: deterministic_linear(x[5:6], weight))[0], whole[5])


def test_linear_keeps_leading_dimensions_and_refuses_misfits(randn) -> None:
    weight = randn(6, 4)
    assert deterministic_linear(randn(2, 3, 4), weight).shape == (2, 3, 6)
    assert deterministic_linear(randn(4), weight).shape == (6,)
    assert deterministic_linear(randn(0, 4), weight).shape == (0, 6)
    with pytest.raises(ValueError, match="does not fit"):
        deterministic_linear(randn(2, 5), weight)
    with pytest.raises(ValueError, match="bias"):
        deterministic_linear(randn(2, 4), weight, randn(5))
    with pytest.raises(TypeError, match="weight"):
        deterministic_linear(randn(2, 4).half(), weight)


OPTIONS = [{}, {"window": 150}, {"window": 5, "softcap": 4.0}]


@pytest.mark.drawn(18)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("group", "width"), [(1, 16), (2, 32), (4, 64), (3, 128)])
def test_attention_token_is_independent_of_batch_and_chunking(
    threads, paged, expected_attention, randn, options, group, width
) -> None:
    lens = [300, 17, 129, 1, 128]
    case = paged(lens, width=width, block_tokens=16)
    starts = [0, *torch.tensor(lens).cumsum(0).tolist()]
    q = randn(starts[-1], 2 * group, width)

    def attend(sequence: int, low: int, high: int) -> Tensor:
        """One chunk of one sequence on its own, when nothing after it is stored yet."""
        pool = case.layer_view.clone()
        for slot in case.slots(sequence)[high:]:
            pool[slot // 16, :, :, slot % 16] = float("nan")
        return paged_attention_deterministic(
            q[starts[sequence] + low : starts[sequence] + high], pool,
            torch.tensor([0, high - low], dtype=torch.int32), case.block_table[sequence, None],
            torch.tensor([high], dtype=torch.int32), scale=0.2, **options,
        )  # fmt: skip

    cu_seqlens = torch.tensor(starts, dtype=torch.int32)
    whole = paged_attention_deterministic(
        q, case.layer_view, cu_seqlens, case.block_table, case.context_lens, scale=0.2, **options
    )
    some = torch.tensor([0, 1, 299, 300, 316, 317, 445, 446, starts[-1] - 1])
    dense = expected_attention(q, starts, case, scale=0.2, **options) if width == 16 else None
    if dense is not None:
        torch.testing.assert_close(whole[some], dense[some], atol=2e-6, rtol=2e-6)
    for sequence, length in enumerate(lens):
        part = whole[starts[sequence] : starts[sequence + 1]]
        for chunk in (7, 64, length):
            chunks = [attend(sequence, low, min(low + chunk, length)) for low in range(0, length, chunk)]
            assert torch.equal(torch.cat(chunks), part), (sequence, chunk)
        assert torch.equal(attend(sequence, length - 1, length), part[-1:])


def test_attention_of_a_decode_batch_equals_prefill(threads, paged, randn) -> None:
    lens = [300, 17, 129, 1, 0, 256, 255, 257]
    case = paged(lens, width=32, block_tokens=8)
    q = randn(len(lens), 4, 32)
    starts = torch.arange(len(lens) + 1, dtype=torch.int32)
    batch = paged_attention_deterministic(q, case.layer_view, starts, case.block_table, case.context_lens, scale=0.2)
    assert not batch[4].any()
    for i, length in enumerate(lens):
        filler = randn(max(length - 1, 0), 4, 32)
        alone = paged_attention_deterministic(
            torch.cat([filler, q[i : i + 1]])[:length], case.layer_view, torch.tensor([0, length], dtype=torch.int32),
            case.block_table[i, None], case.context_lens[i, None], scale=0.2,
        )  # fmt: skip
        assert torch.equal(alone[-1:], batch[i : i + 1][:length])


def test_attention_is_independent_of_threads_and_block_size(randn) -> None:
    k, v, q = randn(333, 2, 32), randn(333, 2, 32), randn(40, 4, 32)
    results = []
    for block_tokens in (4, 16, KEY_TILE):
        blocks = -(-333 // block_tokens)
        pool = torch.zeros(blocks, 1, 2, 2, block_tokens, 32)
        for plane, x in enumerate((k, v)):
            padded = functional.pad(x, (0, 0, 0, 0, 0, blocks * block_tokens - 333))
            pool[:, 0, plane] = padded.view(blocks, block_tokens, 2, 32).transpose(1, 2)
        arguments = (
            torch.tensor([0, 40], dtype=torch.int32),
            torch.arange(blocks, dtype=torch.int32)[None],
            torch.tensor([333], dtype=torch.int32),
        )
        for count in (1, 2, 3, 5):
            results.append(
                with_threads(
                    count,
                    lambda: paged_attention_deterministic(q, pool[:, 0], *arguments, scale=0.2),  # noqa: B023
                )
            )
    assert all(torch.equal(result, results[0]) for result in results)


def test_attention_survives_freed_blocks_and_small_working_sets(paged, randn, monkeypatch) -> None:
    import tandem.kernels.deterministic_attention.reference as module

    case = paged([300, 170], width=32, block_tokens=16)
    freed = case.without_blocks_before(20)
    q = randn(2, 4, 32)
    starts = torch.arange(3, dtype=torch.int32)
    options: dict[str, Any] = {"scale": 0.2, "window": 20}
    full = paged_attention_deterministic(q, case.layer_view, starts, case.block_table, case.context_lens, **options)
    monkeypatch.setattr(module, "_GATHERED_BYTES", 1)
    again = paged_attention_deterministic(q, freed.layer_view, starts, freed.block_table, freed.context_lens, **options)
    assert torch.equal(full, again)


def test_attention_refuses_misfits(paged, randn) -> None:
    case = paged([12], block_tokens=12)
    with pytest.raises(ValueError, match="block_tokens"):
        paged_attention_deterministic(
            randn(1, 4, 16), case.layer_view, torch.tensor([0, 1], dtype=torch.int32), case.block_table,
            case.context_lens, scale=1.0,
        )  # fmt: skip


ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "rmsnorm": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "functional.rms_norm": lambda x: functional.rms_norm(x, x.shape[-1:], eps=1e-6),
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "logsumexp": lambda x: torch.logsumexp(x, -1, keepdim=True),
    "sum": lambda x: x.sum(-1, keepdim=True),
    "silu": lambda x: x / (1.0 + torch.exp(-x)),
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))),
    "gelu_erf": lambda x: 0.5 * x * (1.0 + torch.erf(x * 0.7071067811865476)),
    "exp": torch.exp,
    "cos": torch.cos,
}


@pytest.mark.parametrize("width", [8, 33, 64, 576, 1000, 4096, 40000])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_rows_are_independent(threads, randn, name, width) -> None:
    """Not kernels of ours: what the engine relies on between them.

    `functional.silu`, `functional.gelu` and `torch.sigmoid` are missing on purpose: the numbers left over after the
    last whole vector, of the tensor or of a thread's share, go through other arithmetic, so that a result depends on
    its place. Written out, as here, it does not.
    """
    compute = ELEMENTWISE[name]
    x = randn(37, width)
    whole = compute(x)
    for low, high in ((0, 1), (36, 37), (5, 7), (1, 33)):
        assert torch.equal(compute(x[low:high].clone()), whole[low:high])
        assert torch.equal(compute(x[low:high]), whole[low:high])
    assert torch.equal(with_threads(1, lambda: compute(x)), whole)
