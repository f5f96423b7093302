// Drain, flip, scale: proposed first, shown with all that follows, and written only as it was shown.

import { byId, el, text } from "./dom.js";
import { ask } from "./session.js";

const DEEDS = {
  start: "starts", stop: "finishes what it has, then stops", flip: "changes its role", drain: "gets no new work",
  uncordon: "gets work again", restart: "finishes what it has, then starts anew",
};
const ROLES = ["prefill", "decode", "mixed"];

let proposal = null;

export function makeChanges() {
  const dialog = byId("change");
  byId("confirm").addEventListener("click", write);
  byId("cancel").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => { proposal = null; });
  byId("scale-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const counts = {};
    for (const input of event.target.querySelectorAll("input[data-role]")) counts[input.dataset.role] = Number(input.value);
    propose(`Scale to ${ROLES.filter((role) => role in counts).map((role) => `${counts[role]} ${role}`).join(", ")}`,
      { verb: "scale", counts, model: byId("scale-model").value });
  });
}

// A field for each role that has a pool; what is being typed stays.
export function offerScale(desired) {
  const form = byId("scale-form");
  form.hidden = !desired?.pools;
  if (form.hidden) return;
  const models = [...new Set(desired.pools.map((pool) => pool.model))];
  const select = byId("scale-model");
  if ([...select.options].map((option) => option.value).join("\n") !== models.join("\n")) {
    select.replaceChildren(...models.map((model) => el("option", { value: model }, model)));
  }
  select.parentElement.hidden = models.length < 2;
  const fields = byId("scale-fields");
  for (const role of ROLES) {
    const size = desired.pools.filter((pool) => pool.role === role && pool.model === select.value).reduce((sum, pool) => sum + pool.count, 0);
    const isPool = desired.pools.some((pool) => pool.role === role && pool.model === select.value);
    let input = fields.querySelector(`[data-role="${role}"]`);
    if (!isPool) {
      input?.parentElement.remove();
      continue;
    }
    if (!input) {
      input = el("input", { type: "number", min: 0, max: 1024, required: true, "data-role": role });
      fields.append(el("label", {}, `${role} `, input));
    }
    if (input.dataset.wanted !== String(size)) {
      input.dataset.wanted = size;
      input.value = size;
    }
  }
}

export async function propose(title, wish) {
  const dialog = byId("change");
  text(byId("change-title"), title);
  text(byId("change-error"), "");
  text(byId("change-words"), "Asking what that would do …");
  byId("change-list").replaceChildren();
  byId("confirm").hidden = true;
  dialog.showModal();
  try {
    const asked = await ask("desired/propose", { wish });
    if (!dialog.open) return;
    proposal = asked.is_changed ? asked : null;
    text(byId("change-words"), asked.is_changed
      ? `Version ${asked.before.version} of the desired state becomes version ${asked.after.version}, ${split(asked.before)} becomes ${split(asked.after)}:`
      : "Nothing would change: it is so already.");
    byId("change-list").append(...asked.changes.map((change) =>
      el("li", {}, el("strong", {}, change.worker_id), ` ${DEEDS[change.deed] ?? change.deed}${change.detail ? `: ${change.detail}` : ""}`)));
    byId("confirm").hidden = !asked.is_changed;
    (asked.is_changed ? byId("confirm") : byId("cancel")).focus();
  } catch (error) {
    text(byId("change-words"), "");
    text(byId("change-error"), error.message);
  }
}

async function write() {
  if (proposal === null) return;
  byId("confirm").disabled = true;
  try {
    await ask("desired", { state: proposal.after });
    byId("change").close(); // the stream tells what becomes of it
  } catch (error) {
    text(byId("change-error"), error.message);
    byId("confirm").hidden = true;
  } finally {
    byId("confirm").disabled = false;
  }
}

const split = (state) => ROLES.map((role) => [role, state.pools.filter((pool) => pool.role === role).reduce((sum, pool) => sum + pool.count, 0)])
  .filter(([, size]) => size > 0).map(([role, size]) => `${size}${role[0].toUpperCase()}`).join(":");
