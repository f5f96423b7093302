"""`clusterctl plan`: the workers that a load needs and their cost, before there is a cluster; it connects to none.
With `--live`, the report of a running cluster's planner (live_plan.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.exit_codes import Exit
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.output import Output, Record, note, progress_bar
from tandem.clusterctl.planning import live_plan
from tandem.clusterctl.planning.load_flags import LoadFlags, calibration
from tandem.clusterctl.suggestions import did_you_mean
from tandem.core.errors import ConfigError
from tandem.core.link_speed import rate

if TYPE_CHECKING:
    from rich.console import Console

    from tandem.controlplane.planner.offline import Offer, WorkerKind
    from tandem.controlplane.planner.records import ObservedRequest, Rates
    from tandem.controlplane.simulator.traces import RequestLog

_MADE_UP, _MOST = 1000, 1500
"""Number of made-up requests, and of those of a trace that are examined."""
_OTHERS = 5
"""Number of fleets of other kinds that are shown; more where there are more links."""

app = command_app()


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Flags for the hardware that may be bought."""

    hardware: Annotated[
        list[str] | None,
        typer.Option(help="A class, and the hourly price of one accelerator: h100=2.5. May be given several times."),
    ] = None
    tp: Annotated[list[int] | None, typer.Option(help="Accelerators of a worker. May be given several times.")] = None
    model: Annotated[str, typer.Option(help="The model's shapes, for rates by arithmetic.")] = "llama-3-8b"
    calibration: Annotated[
        Path | None, typer.Option(help="Measured rates of one worker, in place of --hardware and --model.")
    ] = None
    accelerators: Annotated[int, typer.Option(help="Maximum number of accelerators.")] = 16
    link: Annotated[
        list[str] | None,
        typer.Option(
            help="Bytes per second out of a worker and into one, and its hourly price per accelerator: 20e9=0.3. "
            "May be given several times; 0 = as the hardware's is."
        ),
    ] = None
    price: Annotated[float, typer.Option(help="Hourly price of one accelerator, where --hardware gives none.")] = 1.0


@app.command(
    epilog=examples(
        "plan --rate 12 --isl 2000 --osl 300 --hardware h100=2.5 --hardware l40s=0.9",
        "plan --trace requests.csv --slo-ttft 1 --slo-itl 0.03 --tp 1 --tp 2 -o json",
        "plan --rate 12 --isl 4000 --osl 100 --link 1e9 --link 20e9=0.3",
        "plan --live",
    )
)
@flagged
def plan(
    load: LoadFlags,
    machines: Machines,
    where: Where,
    output: Output,
    live: Annotated[bool, typer.Option("--live", help="Show the state of the planner of a running cluster.")] = False,
    target: Annotated[float, typer.Option(help="Share of the requests that must keep the SLO.")] = 0.95,
    headroom: Annotated[float, typer.Option(help="Factor on the rate at which the plan must still hold.")] = 1.1,
    hit_rate: Annotated[float, typer.Option(help="Share of every prompt that is cached.")] = 0.0,
    window: Annotated[float, typer.Option(help="Seconds of the heaviest window of a trace, to plan for.")] = 300.0,
) -> None:
    """Find the cheapest workers for a load: how many of each role, on which hardware, with how many ranks.

    Searches prefill and decode counts, the TP of each, hardware classes, link speeds, and workers that do both. Exits
    with 8 where nothing that fits keeps the promises. With --live it asks a running cluster: what its planner wants,
    and why.
    """
    if live:
        live_plan.show(where, output)
        return
    from tandem.controlplane.planner.offline import PlanTargets, Search

    for flag, value in (("--target", target), ("--hit-rate", hit_rate)):
        if not 0 <= value <= 1:
            raise ConfigError(f"{flag} is {value:g}", todo="Use a share from 0 to 1")
    if not (0 < headroom < math.inf and window > 0):
        raise ConfigError(f"--headroom is {headroom:g} and --window {window:g}", todo="Use more than 0")
    kinds = _kinds(machines)
    trace = load.requests(_MADE_UP)
    requests = heaviest(_seen(trace, hit_rate), window, _MOST) if load.trace else list(_seen(trace, hit_rate))
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    if not span_s > 0:
        raise ConfigError(
            "there is no rate to plan for", why=f"of the heaviest {window:g} s, requests come at one moment only",
            todo="Use a longer --window",
        )  # fmt: skip
    wanted = PlanTargets(
        requests=requests, promises={"": load.promise}, target=target, headroom=headroom,
        accelerators=machines.accelerators,
    )  # fmt: skip
    with progress_bar("kinds of workers") as progress:
        try:
            answer = Search(wanted, kinds, progress).run()
        except ValueError as error:
            raise ConfigError(
                f"nothing fits {machines.accelerators} accelerators",
                why=str(error),
                todo="Raise --accelerators, or allow a smaller --tp",
            ) from error
    found = {
        "requests": trace.name,
        "planned_for": {"requests": len(requests), "seconds": span_s, "rate": len(requests) / span_s},
        "promised": {**asdict(load.promise), "target": target, "headroom": headroom},
        "best": _offer(answer.best),
        "neighbours": [_offer(one) for one in answer.neighbours],
        "others": [_offer(one) for one in answer.others],
        "replays": answer.replays,
    }
    output.show("Plan", found, _show)
    if not answer.best.reaches_target:
        note(f"clusterctl: nothing within {machines.accelerators} accelerators keeps {target:.0%} of the promises.")
        raise typer.Exit(Exit.SLO_MISSED)


