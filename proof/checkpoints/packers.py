"""Packs matrices as published checkpoints do, whole matrices at once, and computes which numbers that means.

Each packer takes a weight `[outputs, inputs]` in fp32 and returns the tensors behind its module's name, and the meant
weight in fp32, computed from the numbers before they are packed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]
_GROUP, _BLOCK, _NESTED = 64, 64, 256
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FP8_MOST = 448.0
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip


class Checkpoint(NamedTuple):
    pack: Callable[[Tensor], Packed]
    quantization_config: dict[str, Any]


def dense(fields: Tensor, bits: int) -> Tensor:
    """Every row of whole numbers as int32 words, lowest bits first."""
    of_bits = ((fields[..., None] >> torch.arange(bits)) & 1).to(torch.uint8).flatten(1).numpy()
    packed = np.packbits(of_bits, axis=1, bitorder="little")
    packed = np.pad(packed, ((0, 0), (0, -packed.shape[1] % 4)))
    return torch.from_numpy(np.ascontiguousarray(packed).view("<i4"))


def _in_groups(weight: Tensor, bits: int, of: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers, zeros of at least 1, fp16 scales, and the meant weight; `of` is the group of each input."""
    most = (1 << bits) - 1
    of = torch.arange(weight.shape[1]) // _GROUP if of is None else of
    order = torch.argsort(of, stable=True)
    grouped = weight[:, order].view(len(weight), -1, _GROUP)
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    scales = ((high - low) / most).clamp(min=1e-5).half()
    zeros = (-low / scales.float()).round().clamp(1, most)
    q = (weight / scales.float()[:, of] + zeros[:, of]).round().clamp(0, most)
    return q.long(), zeros.long(), scales, (q - zeros[:, of]) * scales.float()[:, of]


def awq(weight: Tensor) -> Packed:
    q, zeros, scales, meant = _in_groups(weight, 4)
    words = [dense(one.T.reshape(one.shape[1], -1, 8)[:, :, list(_AWQ_ORDER)].flatten(1), 4) for one in (q, zeros)]
    return {"qweight": words[0], "qzeros": words[1], "scales": scales.T}, meant


def gptq(weight: Tensor, bits: int, *, version: int, is_ordered: bool) -> Packed:
    of = torch.arange(weight.shape[1]) // _GROUP
    if is_ordered:
        of = of[torch.randperm(len(of), generator=torch.Generator().manual_seed(1))]
    q, zeros, scales, meant = _in_groups(weight, bits, of)
    stored = dense(zeros.T - (2 - version), bits)
    return {"qweight": dense(q, bits).T, "qzeros": stored, "scales": scales.T, "g_idx": of.int()}, meant


def packed_ints(weight: Tensor) -> Packed:
    q, zeros, scales, meant = _in_groups(weight, 4)
    tensors = {"weight_packed": dense(q, 4), "weight_zero_point": dense(zeros.T, 4).T, "weight_scale": scales}
    return {**tensors, "weight_shape": torch.tensor(weight.shape)}, meant


def whole_numbers(weight: Tensor) -> Packed:
    scale = (weight.abs().amax(1, keepdim=True) / 127).clamp(min=1e-8)
    q = (weight / scale).round()
    return {"weight": q.to(torch.int8), "weight_scale": scale}, q * scale


def fp8(weight: Tensor, blocks: tuple[int, int] | None) -> Packed:
    rows, columns = blocks or weight.shape
    counts = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    padded = torch.zeros(counts[0] * rows, counts[1] * columns)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    scale = (padded.view(counts[0], rows, counts[1], columns).abs().amax((1, 3)) / _FP8_MOST).clamp(min=1e-8)
    spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: weight.shape[0], : weight.shape[1]]
    numbers = (weight / spread).to(torch.float8_e4m3fn)
    parts = {"weight_scale": scale.reshape(())} if blocks is None else {"weight_scale_inv": scale}
    return {"weight": numbers, **parts}, numbers.float() * spread


def fp8_of_outputs(weight: Tensor) -> Packed:
    scale = (weight.abs().amax(1, keepdim=True) / _FP8_MOST).clamp(min=1e-8).bfloat16()
    numbers = (weight / scale.float()).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale.float()


