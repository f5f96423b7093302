"""The proof of exactness: its criteria for a broken promise, and for too little to judge by."""

from __future__ import annotations

import torch
from torch import Tensor

from proof.exactness.answers import NEAR, Answer, PathVerdict, judge

VOCAB = 30


def row(best: int, second: int, gap: float = 1.0) -> Tensor:
    """Log-probabilities that fall from token to token, `best` and `second` first."""
    logits = torch.linspace(0.0, -6.0, VOCAB)
    logits[best], logits[second] = 3.0, 3.0 - gap
    return logits.log_softmax(-1)


def said(rows: list[Tensor], chosen: list[int] | None = None) -> Answer:
    """An answer with these distributions, and the best of each chosen unless `chosen` is given."""
    tops = [each.topk(20) for each in rows]
    best = [list(zip(top.indices.tolist(), top.values.tolist(), strict=True)) for top in tops]
    tokens = [pairs[0][0] for pairs in best]
    return Answer([1], tokens, chosen or tokens, best)


def verdict(dtype: str, ours: list[Tensor], theirs: list[Tensor], chosen: list[int] | None = None) -> PathVerdict:
    return judge(dtype, [(said(ours, chosen), torch.stack(theirs), True)])


ROWS = [row(3, 4), row(5, 6), row(7, 8), row(9, 10)]


def test_equal_answers_are_exact() -> None:
    for dtype in ("float32", "bfloat16"):
        found = verdict(dtype, ROWS, ROWS)
        assert (found.complaint, found.tokens, found.skipped, found.unequal, found.max_error) == ("", 4, 0, 0, 0.0)


def test_fp32_may_not_differ_by_more_than_the_limit() -> None:
    others = [*ROWS[:3], ROWS[3] + 2e-4]
    assert verdict("float32", others, ROWS).complaint == "log-probabilities differ by 2.0e-04"
    assert verdict("float32", [*ROWS[:3], ROWS[3] + 5e-5], ROWS).complaint == ""
    nothing = ROWS[3] * float("nan")
    for dtype in ("float32", "bfloat16"):
        assert verdict(dtype, [*ROWS[:3], nothing], ROWS).complaint == "log-probabilities differ by inf"


def test_fp32_tokens_differ_only_where_the_gap_is_unclear() -> None:
    assert verdict("float32", ROWS, ROWS, [3, 6, 7, 9]).complaint == "1 tokens differ"
    close = [*[row(n, n + 1) for n in range(5)], row(9, 10, gap=1e-6)]
    found = verdict("float32", close, close, [0, 1, 2, 3, 4, 10])
    assert (found.complaint, found.skipped, found.unequal) == ("", 1, 0)


def test_too_few_compared_tokens_are_a_complaint() -> None:
    close = [row(n, n + 1, gap=1e-6) for n in (3, 5)]
    assert verdict("float32", [*ROWS, *close], [*ROWS, *close]).complaint == "only 4 of 6 tokens could be compared"
    unclear = judge("float32", [(said(ROWS), torch.stack(ROWS), False)])
    assert unclear.complaint == "only 0 of 4 tokens could be compared"
    assert judge("bfloat16", []).complaint == "only 0 of 0 tokens could be compared"


def test_bf16_may_part_where_each_token_is_near_in_the_other() -> None:
    parted = [ROWS[0], row(6, 5), row(20, 21), row(22, 23)]
    found = verdict("bfloat16", parted, ROWS)
    assert (found.complaint, found.tokens, found.skipped) == ("", 4, 2), "what follows is another text"
    assert found.max_error < 2
    far = [ROWS[0], row(VOCAB - 1, 5), ROWS[2], ROWS[3]]
    assert verdict("bfloat16", far, ROWS).complaint == "1 tokens differ"
    theirs_is_far_from_ours = [ROWS[0], row(0, 1), ROWS[2], ROWS[3]]
    theirs = [ROWS[0], row(NEAR + 5, 0), ROWS[2], ROWS[3]]
    assert verdict("bfloat16", theirs_is_far_from_ours, theirs).complaint == "1 tokens differ"
