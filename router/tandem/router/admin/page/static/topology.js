// The router, the pools, and the links between them: cards in columns, and curves where two workers exchange KV.

import { badge, setBadge } from "./badge.js";
import { attribute, byId, el, keyed, svg, text } from "./dom.js";
import { plural, rate, seconds } from "./units.js";

const MOST_CARDS = 8;
const TITLES = { prefill: "Prefill", decode: "Decode", mixed: "Mixed" };

export function makeTopology() {
  const router = el("div", { class: "card" }, el("strong", {}, "Router"), badge(), el("small", {}));
  const columns = Object.keys(TITLES).map((role) => [role, column(role)]);
  const curves = svg("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" });
  const between = el("div", { class: "between" }, el("h3", {}), curves);
  byId("topology").append(
    el("div", { class: "column" }, el("h3", {}, "Front door"), el("div", { class: "cards" }, router)),
    columns[0][1], between, columns[1][1], columns[2][1],
  );
  return (status, workers, links) => {
    showRouter(router, status);
    const shown = {};
    for (const [role, element] of columns) shown[role] = showColumn(element, workers.filter((row) => row.role === role));
    showCurves(between, shown, links);
    showLinks(links);
  };
}

function column(role) {
  return el("div", { class: "column", "data-role": role },
    el("h3", {}, TITLES[role]), el("div", { class: "cards" }), el("small", { class: "more" }));
}

function showRouter(card, status) {
  if (!status?.router) return;
  const [, mark, small] = card.children;
  setBadge(mark, status.is_ready ? "ok" : "bad", status.is_ready ? "ready" : "not ready", (status.missing ?? []).join(", "));
  const waiting = status.admission?.waiting ?? 0;
  text(small, `${plural(status.router.in_flight, "request")} in flight${waiting ? `, ${waiting} waiting` : ""}`);
}

function showColumn(element, rows) {
  const order = { bad: 0, warn: 1, busy: 2, ok: 3 };
  const chosen = rows.length <= MOST_CARDS ? rows : [...rows].sort((a, b) => order[a.level] - order[b.level]).slice(0, MOST_CARDS);
  const [title, cards, more] = element.children;
  element.hidden = rows.length === 0;
  text(title, `${TITLES[element.dataset.role]} (${rows.length})`);
  keyed(cards, chosen, (row) => row.worker, () => el("div", { class: "card" }, el("strong", {}), badge(), el("small", {})),
    (card, row) => {
      attribute(card, "data-level", row.level);
      text(card.children[0], row.worker);
      setBadge(card.children[1], row.level, row.state, row.why);
      text(card.children[2], row.in_flight === undefined ? row.why : plural(row.in_flight, "request"));
    });
  text(more, rows.length > chosen.length ? `and ${rows.length - chosen.length} more in the table` : "");
  return chosen.map((row) => row.worker);
}

function showCurves(between, shown, links) {
  const [words, curves] = between.children;
  const used = usedLinks(links).filter((link) => shown.prefill.includes(link.worker) && shown.decode.includes(link.peer));
  const y = (list, worker) => (100 * (list.indexOf(worker) + 0.5)) / list.length;
  keyed(curves, used, (link) => `${link.worker} ${link.peer}`, () => svg("path", {}, svg("title")), (path, link) => {
    text(path.firstElementChild, `${link.worker} → ${link.peer}: ${rate(link.bytes_per_s)}`);
    const [from, to] = [y(shown.prefill, link.worker), y(shown.decode, link.peer)];
    attribute(path, "d", `M0 ${from}C50 ${from} 50 ${to} 100 ${to}`);
  });
  const speeds = used.map((link) => link.bytes_per_s).filter((speed) => speed > 0).sort((a, b) => a - b);
  const middle = speeds[Math.floor(speeds.length / 2)];
  between.hidden = shown.prefill.length === 0 && shown.decode.length === 0;
  text(words, used.length === 0 ? "no link in use yet" : `${plural(used.length, "link")}, ${rate(middle)}${speeds.length > 1 ? " at the median" : ""}`);
}

// One row for two workers, however many ranks they have: of rank 0.
function usedLinks(links) {
  const rows = new Map();
  for (const link of links?.links ?? []) {
    if (link.rank === 0) rows.set(`${link.worker} ${link.peer}`, link);
  }
  return [...rows.values()];
}

function showLinks(links) {
  keyed(byId("links").querySelector("tbody"), usedLinks(links), (link) => `${link.worker} ${link.peer}`,
    () => el("tr", {}, ...["From", "To", "Transport", "Measured", "Achieved", "Latency"].map((label) => el("td", { "data-label": label }))),
    (row, link) => {
      const values = [link.worker, link.peer, link.transport, rate(link.bytes_per_s), rate(link.achieved_bytes_per_s), seconds(link.latency_s || undefined)];
      values.forEach((value, number) => text(row.children[number], value));
    });
}
