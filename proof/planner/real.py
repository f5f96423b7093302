"""The planner's proof on real processes: Redis, a router, eight workers with the sim engine, the planner in `act`.

Everything runs `speed` times as fast as on virtual time, and prompts and answers are `shrink` times shorter, of tokens
that take `shrink` times as long, and what context adds `shrink` times that: the seconds of work stay, messages get
fewer. The sim engine reads the whole context back in every step, which must take less time than the step: so its model
is one of few bytes a token.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from proof.planner.runs import FIXED, PLANNER, START, WORKERS, Load
from tandem.clusterctl.loadgen.client import Target, TimedAnswer, send_all
from tandem.clusterctl.loadgen.requests import RequestForm, plan_of
from tandem.clusterctl.loadgen.results import Slo
from tandem.controlplane.model_catalog import bundled_model
from tandem.controlplane.simulator.traces import RequestLog
from tandem.core.config import SloSection
from tandem.core.events import EventKind
from tools.running_cluster import Cluster, running

PLAN_EVERY_S, WINDOW_S, COOL_DOWN_S, WORTH_S = 10.0, 60.0, 30.0, 10.0
"""Interval of the planner, on the traces' time."""
LONGEST_PROMPT, LONGEST_ANSWER = 12000, 4000
"""Tokens that the model's context holds, after shrinking."""
SHAPE = {
    "num_hidden_layers": 4, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 16384,
}  # fmt: skip
"""Shape of the simulated model; all else is the bundled one's."""
TOKEN_BYTES = 4 * 2 * 8 * 2
"""Bytes of a token's KV: layers, keys and values, dimensions, bytes of bfloat16."""
MODEL = "simulated"
_ANSWER_S = 300.0
_MANY = 500


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Scale that fits a load to this machine."""

    speed: float
    shrink: int

    def promise(self, load: Load) -> SloSection:
        """The load's, in this machine's seconds."""
        ttft_s, itl_s = load.promise.ttft_s, load.promise.itl_s
        return SloSection(ttft_s=ttft_s / self.speed, itl_s=itl_s * self.shrink / self.speed)


def trace_of(load: Load, first: RequestLog, second: RequestLog, scale: Scale) -> tuple[RequestLog, float]:
    """Both traces in a row in this machine's seconds, and the start of the second."""
    whole, change_s = load.trace(first, second)
    whole = whole.shrunk(scale.shrink)
    requests = tuple(
        dataclasses.replace(
            one,
            prompt_tokens=min(one.prompt_tokens, LONGEST_PROMPT),
            output_tokens=min(one.output_tokens, LONGEST_ANSWER),
        )
        for one in whole.requests
    )
    return dataclasses.replace(whole, requests=requests).scaled(scale.speed), change_s / scale.speed


def write_model(folder: Path) -> None:
    """The bundled model in SHAPE, without weights."""
    shutil.copytree(bundled_model(), folder, ignore=shutil.ignore_patterns("*.safetensors", "*.png", "*.md"))
    config = json.loads((folder / "config.json").read_text()) | SHAPE
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def settings(load: Load, name: str, scale: Scale, model: Path) -> str:
    """The cluster's configuration, as TOML."""
    is_planned = name == PLANNER
    split = START if is_planned else next(split for split in FIXED if str(split) == name)
    promise, made = scale.promise(load), load.calibration
    slower, context_slower = scale.shrink / scale.speed, scale.shrink**2 / scale.speed
    return f"""
max_ranks = {WORKERS}
[model]
path = {json.dumps(str(model))}
served_names = [{json.dumps(MODEL)}]
[pools]
prefill = {split.prefill}
decode = {split.decode}
[worker]
engine = "sim"
threads = 1
chunk_tokens = {made.chunk_tokens // scale.shrink}
max_step_tokens = {made.max_step_tokens // scale.shrink}
max_step_s = {made.max_step_s / scale.speed}
max_sequences = {made.max_sequences}
kv_memory_bytes = {made.kv_tokens // scale.shrink * TOKEN_BYTES}
[worker.sim]
prefill_tokens_per_s = {1 / (made.prefill_token_s * slower)}
prefill_step_s = {made.prefill_step_s / scale.speed}
prefill_context_s = {made.prefill_context_s * context_slower}
decode_step_s = {made.decode_step_s * slower}
decode_sequence_s = {made.decode_sequence_s * slower}
decode_context_s = {made.decode_context_s * context_slower}
[router]
disaggregation = {json.dumps(load.disaggregation.value)}
[slo.proof]
ttft_s = {promise.ttft_s}
itl_s = {promise.itl_s}
[admission]
default_slo = "proof"
[planner]
mode = "{"act" if is_planned else "off"}"
interval_s = {max(0.1, PLAN_EVERY_S / scale.speed)}
window_s = {WINDOW_S / scale.speed}
min_requests = 30
cool_down_s = {COOL_DOWN_S / scale.speed}
worth_s = {WORTH_S / scale.speed}
budget = {WORKERS}
"""


