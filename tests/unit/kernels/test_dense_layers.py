"""All layers of few rows in one call against the same layers one by one, bit for bit."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.kernels.extend_attention import LIBRARY, extend_attention
from tandem.kernels.fused_layer import DenseLayers, DenseRow, PagedChunks, PagedRows, join
from tandem.kernels.kv_store import kv_store
from tandem.kernels.paged_decode import paged_decode
from tests.unit.kernels.dense_parts import HEAD_DIM, HEADS, INNER, KV_HEADS, WIDTH, fused, parts

LAYERS, BLOCKS, BLOCK_TOKENS, SCALE = 3, 40, 16, 0.2


def pool(randn) -> Tensor:
    made: Tensor = randn(BLOCKS, LAYERS, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM, dtype=torch.bfloat16)
    return made


def rows_of(randn, bits: int = 16, row_bits: int = 8) -> list[DenseRow]:
    return [fused(parts(randn, has_bias=layer == 1, bits=bits, row_bits=row_bits)) for layer in range(LAYERS)]


def joined(rows: list[DenseRow], kv: Tensor) -> DenseLayers:
    found = join(rows, [kv[:, layer] for layer in range(LAYERS)], SCALE)
    assert found is not None
    return found


def alone(length: int, blocks: list[int]) -> PagedRows:
    slot = blocks[(length - 1) // BLOCK_TOKENS] * BLOCK_TOKENS + (length - 1) % BLOCK_TOKENS
    table = torch.tensor([blocks], dtype=torch.int32)
    return PagedRows(tables=table, lengths=torch.tensor([length], dtype=torch.int32), slots=torch.tensor([slot]))


def several(lengths: list[int]) -> PagedRows:
    """Sequences of blocks of their own, in no order; tables have strides of their own."""
    size = max(-(-length // BLOCK_TOKENS) for length in lengths)
    free = iter((7 * place + 3) % BLOCKS for place in range(BLOCKS))
    tables, slots = torch.zeros((len(lengths), size + 2), dtype=torch.int32), []
    for table, length in zip(tables, lengths, strict=True):
        for place in range(-(-length // BLOCK_TOKENS)):
            table[place] = next(free)
        slots.append(int(table[(length - 1) // BLOCK_TOKENS]) * BLOCK_TOKENS + (length - 1) % BLOCK_TOKENS)
    return PagedRows(
        tables=tables[:, :size], lengths=torch.tensor(lengths, dtype=torch.int32), slots=torch.tensor(slots)
    )


def mixed(lengths: list[int], chunks: list[tuple[int, int]]) -> PagedRows:
    """Sequences of these lengths that decode, and behind them (rows, length) of chunks."""
    every = several([*lengths, *(length for _, length in chunks)])
    decodes, starts, slots = len(lengths), [0], every.slots[: len(lengths)].tolist()
    for (rows, length), table in zip(chunks, every.tables[decodes:].tolist(), strict=True):
        starts.append(starts[-1] + rows)
        slots += [table[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS for at in range(length - rows, length)]
    behind = PagedChunks(
        tables=every.tables[decodes:], lengths=every.lengths[decodes:], starts=torch.tensor(starts, dtype=torch.int32)
    )
    return PagedRows(
        tables=every.tables[:decodes], lengths=every.lengths[:decodes], slots=torch.tensor(slots),
        chunks=behind if chunks else None,
    )  # fmt: skip


def one_by_one(rows: list[DenseRow], kv: Tensor, x: Tensor, cos: Tensor, sin: Tensor, of: PagedRows) -> Tensor:
    for layer, row in enumerate(rows):
        fused = row.before(x, cos, sin).view(len(x), HEADS + 2 * KV_HEADS, HEAD_DIM)
        q, k, v = fused.split_with_sizes((HEADS, KV_HEADS, KV_HEADS), 1)
        kv_store(k, v, kv[:, layer], of.slots)
        decodes = len(of.lengths)
        answers = paged_decode(q[:decodes], kv[:, layer], of.tables, of.lengths, scale=SCALE)
        if (behind := of.chunks) is not None:
            starts, tables, lengths = behind.starts, behind.tables, behind.lengths
            chunked = extend_attention(q[decodes:], kv[:, layer], starts, tables, lengths, scale=SCALE)
            answers = torch.cat((answers, chunked))
        x = row.behind(x, answers)
    return x


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 16, 17, 100])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_joined_layers_are_the_layers(randn, bits, length, threads) -> None:
    torch.set_num_threads(threads)
    check_joined(randn, rows_of(randn, bits), alone(length, [7, 2, 11, 0, 5, 9, 1]))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    "lengths", [[1, 1], [40, 7, 16], [3, 90, 17, 16, 1, 33, 64, 2], [i + 1 if i < 24 else i - 20 for i in range(32)]]
)
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_joined_layers_of_several_rows_are_the_layers(randn, bits, lengths, threads) -> None:
    torch.set_num_threads(threads)
    rows = rows_of(randn, bits)
    check_joined(randn, rows, several(lengths))


@pytest.mark.drawn(60)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("lengths", "chunks"),
    [
        ([], [(1, 1)]), ([], [(40, 40)]), ([], [(33, 90), (2, 50), (70, 70)]), ([5, 40, 16], [(17, 60)]),
        ([30], [(1, 9)]), ([9], [(150, 190), (3, 16)]), ([i + 1 for i in range(8)], [(64, 200)]),
        ([i % 16 + 1 for i in range(40)], []),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("bits", "row_bits"), [(8, 8), (8, 16), (4, 8), (4, 16)])
def test_chunks_pass_joined_layers_beside_decodes(randn, bits, row_bits, lengths, chunks, threads) -> None:
    torch.set_num_threads(threads)
    rows, of, kv = rows_of(randn, bits, row_bits), mixed(lengths, chunks), pool(randn)
    ours, count = kv.clone(), len(of.slots)
    layers = joined(rows, ours)
    if not layers.takes_chunks:
        assert not LIBRARY.is_available()
        return
    cos, sin = randn(count, 2, HEAD_DIM, dtype=torch.bfloat16).unbind(1)
    x = randn(count, WIDTH, dtype=torch.bfloat16)
    want = one_by_one(rows, kv, x.clone(), cos, sin, of)
    for first, last in ((0, 1), (1, LAYERS)):
        answers = layers.pass_chunks(x, cos, sin, of, first, last, ends_attended=last == LAYERS)
    assert torch.equal(rows[-1].behind(x, answers), want)
    assert torch.equal(ours, kv)


def test_chunks_that_contradict_themselves_are_refused(randn) -> None:
    rows, kv = rows_of(randn, 8), pool(randn)
    layers, before, of = joined(rows, kv), kv.clone(), mixed([5], [(20, 30), (7, 7)])
    if not layers.takes_chunks:
        assert not LIBRARY.is_available()
        return
    x, cos = randn(28, WIDTH, dtype=torch.bfloat16), randn(28, HEAD_DIM, dtype=torch.bfloat16)
    assert of.chunks is not None
    for wrong in (
        replace(of.chunks, lengths=torch.tensor([19, 7], dtype=torch.int32)),
        replace(of.chunks, lengths=torch.tensor([30, 70], dtype=torch.int32)),
        replace(of.chunks, starts=torch.tensor([0, 20, 28], dtype=torch.int32)),
        replace(of.chunks, tables=of.chunks.tables + BLOCKS),
    ):
        with pytest.raises(IndexError, match="pool"):
            layers.pass_chunks(x, cos, cos, replace(of, chunks=wrong), 0, LAYERS, ends_attended=True)
    assert torch.equal(kv, before)


def test_rows_after_more_rows_and_after_one_find_nothing_of_theirs(randn) -> None:
    rows = rows_of(randn)
    theirs = pool(randn)
    layers = joined(rows, theirs.clone())
    for lengths in ([5, 50, 20, 33, 9], [70], [12, 3], [8]):
        cos, sin = randn(len(lengths), 2, HEAD_DIM, dtype=torch.bfloat16).unbind(1)
        x = randn(len(lengths), WIDTH, dtype=torch.bfloat16)
        want = one_by_one(rows, theirs, x.clone(), cos, sin, several(lengths))
        assert torch.equal(layers(x, cos, sin, several(lengths)), want)


def test_attention_that_threads_share_is_merged(randn) -> None:
    """1,200 keys among three threads: both heads' are cut, and no thread has all of one."""
    torch.set_num_threads(3)
    check_joined(randn, rows_of(randn), alone(600, [(7 * place + 3) % BLOCKS for place in range(BLOCKS)]))


