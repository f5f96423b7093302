"""Every block of every layer is pushed exactly once, never before it is computed, never if the receiver has it."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tandem.core.ids import BlockId, GroupId
from tandem.core.kv_layout import KVGroupSpec
from tandem.kvtransfer.kv_pool_access import TokenRun
from tandem.prefill_worker.push_plan import PushPlan

SPEC = KVGroupSpec(
    group=GroupId(0), layers=(0, 1, 2, 3, 4), planes=2, heads=2, width=4, block_tokens=4, dtype="float32"
)


@given(
    prompt=st.integers(1, 60),
    cached_blocks=st.integers(0, 15),
    skip=st.integers(0, 15),
    size=st.sampled_from([1, 2, 3, 4, 6, 8, 64]),
    chunk=st.integers(1, 20),
    layer_group=st.integers(1, 5),
    open_after=st.integers(0, 12),
)
def test_each_block_and_layer_once(
    prompt: int, cached_blocks: int, skip: int, size: int, chunk: int, layer_group: int, open_after: int
) -> None:
    cached = min(cached_blocks, (prompt - 1) // 4) * 4
    skip = min(skip, prompt // size)
    plan = PushPlan(SPEC, prompt, cached)
    computed = {(layer, token) for layer in range(5) for token in range(cached)}
    pushed: list[tuple[int, int]] = []

    def take() -> None:
        for push in plan.take():
            ours, offset, tokens_pushed = plan.source(push)
            assert 0 <= offset < 4
            assert ours.start * 4 + offset == push.first * size
            wanted = min(prompt, push.last * size)
            assert tokens_pushed == wanted - push.first * size
            assert (ours.stop - 1) * 4 < wanted <= ours.stop * 4
            run = TokenRun(tuple(map(BlockId, range(ours.start, ours.stop))), 4, offset)
            assert run.reaches(push.last - push.first, size)
            for block in range(push.first, push.last):
                tokens = range(block * size, min(prompt, block * size + size))
                for layer in range(push.first_layer, push.last_layer):
                    assert all((layer, token) in computed for token in tokens)
                    pushed.append((block, layer))

    step = 0
    start = cached
    while start < prompt:
        end = min(prompt, start + chunk)
        for first in range(0, 5, layer_group):
            if step == open_after:
                plan.open(skip, size)
            step += 1
            last = min(5, first + layer_group)
            computed |= {(layer, token) for layer in range(first, last) for token in range(start, end)}
            plan.computed(first, last, end)
            take()
        start = end
    if step <= open_after:
        assert not pushed
        assert not plan.is_complete
        plan.open(skip, size)
        take()
    assert plan.is_complete
    assert sorted(pushed) == [(block, layer) for block in range(skip, -(-prompt // size)) for layer in range(5)]


def test_layers_of_another_group_do_not_count() -> None:
    spec = KVGroupSpec(group=GroupId(1), layers=(1, 3), planes=2, heads=2, width=4, block_tokens=4, dtype="float32")
    plan = PushPlan(spec, 8, 0)
    plan.open(0, 4)
    plan.computed(0, 2, 8)
    (first,) = plan.take()
    assert (first.first_layer, first.last_layer) == (0, 1)
    plan.computed(2, 4, 8)
    (second,) = plan.take()
    assert (second.first_layer, second.last_layer) == (1, 2)
    assert plan.is_complete


def test_a_plan_says_where_the_receivers_blocks_lie() -> None:
    spec = replace(SPEC, block_tokens=16)
    plan = PushPlan(spec, 50, 50)
    plan.open(2, 10)
    (push,) = plan.take()
    assert (push.first, push.last) == (2, 5)
    assert plan.source(push) == (slice(1, 4), 4, 30)
    plan.close()
    plan.open(0, 64)
    (push,) = plan.take()
    assert (push.first, push.last) == (0, 1)
    assert plan.source(push) == (slice(0, 4), 0, 50)


def test_a_ticket_taken_back_leaves_all_to_be_pushed_again() -> None:
    plan = PushPlan(SPEC, 40, 0)
    plan.computed(0, 99, 40)
    plan.open(0, SPEC.block_tokens)
    assert plan.take()
    assert plan.is_complete
    plan.close()
    assert not plan.is_complete
    assert plan.take() == []
    plan.open(1, SPEC.block_tokens)
    assert {(push.first, push.last) for push in plan.take()} == {(1, 10)}
    assert plan.is_complete
