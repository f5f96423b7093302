// How much of the prompts nobody had to compute, and what workers' blocks hold.

import { attribute, byId, el, keyed, text } from "./dom.js";
import { count, share } from "./units.js";

const STATES = ["request", "reserved", "pushing", "cached", "free"];

export function showCache(figures, workers) {
  const totals = figures?.totals ?? {};
  const prompts = totals.prompt_tokens ?? 0;
  const facts = [
    ["Prompt tokens from caches", prompts > 0 ? share((totals.cached_tokens ?? 0) / prompts) : "–"],
    ["Prompt tokens", count(prompts)],
    ["Predicted to be known", count(totals.predicted_tokens ?? 0)],
    ["Found to be known", count(totals.found_tokens ?? 0)],
  ];
  keyed(byId("hits"), facts, (fact) => fact[0], (fact) => el("div", {}, el("dt", {}, fact[0]), el("dd", {})),
    (line, fact) => text(line.lastElementChild, fact[1]));
  const rows = workers.filter((row) => row.blocks?.length > 0);
  keyed(byId("blocks"), rows, (row) => row.worker,
    () => el("li", {}, el("span", {}), el("span", { class: "bar", role: "img" }), el("small", {})), showBlocks);
}

function showBlocks(line, row) {
  const [name, bar, words] = line.children;
  const sums = STATES.map((state) => [state, row.blocks.reduce((sum, one) => sum + one[state], 0)]);
  const total = Math.max(1, row.blocks.reduce((sum, one) => sum + one.total, 0));
  text(name, row.worker);
  let left = 0;
  keyed(bar, sums, ([state]) => state, ([state]) => el("span", { "data-blocks": state }), (piece, [, blocks]) => {
    piece.style.left = `${(100 * left) / total}%`;
    piece.style.width = `${(100 * blocks) / total}%`;
    left += blocks;
  });
  const said = sums.filter(([state, blocks]) => blocks > 0 || state === "cached").map(([state, blocks]) => `${count(blocks)} ${state}`);
  text(words, said.join(", "));
  attribute(bar, "aria-label", `of ${count(total)} blocks ${said.join(", ")}`);
}
