"""KV transfer against what the machine can do: every transport, checksums, codecs, overlap with compute, slow links.

Parts and predictions: README.md beside this file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from bench import pages
from bench.kvtransfer import checksum, codecs, handoff, itl, links, transports
from bench.report import Row, arguments_of, publish

PARTS = ("transports", "checksum", "codecs", "logits", "exposed", "handoff", "itl", "links")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = arguments_of("kvtransfer", __doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="may be repeated; default all")
    parser.add_argument("--transport", action="append", choices=transports.TRANSPORTS, help="may be repeated")
    parser.add_argument("--pin", action="store_true", help="part transports: hold P and D to a core each")
    parser.add_argument("--seconds", type=float, default=1.5, help="for each way of a case")
    parser.add_argument("--prompts", type=int, default=5, help="of each kind in part exposed")
    parser.add_argument("--requests", type=int, default=160, help="for each number of clients in part handoff")
    arguments = parser.parse_args(argv)
    chosen = tuple(arguments.transport or transports.TRANSPORTS)
    parts: dict[str, Callable[[], list[Row]]] = {
        "transports": lambda: transports.run(chosen, arguments.seconds, is_pinned=arguments.pin),
        "checksum": lambda: checksum.run(arguments.seconds),
        "codecs": lambda: codecs.run(arguments.seconds),
        "logits": _logits,
        "exposed": lambda: _exposed(chosen, arguments.prompts),
        "handoff": lambda: handoff.run(arguments.requests),
        "itl": lambda: itl.run(chosen[:1], arguments.seconds),
        "links": lambda: links.run(chosen),
    }
    rows: list[Row] = []
    for name in arguments.part or PARTS:
        print(f"part {name}", flush=True)
        rows += parts[name]()
    publish("kvtransfer", rows, arguments.out, text=pages.digest())
    return 0


def _logits() -> list[Row]:
    from bench.kvtransfer import logits  # brings torch along, which the others do without

    return logits.run()


def _exposed(chosen: tuple[str, ...], prompts: int) -> list[Row]:
    from bench.kvtransfer import exposed  # torch again

    return exposed.run(chosen, prompts) + exposed.run_cluster(prompts)


if __name__ == "__main__":
    sys.exit(main())
