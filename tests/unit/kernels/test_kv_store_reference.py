"""kv_store in C, where there is a compiler, and its torch reference."""

import pytest
import torch

from tandem.kernels import backend
from tandem.kernels.kv_store import kv_store


@pytest.fixture(params=["auto", "reference"], autouse=True)
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_chosen", request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_stores_into_the_slots_and_nowhere_else(paged, randn, dtype) -> None:
    case = paged([11, 4, 7], dtype=dtype)
    fused = randn(22, 3 * 2 * 16, dtype=dtype)
    k, v = fused[:, 32:64].view(22, 2, 16), fused[:, 64:].view(22, 2, 16)
    slots = torch.tensor([slot for i in range(3) for slot in case.slots(i)])
    slots[[3, 21]] = -1
    before = case.pool.clone()
    kv_store(k, v, case.layer_view, slots)
    expected = before[:, 1].clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // 4, 0, :, slot % 4] = k[token]
            expected[slot // 4, 1, :, slot % 4] = v[token]
    torch.testing.assert_close(case.layer_view, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(case.pool[:, [0, 2]], before[:, [0, 2]], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("computed", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_are_rounded_to_the_dtype_of_the_view(paged, randn, stored, computed) -> None:
    case = paged([5], dtype=stored)
    k, v = randn(5, 2, 16, dtype=computed), randn(5, 2, 16, dtype=computed)
    kv_store(k, v, case.layer_view, torch.tensor(case.slots(0)))
    for token, slot in enumerate(case.slots(0)):
        found = case.layer_view[slot // 4, :, :, slot % 4]
        torch.testing.assert_close(found, torch.stack((k[token], v[token])).to(stored), rtol=0, atol=0)


def test_padding_alone_writes_nothing(paged, randn) -> None:
    case = paged([4])
    before = case.pool.clone()
    kv_store(randn(3, 2, 16), randn(3, 2, 16), case.layer_view, torch.full((3,), -1))
    torch.testing.assert_close(case.pool, before, rtol=0, atol=0, equal_nan=True)


def test_arguments_that_do_not_fit_are_named(paged, randn) -> None:
    case = paged([4])
    slots = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="k and v must be"):
        kv_store(randn(3, 2, 16), randn(3, 2, 16), case.layer_view, slots)
    with pytest.raises(TypeError, match="slot_mapping"):
        kv_store(randn(2, 2, 16), randn(2, 2, 16), case.layer_view, slots.int())
    with pytest.raises(TypeError, match=r"v is .*int32"):
        kv_store(randn(2, 2, 16), randn(2, 2, 16).int(), case.layer_view, slots)
    with pytest.raises(IndexError):
        kv_store(randn(2, 2, 16), randn(2, 2, 16), case.layer_view, torch.tensor([0, 10_000]))
