"""The GPU bench: correctness of every kernel first, then what they reach. See README.md beside this file.

Runs as `python -m bench.gpu` from the repository root and as `python bench/gpu/run.py` from anywhere, with torch and
Triton alone: the source roots are put on the path here, nothing needs to be installed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # at run time the path has to be set first
    import torch

    from bench.gpu.report import Case, Report

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("correctness", "families", "attention", "small", "decode", "gap", "transfer")


def main(arguments: list[str] | None = None) -> int:
    """Run the parts asked for. Returns 1 when a kernel is wrong, else 0, also without a device."""
    options = _parse(arguments)
    if options.picture is not None:
        sys.path.insert(0, str(ROOT))
        from bench.gpu.report import draw

        print(f"{draw(options.out, options.picture)} speeds in {options.picture}")
        return 0
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"
    sys.path[:0] = [str(ROOT), *(str(ROOT / root) for root in ("core", "kernels", "engine", "kvtransfer", "worker"))]
    import torch

    from bench.gpu import machine
    from bench.gpu.report import Report

    if options.list:
        return _list(options.part, options.rehearse)
    if not torch.cuda.is_available() and not options.rehearse:
        print("No CUDA device here: nothing is measured and nothing is claimed.")
        Report.open(options.out, {"device": "none"}, commit=options.commit, fresh=True).save()
        return 0
    torch.manual_seed(0)
    device = torch.device("cpu" if options.rehearse else "cuda")
    report = Report.open(options.out, machine.describe(device), commit=options.commit, fresh=options.fresh)
    print(f"{report.device} commit {report.commit}")
    deadline = time.monotonic() + options.budget_s if options.budget_s else None
    for part in ("machine", *options.part):
        if not _run_part(part, report, device, options.rehearse, deadline):
            print(f"Stopped after {options.budget_s} s; run the same command again to go on.")
            break
    report.save()
    failures = report.failures()
    for row in failures:
        print(f"WRONG: {row.case}: {row.metric} {row.value:.3g}, tolerance {row.limit:.3g}")
    print(f"{len(report.done)} cases done, {len(failures)} wrong, in {options.out}")
    return 1 if failures else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-gpu.json"), help="result file, continued if it fits")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all, in order")
    parser.add_argument("--list", action="store_true", help="say the cases of the parts, on any machine, and end")
    parser.add_argument("--picture", type=Path, help="draw the result file as a picture, on any machine, and end")
    parser.add_argument("--fresh", action="store_true", help="forget what the result file holds")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--budget-s", type=float, help="start no further case after this many seconds")
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny shapes in Triton's interpreter: tries the code, measures nothing"
    )
    options = parser.parse_args(arguments)
    options.part = options.part or list(PARTS)
    return options


def _list(parts: list[str], rehearsal: bool) -> int:
    import torch

    for part in parts:
        for name, _ in _cases(part, torch.device("cpu"), rehearsal):
            print(f"{part}: {name}")
    if not torch.cuda.is_available():
        print("No CUDA device here: these are names, nothing is measured and nothing is claimed.")
    return 0


def _cases(part: str, device: torch.device, rehearsal: bool) -> Iterator[Case]:
    """Names and bodies of cases; nothing is computed before a body runs."""
    from bench.gpu import attention, correctness, decode, experts, families, latents, small_kernels, transfer

    if part == "machine":
        yield "machine", partial(_machine, device=device, rehearsal=rehearsal)
        return
    sources = {
        "correctness": (correctness.cases, small_kernels.correctness, latents.correctness, experts.correctness),
        "families": (families.correctness,), "attention": (attention.cases, latents.speed),
        "small": (small_kernels.speed, experts.speed), "decode": (decode.cases,), "gap": (families.speed,),
        "transfer": (transfer.cases,),
    }  # fmt: skip
    for cases in sources[part]:
        yield from cases(device, rehearsal=rehearsal)


def _run_part(part: str, report: Report, device: torch.device, rehearsal: bool, deadline: float | None) -> bool:
    """Run the cases of a part that are not done. Returns False when time ran out."""
    for name, body in _cases(part, device, rehearsal):
        key = f"{part}: {name}"
        if key in report.done:
            continue
        if deadline is not None and time.monotonic() > deadline:
            return False
        kept = len(report.rows)
        try:
            body(report)
        except BaseException:
            del report.rows[kept:]
            raise
        report.finish(key)
    return True


def _machine(report: Report, device: torch.device, rehearsal: bool) -> None:
    from bench.gpu import machine

    report.add(
        "machine", "copy bandwidth", machine.copy_bytes_per_s(device, 1 << (20 if rehearsal else 32)) / 1e9, "GB/s"
    )
    report.add(
        "machine", "matmul rate", machine.matmul_flops_per_s(device, 64 if rehearsal else 8192) / 1e12, "TFLOP/s"
    )


if __name__ == "__main__":
    raise SystemExit(main())