def check_joined(randn, rows: list[DenseRow], of: PagedRows) -> None:
    kv = pool(randn)
    count = len(of.lengths)
    cos, sin = randn(count, 2, HEAD_DIM, dtype=torch.bfloat16).unbind(1)
    x, ours = randn(count, WIDTH, dtype=torch.bfloat16), kv.clone()
    layers = joined(rows, ours)
    for _ in range(2):  # what lies between is used again
        theirs = kv.clone()
        want = one_by_one(rows, theirs, x.clone(), cos, sin, of)
        kept = x.clone()
        assert layers(kept, cos, sin, of) is kept
        assert torch.equal(kept, want)
        assert torch.equal(ours, theirs)


def test_what_the_pool_does_not_have_is_refused_and_nothing_written(randn) -> None:
    rows, kv = rows_of(randn), pool(randn)
    layers, before = joined(rows, kv), kv.clone()
    x, cos = randn(1, WIDTH, dtype=torch.bfloat16), randn(1, HEAD_DIM, dtype=torch.bfloat16)
    good = alone(20, [3, 4])
    for wrong in (
        replace(good, slots=torch.tensor([BLOCKS * BLOCK_TOKENS])), replace(good, slots=torch.tensor([-1])),
        replace(good, tables=torch.tensor([[3, BLOCKS]], dtype=torch.int32)),
        replace(good, lengths=torch.tensor([33], dtype=torch.int32)),
        replace(good, lengths=torch.tensor([0], dtype=torch.int32)),
        replace(good, lengths=torch.tensor([-1], dtype=torch.int32)),
    ):  # fmt: skip
        with pytest.raises(IndexError, match="pool"):
            layers(x, cos, cos, wrong)
    if rows[0].most_rows > 1:  # one of two is enough
        two = several([20, 30])
        for wrong in (
            replace(two, slots=torch.tensor([0, BLOCKS * BLOCK_TOKENS])), replace(two, slots=torch.tensor([-1, 0])),
            replace(two, lengths=torch.tensor([20, 0], dtype=torch.int32)),
            replace(two, lengths=torch.tensor([20, 33], dtype=torch.int32)),
        ):  # fmt: skip
            with pytest.raises(IndexError, match="pool"):
                layers(x.repeat(2, 1), cos.repeat(2, 1), cos.repeat(2, 1), wrong)
    assert torch.equal(kv, before)


