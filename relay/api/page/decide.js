// The question before a decision: about the state of an event that somebody sees, or a standing hold.

import { facts, h, setText } from "./dom.js";
import { Failure, get, key, newId, post, session } from "./api.js";
import { state, want } from "./store.js";
import { eventTitle, plural, sentence, time } from "./words.js";

/** The labels of the buttons that decide. */
export const LABELS = { approve: "Approve", hold: "Hold", release: "Release the hold" };
/** What a decision does: as a rule, while the event stays on hold, and in a dry run. */
const QUESTIONS = {
  approve: ["It may begin within seconds of the last vote, and cannot be taken back.",
    "It is on hold: the vote waits until no hold is in force, and then it may begin within seconds.", "The vote counts in the dry run alone."],
  hold: ["This relay sends no StartRequest for it, whatever rules and votes say, until the hold is released or expires."],
  release: ["Votes and rules are weighed again, and it may begin within seconds.",
    "A standing hold is in force too: the event stays on hold.", "Votes and rules are weighed again."],
};
const isDryRun = () => state.status?.mode === "dry-run";
const HOLD_NOTICE = "a hold stops this relay alone: Azure proceeds at NotBefore regardless, and other relays and Azure Resource Manager can approve";
const MAX_LIVE = 1000;
const dialog = document.getElementById("decide");
let open = null;

/** Ask about a decision. `item` is the event as the reader sees it: the decision is about its revision. */
export async function openDecision(decision, item) {
  const current = {
    label: LABELS[decision], question: () => eventQuestion(item, decision), title: eventTitle(item), item, decision, rule: null,
    facts: [
      ["NotBefore", item.notBefore ? [time(item.notBefore), " (", time(item.notBefore, "in"), ")"] : "not known"],
      ["Machines", item.resources.join(", ") || "none is named"],
      ["You decide about", ["revision ", h("code", {}, item.revision)]],
    ],
    notices: () => eventNotices(current),
    alarm: () => eventAlarm(item),
    send: (id, reason) => post("v1/approvals",
      { eventId: item.eventId, scope: item.scope, decision, revision: item.revision, ...(reason && { reason }) }, { "Idempotency-Key": id }),
    outcome: answer => outcomeText(answer, current.rule),
  };
  show(current);
  try {
    const path = `v1/events/${encodeURIComponent(item.eventId)}/rule?${new URLSearchParams({ scope: item.scope })}`;
    current.rule = await get(path);
  } catch { /* without it, the notices are the general ones; the gate decides by itself */ }
  if (open === current) updateNotices();
}

/** Ask whether a standing hold ends now. */
export function openEndOfHold(hold, about) {
  show({
    label: "End the standing hold", title: about,
    question: () => `Votes and rules of the events that it holds are weighed again${isDryRun() ? "" : ", and they may begin within seconds"}.`,
    facts: [["Made by", hold.principal], ["Because", hold.reason], ["It would end", [time(hold.ends), " (", time(hold.ends, "in"), ")"]]],
    notices: () => [sentence(hold.notice ?? HOLD_NOTICE)],
    alarm: () => ({ text: state.link === "lost" ? "The connection is lost: the standing hold may have ended." : "" }),
    send: (id, reason) => post(`v1/standing-holds/${encodeURIComponent(hold.holdId)}/end`, reason ? { reason } : {}, { "Idempotency-Key": id }),
    outcome: () => ["Ended", "The standing hold has ended. What it held goes on as rules, votes and other holds say."],
  });
}

function show(question) {
  open = Object.assign(question, { id: newId(), isBusy: false, principal: state.status?.caller.principal });
  dialog.replaceChildren(
    h("form", { novalidate: true, on: { submit: decide } },
      h("h2", { id: "decide-title", tabindex: "-1" }, `${open.label}?`),
      h("p", {}, h("strong", {}, open.title)),
      h("p", { id: "decide-question" }),
      facts(open.facts),
      h("div", { id: "decide-alarms", role: "alert" }),
      h("div", { id: "decide-notices", class: "note" }),
      h("label", { for: "reason" }, "Reason ", h("span", { class: "soft" }, "(optional)")),
      h("textarea", { id: "reason", rows: 2, maxlength: 1000, autocomplete: "off", "aria-describedby": "reason-hint" }),
      h("p", { id: "reason-hint", class: "hint" }, "Everybody who is notified of the decision can read it."),
      h("p", { id: "decide-wrong", class: "wrong", role: "alert" }),
      h("p", { class: "actions" },
        h("button", { id: "decide-do", type: "submit" }, open.label),
        h("button", { type: "button", class: "plain", on: { click: () => dialog.close() } }, "Cancel"))));
  if (!dialog.open) dialog.showModal();
  updateNotices();
}

/** Say what a decision cannot do, and what changed since the reader looked. */
export function updateNotices() {
  const place = document.getElementById("decide-notices");
  if (!open || !place) return;
  setText(document.getElementById("decide-question"), open.question());
  document.getElementById("decide-do").disabled = open.decision && state.status?.mode === "off";
  place.replaceChildren(...open.notices().map(text => h("p", {}, text)));
  const alarms = document.getElementById("decide-alarms"), { text, button } = open.alarm();
  if (alarms.dataset.text === text) return; // a screen reader says it once
  alarms.dataset.text = text;
  alarms.replaceChildren(...(text ? [h("div", { class: "alarm" }, h("p", {}, text), button)] : []));
}

