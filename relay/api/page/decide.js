// The dialog in which somebody decides about the state of an event that they see.

import { h } from "./dom.js";
import { get, newId, post } from "./api.js";
import { state, want } from "./store.js";
import { eventTitle, plural, sentence, time } from "./words.js";

const LABELS = { approve: "Approve", hold: "Hold", release: "Release the hold" };
const dialog = document.getElementById("decide");
let open = null;

/** Ask about a decision. `item` is the event as the reader sees it: its revision is what they decide about. */
export async function openDecision(decision, item) {
  open = { decision, item, id: newId(), rule: null, isBusy: false };
  const current = open;
  show();
  if (!dialog.open) dialog.showModal();
  try {
    const path = `v1/events/${encodeURIComponent(item.eventId)}/rule?${new URLSearchParams({ scope: item.scope })}`;
    current.rule = await get(path);
  } catch { /* without it, the dialog lacks the notices of this very event; the gate decides by itself */ }
  if (open === current) updateNotices();
}

function show() {
  const { decision, item } = open;
  dialog.replaceChildren(
    h("form", { novalidate: true, on: { submit: decide } },
      h("h2", { id: "decide-title", tabindex: "-1" }, `${LABELS[decision]}?`),
      h("p", {}, h("strong", {}, eventTitle(item))),
      h("p", {}, question(decision)),
      h("dl", { class: "facts" },
        h("dt", {}, "NotBefore"), h("dd", {}, item.notBefore ? [time(item.notBefore), " (", time(item.notBefore, "in"), ")"] : "not known"),
        h("dt", {}, "Machines"), h("dd", {}, item.resources.join(", ") || "none is named"),
        h("dt", {}, "You decide about"), h("dd", {}, "revision ", h("code", {}, item.revision))),
      h("div", { id: "decide-alarms", role: "alert" }),
      h("div", { id: "decide-notices", class: "note" }),
      h("label", { for: "reason" }, "Reason ", h("span", { class: "soft" }, "(optional)")),
      h("textarea", { id: "reason", rows: 2, maxlength: 1000, autocomplete: "off", "aria-describedby": "reason-hint" }),
      h("p", { id: "reason-hint", class: "hint" }, "Everybody who is notified of the decision can read it."),
      h("p", { id: "decide-wrong", class: "wrong", role: "alert" }),
      h("p", { class: "actions" },
        h("button", { id: "decide-do", type: "submit" }, LABELS[decision]),
        h("button", { type: "button", class: "plain", on: { click: () => dialog.close() } }, "Cancel"))));
  updateNotices();
}

function question(decision) {
  return {
    approve: "It may begin within seconds of the last vote, and cannot be taken back.",
    hold: "This relay sends no StartRequest for it, whatever rules and votes say, until the hold is released or expires.",
    release: "Votes and rules are weighed again, and it may begin within seconds.",
  }[decision];
}

/** Say what holds and limits cannot do, and what changed since the reader looked. */
export function updateNotices() {
  const place = document.getElementById("decide-notices");
  if (!open || !place) return;
  const { item, rule } = open;
  const newest = state.live.find(one => one.eventId === item.eventId && one.scope === item.scope) ?? (state.detail?.eventId === item.eventId ? state.detail : null);
  const notices = [];
  showAlarms(item, newest);
  notices.push(sentence(open.decision === "approve"
    ? "Azure proceeds at NotBefore regardless, whether or not anybody approves"
    : rule?.holdMeans ?? "a hold stops this relay alone: Azure proceeds at NotBefore regardless, and other relays and Azure Resource Manager can approve"));
  if (item.approval.waitingFor.length && rule) notices.push(sentence(rule.limitMeans));
  const mode = rule?.mode ?? state.status?.mode;
  if (mode === "dry-run") notices.push("Approvals are a dry run: no StartRequest is sent.");
  if (mode === "off") notices.push("Approvals are off: nothing can be decided now.");
  place.replaceChildren(...notices.map(text => h("p", {}, text)));
}

