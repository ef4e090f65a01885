// What is scheduled now, the relay's health, and what ended lately.

import { facts, h, icon, showItems, svg } from "./dom.js";
import { state } from "./store.js";
import { LABELS, openDecision, openEndOfHold } from "./decide.js";
import { mayOperate, moreButton } from "./sinks.js";
import { conditions, eventTitle, names, now, plural, roughly, sentence, source, time, urgency } from "./words.js";

const SHOWN_AT_ONCE = 50;
let shown = SHOWN_AT_ONCE;

/** Return the address of an event's view. */
export function eventHref(item) {
  return `#/event/${encodeURIComponent(item.scope)}/${encodeURIComponent(item.eventId)}`;
}

/** Return the state of an event in a few words, and its tone. */
export function standing(item) {
  const approval = item.approval, limits = approval.waitingFor.map(wait => wait.limit).join(", ");
  if (item.outcome !== null) return { tone: item.outcome === "completed" ? "good" : "", text: item.outcome };
  if (item.eventStatus === "Started") return { tone: "run", text: "Azure has begun" };
  switch (approval.state) {
    case "held": return { tone: "held", text: "on hold" };
    case "pending": return approval.missing
      ? { tone: "warn", text: `${plural(approval.missing, "vote")} missing` } : { tone: "good", text: "votes complete" };
    case "waiting": return { tone: "warn", text: `approved, waits for limit ${limits}` };
    case "granted": return { tone: "good", text: "approved" };
    case "sent": return { tone: "good", text: "StartRequest sent" };
    case "accepted": return { tone: "good", text: "Azure accepted the StartRequest" };
    case "failed": return { tone: "bad", text: "StartRequest failed" };
    default: return state.status?.mode === "off" && approval.rule
      ? { tone: "", text: "approvals are off" }
      : { tone: "", text: approval.rule ? "not approved" : "no rule: nobody votes" };
  }
}

export function renderNow(view) {
  if (!view.querySelector("#events")) {
    shown = SHOWN_AT_ONCE;
    view.replaceChildren(
      h("section", { "aria-labelledby": "health-title" },
        h("h2", { id: "health-title", class: "quiet" }, "Health"), h("ul", { id: "health", class: "chips" })),
      h("section", { "aria-labelledby": "now-title" },
        h("h1", { id: "now-title", tabindex: "-1" }, "Scheduled now"),
        h("p", { id: "now-empty", class: "empty", hidden: true }),
        h("div", { id: "events" }),
        h("button", { id: "more-live", class: "plain", type: "button", hidden: true,
          on: { click: () => { shown += SHOWN_AT_ONCE; renderNow(view); } } })),
      h("section", { id: "standing", "aria-labelledby": "standing-title", hidden: true },
        h("h2", { id: "standing-title" }, "Standing holds"), h("ul", { id: "standing-holds", class: "rows" })),
      h("section", { "aria-labelledby": "recent-title" },
        h("h2", { id: "recent-title" }, "Ended lately"),
        h("p", { id: "recent-empty", class: "soft", hidden: true }, "No event has ended yet, as far as the state file remembers."),
        h("ul", { id: "recent", class: "rows" }),
        moreButton("more-recent", "recent", "Earlier events")));
  }
  renderHealth(view.querySelector("#health"));
  const live = state.live.slice(0, shown);
  showItems(view.querySelector("#events"), live.map(withSituation), item => `${item.scope}/${item.eventId}/${item.occurrence}`, renderCard);
  const empty = view.querySelector("#now-empty"), rest = state.live.length - live.length;
  empty.hidden = Boolean(state.live.length) || !state.status;
  empty.replaceChildren(...emptyText());
  const moreLive = view.querySelector("#more-live");
  moreLive.hidden = rest <= 0;
  moreLive.textContent = `${rest} later ones`;
  view.querySelector("#standing").hidden = !state.standingHolds.length;
  showItems(view.querySelector("#standing-holds"), state.standingHolds.map(hold => ({ ...hold, may: mayOperate() })), hold => hold.holdId, renderStandingHold);
  const ended = [...state.recent ?? []].sort((one, other) => Date.parse(other.lastChanged) - Date.parse(one.lastChanged));
  showItems(view.querySelector("#recent"), ended, item => `${item.scope}/${item.eventId}/${item.occurrence}`, renderEnded);
  view.querySelector("#recent-empty").hidden = state.recent === null || state.recent.length > 0;
  view.querySelector("#more-recent").hidden = !state.recentNext;
}

