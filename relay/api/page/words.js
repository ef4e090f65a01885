// Words for people: times, and a sentence for each CloudEvent.

import { h } from "./dom.js";

let clockOffset = 0;

/** Follow the clock of the relay, which said that it is `now`. */
export function setClock(now) {
  clockOffset = Date.parse(now) - Date.now();
}

/** Milliseconds since 1970 by the clock of the relay. */
export function now() {
  return Date.now() + clockOffset;
}

const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const SHORT_CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const DAY = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short" });
const FULL = new Intl.DateTimeFormat(undefined, { dateStyle: "full", timeStyle: "long" });

/** Return a duration in two units at most, such as 1 h 59 min. */
export function duration(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  if (whole < 129600) return `${Math.floor(whole / 3600)} h ${String(Math.floor(whole / 60) % 60).padStart(2, "0")} min`;
  return `${Math.floor(whole / 86400)} days ${Math.floor(whole / 3600) % 24} h`;
}

/** Return a duration in one unit, such as 3 min. */
export function roughly(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 90) return `${whole} s`;
  if (whole < 5400) return `${Math.round(whole / 60)} min`;
  if (whole < 129600) return `${Math.round(whole / 3600)} h`;
  return `${Math.round(whole / 86400)} days`;
}

/** Return how long something takes, as chat, log and command line say it. */
export function takes(seconds) {
  if (seconds < 120) return `${seconds} s`;
  return seconds < 7200 ? `${Math.floor(seconds / 60)} min` : `${Math.floor(seconds / 3600)} h`;
}

/** Return the time of day, with the date unless it is today. */
export function clock(moment, { short = false } = {}) {
  const time = (short ? SHORT_CLOCK : CLOCK).format(moment);
  const isToday = new Date(moment).toDateString() === new Date(now()).toDateString();
  return isToday ? time : `${DAY.format(moment)} ${time}`;
}

const SHOWN = {
  clock: moment => clock(moment),
  in: moment => (moment > now() ? `in ${duration((moment - now()) / 1000)}` : `${roughly((now() - moment) / 1000)} ago`),
  left: moment => (moment > now() ? duration((moment - now()) / 1000) : "due"),
  ago: moment => (now() - moment < 2000 ? "just now" : `${roughly((now() - moment) / 1000)} ago`),
};

/** Make a time that keeps itself up to date. `how` is a key of SHOWN. */
export function time(text, how = "clock", attributes = {}) {
  const moment = Date.parse(text);
  if (Number.isNaN(moment)) return h("span", attributes, text ?? "not known");
  return h("time", { datetime: text, "data-how": how, title: FULL.format(moment), ...attributes }, SHOWN[how](moment));
}

/** Bring every time that is shown up to date. */
export function tick() {
  for (const element of document.querySelectorAll("time[data-how]")) {
    const text = SHOWN[element.dataset.how](Date.parse(element.dateTime));
    if (element.textContent !== text) element.textContent = text;
  }
}

/** Return how urgent NotBefore is: soon under 15 minutes, now under 5. */
export function urgency(notBefore) {
  const minutes = (Date.parse(notBefore) - now()) / 60000;
  return minutes < 5 ? "now" : minutes < 15 ? "soon" : "";
}

/** Return the names, and how many more there are. */
export function names(list, most = 3) {
  const shown = list.slice(0, most).join(", ");
  return list.length > most ? `${shown} and ${list.length - most} more` : shown;
}