function showAlarms(item, newest) {
  const place = document.getElementById("decide-alarms");
  const hasChanged = newest && newest.revision !== item.revision;
  const alarm = state.link === "lost" ? "The connection is lost: the event may have changed."
    : hasChanged ? "Azure has changed the event since you opened this. You would decide about its former state."
      : !newest && state.live.length < 1000 ? "The event is not in Azure’s document any more." : "";
  if (place.textContent.startsWith(alarm) && Boolean(place.textContent) === Boolean(alarm)) return;
  place.replaceChildren(...(alarm ? [h("div", { class: "alarm" }, h("p", {}, alarm), hasChanged
    ? h("button", { type: "button", class: "plain small", on: { click: () => openDecision(open.decision, newest) } }, "Look at its new state") : null)] : []));
}

async function decide(event) {
  event.preventDefault();
  const current = open;
  if (current.isBusy) return;
  const { item, decision, id } = current;
  const reason = document.getElementById("reason").value.trim();
  const button = document.getElementById("decide-do"), wrong = document.getElementById("decide-wrong");
  current.isBusy = true;
  wrong.textContent = "";
  button.setAttribute("aria-disabled", "true");
  button.textContent = "One moment …";
  const body = { eventId: item.eventId, scope: item.scope, decision, revision: item.revision, ...(reason && { reason }) };
  try {
    // The id stays while the dialog is open: a second try of the same decision counts once.
    const answer = await post("v1/approvals", body, { "Idempotency-Key": id });
    if (open === current) showOutcome(answer);
  } catch (failure) {
    if (open !== current) return;
    button.removeAttribute("aria-disabled");
    button.textContent = LABELS[decision];
    wrong.textContent = failure.status === 0
      ? "The relay cannot be reached. It may have taken your decision. Try again: it counts once."
      : sentence(failure.message);
    // Of a refusal the relay remembers its first answer: another try is another request.
    if (![0, 429, 503].includes(failure.status)) current.id = newId();
  } finally {
    current.isBusy = false;
    want();
  }
}

function showOutcome(answer) {
  const title = h("h2", { id: "decide-title", tabindex: "-1" }, { granted: "Approved", waiting: "Approved, and waiting" }[answer.state] ?? "Recorded");
  dialog.replaceChildren(h("div", { role: "status" }, title, h("p", {}, outcomeText(answer)),
    answer.notice ? h("p", {}, sentence(answer.notice)) : null,
    state.status?.mode === "dry-run" ? h("p", {}, "Approvals are a dry run: no StartRequest is sent.") : null,
    h("p", { class: "actions" }, h("button", { type: "button", on: { click: () => dialog.close() } }, "Close"))));
  title.focus();
}

function outcomeText(answer) {
  const votes = `${answer.votes} of ${plural(answer.required, "vote")}`;
  const notice = sentence(open.rule?.holdMeans ?? "a hold stops this relay alone: Azure proceeds at NotBefore regardless");
  const limit = sentence(open.rule?.limitMeans ?? "Azure proceeds at NotBefore regardless");
  switch (`${answer.decision} ${answer.state}`) {
    case "approve granted": return `It is approved, with ${votes}. It may begin within seconds.`;
    case "approve waiting": return `It is approved, with ${votes}, and waits for a limit. ${limit}`;
    case "approve held": return `Your vote is recorded, and waits while the event is held (${votes}). ${notice}`;
    case "approve pending": return `Your vote is recorded: ${votes}. More are missing, and until they come nothing is sent.`;
    case "hold held": return `It is on hold. ${notice}`;
    case "release held": return `Your hold is released, and others still hold. ${notice}`;
    case "release granted": return "The hold is released, and it is approved: it may begin within seconds.";
    case "release waiting": return `The hold is released, and it is approved and waits for a limit. ${limit}`;
    case "release pending": return `The hold is released, and it waits for votes: ${votes}.`;
    default: return "The hold is released, and nobody has voted.";
  }
}

dialog.addEventListener("close", () => { open = null; dialog.replaceChildren(); });
