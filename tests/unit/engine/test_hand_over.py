"""A request that another engine prefilled goes on here: its blocks become its own, nothing is computed again."""

from typing import Any

import pytest

from tandem.core.errors import InternalError
from tandem.core.handoff import ChoiceState
from tandem.core.ids import ChoiceIndex, GroupId
from tandem.core.ledger import Holder, HoldKind, LedgerError
from tandem.core.state_enums import FinishReason
from tandem.engine.request import RequestKind
from tests.unit.engine.arithmetic import BLOCK, ROOT, Bench, cached_blocks, make_request, tokens

G0 = GroupId(0)


def _hand_over(n: int, prompt: int, groups: int = 1, pushing: bool = False) -> None:
    """Prefill on one engine, copy the blocks as a transfer would, decode on another."""
    options: dict[str, Any] = {"n": n, "temperature": 1.0 if n > 1 else 0.0, "seed": 11}
    sender, receiver = Bench(groups=groups, chunk_tokens=5), Bench(groups=groups)
    first = sender.add("a", tokens(prompt), 9, kind=RequestKind.PREFILL_ONLY, **options)
    sender.run()
    holder = Holder(HoldKind.RESERVED, "a/77")
    tables = []
    for g, ledger in enumerate(receiver.engine.ledgers):
        source = sender.engine.block_table("a", GroupId(g))
        blocks = ledger.allocate(holder, len(source) + 1)  # one more than the prompt needs
        assert blocks is not None
        for a, b in zip(source, blocks, strict=False):
            receiver.runner.pools[g][b] = list(sender.runner.pools[g][a])
        tables.append(blocks)
    choices = tuple(ChoiceState(choice=ChoiceIndex(c), tokens=tuple(sender.outputs["a", c])) for c in range(n))
    request = make_request("a", tokens(prompt), 9, **options)
    receiver.requests["a"] = make_request("a", tokens(prompt), 9, forced=choices, **options)
    receiver.engine.add_prefilled(request, holder, tuple(tables), choices)
    assert len(cached_blocks(receiver.engine, ROOT, tokens(prompt), G0)) == prompt // BLOCK
    assert receiver.engine.cached_tokens("a") == 0
    if pushing:
        for ledger, table in zip(receiver.engine.ledgers, tables, strict=True):
            ledger.share(Holder(HoldKind.PUSHING, "again"), table[: -(-prompt // BLOCK)])
    assert receiver.step().prefill_tokens == 0, "nothing of the prompt is computed again"
    receiver.run()
    for ledger in receiver.engine.ledgers:
        ledger.release(Holder(HoldKind.PUSHING, "again"))
    receiver.check_outputs("a")
    receiver.check_idle()
    sender.engine.cancel("a")
    sender.check_idle()
    assert first.prompt == request.prompt


@pytest.mark.parametrize("prompt", [3, 8, 10])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_hand_over(prompt: int, n: int, groups: int) -> None:
    _hand_over(n, prompt, groups)


def test_a_decode_never_writes_into_a_block_that_is_being_pushed() -> None:
    _hand_over(1, 10, pushing=True)
    _hand_over(3, 10, pushing=True)


def test_add_prefilled_refuses_blocks_that_are_not_held() -> None:
    bench = Bench()
    holder = Holder(HoldKind.RESERVED, "a/1")
    blocks = bench.engine.ledgers[0].allocate(holder, 1)
    assert blocks is not None
    one = (ChoiceState(choice=ChoiceIndex(0), tokens=(5,)),)
    with pytest.raises(LedgerError, match="does not hold"):
        bench.engine.add_prefilled(make_request("a", tokens(6)), holder, (blocks,), one)
    with pytest.raises(InternalError, match="first token"):
        bench.engine.add_prefilled(make_request("a", tokens(3)), holder, (blocks,), ())
    assert bench.engine.ledgers[0].blocks_of(holder) == blocks
    finished = (ChoiceState(choice=ChoiceIndex(0), tokens=(5,), finish=FinishReason.STOP),)
    bench.engine.add_prefilled(make_request("a", tokens(3)), holder, (blocks,), finished)
    bench.check_idle()
