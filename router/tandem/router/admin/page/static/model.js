// What the sections of the stream mean together: which workers there are, how each is, how busy it was lately.

export const LEVELS = { ok: "●", busy: "◐", warn: "▲", bad: "✖" };

const BY_STATE = { ready: "ok", draining: "busy", drained: "busy", flipping: "busy", stalled: "bad", unreachable: "bad", gone: "bad" };
const ROLES = ["prefill", "decode", "mixed"];
const WINDOW_MS = 10_000;

const lastRoles = new Map();

// Rows of workers that are known or wanted, by role and name: {worker, role, state, level, why, isWanted, ...status row}.
export function workersOf(status, desired) {
  const members = new Map((desired?.members ?? []).map((member) => [member.worker_id, member]));
  const rows = (status?.workers ?? []).map((row) => described(row, members.get(row.worker), members.size > 0));
  const known = new Set(rows.map((row) => row.worker));
  for (const member of members.values()) {
    if (!known.has(member.worker_id)) rows.push(missing(member));
  }
  for (const row of rows) lastRoles.set(row.worker, row.role);
  return rows.sort((a, b) => ROLES.indexOf(a.role) - ROLES.indexOf(b.role) || natural(a.worker, b.worker));
}

function described(row, member, isRecord) {
  const role = row.role ?? lastRoles.get(row.worker) ?? member?.role ?? "";
  let level = BY_STATE[row.state] ?? "warn";
  let state = row.state;
  let why = row.trouble ?? "";
  if (isRecord && member === undefined && level !== "ok") {
    [level, state, why] = ["busy", "leaving", why || "it is wanted no more"];
  } else if (level === "ok" && why) {
    level = "warn";
  }
  return { ...row, role, state, level, why, member, isWanted: member !== undefined };
}

function missing(member) {
  const why = "it should run, but is not there";
  return { worker: member.worker_id, role: member.role, state: "missing", level: "bad", why, member, isWanted: true };
}

const natural = (a, b) => a.localeCompare(b, "en", { numeric: true });

export function kvUse(row) {
  const blocks = row.blocks ?? [];
  if (blocks.length === 0) return undefined;
  return Math.max(...blocks.map((one) => (one.total > 0 ? 1 - (one.free + one.cached) / one.total : 0)));
}

// Rates of workers' counters over the last ten seconds.
export class Rates {
  #seen = new Map();

  note(workers, nowMs) {
    const present = new Set();
    for (const row of workers) {
      if (row.counters === undefined) continue;
      present.add(row.worker);
      const seen = this.#seen.get(row.worker) ?? [];
      if (seen.some((one) => fell(one.counters, row.counters))) seen.length = 0; // it began anew
      seen.push({ atMs: nowMs, counters: row.counters });
      while (seen.length > 2 && seen[1].atMs < nowMs - WINDOW_MS) seen.shift();
      this.#seen.set(row.worker, seen);
    }
    for (const worker of this.#seen.keys()) if (!present.has(worker)) this.#seen.delete(worker);
  }

  // A second, or undefined before there were two looks.
  of(worker, counter) {
    const seen = this.#seen.get(worker);
    if (seen === undefined || seen.length < 2) return undefined;
    const [first, last] = [seen[0], seen[seen.length - 1]];
    return ((last.counters[counter] ?? 0) - (first.counters[counter] ?? 0)) / ((last.atMs - first.atMs) / 1000);
  }

  busy(worker) {
    const share = this.of(worker, "step_seconds");
    return share === undefined ? undefined : Math.min(1, share);
  }
}

const fell = (before, now) => (now.step_seconds ?? 0) < (before.step_seconds ?? 0);

// "ok", "degraded" or "down", and why.
export function healthOf(status, workers) {
  if (!status || status.error) return { level: "bad", label: "unknown", why: status?.error ?? "" };
  if (!status.is_ready) return { level: "bad", label: "down", why: (status.missing ?? []).join(", ") };
  const bad = workers.filter((row) => row.level === "bad");
  if (bad.length > 0) return { level: "warn", label: "degraded", why: bad.map((row) => `${row.worker} ${row.state}`).join(", ") };
  if (status.registry_trouble) return { level: "warn", label: "degraded", why: status.registry_trouble };
  return { level: "ok", label: "ok", why: "" };
}
