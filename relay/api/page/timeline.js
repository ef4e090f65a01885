// The picture of what happened to an event: a line of time with a lane for Azure, people, the relay
// and each sink. The list below it says the same in words.

import { h, svg } from "./dom.js";
import { clock, eventName, mark, now, typeName } from "./words.js";

const LEFT = 108, RIGHT = 14, TOP = 22, LANE = 30, AXIS = 24;
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

/** Make the picture of an event, as wide as it will be shown. */
export function timeline(detail, width) {
  const history = detail.history.filter(event => !Number.isNaN(Date.parse(event.time)));
  const isLive = detail.outcome === null, present = now();
  const first = Date.parse(detail.firstSeen);
  const ends = [first + 1000, ...history.map(event => Date.parse(event.time)),
    ...detail.deliveries.map(one => Date.parse(one.settled ?? one.recorded))];
  const notBefore = Date.parse(detail.notBefore);
  if (isLive) ends.push(present);
  if (notBefore > first && (isLive || notBefore < Math.max(...ends) + 60000)) ends.push(notBefore);
  const last = Math.max(...ends) + (Math.max(...ends) - first) * 0.03;
  const lanes = ["Azure", "People", "Relay", ...new Set(detail.deliveries.map(one => one.sink).reverse())];
  const height = TOP + lanes.length * LANE + AXIS;
  const left = width < 480 ? 74 : LEFT;
  const x = moment => left + ((Math.min(last, Math.max(first, moment)) - first) / (last - first)) * (width - left - RIGHT);
  const y = lane => TOP + lanes.indexOf(lane) * LANE + LANE / 2;
  const place = dodge();
  return svg("svg", { class: "timeline", width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `Timeline with ${history.length} events; the list below says the same` },
  axis(first, last, x, height),
  lanes.map(lane => svg("g", {},
    svg("line", { class: "lane", x1: left, x2: width - RIGHT, y1: y(lane), y2: y(lane) }),
    svg("text", { class: "lane-name", x: left - 10, y: y(lane) + 4, "text-anchor": "end" }, cut(lane, left < LEFT ? 9 : 14)))),
  isLive ? line(x(present), height, width, "now", "now") : null,
  notBefore > first && notBefore <= last ? line(x(notBefore), height, width, "due", "NotBefore") : null,
  azureBar(detail, history, x, y("Azure"), last, isLive, present),
  holdBars(history, x, y("People"), isLive ? present : ends.reduce((a, b) => Math.max(a, b))),
  detail.deliveries.slice().reverse().map(one => delivery(one, x, y(one.sink), present, place)),
  history.map(event => point(event, x, y, place)));
}

function cut(text, length) {
  return text.length > length ? `${text.slice(0, length - 1)}…` : text;
}

/** Points of a lane that would cover each other move to the right. */
function dodge() {
  const taken = new Map();
  return (lane, at, space) => {
    const to = Math.max(at, taken.get(lane) ?? -Infinity);
    taken.set(lane, to + space);
    return to;
  };
}

function axis(first, last, x, height) {
  const step = 1000 * (STEPS.find(seconds => x(first + seconds * 1000) - x(first) > 84) ?? STEPS.at(-1));
  const offset = new Date(first).getTimezoneOffset() * 60000;
  const ticks = [];
  for (let at = Math.ceil((first - offset) / step) * step + offset; at < last; at += step) ticks.push(at);
  return svg("g", { class: "axis" }, ticks.slice(0, 40).map(at => [
    svg("line", { x1: x(at), x2: x(at), y1: TOP, y2: height - AXIS }),
    svg("text", { x: x(at), y: height - 6, "text-anchor": "middle" }, clock(at, { short: step >= 60000 })),
  ]));
}

function line(at, height, width, kind, text) {
  const anchor = at > width - 60 ? "end" : "middle";
  return svg("g", { class: `mark ${kind}` }, svg("line", { x1: at, x2: at, y1: TOP - 4, y2: height - AXIS }),
    svg("text", { x: anchor === "end" ? width - 2 : at, y: TOP - 9, "text-anchor": anchor }, text));
}

function azureBar(detail, history, x, y, last, isLive, present) {
  const at = name => Date.parse(history.find(event => eventName(event) === name)?.time);
  const started = at("event.started"), ended = isLive ? present : at("event.ended") || Date.parse(detail.lastChanged);
  const from = Date.parse(detail.firstSeen), until = started || ended;
  const bar = (kind, begin, end, text) => svg("rect", { class: `bar ${kind}`, x: x(begin), y: y - 5, width: Math.max(1, x(end) - x(begin)), height: 10, rx: 3 },
    svg("title", {}, text));
  return svg("g", {}, bar("scheduled", from, until, "scheduled"), started ? bar("run", started, ended, "started") : null);
}