def play_live(load: Load, name: str, first: RequestLog, second: RequestLog, scale: Scale) -> dict[str, Any]:
    """As `runs.play`, by real workers; goodput is in requests a second of the traces' time."""
    trace, change_s = trace_of(load, first, second, scale)
    with tempfile.TemporaryDirectory(prefix="td-plan-") as folder:
        model = Path(folder) / MODEL
        write_model(model)
        with running(config=settings(load, name, scale, model)) as cluster:
            began_s = time.time()
            answers = _send(cluster, trace)
            events = cluster.admin(f"/admin/v1/events?count={_MANY}")["events"]
            pools = cluster.admin("/admin/v1/desired")["desired"]["pools"]
    promise = scale.promise(load)
    slo = Slo(ttft_s=promise.ttft_s, itl_s=promise.itl_s)
    rows = list(zip(trace.requests, answers, strict=True))
    halves = [[a for one, a in rows if (one.arrival_s >= change_s) is is_second] for is_second in (False, True)]
    kept = [sum(map(slo.is_kept, half)) for half in halves]
    spans_s = [change_s * scale.speed, (trace.span_s - change_s) * scale.speed]
    return {
        "requests": [len(half) for half in halves],
        "attained": [round(count / max(1, len(half)), 4) for count, half in zip(kept, halves, strict=True)],
        "goodput_per_s": [round(count / max(span_s, 1e-9), 4) for count, span_s in zip(kept, spans_s, strict=True)],
        "attained_in_all": round(sum(kept) / len(answers), 4),
        "errors": _errors(answers),
        "sent_late_p99_s": round(sorted(a.sent_s - a.due_s for a in answers)[int(0.99 * (len(answers) - 1))], 3),
        "flips": sum(one["kind"] == "flipped" for one in events),
        "most_workers": max(sum(pool["count"] for pool in pools), most_workers(events)),
        "changes": [_change(one, began_s, scale) for one in events if one["kind"] == "plan_acted"],
    }


def most_workers(events: Sequence[Mapping[str, Any]]) -> int:
    """The most workers that the desired state ever asked for, by the events of its versions."""
    told = (str(one["reason"]).partition(": ")[2] for one in events if one["kind"] == EventKind.DESIRED_CHANGED)
    return max((sum(map(int, re.findall(r" (\d+)(?:, |$)", pools))) for pools in told), default=0)


def _send(cluster: Cluster, trace: RequestLog) -> list[TimedAnswer]:
    done, count = itertools.count(1), len(trace.requests)

    def heard(answer: TimedAnswer) -> None:
        if (number := next(done)) % 1000 == 0:
            print(f"  {number} of {count} answered", flush=True)

    plan = plan_of(trace, RequestForm(model=MODEL, headers={}), 1)
    return asyncio.run(send_all(Target.of(cluster.api, is_strict=True), plan, _ANSWER_S, heard))


def _change(event: Mapping[str, Any], began_s: float, scale: Scale) -> dict[str, Any]:
    """In the form of `runs.play`; `at_s` on the traces' time."""
    step, _, why = str(event["reason"]).partition(", because ")
    before, _, after = step.partition(" → ")
    return {"at_s": round((event["time_s"] - began_s) * scale.speed, 1), "from": before, "to": after, "why": why}


def _errors(answers: Sequence[TimedAnswer]) -> dict[str, int]:
    """Count each error; rejections, as promises could not be kept, are separate by their words."""
    found: dict[str, int] = {}
    for answer in answers:
        if answer.error:
            found[answer.error[:160]] = found.get(answer.error[:160], 0) + 1
    return found
