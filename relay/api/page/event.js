// One event: how it stands, what happened, its rules and deliveries.

import { facts, h, icon, setText, showItems, table } from "./dom.js";
import { state } from "./store.js";
import { actions, approvalFacts, countdown, standing } from "./now.js";
import { deliveryRow, mayOperate } from "./sinks.js";
import { eventTitle, mark, names, plural, sentence, source, time } from "./words.js";

const HEADS = ["Recorded", "Sink", "What", "State", ""];

export function renderEvent(view) {
  const detail = state.detail;
  if (detail === "unknown") {
    view.replaceChildren(h("h1", { tabindex: "-1" }, "No such event"),
      h("p", {}, "The relay does not know it, or does not remember it any more. ", h("a", { href: "#/" }, "Back to what is scheduled now")));
    return;
  }
  if (!detail || detail.eventId.toLowerCase() !== state.view.id.toLowerCase()) {
    view.replaceChildren(h("h1", { tabindex: "-1" }, "Event"), h("p", { class: "soft" }, "One moment …"));
    return;
  }
  if (view.querySelector("#event-view")?.dataset.id !== `${detail.scope}/${detail.eventId}`) build(view, detail);
  const { history, votes, deliveries, next, ...summary } = detail;
  showItems(view.querySelector("#event-card"), [{ ...summary, mode: state.status?.mode }], () => "card", renderSummary);
  setText(view.querySelector("#cut"), next ? "The beginning is left out: imds-relay show --all lists everything." : "");
  showItems(view.querySelector("#history"), history.slice().reverse(), event => event.id, renderLine);
  showItems(view.querySelector("#rules"), state.rule ? [{ rules: state.rule.rules, uncovered: state.rule.uncoveredResources, automatic: !state.rule.required }] : [], () => "rules", renderRules);
  const waiting = deliveries.filter(one => one.state === "waiting").length, parked = deliveries.filter(one => one.state === "parked").length;
  setText(view.querySelector("#deliveries-title"), `Deliveries: ${deliveries.length}${waiting ? `, ${waiting} waiting` : ""}${parked ? `, ${plural(parked, "dead letter")}` : ""}`);
  const open = deliveries.filter(isOpen), settled = deliveries.filter(one => !isOpen(one));
  view.querySelector("#open-table").hidden = !open.length;
  showItems(view.querySelector("#open"), open.map(one => ({ ...one, may: mayOperate() })), one => one.id, deliveryRow);
  view.querySelector("#settled").hidden = !settled.length;
  setText(view.querySelector("#settled-title"), `${settled.length} delivered or replaced`);
  showItems(view.querySelector("#deliveries"), settled, one => one.id, deliveryRow);
}

const isOpen = one => ["waiting", "parked"].includes(one.state);

function build(view, detail) {
  view.replaceChildren(h("div", { id: "event-view", "data-id": `${detail.scope}/${detail.eventId}` },
    h("p", { class: "back" }, h("a", { href: "#/" }, "← Scheduled now")),
    h("div", { id: "event-card" }),
    h("section", { "aria-labelledby": "history-title", class: "card" },
      h("h2", { id: "history-title" }, "What happened"),
      h("ol", { id: "history", class: "lines" }),
      h("p", { id: "cut", class: "soft" })),
    h("section", { "aria-labelledby": "rules-title", class: "card" },
      h("h2", { id: "rules-title" }, "Why: the rules"), h("div", { id: "rules" })),
    h("section", { "aria-labelledby": "deliveries-title", class: "card" },
      h("h2", { id: "deliveries-title" }),
      table("Deliveries that wait or were given up", HEADS, "open", { id: "open-table" }),
      h("details", { id: "settled" }, h("summary", { id: "settled-title" }), table("Deliveries that are settled", HEADS, "deliveries")))));
}

function renderSummary(detail) {
  const { tone, text } = standing(detail);
  return h("article", { class: `event card ${tone}` },
    h("div", { class: "event-head" },
      h("div", {}, h("h1", { tabindex: "-1" }, eventTitle(detail)), h("p", { class: "soft" }, h("span", { class: `pill ${tone}` }, text))),
      countdown(detail)),
    h("p", {}, detail.means),
    approvalFacts(detail), actions(detail),
    detail.outcome === null && detail.notBefore && detail.eventStatus !== "Started"
      ? h("p", { class: "soft small" }, detail.approval.holds.length && state.rule ? sentence(state.rule.holdMeans) : "Azure proceeds at NotBefore regardless.") : null,
    facts([
      ["Machines", detail.resources.length > 10
        ? h("details", { "data-key": "machines" }, h("summary", {}, plural(detail.resources.length, "machine")), h("p", {}, detail.resources.join(", ")))
        : names(detail.resources, 10) || "none is named"],
      ["Started by", source(detail.eventSource)],
      detail.description ? ["Azure says", detail.description] : null,
      ["Announced", [time(detail.firstSeen), " (", time(detail.firstSeen, "ago"), ")"]],
      detail.occurrence > 1 ? ["Seen before", `this EventId is in Azure’s document for time ${detail.occurrence}`] : null,
      ["Scope", detail.scope],
      ["EventId", h("code", {}, detail.eventId)],
      ["Revision", h("code", {}, detail.revision)],
    ], "more"));
}

function renderLine(event) {
  const [name, tone] = mark(event);
  return h("li", {}, h("span", { class: "when soft" }, time(event.time)), icon(name, tone), h("span", { class: "what" }, event.said));
}

function renderRules({ rules, uncovered, automatic }) {
  const decides = rules.find(rule => rule.decides);
  return h("div", {},
    h("p", { class: "soft" }, decides ? `Rule ${decides.name} decides: it is the first whose conditions the event meets.${automatic ? " It needs no votes." : ""}`
      : rules.length ? "No rule matches. This relay starts nothing, and Azure begins at NotBefore." : "There are no rules: this relay starts nothing."),
    uncovered.length ? h("p", {}, `Nobody has spoken for ${names(uncovered, 10)} yet.`) : null,
    h("ol", { class: "rules" }, rules.map(rule => h("li", { class: rule.decides ? "decides" : "" },
      icon(rule.decides ? "ok" : rule.unmet.length ? "bad" : "none", rule.decides ? "good" : ""), h("strong", {}, rule.name), " ",
      h("span", { class: "soft" }, rule.decides ? "decides" : rule.unmet.length ? `does not match: ${rule.unmet.join(", ")}` : "matches, after the one that decides")))));
}