def heaviest(requests: Sequence[ObservedRequest], window_s: float, most: int) -> list[ObservedRequest]:
    """Return the requests of the window with most tokens, a generated one counting for ten of a prompt; the first
    `most`."""
    best, best_work, work, start = (0, 0), -1.0, 0.0, 0
    for end, one in enumerate(requests):
        work += _work(one)
        while one.arrival_s - requests[start].arrival_s > window_s:
            work -= _work(requests[start])
            start += 1
        if work > best_work:
            best, best_work = (start, end + 1), work
    return list(requests[best[0] : best[1]])[:most]


def _work(one: ObservedRequest) -> float:
    return one.prompt_tokens + 10.0 * one.output_tokens


def _seen(trace: RequestLog, hit_rate: float) -> list[ObservedRequest]:
    from tandem.controlplane.planner.records import ObservedRequest

    return [
        ObservedRequest(
            arrival_s=one.arrival_s, prompt_tokens=one.prompt_tokens, output_tokens=one.output_tokens,
            cached_tokens=int(hit_rate * one.prompt_tokens),
        )
        for one in trace.requests
    ]  # fmt: skip


def _kinds(machines: Machines) -> list[WorkerKind]:
    """Return every kind of worker that may be bought; ConfigError if there is none."""
    from tandem.controlplane.planner.hardware import HARDWARE, MODELS, rates
    from tandem.controlplane.planner.offline import WorkerKind
    from tandem.engine.model_config import SPOKEN_SIZES, TP_SIZES

    if machines.calibration is not None:
        if machines.hardware or machines.tp:
            raise ConfigError("--calibration replaces --hardware and --tp", todo="Leave out --hardware and --tp")
        found = [WorkerKind(hardware="measured", tp=1, rates=_measured(machines.calibration), price=_price(machines))]
    else:
        if machines.model not in MODELS:
            near = did_you_mean(machines.model, MODELS)
            raise ConfigError(
                f"no shapes of {machines.model!r} are known", why=f"known are {', '.join(MODELS)}. {near}".strip(),
                todo="Give measured rates with --calibration",
            )  # fmt: skip
        found = []
        for name, price in _priced(machines, HARDWARE):
            for tp in machines.tp or [1]:
                if tp not in TP_SIZES:
                    raise ConfigError(f"--tp is {tp}", todo=f"Use {SPOKEN_SIZES}")
                made = rates(HARDWARE[name], MODELS[machines.model], tp)
                if made is not None:
                    found.append(WorkerKind(hardware=name, tp=tp, rates=made, price=price))
    if not found:
        raise ConfigError(f"{machines.model} does not fit any of the workers", todo="Allow a larger --tp")
    links = _links(machines.link or [])
    if not links:
        return found
    return [
        replace(
            one, price=one.price + price, network=f"{speed:g}",
            rates=replace(one.rates, link_bytes_per_s=speed or one.rates.link_bytes_per_s),
        )
        for speed, price in links.items()
        for one in found
    ]  # fmt: skip