/** What a card shows depends on the mode too. */
function withSituation(item) {
  return { ...item, mode: state.status?.mode, ownScope: state.status?.hub ? null : state.status?.scope };
}

function emptyText() {
  const status = state.status;
  if (!status) return [];
  if (!status.source.ok) return ["The relay does not hear of events now: something may be scheduled."];
  if (status.hub) return [h("strong", {}, "Nothing is scheduled."), ` No agent${state.scope ? ` of ${state.scope}` : ""} reports an event.`];
  return [h("strong", {}, "Nothing is scheduled."), " Azure’s document lists no event for these machines."];
}

// --- health

function renderHealth(list) {
  const status = state.status;
  showItems(list, status ? healthOf(status, state.sinks) : [], part => part.name, part =>
    h("li", { class: `chip ${part.tone}` }, icon(part.icon, part.tone),
      h("span", {}, h("strong", {}, part.name), " ", h("span", { class: "chip-text" }, part.text)),
      part.reason ? h("span", { class: "chip-reason" }, sentence(part.reason)) : null));
}

/** Return the parts of the relay: whether each works, in a word and with the reason. */
export function healthOf(status, sinks) {
  const part = (name, ok, text, reason = null) => ({ name, tone: ok ? "good" : "bad", icon: ok ? "ok" : "bad", text, reason });
  const doubt = (name, text, reason = null, sign = "none") => ({ name, tone: "warn", icon: sign, text, reason });
  const parts = [];
  const source = status.source, store = status.store, link = status.approvalsLink;
  const age = source.readAgeSeconds;
  const read = age === null ? "" : age < 15 ? "read seconds ago" : `read ${roughly(age)} ago`;
  const hears = status.hub ? "Agents" : "Source", heard = status.hub ? "heard" : read || "not read yet";
  const tries = `${heard}; ${status.hub ? "connections" : "polls"} failed since: ${source.failures}`;
  parts.push(source.ok && source.failures ? doubt(hears, tries) : part(hears, source.ok, source.ok ? heard : "lost", source.reason));
  parts.push(part("State file", store.ok, store.ok ? "written" : "failing", store.ok ? null : `${store.reason}; notices go out from memory, approvals are refused`));
  for (const sink of sinks.filter(one => one.kind === "rabbitmq")) {
    const ok = sink.state === "on" && !sink.failing;
    parts.push(part(`Broker ${sink.name}`, ok, ok ? "takes events" : sink.state === "on" ? "failing" : sink.state, ok ? null : sink.reason));
  }
  if (link) parts.push(part("Approvals link", link.ok, link.ok ? "connected" : "not connected", link.reason));
  const others = sinks.filter(one => one.kind !== "rabbitmq");
  const wrong = others.filter(one => one.state !== "on" || one.failing);
  for (const sink of wrong) {
    const name = `Sink ${sink.name}`, text = sink.state === "on" ? "failing" : sink.state;
    parts.push(sink.state === "paused" ? doubt(name, text, sink.reason, "hold") : part(name, false, text, sink.reason));
  }
  const taking = `${others.length - wrong.length} of ${others.length} take events`;
  if (others.length) parts.push(wrong.length ? doubt("Sinks", taking) : part("Sinks", true, taking));
  const skew = source.clockOffsetSeconds;
  if (skew !== null && Math.abs(skew) > 30) parts.push(part("Clock", false, `${roughly(Math.abs(skew))} ${skew > 0 ? "ahead of" : "behind"} Azure’s`));
  const modes = { "dry-run": "dry run: nothing is started", off: "off: nothing can be decided" };
  parts.push(status.mode === "on" ? part("Approvals", true, "on") : doubt("Approvals", modes[status.mode] ?? "not known"));
  const rank = { bad: 0, warn: 1, good: 2 };
  return parts.sort((one, other) => rank[one.tone] - rank[other.tone]);
}

