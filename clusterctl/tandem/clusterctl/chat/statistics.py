"""The line under an answer: how quick it was, which workers it took, what they had cached, what the hand-off cost."""

from __future__ import annotations

from tandem.clusterctl.output import Record

_EXPECTED = ("", "stop")


def line_of(found: Record) -> str:
    """Format the known values of a document `Chat`; "" if none is known."""
    timings, usage, workers, handoff = found["timings"], found["usage"], found["workers"], found["handoff"]
    parts = []
    if timings["ttft_s"] is not None:
        parts.append(f"TTFT {_ms(timings['ttft_s'])}")
    if timings["tokens_per_s"] is not None:
        parts.append(f"{timings['tokens_per_s']:.1f} tokens/s")
    if workers is not None:
        is_one = workers["prefill"] == workers["decode"]
        parts.append(f"on {workers['decode']}" if is_one else f"{workers['prefill']} → {workers['decode']}")
    if handoff is not None:
        parts.append(f"hand-off {_ms(handoff['overhead_s'])}")
    if usage is not None:
        parts.append(f"{usage['prompt_tokens']} in, {usage['completion_tokens']} out")
        if usage["cached_tokens"] is not None:
            parts[-1] += f", {usage['cached_tokens']} cached"
    if found["finish_reason"] not in _EXPECTED:
        parts.append(f"ended by {found['finish_reason']}")
    return " · ".join(parts)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
