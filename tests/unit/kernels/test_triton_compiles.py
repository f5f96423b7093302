"""Every Triton kernel compiles to machine code for Hopper through its own launch code, without a device.

A stand-in for the driver names the target; a launch stops after compilation. What the interpreter cannot see is seen
here: types, specialised arguments, shared memory, the assembler.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter's process compiles nothing", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("a device is here: bench/gpu compiles and runs the kernels", allow_module_level=True)

SHARED_MEMORY_BYTES = 227 * 1024


class Hopper:
    """The driver's questions that compilation asks."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int | None = None) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Launches compile only; returns the list of (kernel, shared memory in bytes)."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launches: list[tuple[str, int]] = []

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            binary = kernel.run(*arguments, grid=grid, warmup=True, **options)
            launches.append((kernel.fn.__name__, int(binary.metadata.shared)))

        return launch

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.setattr(JITFunction, "__getitem__", launcher)
    monkeypatch.setattr(driver, "_active", Hopper())
    return launches


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "width", "dtype", "stored", "options"),
    [
        (32, 8, 128, torch.bfloat16, torch.bfloat16, {}),
        (6, 2, 80, torch.float16, torch.float16, {"window": 1024, "softcap": 30.0}),
        (8, 4, 256, torch.bfloat16, torch.bfloat16, {"window": 4096, "softcap": 50.0}),
        (14, 2, 64, torch.float32, torch.float32, {}),
        (32, 8, 128, torch.bfloat16, torch.float32, {}),
        (32, 8, 128, torch.float32, torch.bfloat16, {}),
        (6, 2, 80, torch.bfloat16, torch.float16, {"window": 1024}),
        (64, 8, 64, torch.bfloat16, torch.bfloat16, {"window": 1024, "sinks": torch.zeros(64)}),
    ],
)
def test_attention_kernels_compile(compiled, monkeypatch, q_heads, kv_heads, width, dtype, stored, options) -> None:
    from tandem.kernels.extend_attention import extend_attention
    from tandem.kernels.paged_decode import paged_decode
    from tandem.kernels.paged_decode import triton as decode

    monkeypatch.setattr(decode, "processors", lambda _: 132)
    view = torch.zeros(4, 2, 2, kv_heads, 16, width, dtype=stored)[:, 1]
    for batch, blocks in ((1, 1), (4, 256)):
        q = torch.zeros(batch, q_heads, width, dtype=dtype)
        table = torch.zeros(batch, blocks, dtype=torch.int32)
        lens = torch.ones(batch, dtype=torch.int32)
        starts = torch.arange(batch + 1, dtype=torch.int32)
        paged_decode(q, view, table, lens, scale=0.1, backend="triton", **options)
        extend_attention(q, view, starts, table, lens, scale=0.1, backend="triton", **options)
    assert {name for name, _ in compiled} == {"_split_kernel", "_extend_kernel", "_reduce_kernel"}
    assert max(shared for _, shared in compiled) * 2 <= SHARED_MEMORY_BYTES


@pytest.mark.parametrize(("heads", "dtype"), [(16, torch.bfloat16), (20, torch.float32), (128, torch.bfloat16)])
def test_latent_decode_compiles(compiled, monkeypatch, heads, dtype) -> None:
    from tandem.kernels.latent_decode import latent_decode
    from tandem.kernels.latent_decode import triton as decode
    from tandem.kernels.layer_view import key_value_view
    from tandem.kernels.triton_tiles import latent_tile

    monkeypatch.setattr(decode, "processors", lambda _: 132)
    view = key_value_view(torch.zeros(4, 2, 1, 1, 16, 576, dtype=dtype)[:, 1])
    for batch, blocks in ((1, 1), (4, 256)):
        q, table = torch.zeros(batch, heads, 576, dtype=dtype), torch.zeros(batch, blocks, dtype=torch.int32)
        latent_decode(q, view, table, torch.ones_like(table[:, 0]), rank=512, scale=0.1, backend="triton")
    assert {name for name, _ in compiled} == {"_latent_kernel", "_reduce_kernel"}
    fit = latent_tile(heads, 512, dtype.itemsize).programs_per_processor
    assert max(shared for _, shared in compiled) * fit <= SHARED_MEMORY_BYTES


