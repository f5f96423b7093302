// A state as a word, a sign and a colour: never the colour alone.

import { attribute, el, text } from "./dom.js";
import { LEVELS } from "./model.js";

export function badge() {
  return el("span", { class: "badge" }, el("span", { "aria-hidden": "true" }), el("span", {}));
}

export function setBadge(element, level, label, why = "") {
  attribute(element, "data-level", level);
  attribute(element, "title", why || undefined);
  text(element.firstElementChild, LEVELS[level]);
  text(element.lastElementChild, label);
}