def _links(said: Sequence[str]) -> dict[float, float]:
    """Parse links: bytes a second → their price added to an accelerator's hour; ConfigError if it is anything else."""
    found: dict[float, float] = {}
    for text in said:
        speed, _, price = text.partition("=")
        try:
            one = float(speed), float(price or 0.0)
        except ValueError:
            one = -1.0, 0.0
        if not all(0 <= value < math.inf for value in one):
            raise ConfigError(
                f"{text!r} is not the speed of a link in bytes per second",
                todo="Write it like 20e9, or like 20e9=0.3 with a price",
            )
        found[one[0]] = one[1]
    return found


def _priced(machines: Machines, known: Any) -> Iterator[tuple[str, float]]:
    for text in machines.hardware or ["h100"]:
        name, _, price = text.partition("=")
        if name not in known:
            raise ConfigError(
                f"no hardware class {name!r}", why=f"known are {', '.join(known)}. {did_you_mean(name, known)}".strip()
            )
        try:
            paid = float(price) if price else _price(machines)
        except ValueError:
            paid = -1.0
        if not 0 < paid < math.inf:
            raise ConfigError(f"the price of {text!r} is not a number above 0", todo="Write it like h100=2.5")
        yield name, paid


def _price(machines: Machines) -> float:
    if not 0 < machines.price < math.inf:
        raise ConfigError(f"--price is {machines.price:g}", todo="Use a number above 0")
    return machines.price


def _measured(path: Path) -> Rates:
    from tandem.controlplane.simulator.planner_rates import calibrated
    from tandem.core.prefill_queue import QueueRules

    return calibrated(calibration(path), QueueRules())


def _offer(offer: Offer) -> dict[str, Any]:
    fleet, seen = offer.fleet, offer.forecast
    decode = _group(fleet.decode, fleet.decode_count)
    return {
        "fleet": str(fleet),
        "prefill": None if fleet.prefill is None else _group(fleet.prefill, fleet.prefill_count),
        "decode": None if fleet.prefill is None else decode,
        "mixed": decode if fleet.prefill is None else None,
        "link_bytes_per_s": fleet.link_bytes_per_s,
        "accelerators": fleet.accelerators,
        "price_per_hour": fleet.price,
        "input_price_per_million": offer.input_price,
        "output_price_per_million": offer.output_price,
        "attained": seen.attained,
        "reaches_target": offer.reaches_target,
        **{name: getattr(seen, name) for name in ("ttft_p90_s", "itl_p90_s", "prefill_busy")},
    }


def _group(kind: WorkerKind, count: int) -> dict[str, Any]:
    return {"count": count, "hardware": kind.hardware, "tp": kind.tp}


def _show(found: Record, console: Console) -> None:
    from tandem.clusterctl import rich_output

    planned, promised = found["planned_for"], found["promised"]
    rich_output.say(
        console,
        f"{found['requests']}: planned for {planned['requests']} requests, {planned['rate']:.2f} a second; "
        f"first token in {promised['ttft_s']:g} s, {1000 * promised['itl_s']:g} ms for each after it, kept for "
        f"{promised['target']:.0%} at {promised['headroom']:g} times the rate",
    )
    columns = ("", "FLEET", "LINK", "ACC", "PRICE/H", "IN/M", "OUT/M", "KEPT", "TTFT P90", "ITL P90")
    made = rich_output.table(*columns, right=columns[2:], fixed=columns[:2])
    rows = [("best", found["best"])]
    rows += [("beside", one) for one in found["neighbours"]]
    rows += [("else", one) for one in _others(found["best"], found["others"])]
    for name, one in rows:
        made.add_row(
            name, one["fleet"], rate(one["link_bytes_per_s"]), str(one["accelerators"]), f"{one['price_per_hour']:.2f}",
            f"{one['input_price_per_million']:.3f}", f"{one['output_price_per_million']:.3f}", f"{one['attained']:.1%}",
            f"{one['ttft_p90_s']:.2f} s", f"{1000 * one['itl_p90_s']:.0f} ms",
        )  # fmt: skip
    console.print(made)


def _others(best: Record, others: Sequence[Record]) -> list[Record]:
    """Return those of `others` that are shown: the best of every other link, and the first few, in their order."""
    first = {one["link_bytes_per_s"]: place for place, one in reversed(list(enumerate(others)))}
    first.pop(best["link_bytes_per_s"], None)
    places = sorted(first.values())
    places += [place for place in range(len(others)) if place not in places][: max(0, _OTHERS - len(places))]
    return [others[place] for place in sorted(places)]
