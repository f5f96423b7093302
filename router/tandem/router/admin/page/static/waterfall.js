// One request on one time line: where it waited, who computed it, how long its KV travelled.

import { attribute, el, keyed, text } from "./dom.js";
import { plural, seconds } from "./units.js";

export const PHASES = ["wait", "queue", "prefill", "transfer", "decode"];

export function makeWaterfall() {
  return el("details", { class: "request" },
    el("summary", {}, el("span", { class: "name" }), el("span", { class: "bar", role: "img" }), el("span", { class: "took" })),
    el("p", {}),
    el("ol", {}));
}

// `scaleS`: as long as the bar is wide.
export function setWaterfall(element, trace, scaleS) {
  const [summary, words, list] = element.children;
  const [name, bar, took] = summary.children;
  attribute(element, "data-outcome", trace.is_over ? trace.outcome : "running");
  text(name, trace.request);
  text(took, `${trace.is_over ? outcome(trace) : trace.outcome} ${seconds(trace.duration_s)}`);
  attribute(bar, "aria-label", trace.spans.map((span) => `${span.span} ${seconds(span.end_s - span.start_s)}`).join(", "));
  keyed(bar, trace.spans, keyOf, (span) => el("span", { "data-phase": span.span }), (piece, span) => {
    piece.style.left = `${(100 * span.start_s) / scaleS}%`;
    piece.style.width = `${(100 * (span.end_s - span.start_s)) / scaleS}%`;
  });
  text(words, wordsOf(trace));
  keyed(list, trace.spans, keyOf, (span) => el("li", { "data-phase": span.span }), (line, span) => {
    const again = trace.attempts > 1 ? ` (attempt ${span.attempt})` : "";
    text(line, `${span.span} ${seconds(span.end_s - span.start_s)}${span.worker ? `, ${span.worker}` : ""}${again}`);
  });
}

const keyOf = (span) => `${span.attempt} ${span.span}`;
const outcome = (trace) => (trace.outcome === "finished" ? "" : `${trace.outcome},`);

function wordsOf(trace) {
  const cached = trace.cached_tokens ? `, ${trace.cached_tokens} of them cached` : "";
  const words = [`${plural(trace.prompt_tokens, "prompt token")}${cached}, ${plural(trace.output_tokens, "output token")}`];
  if (trace.handoff) words.push(`the hand-off added ${seconds(trace.handoff.overhead_s)}`);
  if (trace.attempts > 1) words.push(plural(trace.attempts, "attempt"));
  if (trace.error) words.push(trace.error);
  return words.join("; ");
}
