"""The engine's blocks: one ledger a KV group, and operations of sequences on them. Decides nothing, moves no bytes.

Every sequence has one table a group, all of the same length: block i of every table holds tokens
[i·block_tokens, (i+1)·block_tokens). In a group with a window the leading ones go back while the sequence runs, see
`leave`. All methods either succeed in every group or change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence
from typing import NamedTuple

from tandem.core.block_hash import BlockHash, chain, next_hash
from tandem.core.clock import Clock
from tandem.core.errors import ConfigError
from tandem.core.ids import BlockId, GroupId
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.core.ledger import BlockLedger, Holder, HoldKind, LedgerError
from tandem.core.state_enums import FinishReason
from tandem.engine.request import CacheEvent
from tandem.engine.sequence import GONE, QueueState, RequestState, Sequence

_WRITTEN = Holder(HoldKind.REQUEST, "begun")


class BlockCopy(NamedTuple):
    """A copy-on-write: block `source` of `group` must be copied to `target` before the step writes."""

    group: GroupId
    source: BlockId
    target: BlockId


class Reserved(NamedTuple):
    """Blocks of `group` in logical order: the first `left` are behind the window and not held; those up to `hits` were
    cached, the others are to be filled."""

    group: GroupId
    blocks: list[BlockId]
    hits: int
    left: int = 0


class BlockSpace:
    """Ledgers of all groups. Not thread-safe: owned by the step loop."""

    def __init__(self, layout: KVLayout, num_blocks: AbstractSequence[int], clock: Clock | None = None) -> None:
        sizes = {spec.block_tokens for spec in layout.groups}
        if len(sizes) != 1 or len(num_blocks) != len(layout.groups):
            raise ConfigError(
                f"KV groups have block sizes {sorted(sizes)} and {len(num_blocks)} pools",
                why="block hashes need one block size, and every group one pool",
            )
        self.block_tokens = sizes.pop()
        self._specs = layout.groups
        self._windows = tuple(i for i, spec in enumerate(layout.groups) if spec.window is not None)
        self._events: list[CacheEvent] = []
        self._clock = clock
        self._written: dict[Holder, list[BlockId]] = {}
        self.ledgers = tuple(self._ledger(s.group, n) for s, n in zip(layout.groups, num_blocks, strict=True))

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens in one group."""
        return -(-tokens // self.block_tokens)

    def total_blocks(self) -> int:
        """Blocks of the smallest pool: what a request may need at most."""
        return min(ledger.num_blocks for ledger in self.ledgers)

    def take_events(self) -> list[CacheEvent]:
        """Hashes stored and removed since the last call, in order. Call it after every step."""
        events, self._events = self._events, []
        return events

    def admit(self, state: RequestState, headroom_blocks: int) -> bool:
        """Give a waiting request blocks for all tokens it knows, sharing the longest cached prefix.

        At least one token stays to be computed, and those with requested logits. False if fewer than `headroom_blocks`
        would be left.
        """
        leader = state.leader
        goal = state.goal(leader)
        spare = self._spare(state)
        total, limit = self.blocks_for(goal), state.reusable_tokens(goal) // self.block_tokens
        room = min(ledger.available for ledger in self.ledgers) - headroom_blocks
        if total - limit + spare > room:
            return False
        self._hash(leader, state.request.hash_root, limit)
        hits = longest_hit(self.ledgers, self._specs, leader.hashes[:limit], is_whole=state.is_prefill_only)
        if total - hits + spare > room:
            return False
        window_offsets = [self._first_needed(state, spec, hits * self.block_tokens) for spec in self._specs]
        matches = [led.match(leader.hashes[left:hits]) for led, left in zip(self.ledgers, window_offsets, strict=True)]
        for ledger, match in zip(self.ledgers, matches, strict=True):
            ledger.share(leader.holder, match)
        need = total - hits + spare
        if any(ledger.available - headroom_blocks < need for ledger in self.ledgers):  # hits may have been cached ones
            self.release(state)
            return False
        leader.left = window_offsets
        for ledger, table, left, match in zip(self.ledgers, leader.tables, window_offsets, matches, strict=True):
            table.extend([GONE] * left)
            table.extend(match)
            table.extend(_allocated(ledger, leader.holder, total - hits))
            if spare:
                _allocated(ledger, state.spare_holder, spare)
        state.spare_blocks = spare
        leader.published = hits
        leader.computed = hits * self.block_tokens
        return True

    def reserve(
        self,
        holder: Holder,
        hashes: AbstractSequence[BlockHash],
        count: int,
        headroom_blocks: int,
        window_offsets: AbstractSequence[int] | None = None,
    ) -> tuple[Reserved, ...] | None:
        """Pin the cached blocks of `hashes` and allocate the rest of `count`. In every group, for `holder`, which has
        none yet; without the first `window_offsets[i]` of group i, to which no token will attend. None, and nothing
        held, if fewer than `headroom_blocks` would be left in a group."""
        reserved = []
        for ledger, left in zip(self.ledgers, window_offsets or [0] * len(self.ledgers), strict=True):
            hits = ledger.match(hashes[left:])
            ledger.share(holder, hits)
            missing = count - left - len(hits)
            has_room = ledger.available - missing >= headroom_blocks
            new = ledger.allocate(holder, missing) if has_room else None
            if new is None:
                self.release_holder(holder)
                return None
            reserved.append(Reserved(ledger.group, [*[GONE] * left, *hits, *new], left + len(hits), left))
        return tuple(reserved)

    def release_holder(self, holder: Holder) -> None:
        """Give back all that `holder` has, in every group. Nothing may read or write it for the holder any more."""
        for ledger in self.ledgers:
            ledger.release(holder)

    def cached_tokens(self, state: RequestState) -> int:
        """Leading tokens that a waiting request would not have to compute if it were admitted now. Holds nothing.

        Looks only at where the hit ended last time, so that a long queue can be looked at before every step.
        """
        leader = state.leader
        limit = state.reusable_tokens(state.goal(leader)) // self.block_tokens
        if limit <= 0:
            return 0
        self._hash(leader, state.request.hash_root, limit)
        count = min(state.cached_blocks, limit)
        if count and not self._is_findable(leader.hashes[count - 1]):
            count = 0
        while count < limit and self._is_findable(leader.hashes[count]):
            count += 1
        state.cached_blocks = count
        return count * self.block_tokens

    def adopt(self, state: RequestState, holder: Holder, tables: tuple[list[BlockId], ...]) -> None:
        """Move a received prompt's blocks from `holder` to the request, publish them and fork its choices.
        Of a group with a window the blocks from `first_to_hand_over` on."""
        leader = state.leader
        count = self.blocks_for(leader.prompt_tokens)
        window_offsets = [spec.first_to_hand_over(leader.prompt_tokens) for spec in self._specs]
        for ledger, table, left in zip(self.ledgers, tables, window_offsets, strict=True):
            if len(table) < count or not set(table[left:count]) <= set(ledger.blocks_of(holder)):
                raise LedgerError(f"{holder} does not hold the {count} prompt blocks of group {ledger.group}")
        leader.left = window_offsets
        for ledger, mine, table, left in zip(self.ledgers, leader.tables, tables, window_offsets, strict=True):
            ledger.move(holder, leader.holder)
            mine.extend([GONE] * left)
            mine.extend(table[left:count])
            kept = set(mine[left:])
            ledger.release(leader.holder, [block for block in ledger.blocks_of(leader.holder) if block not in kept])
        leader.computed = leader.prompt_tokens
        self.publish(state, leader)
        self.leave(state, leader)
        self.fork(state, leader)

    def extend(self, state: RequestState, sequence: Sequence, end: int) -> list[BlockCopy] | None:
        """Make room for tokens [computed, end): new blocks, and copies where the first block is shared.

        None if a group has too few blocks (nothing changed).
        """
        computed, block_tokens = sequence.computed, self.block_tokens
        grow = max(0, -(-end // block_tokens) - len(sequence.tables[0]))
        # Prompt blocks have one writer even while a push shares them; a fork makes the partial tail common.
        is_tail = computed >= sequence.prompt_tokens and computed % block_tokens != 0
        tail = computed // block_tokens
        shared: list[bool] | None = None
        if is_tail:
            shared = [led.is_shared(t[tail]) for led, t in zip(self.ledgers, sequence.tables, strict=True)]
            if not any(shared):
                shared = None
        if not grow and shared is None:
            return []
        needs = [grow + (shared[i] if shared else 0) for i in range(len(self.ledgers))]
        if any(led.available + state.spare_blocks < need for led, need in zip(self.ledgers, needs, strict=True)):
            return None
        self._return_spare(state, max(needs))
        copies: list[BlockCopy] = []
        for index, (ledger, table) in enumerate(zip(self.ledgers, sequence.tables, strict=True)):
            if shared and shared[index]:
                (target,) = _allocated(ledger, sequence.holder, 1)
                copies.append(BlockCopy(ledger.group, table[tail], target))
                ledger.release(sequence.holder, [table[tail]])
                table[tail] = target
            if grow:
                table.extend(_allocated(ledger, sequence.holder, grow))
        return copies

    def extend_ahead(self, state: RequestState, sequence: Sequence, end: int) -> bool:
        """Make room for the token before `end`, behind one that is being computed. False, with nothing changed, if a
        group has too few blocks, or if the token's block is or may be shared."""
        grow, last = self.blocks_for(end) - len(sequence.tables[0]), (end - 1) // self.block_tokens
        if state.spare_blocks or any(ledger.available < grow for ledger in self.ledgers):
            return False
        for ledger, table in zip(self.ledgers, sequence.tables, strict=True):
            if grow <= 0 and ledger.is_shared(table[last]):
                return False
        if grow > 0:
            for ledger, table in zip(self.ledgers, sequence.tables, strict=True):
                table.extend(_allocated(ledger, sequence.holder, grow))
        return True

    def keep_written(self, sequences: Iterable[tuple[Sequence, int]]) -> None:
        """Reserve the block of each sequence's token before `end` until the next call, which ends this one. It is not
        reallocated, even if the sequence gives it back: a step that has begun writes there."""
        self.release_holder(_WRITTEN)
        self._written = {
            sequence.holder: [table[(end - 1) // self.block_tokens] for table in sequence.tables]
            for sequence, end in sequences
        }

    def fork(self, state: RequestState, leader: Sequence) -> None:
        """Let every other live choice share the blocks of `leader`, which has computed exactly the prompt."""
        for sequence in state.live:
            if sequence is leader:
                continue
            for group, (ledger, mine) in enumerate(zip(self.ledgers, sequence.tables, strict=True)):
                ledger.share(sequence.holder, leader.held(group))
                mine.extend(leader.tables[group])
            sequence.left = list(leader.left)
            sequence.computed, sequence.published = leader.computed, leader.published
            if len(sequence.hashes) < len(leader.hashes):
                sequence.hashes = leader.hashes[: sequence.computed // self.block_tokens]
        state.is_forked = True

    def publish(self, state: RequestState, sequence: Sequence) -> None:
        """Make the full computed blocks findable. Call it only after the step that wrote them has completed."""
        full = sequence.computed // self.block_tokens
        if full <= sequence.published:
            return
        self._hash(sequence, state.request.hash_root, full)
        for ledger, table, left in zip(self.ledgers, sequence.tables, sequence.left, strict=True):
            for index in range(max(left, sequence.published), full):
                ledger.publish(table[index], sequence.hashes[index])
        sequence.published = full

    def leave(self, state: RequestState, sequence: Sequence) -> None:
        """Give back the blocks that no token from `computed` on attends to. Those that were published stay cached.

        A PREFILL_ONLY request keeps all of its prompt: it is being pushed, in blocks of the receiver's size.
        """
        for group in self._windows:
            first, left = self._first_needed(state, self._specs[group], sequence.computed), sequence.left[group]
            if first > left:
                table = sequence.tables[group]
                self.ledgers[group].release(sequence.holder, table[left:first])
                table[left:first] = [GONE] * (first - left)
                sequence.left[group] = first

    def release_sequence(self, sequence: Sequence) -> None:
        """Give back one choice's blocks."""
        written = self._written.pop(sequence.holder, None)
        if written is not None:
            for ledger, block in zip(self.ledgers, written, strict=True):
                ledger.share(_WRITTEN, [block])
        self.release_holder(sequence.holder)
        sequence.forget()

    def end_sequence(self, state: RequestState, sequence: Sequence) -> None:
        """Take a live choice out of its request, with its blocks; the prompt that it computes for all goes to the next.

        What a PREFILL_ONLY request has computed stays: it is being pushed.
        """
        is_leader = not state.is_forked and sequence is state.leader
        sequence.finish = FinishReason.STOP
        state.live.remove(sequence)
        if is_leader and state.live:
            self._pass_on(sequence, state.live[0])
        elif not state.is_prefill_only:
            self.release_sequence(sequence)
        if not state.is_forked and state.live:
            self._return_spare(state, state.spare_blocks - self._spare(state))

    def release(self, state: RequestState) -> None:
        """Give back all blocks of a request; full published ones stay cached."""
        for sequence in state.sequences:
            self.release_sequence(sequence)
        self.release_holder(state.spare_holder)
        state.spare_blocks = 0
        state.is_forked = len(state.live) <= 1

    def unpublish(self, state: RequestState) -> None:
        """Unpublish the request's blocks after a computation that may have left bad values. They are no longer found,
        even while a push still holds them, nor is any block without a holder."""
        for sequence in state.sequences:
            for group, ledger in enumerate(self.ledgers):
                behind = (ledger.lookup(block_hash) for block_hash in sequence.hashes[: sequence.left[group]])
                ledger.unpublish([*sequence.held(group), *(block for block in behind if block is not None)])
        for ledger in self.ledgers:
            ledger.evict_cached()

    def check_integrity(self, states: AbstractSequence[RequestState]) -> None:
        """Raise LedgerError unless ledgers and tables agree; waiting requests hold nothing."""
        known: dict[Holder, Sequence | int] = {}
        for state in states:
            if state.place is QueueState.WAITING and (state.spare_blocks or any(s.tables[0] for s in state.sequences)):
                raise LedgerError(f"{state.request.key} waits but holds blocks")
            known.update({s.holder: s for s in state.sequences})
            known[state.spare_holder] = state.spare_blocks
        for index, ledger in enumerate(self.ledgers):
            ledger.check_integrity()
            held = ledger.holders()
            for holder, expected in known.items():
                if isinstance(expected, int):
                    is_equal = held.get(holder, 0) == expected
                else:
                    is_equal = sorted(ledger.blocks_of(holder)) == sorted(expected.held(index))
                if not is_equal:
                    raise LedgerError(f"group {ledger.group}: {holder} and its block table disagree")
            strays = [h for h in held if "#" in h.key and h.kind is HoldKind.REQUEST and h not in known]
            if strays:
                raise LedgerError(f"group {ledger.group}: {strays} hold blocks of no known request")

    def _ledger(self, group: GroupId, num_blocks: int) -> BlockLedger:
        def stored(block_hash: BlockHash) -> None:
            self._events.append(CacheEvent(is_stored=True, group=group, hash=block_hash))

        def removed(block_hash: BlockHash) -> None:
            self._events.append(CacheEvent(is_stored=False, group=group, hash=block_hash))

        return BlockLedger(group, num_blocks, on_stored=stored, on_removed=removed, clock=self._clock)

    def _hash(self, sequence: Sequence, root: BlockHash, count: int) -> None:
        """Compute the hashes of the first `count` full blocks; they depend on tokens alone and are never dropped."""
        hashes, size = sequence.hashes, self.block_tokens
        if not hashes and count:
            hashes.extend(chain(root, sequence.prompt, size))
        while len(hashes) < count:
            start = len(hashes) * size
            hashes.append(next_hash(hashes[-1] if hashes else root, sequence.slice(start, start + size)))

    @staticmethod
    def _first_needed(state: RequestState, spec: KVGroupSpec, computed: int) -> int:
        return 0 if state.is_prefill_only else spec.first_needed(computed)

    def _is_findable(self, block_hash: BlockHash) -> bool:
        return all(ledger.is_findable(block_hash) for ledger in self.ledgers)

    def _spare(self, state: RequestState) -> int:
        """Blocks a group that the choices' known outputs will need after the fork, set aside at admission."""
        if state.is_forked:
            return 0
        writers = [s for s in state.live if s.outputs]
        shared, rest = divmod(state.leader.prompt_tokens, self.block_tokens)
        is_tail_reused = rest != 0 and len(writers) == len(state.live)  # the last writer keeps the original
        return sum(self.blocks_for(s.length) - shared for s in writers) - is_tail_reused

    def _pass_on(self, source: Sequence, target: Sequence) -> None:
        """Give the prompt that `source` is computing to `target`, which has nothing yet."""
        for ledger in self.ledgers:
            ledger.move(source.holder, target.holder)
        target.tables, target.left = source.tables, source.left
        target.computed, target.published = source.computed, source.published
        if not target.hashes:
            target.hashes = source.hashes[: source.prompt_tokens // self.block_tokens]
        source.forget()

    def _return_spare(self, state: RequestState, count: int) -> None:
        count = min(count, state.spare_blocks)
        if count <= 0:
            return
        for ledger in self.ledgers:
            ledger.release(state.spare_holder, ledger.blocks_of(state.spare_holder)[:count])
        state.spare_blocks -= count


def longest_hit(
    ledgers: AbstractSequence[BlockLedger],
    specs: AbstractSequence[KVGroupSpec],
    hashes: AbstractSequence[BlockHash],
    *,
    is_whole: bool,
) -> int:
    """Count the leading blocks of `hashes` that need not be computed. Holds nothing.

    whole context   every block before the hit's end must be here
    window          those that the first token behind the hit attends to, no others; with `is_whole` all of them

              ├── gone ──┤├── gone ──┤├─ cached ─┤├─ cached ─┤│ first token to compute
                                      ◀──────── window ────────▶
    """
    count, before = len(hashes), -1
    while count != before:  # a block that one group lacks may end the hit where another one lacks one, too
        before = count
        for ledger, spec in zip(ledgers, specs, strict=True):
            if is_whole or spec.window is None:
                count = len(ledger.match(hashes[:count]))
            else:
                count = _longest_in_window(ledger, spec, hashes, count)
    return count


def _longest_in_window(ledger: BlockLedger, spec: KVGroupSpec, hashes: AbstractSequence[BlockHash], count: int) -> int:
    """The largest hit up to `count` with all blocks here to which a token behind it attends."""
    index = count
    while index > spec.first_needed(count * spec.block_tokens):
        index -= 1
        if not ledger.is_findable(hashes[index]):
            count = index  # every longer hit that is left would need this block
    return count


def _allocated(ledger: BlockLedger, holder: Holder, count: int) -> list[BlockId]:
    blocks = ledger.allocate(holder, count) if count else []
    if blocks is None:
        raise LedgerError(f"group {ledger.group} has fewer than {count} blocks after a check said otherwise")
    return blocks