@pytest.mark.parametrize(
    ("tokens", "dtype", "gate", "has_biases"),
    [(1, torch.bfloat16, "silu", False), (300, torch.bfloat16, "clamped", True), (9000, torch.bfloat16, "silu", False),
     (5, torch.float32, "gelu_tanh", True)],
)  # fmt: skip
def test_expert_kernels_compile(compiled, tokens, dtype, gate, has_biases) -> None:
    from tandem.kernels.expert_mlp import ExpertWeights, GateActivation, expert_mlp

    count, features, hidden, per_token = 32, 96, 2880, 4
    shapes = (count * 2 * features, hidden), (count * hidden, features)
    matrices = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    biases = (matrices[0][:, 0].contiguous(), matrices[1][:, 0].contiguous()) if has_biases else (None, None)
    experts = ExpertWeights(
        count=count, gate_up=matrices[0], down=matrices[1], gate_up_bias=biases[0], down_bias=biases[1],
        gate=GateActivation(kind=gate, alpha=1.7, limit=7.0),
    )  # fmt: skip
    chosen = torch.zeros(tokens, per_token, dtype=torch.int64)
    expert_mlp(torch.zeros(tokens, hidden, dtype=dtype), chosen, chosen.float(), experts, backend="triton")
    assert [name for name, _ in compiled] == ["_sort_kernel", "_gate_up_kernel", "_down_kernel", "_sum_kernel"]
    assert max(shared for _, shared in compiled) <= SHARED_MEMORY_BYTES


def test_memory_kernels_compile(compiled) -> None:
    from tandem.kernels.kv_blocks import copy_blocks, gather_blocks, scatter_blocks
    from tandem.kernels.kv_store import kv_store

    pool = torch.zeros(4, 2, 2, 8, 16, 128, dtype=torch.bfloat16)
    new = torch.zeros(3, 8, 128, dtype=torch.bfloat16)
    for stored in (torch.bfloat16, torch.float32, torch.float16):
        kv_store(new, new, pool[:, 1].to(stored), torch.zeros(3, dtype=torch.int64), backend="triton")
    ids = torch.zeros(2, dtype=torch.int32)
    for heads in (slice(None), slice(0, 1)):
        scatter_blocks(
            pool, ids, gather_blocks(pool, ids, heads=heads, backend="triton"), heads=heads, backend="triton"
        )
    copy_blocks(pool, ids, ids, backend="triton")
    assert {name for name, _ in compiled} == {"_store_kernel", "_move_runs_kernel", "_copy_blocks_kernel"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_row_kernels_compile(compiled, dtype) -> None:
    from tandem.kernels.rms_norm import rms_norm
    from tandem.kernels.rope import rotate
    from tandem.kernels.silu_mul import silu_mul

    x, weight = torch.zeros(2, 5120, dtype=dtype), torch.zeros(5120, dtype=dtype)
    rms_norm(x, weight, 1e-5, added=None, backend="triton")
    rms_norm(x, weight, 1e-5, added=x.clone(), backend="triton")
    silu_mul(x, backend="triton")
    for heads, width in ((40, 128), (12, 80)):
        table = torch.zeros(2, width, dtype=dtype)
        rotate(torch.zeros(2, heads, width, dtype=dtype), table, table, backend="triton")
    assert {name for name, _ in compiled} == {"_rms_norm_kernel", "_silu_mul_kernel", "_rotate_kernel"}


def test_forbid_compiles(compiled) -> None:
    from tandem.kernels.token_mask import forbid

    forbid(torch.zeros(3, 50_003), [0, 2], torch.zeros(2, 6251, dtype=torch.uint8), backend="triton")
    assert {name for name, _ in compiled} == {"_forbid_kernel"}


def test_choose_token_compiles(compiled) -> None:
    from tandem.kernels.sample import choose_token

    one = torch.ones(2, dtype=torch.float64)
    choose_token(torch.zeros(2, 151_936), torch.ones(2, dtype=torch.int64), one, one, one, backend="triton")
    assert {name for name, _ in compiled} == {"_choose_kernel"}


def test_the_payload_checksum_compiles(compiled) -> None:
    from tandem.kernels.payload_checksum import payload_checksum

    for size in (8192, 50_001):
        payload_checksum(torch.zeros(size, dtype=torch.uint8), backend="triton")
    assert {name for name, _ in compiled} == {"_weighted_sum_kernel"}
