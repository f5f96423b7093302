// What the cluster did and why, the latest first.

import { byId, el, keyed, text } from "./dom.js";
import { moment } from "./units.js";

export function showEvents(section) {
  const rows = [...(section?.events ?? [])].reverse();
  keyed(byId("events"), rows, (row) => row.place, () => el("li", {}, el("time", {}), el("strong", {}), el("span", {})), (line, row) => {
    const [time, kind, words] = line.children;
    text(time, moment(row.time_s));
    time.dateTime = new Date(1000 * row.time_s).toISOString();
    text(kind, row.kind.replaceAll("_", " "));
    text(words, `${row.subject}: ${row.reason}`);
  });
}
