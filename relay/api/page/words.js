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

/** Return the time of day, with the date unless it is today. */
export function clock(moment) {
  const time = CLOCK.format(moment);
  const isToday = new Date(moment).toDateString() === new Date(now()).toDateString();
  return isToday ? time : `${DAY.format(moment)} ${time}`;
}

const SHOWN = {
  clock,
  in: moment => (moment > now() ? `in ${duration((moment - now()) / 1000)}` : `${roughly((now() - moment) / 1000)} ago`),
  next: moment => (moment > now() ? SHOWN.in(moment) : "now"),
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
  const type = data.eventType ?? "Maintenance";
  return data.resources?.length ? `${type} of ${names(data.resources)}` : `${type} (no machine named)`;
}

const SOURCES = { __proto__: null, platform: "Azure itself", user: "a user of the subscription" };

export function source(text) {
  return SOURCES[(text ?? "").toLowerCase()] ?? text ?? "not said";
}

/** Return the type of a CloudEvent without prefix and version, such as event.scheduled. */
export function typeName(type) {
  return type.replace(/^io\.imdsrelay\./, "").replace(/\.v[0-9]+$/, "");
}

/** Return the type of this CloudEvent without prefix and version. */
export function eventName(event) {
  return typeName(event.type);
}

const condition = given => {
  if (Array.isArray(given)) return given.length > 10 ? `${given.slice(0, 10).join(" ")} and ${given.length - 10} more` : given.join(" ");
  if (given === null || typeof given !== "object") return String(given);
  return Object.entries(given).map(([key, part]) => `${key} ${condition(part)}`).join(", ");
};

/** Return which events a standing hold is about. */
export function conditions(hold) {
  return Object.entries(hold.match ?? {}).map(([key, given]) => `${key} ${condition(given)}`).join("; ") || "every event";
}

const MARKS = {
  __proto__: null,
  "event.scheduled": ["bell", "note"], "event.updated": ["edit", "note"], "event.started": ["start", "run"], "event.ended": ["ok", "good"],
  "approval.granted": ["ok", "good"], "approval.refused": ["bad", "bad"], "approval.voided": ["none", "warn"], "approval.reminder": ["bell", "warn"],
  "standing-hold.created": ["hold", "held"], "standing-hold.ended": ["open", "good"], "standing-hold.expired": ["open", ""],
  "startrequest.accepted": ["send", "good"], "startrequest.failed": ["bad", "bad"],
  approve: ["ok", "good"], hold: ["hold", "held"], release: ["open", "good"],
};

/** Return the icon of a CloudEvent and its tone. What it tells is said by the relay: `event.said`. */
export function mark(event) {
  const name = eventName(event);
  if (name === "event.ended" && event.data?.outcome !== "completed") return ["ok", ""];
  return MARKS[name === "approval.recorded" ? event.data?.decision : name] ?? (/recovered|ping/.test(name) ? ["ok", "good"] : ["bad", "warn"]);
}
