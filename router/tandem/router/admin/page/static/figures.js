// Latencies, goodput and tokens of the last quarter of an hour: a figure, and its curve.

import { attribute, byId, el, keyed, svg, text } from "./dom.js";
import { count, moment, seconds, share } from "./units.js";

const LEAST_SLOTS = 24; // of a curve; it grows to a quarter of an hour
const NOW_SLOTS = 12; // "now" is the last minute
const perSecond = (value) => `${count(value)}/s`;

const CURVES = [
  { title: "TTFT, p50", field: "ttft_p50_s", words: seconds, second: "ttft_p99_s", label: "p99" },
  { title: "ITL, p50", field: "itl_p50_s", words: seconds, second: "itl_p99_s", label: "p99" },
  { title: "Goodput", field: "goodput_per_s", words: perSecond, second: "kept", label: "of promises kept", other: share },
  { title: "Answers", field: "answers_per_s", words: perSecond, second: "failed", label: "failed", other: count },
  { title: "Output, tokens", field: "output_tokens_per_s", words: perSecond },
  { title: "Input, tokens", field: "prompt_tokens_per_s", words: perSecond },
];

export function showFigures(figures) {
  const slots = figures?.slots ?? [];
  text(byId("since"), slots.length > 0 ? `since ${moment(slots[0].at_s)}` : "");
  keyed(byId("figures"), CURVES, (curve) => curve.field, create, (card, curve) => update(card, curve, slots));
}

function create(curve) {
  const line = svg("svg", { preserveAspectRatio: "none", role: "img" }, svg("path", {}));
  return el("div", { class: "figure" }, el("h3", {}, curve.title), el("strong", {}), el("small", {}), line);
}

function update(card, curve, slots) {
  const [, figure, small, drawing] = card.children;
  const lately = slots.slice(-NOW_SLOTS);
  const now = last(lately, curve.field);
  const second = curve.second ? last(lately, curve.second) : undefined;
  const words = curve.words;
  text(figure, now === undefined ? "–" : words(now));
  if (curve.field === "goodput_per_s" && now === undefined) text(small, "no request of an SLO class");
  else text(small, second === undefined ? "" : `${(curve.other ?? words)(second)} ${curve.label}`);
  const values = slots.map((slot) => slot[curve.field]).filter((value) => value !== null);
  const most = Math.max(...values, 0);
  const width = Math.max(slots.length, LEAST_SLOTS);
  attribute(drawing, "viewBox", `0 0 ${width} 40`);
  attribute(drawing.firstElementChild, "d", path(slots, curve.field, most, width));
  attribute(drawing, "aria-label", values.length === 0 ? `${curve.title}: nothing measured yet`
    : `${curve.title} since ${moment(slots[0].at_s)}: between ${words(Math.min(...values))} and ${words(most)}`);
}

function last(slots, field) {
  for (let place = slots.length - 1; place >= 0; place -= 1) {
    if (slots[place][field] !== null) return slots[place][field];
  }
  return undefined;
}

// Drawn from the right; where nothing was measured the line is broken, and a single measurement is a dash.
function path(slots, field, most, width) {
  let drawn = "";
  let isDown = false;
  slots.forEach((slot, place) => {
    const value = slot[field];
    if (value === null) {
      isDown = false;
      return;
    }
    const x = width - slots.length + place;
    const y = (38 - 36 * (most > 0 ? value / most : 0)).toFixed(1);
    drawn += isDown ? `L${x} ${y}` : `M${x} ${y}h1`;
    isDown = true;
  });
  return drawn;
}
