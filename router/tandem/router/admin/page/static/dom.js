// Elements without markup in strings: the page's policy forbids that, and nothing that a worker says becomes markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

// Writes only what differs, so that focus, selection and screen readers are left alone.
export function text(element, value) {
  const wanted = String(value ?? "");
  if (element.textContent !== wanted) element.textContent = wanted;
}

export function attribute(element, name, value) {
  if (value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

// Children of `parent` as `items`: each keeps its element, and its place, for as long as its key is there.
export function keyed(parent, items, key, create, update) {
  const names = items.map((item) => String(key(item)));
  const wanted = new Set(names);
  const known = new Map();
  for (const child of [...parent.children]) {
    if (wanted.has(child.dataset.key)) known.set(child.dataset.key, child);
    else child.remove();
  }
  let place = parent.firstElementChild;
  items.forEach((item, number) => {
    const child = known.get(names[number]) ?? create(item);
    child.dataset.key = names[number];
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    update(child, item);
  });
}
