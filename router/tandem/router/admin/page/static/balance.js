// Prefill against decode: how busy each pool is, and what the planner would change.

import { attribute, byId, el, keyed, text } from "./dom.js";
import { kvUse } from "./model.js";
import { count, moment, plural, seconds, share } from "./units.js";

const FORECAST = ["Promises kept", "Goodput", "TTFT p90", "ITL p90", "Prefill busy"];
const ROLES = ["prefill", "decode", "mixed"];
const mean = (values) => (values.length > 0 ? values.reduce((sum, value) => sum + value, 0) / values.length : undefined);

export function showBalance(workers, rates, plan) {
  const pools = ROLES.map((role) => poolOf(role, workers.filter((row) => row.role === role), rates)).filter((pool) => pool.size > 0);
  keyed(byId("pools"), pools, (pool) => pool.role, create, update);
  showPlan(plan);
}

function poolOf(role, rows, rates) {
  const heard = rows.filter((row) => row.in_flight !== undefined);
  const known = (values) => values.filter((value) => value !== undefined);
  const ahead = heard.filter((row) => row.prefill_tokens_per_s > 0).map((row) => row.queued_tokens / row.prefill_tokens_per_s);
  return {
    role,
    size: rows.length,
    busy: mean(known(heard.map((row) => rates.busy(row.worker)))),
    kv: mean(known(heard.map(kvUse))),
    running: heard.reduce((sum, row) => sum + row.running_requests, 0),
    waiting: heard.reduce((sum, row) => sum + row.queued_requests, 0),
    aheadS: role === "decode" ? undefined : mean(ahead),
  };
}

function create(pool) {
  const meter = (label) => el("div", { class: "meter" }, el("span", {}, label),
    el("span", { class: "bar", role: "meter", "aria-valuemin": 0, "aria-valuemax": 1, "aria-label": `${pool.role}, ${label}` },
      el("span", { "data-pool": pool.role })),
    el("span", {}));
  return el("div", { class: "pool" }, el("h3", {}), meter("busy"), meter("KV in use"), el("small", {}));
}

function update(card, pool) {
  const [title, busy, kv, small] = card.children;
  text(title, `${pool.role[0].toUpperCase()}${pool.role.slice(1)}, ${plural(pool.size, "worker")}`);
  setMeter(busy, pool.busy);
  setMeter(kv, pool.kv);
  const ahead = pool.aheadS === undefined ? "" : `, ${seconds(pool.aheadS)} of prompts ahead`;
  text(small, `${count(pool.running)} running, ${count(pool.waiting)} waiting${ahead}`);
}

function setMeter(line, value) {
  const [, bar, words] = line.children;
  attribute(bar, "aria-valuenow", (value ?? 0).toFixed(3));
  attribute(bar, "aria-valuetext", share(value));
  bar.firstElementChild.style.width = `${100 * (value ?? 0)}%`;
  text(words, share(value));
}

function showPlan(section) {
  const word = section?.plan;
  const lines = [];
  if (!section) lines.push("");
  else if (section.mode === "off") lines.push("The planner is off: [planner] mode in the configuration turns it on.");
  else if (!word) lines.push(`The planner (${section.mode}) has said nothing for a while.`);
  else {
    const isSame = word.wanted === word.split;
    lines.push(isSame ? `The planner (${section.mode}) would leave ${word.split} as it is.`
      : `The planner (${section.mode}) ${word.is_advice ? "advises" : "wants"} ${word.wanted} instead of ${word.split}.`);
    if (word.reason) lines.push(`${word.reason}.`);
    if (word.unsettled) lines.push(`It waits: ${word.unsettled}.`);
    if (word.last_action) lines.push(`At ${moment(word.last_action.at_s)}: ${word.last_action.what}.`);
  }
  showForecasts(word);
  keyed(byId("plan"), lines.map((line, place) => ({ line, place })), (one) => one.place, () => el("p", {}), (p, one) => text(p, one.line));
}

// What the planner expects of the split that there is, and of the one that it would have.
function showForecasts(word) {
  const rows = [word?.now, word?.wanted === word?.split ? null : word?.then].filter(Boolean);
  byId("forecasts").hidden = rows.length === 0;
  keyed(byId("forecasts").tBodies[0], rows.map((row, place) => ({ row, place })), (one) => one.place,
    () => el("tr", {}, el("th", { scope: "row" }), ...FORECAST.map((label) => el("td", { "data-label": label }))),
    (line, { row }) => {
      const values = [row.split, share(row.attained), `${count(row.goodput_per_s)}/s`, seconds(row.ttft_p90_s),
        seconds(row.itl_p90_s), share(row.prefill_busy)];
      values.forEach((value, number) => text(line.children[number], value));
    });
}
