"""Every Triton kernel compiles to machine code for Hopper, without a device: types, shared memory, assembler."""

from __future__ import annotations

import os
from typing import Any

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter's process compiles nothing", allow_module_level=True)

SHARED_MEMORY_BYTES = 227 * 1024
INTEGER_POINTERS = {"table_ptr": "*i32", "lens_ptr": "*i32", "cu_seqlens_ptr": "*i32", "slots_ptr": "*i64"}
INTEGER_POINTERS |= {"ids_ptr": "*i32", "src_ptr": "*i32", "dst_ptr": "*i32"}
FLOAT_POINTERS = {"partial_ptr": "*fp32", "statistics_ptr": "*fp32"}
ALIGNED = {"q_stride", "out_stride", "k_stride", "v_stride", "stride_block", "stride_plane", "stride_head"}


def shared_bytes(kernel: Any, dtype: str, constants: dict[str, Any], warps: int = 4, stages: int = 3) -> int:
    """Compile for compute capability 9.0 with arguments like those of the launch; the shared memory it takes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = INTEGER_POINTERS.get(name) or FLOAT_POINTERS.get(name) or f"*{dtype}"
        else:
            signature[name] = "fp32" if name in ("scale_log2", "softcap") else "i32"
        if name.endswith("_ptr") or name in ALIGNED:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert len(compiled.asm["cubin"]) > 0
    return int(compiled.metadata.shared)


@pytest.fixture(autouse=True)
def chosen_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("width", "window", "softcap"), [(128, 0, False), (64, 1024, True)])
def test_attention_kernels_compile(dtype, width, window, softcap) -> None:
    from tandem.kernels.extend_attention import triton as extend
    from tandem.kernels.paged_decode import triton as decode

    size = 2 if dtype == "bf16" else 4
    common = {
        "GROUP": 4, "BLOCK_TOKENS": 16, "WIDTH": width, "PADDED_WIDTH": width, "WINDOW": window,
        "HAS_SOFTCAP": softcap, "PRECISION": "ieee",
    }  # fmt: skip
    tile, warps, stages = decode.decode_tile(width, size)
    constants = common | {"ROWS": 16, "SPLITS": 8, "TILE": tile}
    assert shared_bytes(decode._split_kernel, dtype, constants, warps, stages) * 2 <= SHARED_MEMORY_BYTES
    rows, tile, warps, stages = extend.extend_tile(width, 4, size)
    constants = common | {"ROWS": rows, "TILE_QUERIES": rows // 4, "TILE": tile}
    assert shared_bytes(extend._extend_kernel, dtype, constants, warps, stages) <= SHARED_MEMORY_BYTES


def test_other_kernels_compile() -> None:
    from tandem.kernels.kv_blocks import triton as blocks
    from tandem.kernels.kv_store import triton as store
    from tandem.kernels.paged_decode import triton as decode

    shared_bytes(decode._reduce_kernel, "bf16", {"SPLITS": 8, "WIDTH": 128, "PADDED_WIDTH": 128})
    constants = {"BLOCK_TOKENS": 16, "NUMBERS": 1024, "WIDTH": 128, "PADDED": 1024}
    shared_bytes(store._store_kernel, "bf16", constants)
    for scatter in (False, True):
        shared_bytes(blocks._move_runs_kernel, "i16", {"PLANES": 2, "CHUNK": 4096, "SCATTER": scatter})
    shared_bytes(blocks._copy_blocks_kernel, "i16", {"CHUNK": 4096})