// --- the card of an event

function renderCard(item) {
  const { tone, text } = standing(item);
  return h("article", { class: `event card ${tone}`, "aria-label": eventTitle(item) },
    h("div", { class: "event-head" },
      h("div", {},
        h("h2", {}, h("a", { href: eventHref(item), "data-key": "title" }, eventTitle(item))),
        h("p", { class: "soft" }, h("span", { class: `pill ${tone}` }, text), " · ",
          item.scope !== item.ownScope ? [h("span", { class: "scope" }, item.scope), " · "] : null,
          `started by ${source(item.eventSource)}`)),
      countdown(item)),
    fuse(item),
    h("p", { class: "impact" }, item.means),
    approvalFacts(item),
    actions(item));
}

/** The time that is left, large. */
export function countdown(item) {
  if (item.outcome !== null) return null;
  if (item.eventStatus === "Started") return h("p", { class: "count run" }, h("strong", {}, "begun"), h("span", {}, time(item.lastChanged, "ago")));
  if (["sent", "accepted"].includes(item.approval.state)) {
    return h("p", { class: "count run" }, h("strong", {}, "any moment"),
      item.notBefore ? h("span", {}, "NotBefore ", time(item.notBefore)) : null);
  }
  if (!item.notBefore) return h("p", { class: "count" }, h("strong", {}, "soon"), h("span", {}, "Azure gave no NotBefore"));
  return h("p", { class: `count ${urgency(item.notBefore)}`, "data-notbefore": item.notBefore },
    h("strong", {}, time(item.notBefore, "left")),
    h("span", {}, "NotBefore ", time(item.notBefore)));
}

/** How much of the time between the announcement and NotBefore is left, as a line. */
function fuse(item) {
  if (!item.notBefore || item.eventStatus === "Started" || item.outcome !== null) return null;
  const from = Date.parse(item.firstSeen), to = Date.parse(item.notBefore), closes = Date.parse(item.approval.closes);
  if (!(to > from)) return null;
  const at = moment => Math.min(1000, Math.max(0, (1000 * (moment - from)) / (to - from)));
  return svg("svg", { class: "fuse", viewBox: "0 0 1000 10", preserveAspectRatio: "none", "aria-hidden": "true", "data-from": from, "data-to": to },
    svg("rect", { class: "fuse-all", x: 0, y: 3, width: 1000, height: 4 }),
    svg("rect", { class: "fuse-gone", x: 0, y: 3, width: at(now()), height: 4 }),
    closes < to ? svg("rect", { class: "fuse-closes", x: at(closes), y: 0, width: 3, height: 10 }) : null);
}

/** Move the lines on, and color the countdowns. */
export function tickCards() {
  for (const line of document.querySelectorAll(".fuse")) {
    const from = Number(line.dataset.from), to = Number(line.dataset.to);
    const width = Math.min(1000, Math.max(0, (1000 * (now() - from)) / (to - from)));
    line.querySelector(".fuse-gone").setAttribute("width", width.toFixed(1));
  }
  for (const count of document.querySelectorAll("[data-notbefore]")) {
    count.className = `count ${urgency(count.dataset.notbefore)}`;
  }
}

