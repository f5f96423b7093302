"""`clusterctl route policy | explain`: show and change the routing policy, and explain a decision."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tandem.clusterctl import rich_output
from tandem.clusterctl.chat.request_files import read_schema
from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.confirm import Consent, EffectKind
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.output import Output, Record
from tandem.clusterctl.rich_output import say
from tandem.clusterctl.suggestions import did_you_mean
from tandem.core.errors import ConfigError

app = command_app(help="Show, change and explain how requests are routed.")
_PARTS = ("queue_s", "compute_s", "move_s", "room_s", "decode_s", "others_s", "broken_s", "reuse_s")


@app.command(epilog=examples("route policy", "route policy round_robin", "route policy cost --yes"))
@flagged
def policy(
    where: Where,
    consent: Consent,
    output: Output,
    wanted: Annotated[str, typer.Argument(metavar="[NAME]", help="Route by this policy from now on.")] = "",
) -> None:
    """Show the routing policy, or change it while requests run. After a restart the configured one is back."""
    with where.client() as admin:
        found = admin.policy()
        if wanted and wanted not in found["policies"]:
            todo = did_you_mean(wanted, found["policies"]) or f"there are {', '.join(found['policies'])}"
            raise ConfigError(f"there is no policy {wanted[:40]!r}", todo=todo)
        change = f"{found['policy']} → {wanted}"
        deeds = [EffectKind(deed="set", subject="policy", detail=change)] if wanted not in ("", found["policy"]) else []
        if wanted and not consent.agreed(deeds, output):
            return
        if deeds:
            found = admin.set_policy(wanted)
    output.show("RoutingPolicy", found, _show_name if wanted else _show_policies)


@app.command(
    epilog=examples(
        'route explain "a prompt"', "route explain --tokens 17,4,256 -o json", "route explain - < prompt.txt"
    )
)
@flagged
def explain(
    where: Where,
    output: Output,
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from the standard input.")] = "",
    tokens: Annotated[str, typer.Option(help="Prompt as token ids, such as 17,4,256.")] = "",
    file: Annotated[Path | None, typer.Option(help="File with the prompt.")] = None,
    model: Annotated[str, typer.Option(help="Served model. Without it, the first one.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of the answer.")] = 16,
    schema: Annotated[Path | None, typer.Option(help="File with a JSON schema that the answer would follow.")] = None,
) -> None:
    """Show where a prompt would go now, with the cost of every choice that was weighed. Nothing is sent."""
    body: dict[str, Any] = {"prompt": _prompt(prompt, tokens, file), "max_tokens": max_tokens}
    if model:
        body["model"] = model
    if schema is not None:
        body["response_format"] = read_schema(schema)
    with where.client() as admin:
        output.show("RoutingDecision", admin.explain(body), _show_decision)


def _show_name(found: Record, console: Console) -> None:
    say(console, found["policy"])


def _show_policies(found: Record, console: Console) -> None:
    others = [other for other in found["policies"] if other != found["policy"]]
    say(console, f"{found['policy']} (others: {', '.join(others)})")


def _prompt(text: str, tokens: str, file: Path | None) -> str | list[int]:
    """Return the prompt given; ConfigError unless there is exactly one."""
    if sum((bool(text), bool(tokens), file is not None)) != 1:
        raise ConfigError("give one prompt", todo="as a text, or with --tokens, or with --file")
    if tokens:
        try:
            return [int(token) for token in tokens.replace(",", " ").split()]
        except ValueError:
            raise ConfigError(f"--tokens is {tokens[:40]!r}", why="it must be token ids, such as 17,4,256") from None
    try:
        if file is not None:
            return file.read_text(encoding="utf-8")
        return sys.stdin.buffer.read().decode() if text == "-" else text
    except OSError as error:
        raise ConfigError("cannot read the prompt", why=str(error), todo="check --file") from error
    except UnicodeDecodeError as error:
        raise ConfigError("cannot read the prompt", why="it is not UTF-8 text", todo="convert it") from error


def _show_decision(found: Record, console: Console) -> None:
    """Print the choice, its alternatives, and the known state of the workers."""
    chosen = f"{found['prefill']} → {found['decode']}" if found.get("prefill") else str(found["decode"])
    lines = {
        "prompt": f"{found['prompt_tokens']} tokens, answer up to {found['max_tokens']}",
        "policy": str(found["policy"]),
        "chosen": f"{chosen}: {found['reason']}",
        "cached": f"{found['prefill_hit_tokens']} tokens to compute less, {found['decode_hit_tokens']} to move less",
    }
    if found.get("constraint"):
        lines["follows"] = f"{found['constraint']['kind']}, of {found['constraint']['param']}"
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
            *(one["worker"], one["role"]),
            *(str(one[key]) for key in ("queued_tokens", "in_flight", "decoding", "held_tokens", "free_blocks")),
            f"{one['prefill_tokens_per_s']:.0f}" if one["prefill_tokens_per_s"] else "–",
            _ms(one["decode_step_s"]) if one["decode_step_s"] else "–",
        )
    return table


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1000:.1f}"