const newestOf = item => {
  const isSame = one => one.eventId === item.eventId && one.scope === item.scope;
  return state.live.find(isSame) ?? [state.detail].find(one => one?.history && isSame(one));
};

function eventQuestion(item, decision) {
  const { holds, standingHolds } = (newestOf(item) ?? item).approval, [question, onHold, dryRun] = QUESTIONS[decision];
  const isHeld = standingHolds.length || (decision === "approve" && holds.length);
  return (isDryRun() ? dryRun : isHeld ? onHold : null) ?? question;
}

function eventNotices({ decision, item, rule }) {
  const notices = [sentence(decision === "approve" ? "Azure proceeds at NotBefore regardless, whether or not anybody approves" : rule?.holdMeans ?? HOLD_NOTICE)];
  if (item.approval.waitingFor.length && rule) notices.push(sentence(rule.limitMeans));
  if (isDryRun()) notices.push("Approvals are a dry run: no StartRequest is sent.");
  if (state.status?.mode === "off") notices.push("Approvals are off: nothing can be decided now.");
  return notices;
}

function eventAlarm(item) {
  const newest = newestOf(item);
  if (state.link === "lost") return { text: "The connection is lost: the event may have changed." };
  if (newest && newest.revision !== item.revision) {
    return {
      text: "Azure has changed the event since. You would decide about its former state.",
      button: h("button", { type: "button", class: "plain small", on: { click: () => openDecision(open.decision, newest) } }, "Look at its new state"),
    };
  }
  return { text: newest && newest.outcome === null || state.live.length >= MAX_LIVE ? "" : "The event is not in Azure’s document any more." };
}

/** In another tab somebody else may have signed in since, and the cookie is theirs. */
async function checkSamePerson(before) {
  if (key.get() !== null) return;
  const { principal } = await session();
  if (principal && principal !== before) throw new Failure(403, "somebody else has signed in, and nothing was decided: close this, and look who you are");
}

async function decide(event) {
  event.preventDefault();
  const current = open;
  if (current.isBusy) return;
  const button = document.getElementById("decide-do"), wrong = document.getElementById("decide-wrong");
  current.isBusy = true;
  wrong.textContent = "";
  button.setAttribute("aria-disabled", "true");
  button.textContent = "One moment …";
  try {
    await checkSamePerson(current.principal);
    // The id stays while the question is open: a second try of the same decision counts once.
    const answer = await current.send(current.id, document.getElementById("reason").value.trim());
    if (open === current) showOutcome(answer);
  } catch (failure) {
    if (open !== current) return;
    button.removeAttribute("aria-disabled");
    button.textContent = current.label;
    wrong.textContent = failure.status === 0
      ? "The relay cannot be reached. It may have taken your decision. Try again: it counts once." : sentence(failure.message);
    wrong.scrollIntoView({ block: "nearest" });
    // Of a refusal the relay remembers its first answer: another try is another request.
    if (![0, 429, 503].includes(failure.status)) current.id = newId();
  } finally {
    current.isBusy = false;
    want();
  }
}

function showOutcome(answer) {
  const [heading, text] = open.outcome(answer);
  const title = h("h2", { id: "decide-title", tabindex: "-1" }, heading);
  dialog.replaceChildren(h("div", { role: "status" }, title, h("p", {}, text),
    answer.notice ? h("p", {}, sentence(answer.notice)) : null,
    h("p", { class: "actions" }, h("button", { type: "button", on: { click: () => dialog.close() } }, "Close"))));
  title.focus();
}

function outcomeText(answer, rule) {
  const votes = `${answer.votes} of ${plural(answer.required, "vote")}`;
  const begins = isDryRun() ? "" : " It may begin within seconds.";
  const notice = sentence(rule?.holdMeans ?? HOLD_NOTICE), limit = sentence(rule?.limitMeans ?? "Azure proceeds at NotBefore regardless");
  const texts = {
    "approve granted": `It is approved, with ${votes}.${begins}`,
    "approve waiting": `It is approved, with ${votes}, and waits for a limit. ${limit}`,
    "approve held": `Your vote is recorded, and waits while the event is held (${votes}). ${notice}`,
    "approve pending": `Your vote is recorded: ${votes}. More are missing, and until they come nothing is sent.`,
    "hold held": `It is on hold. ${notice}`,
    "release held": `Your hold is released, and the event is still held. ${notice}`,
    "release granted": `The hold is released, and it is approved.${begins}`,
    "release waiting": `The hold is released, and it is approved and waits for a limit. ${limit}`,
    "release pending": `The hold is released, and it waits for votes: ${votes}.`,
  };
  const heading = { granted: "Approved", waiting: "Approved, and waiting" }[answer.state] ?? "Recorded";
  return [heading, texts[`${answer.decision} ${answer.state}`] ?? "The hold is released, and nobody has voted."];
}

dialog.addEventListener("close", () => { open = null; dialog.replaceChildren(); });