/** Who has voted, who must still vote, who holds, and for what it waits. */
export function approvalFacts(item) {
  const approval = item.approval, isOpen = item.outcome === null && item.eventStatus !== "Started";
  const rows = [];
  if (isOpen && approval.required) {
    rows.push(["Votes", h("span", {}, `${approval.votes} of ${approval.required}`, approval.rule ? ` by rule ${approval.rule}` : "",
      approval.closes && approval.closes !== item.notBefore && approval.missing ? ["; voting closes ", time(approval.closes, "in")] : null)]);
    if (approval.voted.length) rows.push(["Voted", people(approval.voted.map(vote => vote.principal), "ok", "good")]);
    if (approval.mayVote.length) rows.push([approval.missing === approval.mayVote.length ? "Must still vote" : "Can still vote", people(approval.mayVote, "open", "")]);
  } else if (isOpen && approval.rule) {
    rows.push(["Rule", `${approval.rule}: needs no votes`]);
  } else if (isOpen) {
    rows.push(["Rule", "none allows this relay to approve it: Azure begins at NotBefore"]);
  }
  if (approval.holds.length) {
    rows.push(["Held by", h("ul", { class: "people" }, approval.holds.map(hold => h("li", {}, icon("hold", "held"), hold.principal,
      hold.until ? [" until ", time(hold.until)] : null)))]);
  }
  for (const hold of approval.standingHolds) {
    rows.push(["Standing hold", h("span", {}, icon("hold", "held"), ` ${hold.principal} until `, time(hold.until), `: ${hold.reason}`)]);
  }
  for (const wait of isOpen ? approval.waitingFor : []) {
    rows.push(["Waits for", h("span", {}, `limit ${wait.limit}: ${plural(wait.max, "machine")} at once`,
      wait.machines?.length ? `, taken by ${names(wait.machines, 5)}` : "", wait.until ? [", until ", time(wait.until)] : null)]);
  }
  if (isOpen && approval.runbook?.startsWith("https:")) {
    rows.push(["Runbook", h("a", { href: approval.runbook, target: "_blank", rel: "noopener noreferrer" }, approval.runbook)]);
  }
  return rows.length ? facts(rows) : null;
}

function people(principals, name, tone) {
  return h("ul", { class: "people" }, principals.slice(0, 12).map(one => h("li", {}, icon(name, tone), one)),
    principals.length > 12 ? h("li", {}, `and ${principals.length - 12} more`) : null);
}

/** The decisions that this reader may take. */
export function actions(item) {
  const decisions = item.approval.decisions;
  if (!decisions.length) return null;
  return h("p", { class: "actions" }, decisions.map(decision => {
    const label = decision === "hold" && item.approval.holds.length ? "Hold too" : LABELS[decision];
    return h("button", {
      type: "button", "data-key": decision, class: decision === "approve" ? "" : "plain",
      "aria-label": `${label}: ${eventTitle(item)}`, on: { click: () => openDecision(decision, item) },
    }, label);
  }));
}

// --- standing holds

function renderStandingHold(hold) {
  const about = conditions(hold);
  return h("li", {}, icon("hold", "held"),
    h("span", { class: "what" }, h("strong", {}, about), ` by ${hold.principal} (“${hold.reason}”)`, h("span", { class: "soft block small" },
      hold.state === "upcoming" ? ["from ", time(hold.starts), " "] : "", "until ", time(hold.ends), " (", time(hold.ends, "in"), ")")),
    hold.may ? h("button", { class: "plain small", type: "button", "data-key": "end", "aria-label": `End the standing hold on ${about}`,
      on: { click: () => openEndOfHold(hold, about) } }, "End") : null);
}

// --- what is over

function renderEnded(item) {
  return h("li", {},
    h("span", { class: "when soft" }, time(item.lastChanged, "ago")),
    h("span", { class: "what" }, h("a", { href: eventHref(item), "data-key": "title" }, eventTitle(item)),
      item.occurrence > 1 ? ` (time ${item.occurrence})` : "",
      h("span", { class: "soft" }, ` ${item.means}`)));
}

