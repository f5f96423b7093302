"""Tools: conversations of every format, calls that have to be made, and schemas of others.

Without options, random conversations of every format: the model's template writes them as transformers does, and the
calls come back out of the answers, whole, in random pieces, and cut at every byte. `--templates` names a folder with
more templates than the short ones of the tests. `--required N` asks SmolLM2 for so many calls, on a cluster; `--bfcl`
names the wheel of bfcl-eval or a folder with its data: its functions are offered as tools. Finished entries are kept
in --out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.report import ROOT
from proof.record import Record, arguments_of, say_how_to_repeat
from proof.tools.bfcl import check_functions
from proof.tools.format_trials import FORMATS, of_format, of_template
from proof.tools.required import ask_for_calls

OURS = ROOT / "tests" / "unit" / "router" / "output_formats" / "templates"


def main() -> int:
    parser = arguments_of("tools", __doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--conversations", type=int, default=200, help="of each format")
    parser.add_argument("--templates", type=Path, help="a folder of *.jinja")
    parser.add_argument("--required", type=int, default=0, help="so many calls of SmolLM2 that have to be made")
    parser.add_argument("--budget", type=float, default=0, help="begin nothing new after so many seconds (0: no limit)")
    parser.add_argument("--bfcl", type=Path, help="the wheel of bfcl-eval, or a folder with its data")
    arguments = parser.parse_args()
    for given in (arguments.templates, arguments.bfcl):
        if given is not None and not given.exists():
            print(f"there is no {given}")
            return 2
    about = {"seed": arguments.seed, "conversations": arguments.conversations}
    record = Record(arguments.out, "tools", about, is_fresh=arguments.fresh)
    end_s = time.monotonic() + (arguments.budget or math.inf)
    left = prove_conversations(record, arguments, end_s)
    if arguments.bfcl is not None:
        left += check_functions(record, arguments.bfcl, end_s)
    if arguments.required:
        left += ask_for_calls(record, arguments.seed, arguments.required, end_s)
    entries = [(f"{part} {name}", one) for part in ("formats", "templates", "bfcl", "required")
               for name, one in record.content.get(part, {}).items()]  # fmt: skip
    broken = [(name, one["broken"]) for name, one in entries if one.get("broken")]
    for name, what in broken:
        print(f"{name}: {what}")
    if broken:
        say_how_to_repeat("tools", f"--seed {arguments.seed}")
    return record.verdict(len(entries), left=left, broken=len(broken))


def prove_conversations(record: Record, arguments: argparse.Namespace, end_s: float) -> int:
    """Each format as its models write it, and each template; returns how many are left when the time is over."""
    folder, seed, count = arguments.templates, arguments.seed, arguments.conversations
    files = {f"ours: {file.stem}": file for file in sorted(OURS.glob("*.jinja"))}
    files |= {file.stem: file for file in sorted(folder.glob("*.jinja"))} if folder else {}
    work: list[tuple[str, str, Callable[[], dict[str, Any]]]] = [
        ("formats", name, partial(of_format, name, seed, count)) for name in FORMATS
    ]
    work += [("templates", name, partial(of_template, file, seed, count)) for name, file in files.items()]
    left = 0
    for part, name, trial in work:
        found: dict[str, Any] = record.content.setdefault(part, {})
        if name in found and not found[name].get("broken"):
            continue
        if time.monotonic() > end_s:
            left += 1
            continue
        found[name] = trial()
        record.save()
        print(f"{name}: {json.dumps(found[name], ensure_ascii=False)[:300]}", flush=True)
    return left


if __name__ == "__main__":
    sys.exit(main())