def test_layers_that_differ_are_not_joined(randn) -> None:
    rows, kv = rows_of(randn), pool(randn)
    views = [kv[:, layer] for layer in range(LAYERS)]
    assert join([rows[0], None, rows[2]], views, SCALE) is None
    assert join(rows, [view.float() for view in views], SCALE) is None
    assert join(rows, [views[0], views[1], views[2].contiguous()], SCALE) is None
    for other in (
        {"width": WIDTH + 32}, {"inner": INNER + 32}, {"mixed_heads": HEADS + 1},
        {"heads": HEADS - 1, "kv_heads": KV_HEADS + 1},
    ):  # fmt: skip
        assert join([rows[0], fused(parts(randn, has_bias=False, **other)), rows[2]], views, SCALE) is None
    rows[1].eps = 1e-3
    assert join(rows, views, SCALE) is None


def test_layers_whose_o_does_not_take_what_attention_gives_are_not_joined(randn) -> None:
    rows = [fused(parts(randn, has_bias=False, mixed_heads=HEADS + 1)) for _ in range(LAYERS)]
    kv = pool(randn)
    assert join(rows, [kv[:, layer] for layer in range(LAYERS)], SCALE) is None


def test_what_is_not_a_view_for_every_row_is_refused(randn) -> None:
    rows, kv = rows_of(randn), pool(randn)
    views = [kv[:, layer] for layer in range(LAYERS)]
    assert join([], [], SCALE) is None
    with pytest.raises(ValueError, match="3 rows, but 2 views"):
        join(rows, views[:2], SCALE)
    with pytest.raises(ValueError, match="layer_view must hold contiguous"):
        join(rows, [view.transpose(3, 4) for view in views], SCALE)
