"""The router's replica of the prefix index: time of a lookup, memory under many prefixes, events a second."""

from __future__ import annotations

import sys

from bench.index import events, table
from bench.report import Row, arguments_of, publish

PARTS = ("memory", "lookup", "events")


def main() -> int:
    parser = arguments_of("index", __doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--length", type=int, default=512, help="blocks of a prompt")
    parser.add_argument("--prefixes", type=int, default=10_000_000, help="distinct ones, for the memory")
    parser.add_argument("--memory-bytes", type=int, default=512 * 1024 * 1024, help="the replica's bound")
    args = parser.parse_args()
    rows: list[Row] = []
    if "memory" in args.parts:  # first, while nothing else has taken any
        rows += table.run_memory(args.workers, args.prefixes, args.memory_bytes)
    if "lookup" in args.parts:
        rows += table.run_lookups(args.workers, args.blocks, args.length)
    if "events" in args.parts:
        rows += events.run(args.workers)
    publish("index", rows, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
