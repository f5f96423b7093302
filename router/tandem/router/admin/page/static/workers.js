// Every worker in a line, those that are wanted and not there included.

import { badge, setBadge } from "./badge.js";
import { propose } from "./changes.js";
import { attribute, byId, el, keyed, text } from "./dom.js";
import { kvUse } from "./model.js";
import { count, seconds, share } from "./units.js";

const LABELS = ["Worker", "Role", "State", "Requests", "Queue", "Busy", "Speed", "KV in use", "Change"];

export function showWorkers(workers, rates) {
  keyed(byId("workers").tBodies[0], workers, (row) => row.worker, create, (line, row) => update(line, row, rates));
}

function create() {
  const cells = LABELS.map((label, number) => el(number === 0 ? "th" : "td", number === 0 ? { scope: "row" } : { "data-label": label }));
  cells[2].append(badge(), el("small", {}));
  const line = el("tr", {}, ...cells);
  cells[8].append(
    el("button", { type: "button", click: () => propose(`${line.isCordoned ? "Give work to" : "Drain"} ${line.dataset.key}`,
      { verb: line.isCordoned ? "uncordon" : "drain", worker: line.dataset.key }) }),
    el("button", { type: "button", click: () => propose(`Flip ${line.dataset.key} to ${line.otherRole}`,
      { verb: "flip", worker: line.dataset.key, role: line.otherRole }) }),
  );
  return line;
}

function update(line, row, rates) {
  attribute(line, "data-level", row.level);
  const [name, role, state, requests, queue, busy, speed, kv, change] = line.cells;
  text(name, row.worker);
  text(role, row.role);
  setBadge(state.firstElementChild, row.level, row.state, row.why);
  text(state.lastElementChild, row.why);
  const isHeard = row.in_flight !== undefined;
  text(requests, isHeard ? `${count(row.running_requests)} running, ${count(row.queued_requests)} waiting` : "–");
  text(queue, isHeard ? `${count(row.queued_tokens)} tokens` : "–");
  text(busy, share(isHeard ? rates.busy(row.worker) : undefined));
  text(speed, speedOf(row));
  text(kv, share(kvUse(row)));
  showChange(line, change, row);
}

function showChange(line, cell, row) {
  const [drain, flip] = cell.children;
  line.isCordoned = row.member?.is_cordoned ?? false;
  line.otherRole = { prefill: "decode", decode: "prefill" }[row.member?.role];
  drain.hidden = !row.isWanted;
  flip.hidden = line.otherRole === undefined;
  text(drain, line.isCordoned ? "Give work" : "Drain");
  text(flip, `Flip to ${line.otherRole}`);
  attribute(drain, "aria-label", `${drain.textContent} ${row.worker}`);
  attribute(flip, "aria-label", `Flip ${row.worker} to ${line.otherRole}`);
}

function speedOf(row) {
  const words = [];
  if (row.role !== "decode" && row.prefill_tokens_per_s > 0) words.push(`${count(Math.round(row.prefill_tokens_per_s))} tokens/s`);
  if (row.role !== "prefill" && row.decode_step_s > 0) words.push(`${seconds(row.decode_step_s)} a step`);
  return words.join(", ") || "–";
}
