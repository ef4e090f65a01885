// The agents of a hub: who was heard, and when.

import { h, icon, showItems, table } from "./dom.js";
import { state } from "./store.js";
import { plural, roughly, time } from "./words.js";

const HEADS = ["Agent", "State", "Heard", "Version", "Zone", "Last poll", "Clock"];
const STATES = { fresh: ["ok", "good", "heard"], silent: ["bad", "bad", "silent"], unknown: ["none", "", "not known yet"] };

export function renderFleet(view) {
  if (!view.querySelector("#scopes")) {
    view.replaceChildren(h("section", { "aria-labelledby": "fleet-title" },
      h("h1", { id: "fleet-title", tabindex: "-1" }, "Fleet"),
      h("p", { id: "fleet-summary", class: "soft" }), h("div", { id: "scopes" })));
  }
  const agents = (state.fleet?.agents ?? []).filter(agent => !state.scope || agent.scope === state.scope);
  const silent = new Set(state.fleet?.silentScopes ?? []), scopes = new Map();
  for (const agent of agents) scopes.set(agent.scope, [...(scopes.get(agent.scope) ?? []), agent]);
  view.querySelector("#fleet-summary").textContent = state.fleet === null ? "One moment …" : agents.length
    ? `${plural(agents.length, "agent")} in ${plural(scopes.size, "scope")}, ${agents.filter(one => one.state === "silent").length} silent.`
    : "No agent was heard yet.";
  const groups = [...scopes].map(([scope, members]) => ({ scope, members, isSilent: silent.has(scope) }));
  groups.sort((one, other) => Number(other.isSilent) - Number(one.isSilent) || one.scope.localeCompare(other.scope));
  showItems(view.querySelector("#scopes"), groups, group => group.scope, renderScope);
}

function renderScope({ scope, members, isSilent }) {
  const silent = members.filter(one => one.state === "silent").length;
  const tone = isSilent ? "bad" : silent ? "warn" : "good";
  const text = isSilent ? "all silent: nobody hears of events here" : silent ? `${silent} of ${members.length} silent` : `${members.length} of ${members.length} heard`;
  return h("details", { class: `card scope-card ${tone}`, "data-key": scope, open: members.length <= 20 || silent > 0 },
    h("summary", {}, h("strong", {}, scope), " ", h("span", { class: `pill ${tone}` }, text)),
    table(`Agents of ${scope}`, HEADS, null, {}, members.map(renderAgent)));
}

function renderAgent(agent) {
  const [iconName, agentTone, word] = STATES[agent.state] ?? ["none", "", agent.state];
  return h("tr", {},
    h("th", { scope: "row" }, agent.name || agent.relay),
    h("td", {}, icon(iconName, agentTone), word),
    h("td", {}, time(agent.lastHeard, "ago")),
    h("td", {}, agent.version ?? "–"), h("td", {}, agent.zone ?? "–"),
    h("td", {}, agent.pollAgeSeconds === null ? "–" : `${roughly(agent.pollAgeSeconds)} old`),
    h("td", {}, clockText(agent.clockOffsetSeconds)));
}

function clockText(offset) {
  if (offset === null) return "–";
  return Math.abs(offset) < 1 ? "right" : `${roughly(Math.abs(offset))} ${offset > 0 ? "ahead" : "behind"}`;
}
