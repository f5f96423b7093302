// Requests that run and the last that ended, all on one scale.

import { byId, keyed, text } from "./dom.js";
import { makeWaterfall, setWaterfall } from "./waterfall.js";
import { seconds } from "./units.js";

export function showRequests(section) {
  const traces = section?.requests ?? [];
  const scaleS = Math.max(...traces.map((trace) => trace.duration_s), 0.001);
  text(byId("scale"), traces.length === 0 ? "No request yet." : `A whole line is ${seconds(scaleS)}.`);
  keyed(byId("requests"), traces, (trace) => trace.request, makeWaterfall, (element, trace) => setWaterfall(element, trace, scaleS));
}
