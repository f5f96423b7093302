// Puts the page together: the key, the stream, and who shows what.

import { badge, setBadge } from "./badge.js";
import { showBalance } from "./balance.js";
import { showCache } from "./cache.js";
import { makeChanges, offerScale } from "./changes.js";
import { makeChat, offerModels } from "./chat.js";
import { attribute, byId, text } from "./dom.js";
import { showEvents } from "./events.js";
import { showFigures } from "./figures.js";
import { follow } from "./live.js";
import { healthOf, Rates, workersOf } from "./model.js";
import { showRequests } from "./requests.js";
import { forgetKey, hasKey, isRefused, useKey } from "./session.js";
import { makeTopology } from "./topology.js";
import { showWorkers } from "./workers.js";

const said = {};
const rates = new Rates();
const health = badge();
const connection = badge();
let showTopology;
let leaving = new AbortController();

function show() {
  const workers = workersOf(said.status, said.desired?.desired);
  rates.note(workers, performance.now());
  const { level, label, why } = healthOf(said.status, workers);
  setBadge(health, level, label, why);
  text(byId("cluster-name"), said.status?.cluster ? `· ${said.status.cluster} · ${said.status.served_names.join(", ")}` : "");
  const troubles = Object.values(said).map((value) => value.error).filter(Boolean);
  byId("trouble").hidden = troubles.length === 0;
  text(byId("trouble"), [...new Set(troubles)].join(" "));
  showTopology(said.status, workers, said.links);
  showWorkers(workers, rates);
  showFigures(said.figures);
  showBalance(workers, rates, said.plan);
  showRequests(said.requests);
  showCache(said.figures, workers);
  showEvents(said.events);
  offerModels(said.status);
  offerScale(said.desired?.desired);
}

// What was known stays while a section cannot be read; the reason stands above.
function tell(section, value) {
  said[section] = value.error ? { ...said[section], error: value.error } : value;
}

async function look() {
  leaving = new AbortController();
  byId("login-error").textContent = "";
  try {
    await follow({
      tell,
      beat: () => {
        byId("entry").hidden = true;
        byId("page").hidden = byId("leave").hidden = false;
        show();
      },
      connection: (isLive, why) => {
        setBadge(connection, isLive ? "ok" : "bad", isLive ? "live" : "no news", why);
        attribute(byId("page"), "data-stale", isLive ? undefined : true);
        if (!isLive && byId("page").hidden) text(byId("login-error"), why);
      },
      signal: leaving.signal,
    });
  } catch (error) {
    leave(isRefused(error) ? error.message : "");
    if (!isRefused(error) && !leaving.signal.aborted) throw error;
  }
}

function leave(why) {
  forgetKey();
  byId("page").hidden = byId("leave").hidden = true;
  byId("entry").hidden = false;
  text(byId("login-error"), why);
  byId("key").focus();
}

byId("health").append(health);
byId("connection").append(connection);
showTopology = makeTopology();
makeChat();
makeChanges();
byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim());
  byId("key").value = "";
  look();
});
byId("leave").addEventListener("click", () => {
  leaving.abort();
  leave("");
});
if (hasKey()) look();
else byId("key").focus();