def fp4(weight: Tensor, group: int, *, is_mx: bool) -> Packed:
    grouped = weight.view(len(weight), -1, group)
    wanted = (grouped.abs().amax(2) / 6).clamp(min=1e-6)
    parts: dict[str, Tensor] = {}
    if is_mx:
        exponents = wanted.log2().ceil()
        parts["weight_scale"], scales = (exponents + 127).to(torch.uint8), torch.exp2(exponents)
    else:
        of_all = _FP8_MOST / wanted.amax()
        stored = (wanted * of_all).to(torch.float8_e4m3fn)
        scales = stored.float() / of_all
        parts |= {"weight_scale": stored, "weight_global_scale": of_all.reshape(1)}
    shares = grouped / scales.clamp(min=1e-12)[:, :, None]
    fields = (shares.abs()[..., None] - _FP4).abs().argmin(-1)
    meant = (_FP4[fields] * shares.sign() * scales[:, :, None]).flatten(1)
    fields = (fields + 8 * (shares < 0)).flatten(1).to(torch.uint8)
    return {"weight_packed": fields[:, ::2] | fields[:, 1::2] << 4, **parts}, meant


def nf4(weight: Tensor) -> Packed:
    blocks = weight.reshape(-1, _BLOCK)
    wanted = blocks.abs().amax(1)
    offset = float(wanted.mean())
    codes = torch.linspace(-1, 1, 256)
    padded = torch.zeros(-(-len(wanted) // _NESTED) * _NESTED)
    padded[: len(wanted)] = wanted - offset
    outer = padded.view(-1, _NESTED).abs().amax(1).clamp(min=1e-8)
    spread = outer.repeat_interleave(_NESTED)[: len(wanted)]
    numbers = (((wanted - offset) / spread + 1) * 127.5).round().long().clamp(0, 255)
    absmax = codes[numbers] * spread + offset
    q = (blocks[:, :, None] / absmax.clamp(min=1e-12)[:, None, None] - NF4).abs().argmin(2)
    pairs = q.view(-1, 2)
    state = {
        "shape": list(weight.shape), "blocksize": _BLOCK, "nested_blocksize": _NESTED, "nested_offset": offset,
        "quant_type": "nf4", "dtype": "bfloat16",
    }  # fmt: skip
    tensors = {
        "weight": (pairs[:, 0] << 4 | pairs[:, 1]).to(torch.uint8)[:, None], "weight.absmax": numbers.to(torch.uint8),
        "weight.quant_map": NF4.clone(), "weight.nested_absmax": outer, "weight.nested_quant_map": codes,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }  # fmt: skip
    return tensors, (NF4[q] * absmax[:, None]).view(weight.shape)


def llm_int8(weight: Tensor) -> Packed:
    scales = weight.abs().amax(1).clamp(min=1e-8)
    q = (weight * (127 / scales[:, None])).round()
    return {"weight": q.to(torch.int8), "SCB": scales}, q * scales[:, None] * 7.874015718698502e-3


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _gptq(bits: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": _GROUP, "sym": False, **more}


CHECKPOINTS = {
    "AWQ": Checkpoint(
        awq, {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "version": "gemm", "zero_point": True}
    ),
    "GPTQ, 4 bits": Checkpoint(lambda w: gptq(w, 4, version=1, is_ordered=False), _gptq(4)),
    "GPTQ, 4 bits, ordered": Checkpoint(lambda w: gptq(w, 4, version=1, is_ordered=True), _gptq(4, desc_act=True)),
    "GPTQ, 3 bits": Checkpoint(lambda w: gptq(w, 3, version=1, is_ordered=False), _gptq(3)),
    "GPTQ v2, 8 bits": Checkpoint(
        lambda w: gptq(w, 8, version=2, is_ordered=False), _gptq(8, checkpoint_format="gptq_v2")
    ),
    "compressed-tensors, W8A8": Checkpoint(
        whole_numbers, _compressed("int-quantized", num_bits=8, type="int", strategy="channel")
    ),
    "compressed-tensors, W4A16": Checkpoint(
        packed_ints,
        _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=_GROUP, symmetric=False),
    ),
    "compressed-tensors, FP8": Checkpoint(
        fp8_of_outputs, _compressed("float-quantized", num_bits=8, type="float", strategy="channel")
    ),
    "compressed-tensors, NVFP4": Checkpoint(
        lambda w: fp4(w, 16, is_mx=False),
        _compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    ),
    "compressed-tensors, MXFP4": Checkpoint(
        lambda w: fp4(w, 32, is_mx=True),
        _compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    ),
    "FP8, a scale a matrix": Checkpoint(
        lambda w: fp8(w, None), {"quant_method": "fp8", "activation_scheme": "dynamic"}
    ),
    "FP8, blocks": Checkpoint(lambda w: fp8(w, (128, 128)), {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "bitsandbytes, NF4": Checkpoint(nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "bitsandbytes, LLM.int8": Checkpoint(llm_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}
