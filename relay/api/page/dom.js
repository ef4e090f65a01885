// Makes elements. Text from others becomes text nodes only: nothing here parses markup.

const SVG = "http://www.w3.org/2000/svg";

function build(created, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) created.addEventListener(event, listener);
    } else {
      created.setAttribute(name, value === true ? "" : String(value));
    }
  }
  created.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false));
  return created;
}

/** Make an HTML element. `on` holds listeners; null and false leave an attribute or a child out. */
export function h(name, attributes, ...children) {
  return build(document.createElement(name), attributes, children);
}

/** Make an SVG element. */
export function svg(name, attributes, ...children) {
  return build(document.createElementNS(SVG, name), attributes, children);
}

const ICONS = {
  ok: "M3.5 8.5l3 3 6-7",
  bad: "M4 4l8 8M12 4l-8 8",
  none: "M4 8h8",
  hold: "M6 4v8M10 4v8",
  open: "M8 3a5 5 0 1 0 .01 0",
  start: "M5 3.5l7 4.5-7 4.5z",
  edit: "M3 13l1-3 7-7 2 2-7 7z",
  bell: "M4 11h8l-1-2V7a3 3 0 0 0-6 0v2zM7 13h2",
  send: "M2.5 8L13 3.5 10.5 13 8 9z",
};

/** Make a decorative icon: what it means is beside it in words. */
export function icon(name, tone = "") {
  return svg("svg", { class: `icon ${tone}`, viewBox: "0 0 16 16", "aria-hidden": "true" },
    svg("path", { d: ICONS[name] }));
}

/** Make a list of facts: each a label and what it says; null leaves one out. */
export function facts(rows, more = "") {
  return h("dl", { class: `facts ${more}` }, rows.map(row => row && [h("dt", {}, row[0]), h("dd", {}, row[1])]));
}

/** Make a table whose rows are shown in the body with this id; it scrolls on a small screen. */
export function table(label, heads, body, attributes, rows = []) {
  const texts = heads.map(text => h("th", { scope: "col" }, text || h("span", { class: "hidden" }, "Actions")));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label, ...attributes },
    h("table", {}, h("thead", {}, h("tr", {}, texts)), h("tbody", { id: body }, rows)));
}

const kept = new WeakMap();

/**
 * Show a node for each item, and keep the nodes of items that have not changed.
 *
 * `keyOf` names an item, and `render` makes its node. A node that is replaced keeps focus and open
 * details, which have `data-key`.
 */
export function showItems(parent, items, keyOf, render) {
  const before = new Map([...parent.children].map(node => [kept.get(node)?.key, node]));
  const focused = parent.contains(document.activeElement) ? document.activeElement : null;
  const focusKey = focused?.dataset.key, focusItem = focused && topKey(parent, focused);
  const nodes = items.map(item => {
    const key = keyOf(item), content = JSON.stringify(item), old = before.get(key);
    if (old && kept.get(old).content === content) return old;
    const node = render(item);
    kept.set(node, { key, content });
    if (old) {
      for (const details of old.querySelectorAll("details[open][data-key]")) {
        const same = node.querySelector(`details[data-key="${CSS.escape(details.dataset.key)}"]`);
        if (same) same.open = true;
      }
    }
    return node;
  });
  if (nodes.length !== parent.children.length || nodes.some((node, index) => parent.children[index] !== node)) {
    parent.replaceChildren(...nodes);
    refocus(nodes, focused, focusItem, focusKey);
  }
}

function topKey(parent, node) {
  let top = node;
  while (top.parentElement !== parent) top = top.parentElement;
  return kept.get(top)?.key;
}

function refocus(nodes, focused, item, key) {
  if (!focused || focused === document.activeElement) return;
  if (focused.isConnected) return focused.focus();
  const node = nodes.find(candidate => kept.get(candidate)?.key === item);
  const same = key && node?.querySelector(`[data-key="${CSS.escape(key)}"]`);
  (same || node?.querySelector("a, button") || document.getElementById("content")).focus();
}

/** Replace what an element shows, if it shows something else. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Say something to people who use a screen reader, and show it for a while. */
export function announce(text, tone = "") {
  const said = document.getElementById("said");
  const note = h("p", { class: `toast ${tone}` }, text);
  said.replaceChildren(note);
  setTimeout(() => note.remove(), 12000);
}
