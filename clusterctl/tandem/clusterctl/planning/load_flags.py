"""Flags of `plan` and `simulate` that give the requests and their promises."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.clusterctl.flags import check_positive
from tandem.core.config import SloSection
from tandem.core.errors import ConfigError

if TYPE_CHECKING:
    from tandem.controlplane.simulator.calibration import Calibration
    from tandem.controlplane.simulator.traces import RequestLog


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFlags:
    """A trace, or a rate and mean lengths; and the promises."""

    trace: Annotated[Path | None, typer.Option(help="Recorded requests: .jsonl as Mooncake's, .csv as Azure's.")] = None
    scale: Annotated[float, typer.Option(help="Factor by which arrivals of the trace are sped up.")] = 1.0
    seconds: Annotated[float, typer.Option(help="Use only the first seconds of the trace; 0 = all.")] = 0.0
    rate: Annotated[float, typer.Option(help="Without a trace: requests per second.")] = 0.0
    isl: Annotated[int, typer.Option(help="Without a trace: mean tokens of a prompt.")] = 0
    osl: Annotated[int, typer.Option(help="Without a trace: mean tokens of an answer.")] = 0
    seed: Annotated[int, typer.Option(help="Seed of generated requests.")] = 1
    slo_ttft: Annotated[float, typer.Option(help="SLO: seconds to the first token; 0 = none.")] = 2.0
    slo_itl: Annotated[float, typer.Option(help="SLO: seconds for each token after it; 0 = none.")] = 0.05

    @property
    def promise(self) -> SloSection:
        return SloSection(ttft_s=_least(self.slo_ttft, "--slo-ttft"), itl_s=_least(self.slo_itl, "--slo-itl"))

    def requests(self, count: int) -> RequestLog:
        """Return the trace, or `count` made-up requests. ConfigError if neither is given, or both are."""
        from tandem.controlplane.simulator import traces
        from tandem.controlplane.simulator.workloads import varied

        asked = (self.rate, self.isl, self.osl)
        if self.trace is not None:
            if any(asked):
                raise ConfigError("both --trace and --rate, --isl or --osl are given", why="each defines the requests")
            check_positive("--scale", self.scale)
            found = traces.read(self.trace).scaled(self.scale)
            found = found.first(self.seconds) if self.seconds > 0 else found
        elif all(value > 0 for value in asked):
            found = varied(
                requests=count, rate=self.rate, prompt_tokens=self.isl, output_tokens=self.osl, seed=self.seed
            )
        else:
            raise ConfigError(
                "no requests are given", why="they are a trace, or a rate and two lengths",
                todo="Say --trace FILE, or --rate, --isl and --osl, each above 0",
            )  # fmt: skip
        if len(found.requests) < 2:
            raise ConfigError("there are fewer than two requests", todo="Take more --seconds of the trace")
        return found


def calibration(path: Path | None) -> Calibration:
    """Read a file that `make bench` or a user wrote, or return the default: an H100 by arithmetic."""
    from tandem.controlplane.simulator import calibration as calibrations

    return calibrations.read(path) if path is not None else calibrations.Calibration()


def _least(value: float, flag: str) -> float:
    if not 0 <= value < math.inf:
        raise ConfigError(f"{flag} is {value:g}", todo="Use 0 or more seconds")
    return value
