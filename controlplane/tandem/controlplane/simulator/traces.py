"""Recorded requests: their arrival times, the lengths of prompts and answers, the blocks that they share.

Reads Mooncake's JSON lines (timestamp in ms, input_length, output_length, hash_ids of blocks of 512 tokens) and Azure's
CSV (TIMESTAMP, ContextTokens, GeneratedTokens; nothing is shared).
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tandem.core.block_hash import BlockHash
from tandem.core.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """`blocks` has one id for every `block_tokens` of the trace, the last may be partial: equal ids are equal prefixes.

    Empty = nothing is shared with other requests.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLog:
    """Requests by arrival, the first at 0 s. `block_tokens` is what an id of `TraceRequest.blocks` stands for."""

    name: str
    requests: tuple[TraceRequest, ...]
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival_s if self.requests else 0.0

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self.requests) / self.span_s if self.span_s else 0.0

    def scaled(self, factor: float) -> RequestLog:
        """Return the same requests arriving `factor` times as fast."""
        moved = tuple(dataclasses.replace(r, arrival_s=r.arrival_s / factor) for r in self.requests)
        return dataclasses.replace(self, requests=moved)

    def first(self, seconds: float) -> RequestLog:
        """Return only the requests of the first `seconds`."""
        kept = tuple(r for r in self.requests if r.arrival_s < seconds)
        return dataclasses.replace(self, requests=kept)

    def followed_by(self, other: RequestLog) -> RequestLog:
        """Append the other one, from the moment of the last arrival on. Nothing is shared between the two."""
        if other.block_tokens != self.block_tokens:
            raise ConfigError(
                f"{self.name} has blocks of {self.block_tokens} tokens and {other.name} of {other.block_tokens}",
                why="two traces in a row need the same",
            )
        offset = 1 + max((block for one in self.requests for block in one.blocks), default=0)
        later = (
            dataclasses.replace(
                one, arrival_s=one.arrival_s + self.span_s, blocks=tuple(block + offset for block in one.blocks)
            )
            for one in other.requests
        )
        return RequestLog(
            name=f"{self.name}, {other.name}", requests=(*self.requests, *later), block_tokens=self.block_tokens
        )

    def shrunk(self, times: int) -> RequestLog:
        """Return prompts, answers and blocks a `times`-th as long (answers of two tokens at least), for clusters that
        could not hold the whole. Sharing stays the same."""
        if self.block_tokens % times:
            raise ConfigError(
                f"blocks of {self.block_tokens} tokens cannot be shrunk {times} times", why="they must stay whole"
            )
        kept = (
            dataclasses.replace(
                r, prompt_tokens=max(1, r.prompt_tokens // times), output_tokens=max(2, r.output_tokens // times)
            )
            for r in self.requests
        )
        return dataclasses.replace(self, requests=tuple(kept), block_tokens=self.block_tokens // times)

    def ideal_hit_rate(self) -> float:
        """Return the share of prompt tokens in full blocks that some earlier request had: one cache, never full."""
        seen: set[int] = set()
        hits = tokens = 0
        for request in self.requests:
            tokens += request.prompt_tokens
            full = request.blocks[: request.prompt_tokens // self.block_tokens]
            depth = next((i for i, block in enumerate(full) if block not in seen), len(full))
            hits += min(depth, (request.prompt_tokens - 1) // self.block_tokens) * self.block_tokens
            seen.update(full)
        return hits / tokens if tokens else 0.0


def read(path: Path) -> RequestLog:
    """Read a trace by its ending, `.jsonl` (Mooncake) or `.csv` (Azure). Raises ConfigError that describes the
    mistake."""
    readers = {".jsonl": _mooncake, ".csv": _azure}
    reader = readers.get(path.suffix)
    if reader is None:
        raise ConfigError(f"no reader for {path.name}", why=f"a trace ends in {' or '.join(readers)}")
    try:
        with path.open(newline="") as lines:
            requests = sorted(reader(lines), key=lambda r: r.arrival_s)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, csv.Error) as error:
        raise ConfigError(f"the trace {path} cannot be read", why=f"{type(error).__name__}: {error}") from error
    if not requests:
        raise ConfigError(f"the trace {path} is empty", why="a trace has at least one request")
    start_s = requests[0].arrival_s
    moved = tuple(dataclasses.replace(r, arrival_s=r.arrival_s - start_s) for r in requests)
    return RequestLog(name=path.stem, requests=moved)


def _mooncake(lines: Iterable[str]) -> Iterable[TraceRequest]:
    for line in lines:
        row = json.loads(line)
        yield TraceRequest(
            arrival_s=row["timestamp"] / 1000,
            prompt_tokens=max(1, int(row["input_length"])),
            output_tokens=max(1, int(row["output_length"])),
            blocks=tuple(row["hash_ids"]),
        )


def _azure(lines: Iterable[str]) -> Iterable[TraceRequest]:
    for row in csv.DictReader(lines):
        yield TraceRequest(
            arrival_s=datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=UTC).timestamp(),
            prompt_tokens=max(1, int(row["ContextTokens"])),
            output_tokens=max(1, int(row["GeneratedTokens"])),
        )


class BlockNames:
    """Block hashes for a trace's ids: no tokens are known, so the id itself, widened to 16 bytes, is the hash."""

    def __init__(self, trace_block_tokens: int, block_tokens: int) -> None:
        if trace_block_tokens % block_tokens:
            raise ConfigError(
                f"blocks of {block_tokens} tokens do not fit the trace's {trace_block_tokens}",
                why="the trace only says which of its own blocks are equal",
                todo=f"set block_tokens to a divisor of {trace_block_tokens}",
            )
        self._parts = trace_block_tokens // block_tokens
        self._block_tokens = block_tokens
        self._known: dict[int, list[BlockHash]] = {}

    def hashes(self, request: TraceRequest, number: int) -> list[BlockHash]:
        """Return hashes of the full blocks of the prompt. `number` makes those of a request that shares nothing
        unique."""
        full = request.prompt_tokens // self._block_tokens
        if not request.blocks:
            return [_name(1, number, index) for index in range(full)]
        found: list[BlockHash] = []
        for block in request.blocks:
            names = self._known.get(block)
            if names is None:
                names = self._known[block] = [_name(0, block, part) for part in range(self._parts)]
            found += names
        if len(found) < full:
            missing = full - len(found)
            raise ConfigError(
                f"request {number} lacks ids for {missing} blocks", why="the trace says fewer than its tokens"
            )
        return found[:full]


def _name(kind: int, block: int, part: int) -> BlockHash:
    # The table's dictionaries go by the first byte: it has to differ between blocks.
    mixed = (block * 0x9E3779B97F4A7C15 + part * 0xC2B2AE3D27D4EB4F) & 0xFFFFFFFFFFFFFFFF
    return BlockHash(
        (mixed >> 56).to_bytes(1, "little") + bytes([kind]) + block.to_bytes(8, "little") + part.to_bytes(6, "little")
    )
