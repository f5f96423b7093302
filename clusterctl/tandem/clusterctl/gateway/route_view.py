"""A routing decision as text: the choice, its alternatives, the known state of the workers."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tandem.clusterctl import rich_output
from tandem.clusterctl.output import Record
from tandem.clusterctl.rich_output import say

_PARTS = ("queue_s", "compute_s", "move_s", "room_s", "decode_s", "others_s", "broken_s", "reuse_s")


def show(found: Record, console: Console) -> None:
    """Print the admin port's response."""
    chosen = f"{found['prefill']} → {found['decode']}" if found.get("prefill") else str(found["decode"])
    lines = {
        "prompt": f"{found['prompt_tokens']} tokens, answer up to {found['max_tokens']}",
        "policy": str(found["policy"]),
        "chosen": f"{chosen}: {found['reason']}",
        "cached": f"{found['prefill_hit_tokens']} tokens to compute less, {found['decode_hit_tokens']} to move less",
    }
    if found.get("sources"):
        lines["fetched"] = ", ".join(f"{one['tokens']} tokens from {one['worker']}" for one in found["sources"])
    for name, value in lines.items():
        say(console, f"{name:<8} {value}")
    console.print()
    console.print(_options(found["options"]))
    console.print()
    console.print(_workers(found["workers"]))


def _options(options: list[Record]) -> Table:
    """Build the table of options: in milliseconds where the policy knows seconds, else its bare scores."""
    has_cost = any("cost" in option for option in options)
    figures = [*(part[:-2].upper() for part in _PARTS), "TOTAL, ms"] if has_cost else ["SCORE"]
    table = rich_output.table("PREFILL", "DECODE")
    for figure in figures:  # of which one is called DECODE as well
        table.add_column(figure, justify="right")
    for option in options:
        cost = option.get("cost") or {}
        parts = [_ms(cost.get(part)) for part in _PARTS] if has_cost else []
        total = _ms(cost.get("total_s")) if has_cost else f"{option['score']:g}"
        table.add_row(option["prefill"] or "–", option["decode"], *parts, total)
    return table


def _workers(workers: list[Record]) -> Table:
    figures = ("QUEUED", "IN FLIGHT", "DECODING", "HELD", "FREE BLOCKS", "TOKENS/S", "STEP, ms")
    table = rich_output.table("WORKER", "ROLE", *figures, right=figures)
    for one in workers:
        table.add_row(
            one["worker"],
            one["role"],
            str(one["queued_tokens"]),
            str(one["in_flight"]),
            str(one["decoding"]),
            str(one["held_tokens"]),
            str(one["free_blocks"]),
            f"{one['prefill_tokens_per_s']:.0f}" if one["prefill_tokens_per_s"] else "–",
            _ms(one["decode_step_s"]) if one["decode_step_s"] else "–",
        )
    return table


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1000:.1f}"