export function plural(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

export function sentence(text) {
  return text ? `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}` : "";
}

export function eventTitle(data) {
  return `${data.eventType ?? "Maintenance"} of ${names(data.resources ?? []) || "no machine that is named"}`;
}

const IMPACTS = {
  __proto__: null, // a type can have any name, also that of a method
  freeze: "paused{duration}: memory and open files stay, connections can drop",
  reboot: "rebooted: what is in memory is lost",
  redeploy: "moved to another host: memory and temporary disks are lost",
  preempt: "taken away, being a Spot machine: its temporary disks are lost",
  terminate: "deleted",
};

export function impact(data) {
  const machines = data.resources?.length === 1 ? "The machine is" : "Each machine is";
  const known = IMPACTS[(data.eventType ?? "").toLowerCase()];
  if (!known) return "";
  const seconds = data.durationSeconds;
  const long = seconds === null || seconds === undefined ? null : takes(seconds);
  if (known.includes("{duration}")) {
    return `${machines} ${known.replace("{duration}", long ? ` for about ${long}` : " for a while")}.`;
  }
  return `${machines} ${known}${long ? `; it takes about ${long}` : ""}.`;
}

const SOURCES = { __proto__: null, platform: "Azure itself", user: "a user of the subscription" };

export function source(text) {
  return SOURCES[(text ?? "").toLowerCase()] ?? text ?? "not said";
}

const OUTCOMES = {
  completed: "Azure has completed it.",
  canceled: "Azure has taken it back: it does not happen.",
  unknown: "It is not in Azure's document any more; whether it happened is not known.",
};

export function outcome(text) {
  return OUTCOMES[text] ?? OUTCOMES.unknown;
}

/** Return the type of a CloudEvent without prefix and version, such as event.scheduled. */
export function typeName(type) {
  return type.replace(/^io\.imdsrelay\./, "").replace(/\.v[0-9]+$/, "");
}

/** Return the type of this CloudEvent without prefix and version. */
export function eventName(event) {
  return typeName(event.type);
}

const DECISIONS = { approve: "voted to approve", hold: "put it on hold", release: "released the hold" };
const VOID_REASONS = { changed: "the event has changed", expired: "they have expired", ended: "the event has ended" };
const RELAY_EVENTS = {
  "relay.source-lost": "Azure's metadata service does not answer this relay",
  "relay.source-recovered": "Azure's metadata service answers this relay again",
  "relay.silent": "No agent of a scope is heard of",
  "relay.sink-failing": "{sink} takes nothing",
  "relay.sink-recovered": "{sink} takes events again",
  "relay.sink-disabled": "{sink} is disabled until somebody resumes it",
  "relay.dead-lettered": "What {sink} did not take is given up",
  "relay.store-failing": "This relay cannot write its state file, and takes no approvals",
  "relay.clock-skewed": "The clocks of this relay and of {sink} differ",
  "relay.ping": "A test message for {sink}",
};
const FIELDS = {
  notBefore: "NotBefore", resources: "the machines", durationSeconds: "the duration", eventType: "the type",
  eventStatus: "the status", eventSource: "the source", resourceType: "the kind of machine", description: "the description",
};

function limits(waits) {
  return (waits ?? []).map(wait => wait.limit).join(", ");
}

const condition = given => {
  if (Array.isArray(given)) return given.length > 10 ? `${given.slice(0, 10).join(" ")} and ${given.length - 10} more` : given.join(" ");
  if (given === null || typeof given !== "object") return String(given);
  return Object.entries(given).map(([key, part]) => `${key} ${condition(part)}`).join(", ");
};

/** Return which events a standing hold is about. */
export function conditions(hold) {
  return [
    ...Object.entries(hold.match ?? {}).map(([key, given]) => `${key} ${condition(given)}`),
    ...(hold.within ?? []).map(patterns => `only inside ${condition(patterns)}`),
  ].join("; ") || "every event";
}

/** Return whose standing holds an event names, as a sentence. */
function standingHolds(data) {
  const listed = (data.standingHolds ?? []).map(hold => `${hold.principal} until ${value("notBefore", hold.until)}`);
  return listed.length ? ` It is held by ${listed.join(", and by ")} (standing hold).` : "";
}

function value(name, given) {
  if (given === null || given === undefined) return "not known";
  if (Array.isArray(given)) return names(given, 5) || "none";
  if (name === "notBefore" && !Number.isNaN(Date.parse(given))) return clock(Date.parse(given));
  return String(given);
}

function changes(data) {
  const listed = Object.entries(data.changed ?? {}).map(([name, before]) =>
    `${FIELDS[name] ?? name} from ${value(name, before)} to ${value(name, data[name])}`);
  return listed.join("; ") || "something";
}

/** Return what a CloudEvent tells: an icon, its tone, and a sentence. */
export function tell(event) {
  const data = event.data ?? {}, name = eventName(event);
  const dry = data.dryRun ? " It is a dry run." : "";
  const said = [data.reason && `“${data.reason}”`, data.ticket && `ticket ${data.ticket}`].filter(Boolean).join(", ");
  const reason = said && ` (${said})`;
  switch (name) {
    case "event.scheduled":
      return { icon: "bell", tone: "note", text: `Azure announced it${data.notBefore ? ` for ${value("notBefore", data.notBefore)}` : ""}.` };
    case "event.updated":
      return { icon: "edit", tone: "note", text: `Azure changed ${changes(data)}.` };
    case "event.started":
      return { icon: "start", tone: "run", text: `Azure began${data.approvedByRelay ? ", as this relay had approved" : ""}.` };
    case "event.ended":
      return { icon: "ok", tone: data.outcome === "completed" ? "good" : "", text: outcome(data.outcome) };
    case "approval.recorded": {
      const count = data.decision === "approve" && data.required ? `, ${data.votes} of ${data.required}` : "";
      const waits = data.waitingFor ? ` It is approved, and waits for limit ${limits(data.waitingFor)}.` : "";
      const notice = data.notice ? ` ${sentence(data.notice)}` : "";
      return {
        icon: { approve: "ok", hold: "hold", release: "open" }[data.decision] ?? "none",
        tone: data.decision === "hold" ? "held" : "good",
        text: `${data.principal} ${DECISIONS[data.decision] ?? data.decision}${count}${reason}.${waits}${notice}${standingHolds(data)}${dry}`,
      };
    }
    case "approval.granted":
      return {
        icon: "ok", tone: "good",
        text: `Approved by rule ${data.rule}: ${data.required ? `${data.votes} of ${data.required} votes` : "no votes needed"}.${dry}`,
      };
    case "approval.refused":
      return {
        icon: "bad", tone: "bad",
        text: `${data.principal} tried to ${data.decision}${data.count ? ` ${data.count} more times` : ""}, refused: ${data.refusal}.`,
      };
    case "approval.voided":
      return {
        icon: "none", tone: "warn",
        text: `The votes count no more: ${VOID_REASONS[data.why] ?? data.why}${data.waitedFor ? `, while the event waited for limit ${limits(data.waitedFor)}` : ""}.`,
      };
    case "approval.reminder":
      return {
        icon: "bell", tone: "warn",
        text: `Reminder: ${data.votes} of ${data.required} votes, ${data.missing} missing, from ${names(data.mayVote ?? [], 10)}. Azure proceeds at NotBefore regardless.${dry}`,
      };
    case "standing-hold.created":
      return { icon: "hold", tone: "held", text: `${data.principal} holds ${conditions(data)} from ${value("notBefore", data.starts)} until ${value("notBefore", data.ends)}${reason}. ${sentence(data.notice)}` };
    case "standing-hold.ended":
      return { icon: "open", tone: "good", text: `${data.endedBy} ended the standing hold of ${data.principal} on ${conditions(data)}${data.endReason ? ` (“${data.endReason}”)` : ""}.` };
    case "standing-hold.expired":
      return { icon: "open", tone: "", text: `The standing hold of ${data.principal} on ${conditions(data)} has expired.` };
    case "startrequest.accepted":
      return { icon: "send", tone: "good", text: "Azure accepted the StartRequest." };
    case "startrequest.failed":
      return { icon: "bad", tone: "bad", text: `The StartRequest failed: ${data.reason ?? "no reason is known"}.` };
    default: {
      const known = (RELAY_EVENTS[name] ?? name).replace("{sink}", data.sink ?? "a sink");
      const isGood = /recovered|ping/.test(name);
      return { icon: isGood ? "ok" : "bad", tone: isGood ? "good" : "warn", text: `${known}: ${data.reason ?? "no reason is known"}.` };
    }
  }
}