function holdBars(history, x, y, end) {
  const begun = new Map(), bars = [];
  for (const event of history) {
    const { decision, principal } = event.data ?? {}, at = Date.parse(event.time);
    if (eventName(event) !== "approval.recorded") continue;
    if (decision === "hold" && !begun.has(principal)) begun.set(principal, at);
    if (decision === "release") {
      const whose = begun.has(principal) ? [principal] : [...begun.keys()];
      for (const one of whose) {
        bars.push([begun.get(one), at, one]);
        begun.delete(one);
      }
    }
  }
  for (const [one, at] of begun) bars.push([at, end, one]);
  return svg("g", {}, bars.map(([from, to, who]) => svg("rect", { class: "bar held", x: x(from), y: y - 5, width: Math.max(1, x(to) - x(from)), height: 10, rx: 3 },
    svg("title", {}, `held by ${who}`))));
}

const SHAPES = {
  ok: "M-6 0a6 6 0 1 0 12 0a6 6 0 1 0 -12 0Z M-2.8 .2L-.8 2.2L3 -2",
  bad: "M-6 0a6 6 0 1 0 12 0a6 6 0 1 0 -12 0Z M-2.4 -2.4L2.4 2.4M2.4 -2.4L-2.4 2.4",
  hold: "M-6 0a6 6 0 1 0 12 0a6 6 0 1 0 -12 0Z M-2 -2.6V2.6M2 -2.6V2.6",
  open: "M-6 0a6 6 0 1 0 12 0a6 6 0 1 0 -12 0Z",
  none: "M-6 0a6 6 0 1 0 12 0a6 6 0 1 0 -12 0Z M-2.6 0H2.6",
  bell: "M-6 0a6 6 0 1 0 12 0a6 6 0 1 0 -12 0Z M0 -2.8V.4M0 2.4V2.8",
  edit: "M0 -6.5L6.5 0L0 6.5L-6.5 0Z",
  start: "M-5 -6L6 0L-5 6Z",
  send: "M-5 -6L6 0L-5 6Z",
};

function point(event, x, y, place) {
  const [shape, tone] = mark(event), name = eventName(event), at = Date.parse(event.time);
  const lane = name.startsWith("event.") ? "Azure" : name.startsWith("approval.") && !/granted|voided|reminder/.test(name) ? "People" : "Relay";
  const shift = place(lane, x(at), 14);
  return svg("g", { class: `point ${tone}`, transform: `translate(${shift.toFixed(1)} ${y(lane)})` },
    svg("path", { d: SHAPES[shape] ?? SHAPES.open }), svg("title", {}, `${clock(at)} ${event.said}`));
}

const STATES = { delivered: "good", parked: "bad", waiting: "warn", superseded: "" };

function delivery(one, x, y, present, place) {
  const from = Date.parse(one.recorded), to = one.settled ? Date.parse(one.settled) : present;
  const at = place(one.sink, x(to), 8);
  const title = `${typeName(one.type)}: ${one.state}${one.reason ? ` (${one.reason})` : ""}`;
  return svg("g", { class: `delivery ${STATES[one.state] ?? ""}` },
    svg("line", { x1: x(from), x2: at, y1: y, y2: y }),
    svg(one.state === "parked" ? "path" : "circle", one.state === "parked"
      ? { d: "M-4 -4L4 4M4 -4L-4 4", transform: `translate(${at.toFixed(1)} ${y})` } : { cx: at, cy: y, r: 3.5 }),
    svg("title", {}, title));
}

/** Make the key to the shapes. */
export function legend() {
  const entry = (kind, tone, text) => h("li", {}, svg("svg", { class: "timeline-key", viewBox: "-8 -8 16 16", "aria-hidden": "true" },
    svg("g", { class: `point ${tone}` }, svg("path", { d: SHAPES[kind] }))), text);
  return h("ul", { class: "legend" }, entry("bell", "note", "announced"), entry("edit", "note", "changed"), entry("ok", "good", "voted, granted"),
    entry("hold", "held", "hold"), entry("bad", "bad", "refused, failed"), entry("send", "good", "StartRequest"), entry("start", "run", "Azure began"));
}
