// The newest lines of the journal, as they are recorded.

import { h, icon, showItems } from "./dom.js";
import { eventHref } from "./now.js";
import { state } from "./store.js";
import { eventName, eventTitle, mark, time } from "./words.js";

const FAMILIES = [["all", "Everything"], ["event.", "Azure"], ["approval.", "Decisions"], ["standing-hold.", "Standing holds"], ["startrequest.", "StartRequests"], ["relay.", "This relay"]];
let family = "all";

export function renderLog(view) {
  if (!view.querySelector("#log")) {
    view.replaceChildren(h("section", { "aria-labelledby": "log-title" },
      h("div", { class: "title-row" }, h("h1", { id: "log-title", tabindex: "-1" }, "Log"),
        h("label", { class: "inline" }, "Show ", h("select", { id: "family", on: { change: event => { family = event.target.value; renderLog(view); } } },
          FAMILIES.map(([value, text]) => h("option", { value, selected: value === family }, text))))),
      h("p", { class: "soft small" }, "The newest lines of the journal. imds-relay tail and imds-relay audit show the rest."),
      h("p", { id: "log-empty", class: "empty", hidden: true }),
      h("ol", { id: "log", class: "lines card" })));
  }
  const shown = state.log.filter(({ event }) => (family === "all" || eventName(event).startsWith(family)) && (!state.scope || event.scope === state.scope));
  showItems(view.querySelector("#log"), shown, line => line.at, renderLine);
  const empty = view.querySelector("#log-empty");
  view.querySelector("#log").hidden = !shown.length;
  empty.hidden = shown.length > 0;
  empty.textContent = state.log.length ? "Nothing of this kind happened lately." : "Nothing has happened yet.";
}

function renderLine({ event }) {
  const [name, tone] = mark(event), data = event.data ?? {};
  const isAbout = Boolean(data.eventId) && !eventName(event).startsWith("relay.");
  const title = data.resources ? eventTitle(data) : data.eventId;
  return h("li", {}, h("span", { class: "when soft" }, time(event.time)), icon(name, tone),
    h("span", { class: "what" }, isAbout ? [h("a", { href: eventHref({ scope: event.scope, eventId: data.eventId }) }, title), ": "] : null, event.said));
}
