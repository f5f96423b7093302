"""A model's compute cost: against a count by hand, the decoder's own tensors, and the planner's arithmetic."""

import dataclasses

import pytest
import torch

from tandem.controlplane.planner.hardware import MODELS
from tandem.engine.experts_config import ExpertsConfig
from tandem.engine.latent_config import LatentShape
from tandem.engine.model_config import ModelConfig, read_model_config
from tandem.engine.model_work import ModelWork, model_work
from tandem.engine.models.decoder import Decoder
from tandem.engine.pool_plan import kv_layout
from tandem.engine.request import StepResult
from tests.unit.engine.bundled import MODEL

TINY = read_model_config(MODEL)
QWEN3_MOE = dataclasses.replace(
    TINY, intermediate=512, is_tied=False,
    experts=ExpertsConfig(count=16, per_token=4, intermediate=64, layers=frozenset({1, 2, 4})),
)  # fmt: skip
LLAMA_3_8B = dataclasses.replace(
    TINY, vocab_size=128_256, hidden=4096, intermediate=14_336, layers=32, heads=32, kv_heads=8, head_dim=128,
    is_tied=False,
)  # fmt: skip


LATENT = LatentShape(query_rank=96, rank=64, plain=32, turned=16, value=48, is_interleaved=True)
DEEPSEEK = dataclasses.replace(LLAMA_3_8B, hidden=512, layers=3, intermediate=768, kv_heads=32, head_dim=16)


def work_of(config: ModelConfig, *, tp: int = 1) -> ModelWork:
    layout = kv_layout(config, dtype="bfloat16", block_tokens=16, tp=tp)
    return model_work(config, dtype="bfloat16", layout=layout)


def test_the_bundled_model_by_hand() -> None:
    work = work_of(TINY)
    # A layer: q 256 x 256, k and v 256 x 128 each; o 256 x 256, gate, up and down 256 x 768 each. A head of 4096 x 256.
    before, behind, head = 131_072, 655_360, 1_048_576
    # Two chunks of a prompt of 20 tokens, of which only the last one's logits are wanted.
    first = StepResult(prefill_tokens=16, context_tokens=16, attended=128.0)
    second = StepResult(prefill_tokens=4, context_tokens=20, attended=72.0, logit_rows=1)
    every = 20 * (5 * before + 4 * behind) + behind + head
    # A pair: 8 heads of 32 numbers in 5 layers, for the score and for the mixture. 210 = 1 + 2 + ... + 20.
    assert work.flops(first) + work.flops(second) == 2 * every + 210 * 2 * 2 * 5 * 8 * 32
    # KV: 2 planes of 4 heads of 32 numbers of 2 bytes in 5 layers.
    assert work.bytes_read(first) == 2 * (5 * before + 4 * behind) + 16 * 2 * 5 * 4 * 32 * 2
    assert work.bytes_read(second) == 2 * (5 * before + 5 * behind + head) + 20 * 2 * 5 * 4 * 32 * 2


def test_a_step_of_nothing_costs_nothing() -> None:
    assert (work_of(TINY).flops(StepResult()), work_of(TINY).bytes_read(StepResult())) == (0, 0)


def test_experts_by_hand() -> None:
    work = work_of(QWEN3_MOE)
    # Routers of 16 x 256 and experts of 3 x 256 x 64 in layers 1, 2 and 4; MLPs of 3 x 256 x 512 in layers 0 and 3.
    before, o, router, expert, mlp, head = 131_072, 65_536, 4_096, 49_152, 393_216, 1_048_576
    pairs, kv = 2 * 2 * 5 * 8 * 32, 2 * 5 * 4 * 32 * 2
    step = StepResult(prefill_tokens=10, context_tokens=10, attended=50.0, logit_rows=1)
    token, row = 5 * before + 4 * o + 2 * (router + mlp), o + router + head
    assert work.flops(step) == 2 * (10 * (token + 2 * 4 * expert) + row + 4 * expert) + 55 * pairs
    # One token meets 4 experts of a layer; ten that draw at random meet all but 16 · (3/4)^10 of them.
    ten = 16 - 16 * 0.75**10
    assert work.bytes_read(step) == pytest.approx(2 * (token + row + (2 * ten + 4) * expert) + 10 * kv)
    alone = StepResult(decode_tokens=1, context_tokens=10)
    assert work.bytes_read(alone) == pytest.approx(2 * (token + 2 * 4 * expert) + 10 * kv)


def test_shared_experts_are_met_by_every_token() -> None:
    experts = ExpertsConfig(count=4, per_token=2, intermediate=64, layers=frozenset({1, 2}))
    without, beside = (
        work_of(dataclasses.replace(DEEPSEEK, latent=LATENT, experts=dataclasses.replace(experts, shared=shared)))
        for shared in (0, 96)
    )
    more = beside.token_flops + beside.row_flops - without.token_flops - without.row_flops
    assert more == 2 * 2 * 3 * DEEPSEEK.hidden * 96
    assert beside.row_weight_bytes - without.row_weight_bytes == 2 * 3 * DEEPSEEK.hidden * 96


@pytest.mark.parametrize(
    "config",
    [
        TINY, LLAMA_3_8B, dataclasses.replace(DEEPSEEK, latent=LATENT),
        dataclasses.replace(DEEPSEEK, latent=dataclasses.replace(LATENT, query_rank=None)),
    ],
    ids=["tied", "untied", "latent", "latent without query rank"],
)  # fmt: skip
def test_the_matrices_are_those_of_the_decoder(config: ModelConfig) -> None:
    decoder = Decoder(config, dtype=torch.bfloat16, max_positions=64)
    tensors = [one.tensor for one in decoder.parameters() if config.is_tied or one is not decoder.embedding]
    matrices = sum(tensor.numel() for tensor in tensors if tensor.ndim == 2)
    work = work_of(config)
    assert work.token_flops + work.row_flops == 2 * matrices
    assert work.token_weight_bytes + work.row_weight_bytes == 2 * matrices
    vectors = sum(tensor.numel() for tensor in tensors if tensor.ndim == 1)
    assert vectors < matrices / 1000, "what is left out"


def test_the_planner_reckons_alike() -> None:
    work, planned = work_of(LLAMA_3_8B), MODELS["llama-3-8b"]
    assert work.pair_flops == pytest.approx(planned.context_flops, rel=1e-3)
    assert work.kv_token_bytes == planned.kv_token_bytes
    looked_up = LLAMA_3_8B.vocab_size * LLAMA_3_8B.hidden
    assert work.token_flops + work.row_flops + 2 * looked_up == pytest.approx(2 * planned.parameters, rel=0.01)
    weights = work.token_weight_bytes + work.row_weight_bytes + 2 * looked_up
    assert weights == pytest.approx(planned.weight_bytes, rel=0.01)


def test_the_matrices_of_experts_are_those_of_the_decoder() -> None:
    decoder, work = Decoder(QWEN3_MOE, dtype=torch.bfloat16, max_positions=64), work_of(QWEN3_MOE)
    matrices = [one.tensor for one in decoder.parameters() if one.tensor.ndim == 2 and one is not decoder.embedding]
    assert work.experts is not None
    routed = 3 * work.experts.count * work.experts.expert_bytes
    assert work.token_weight_bytes + work.row_weight_bytes + routed == sum(tensor.nbytes for tensor in matrices)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_ranks_share_it_or_hold_copies(tp: int) -> None:
    assert work_of(TINY, tp=tp) == work_of(TINY)
