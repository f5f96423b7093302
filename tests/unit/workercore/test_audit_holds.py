"""A worker's list of its holds fits one message, however many holders share a prefix."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tandem.core.ids import GroupId
from tandem.core.ledger import BlockLedger, Holder, HoldKind
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.audit import MAX_BLOCKS, _refusal, list_holds
from tandem.workercore.message_ring import DEFAULT_BYTES


def holding(prefix_blocks: int, holders: int) -> BlockLedger:
    """Holders that share one prefix."""
    ledger = BlockLedger(GroupId(0), prefix_blocks)
    prefix = ledger.allocate(Holder(HoldKind.REQUEST, "request-0#1#0"), prefix_blocks) or []
    for number in range(1, holders):
        ledger.share(Holder(HoldKind.REQUEST, f"request-{number}#1#0"), prefix)
    return ledger


def test_all_blocks_are_listed_where_they_fit() -> None:
    (one, two) = list_holds([holding(1000, 2)], max_blocks=2000)
    assert list(one.blocks) == list(two.blocks) == list(range(1000))


def test_many_holders_of_a_long_prefix_name_its_first_blocks() -> None:
    holds = list_holds([holding(1000, 20)], max_blocks=2000)
    assert [list(hold.blocks) for hold in holds] == [list(range(100))] * 20, "every hold stays visible"


def test_what_a_report_names_in_part_is_refused_with_the_reason() -> None:
    ledger = holding(MAX_BLOCKS // 200 + 1, 200)
    context: Any = SimpleNamespace(incarnation=1, engine=SimpleNamespace(ledgers=[ledger]))
    seen = list_holds([ledger])[0]
    assert "only the first of each hold" in _refusal(context, (), 1, seen)
    ledger.release(Holder(HoldKind.REQUEST, "request-199#1#0"))
    assert "nobody holds these blocks" in _refusal(context, (), 1, seen), "a report names all of them now"


def test_as_many_blocks_as_are_listed_fit_the_ring() -> None:
    """Before, books of 200 requests behind one long prefix fitted no message, and the rank that was asked ended."""
    far = range(20_000_000, 20_000_000 + MAX_BLOCKS)  # ids of a pool of hundreds of millions of tokens
    report = w.AuditReport(holds=[w.AuditHold(kind="request", key="request#1#0", since_s=1.0, blocks=far)])
    assert report.ByteSize() < DEFAULT_BYTES // 2 - 1_000_000, "there is room for names"
