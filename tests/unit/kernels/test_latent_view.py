"""Layer views with keys and values in the same memory: every path over them is attention with v = k."""

from dataclasses import replace

import pytest
import torch

from tandem.kernels.deterministic_attention import paged_attention_deterministic
from tandem.kernels.extend_attention import extend_attention
from tandem.kernels.kv_store import kv_store
from tandem.kernels.latent_decode import latent_decode
from tandem.kernels.layer_view import gather_tokens, key_value_view
from tandem.kernels.paged_decode import paged_decode

LENS, STARTS, WIDTH = [3, 33, 50, 200, 1], [0, 1, 13, 20, 120, 121], 48
BACKENDS = ("auto", "reference")


@pytest.fixture
def case(paged):
    """One head of 48 numbers; the second plane of the pool is not there to be read."""
    made = paged(LENS, kv_heads=1, width=WIDTH, block_tokens=16)
    latent = made.pool[:, :, :1].clone()
    return replace(made, values=made.keys, pool=latent, layer_view=key_value_view(latent[:, 1]))


def test_a_view_of_two_planes_stays_as_it_is(paged) -> None:
    view = paged([5]).layer_view
    assert key_value_view(view) is view


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [2, 16])
def test_decode(case, expected_attention, randn, heads, backend) -> None:
    q = randn(len(LENS), heads, WIDTH)
    out = paged_decode(q, case.layer_view, case.block_table, case.context_lens, scale=0.2, backend=backend)
    expected = expected_attention(q, list(range(len(LENS) + 1)), case, scale=0.2)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_latent_decode_is_the_latents_part_of_it(case, expected_attention, randn, backend) -> None:
    q = randn(len(LENS), 4, WIDTH)
    arguments = q, case.layer_view, case.block_table, case.context_lens
    out = latent_decode(*arguments, rank=32, scale=0.2, backend=backend)
    expected = expected_attention(q, list(range(len(LENS) + 1)), case, scale=0.2)[..., :32]
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)


def test_latent_decode_refuses_what_is_no_latent(case, paged, randn) -> None:
    q = randn(len(LENS), 4, WIDTH)
    arguments = case.layer_view, case.block_table, case.context_lens
    with pytest.raises(ValueError, match="rank is 48, it must be from 1 to 47"):
        latent_decode(q, *arguments, rank=WIDTH, scale=0.2)
    with pytest.raises(ValueError, match="q has 2 sequences, block_table 5"):
        latent_decode(q[:2], *arguments, rank=32, scale=0.2)
    planes = paged(LENS, kv_heads=1, width=WIDTH)
    with pytest.raises(ValueError, match="one head whose keys and values are the same memory"):
        latent_decode(q, planes.layer_view, planes.block_table, planes.context_lens, rank=32, scale=0.2)
    empty = latent_decode(q[:0], case.layer_view, case.block_table[:0], case.context_lens[:0], rank=32, scale=0.2)
    assert empty.shape == (0, 4, 32)


@pytest.mark.parametrize("backend", [*BACKENDS, "deterministic"])
def test_extend(case, expected_attention, randn, backend) -> None:
    q, starts = randn(STARTS[-1], 4, WIDTH), torch.tensor(STARTS, dtype=torch.int32)
    arguments = q, case.layer_view, starts, case.block_table, case.context_lens
    if backend == "deterministic":
        out = paged_attention_deterministic(*arguments, scale=0.2)
    else:
        out = extend_attention(*arguments, scale=0.2, backend=backend)
    torch.testing.assert_close(out, expected_attention(q, STARTS, case, scale=0.2), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_store_and_gather(randn, backend) -> None:
    pool = torch.full((4, 3, 1, 1, 16, WIDTH), -1.0)
    latents, slots = randn(3, 1, WIDTH), torch.tensor([5, -1, 33])
    kv_store(latents, latents, key_value_view(pool[:, 1]), slots, backend=backend)
    assert torch.equal(pool[0, 1, 0, 0, 5], latents[0, 0])
    assert torch.equal(pool[2, 1, 0, 0, 1], latents[2, 0])
    assert int((pool != -1.0).any(-1).sum()) == 2
    keys, values = gather_tokens(key_value_view(pool[:, 1]), torch.tensor([[2, 0]]), torch.float32)
    assert keys.data_ptr() == values.data_ptr()
    assert torch.equal(keys[0, 21], latents[0, 0])
