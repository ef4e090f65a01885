// Where events go: what waits for each sink, whether it takes it, and what was given up.

import { announce, facts, h, icon, showItems, table } from "./dom.js";
import { post } from "./api.js";
import { more, state, want } from "./store.js";
import { plural, roughly, sentence, time, typeName } from "./words.js";

const HEADS = ["Recorded", "Sink", "What", "Why", ""];

/** Whether the reader may pause sinks, send dead letters again and end standing holds. */
export const mayOperate = () => state.status?.caller.can.includes("operate") ?? false;

/** Make the button that shows more of a list. */
export function moreButton(id, kind, text) {
  return h("button", { id, class: "plain", type: "button", hidden: true,
    on: { click: () => more(kind).catch(failure => announce(sentence(failure.message), "bad")) } }, text);
}

export function renderSinks(view) {
  if (!view.querySelector("#sinks")) {
    view.replaceChildren(
      h("section", { "aria-labelledby": "sinks-title" },
        h("h1", { id: "sinks-title", tabindex: "-1" }, "Sinks"),
        h("p", { id: "sinks-empty", class: "empty", hidden: true }, "No sink is configured: the relay tells nobody. See the section sinks of its configuration."),
        h("div", { id: "sinks", class: "grid" })),
      h("section", { "aria-labelledby": "dead-title" },
        h("h2", { id: "dead-title" }, "Dead letters"),
        h("p", { id: "dead-empty", class: "soft", hidden: true }, "Nothing was given up."),
        h("ul", { id: "dead-groups", class: "rows" }),
        table("Table of dead letters", HEADS, "dead", { id: "dead-table", class: "scroll card" }),
        moreButton("more-dead", "deadLetters", "Older ones")));
  }
  const may = mayOperate(), letters = state.deadLetters ?? [];
  showItems(view.querySelector("#sinks"), state.sinks.map(sink => ({ ...sink, may })), sink => sink.name, renderSink);
  view.querySelector("#sinks-empty").hidden = state.sinks.length > 0 || !state.status;
  const counted = state.sinks.filter(sink => sink.deadLetters > 1).map(sink => ({ name: sink.name, count: sink.deadLetters, may }));
  showItems(view.querySelector("#dead-groups"), may ? counted : [], group => group.name, renderGroup);
  showItems(view.querySelector("#dead"), letters.map(one => ({ ...one, may, isConfigured: state.sinks.some(sink => sink.name === one.sink) })),
    one => one.id, renderDeadLetter);
  view.querySelector("#dead-empty").hidden = state.deadLetters === null || letters.length > 0;
  view.querySelector("#dead-table").hidden = !letters.length;
  view.querySelector("#more-dead").hidden = !state.deadLettersNext;
}

const BREAKERS = {
  closed: "closed: everything is sent at once",
  open: "open: it failed, and is tried later",
  "half-open": "half-open: one delivery at a time is tried",
};

function renderSink(sink) {
  const isOn = sink.state === "on", ok = isOn && !sink.failing;
  const tone = ok ? "good" : sink.state === "paused" ? "held" : "bad";
  const word = ok ? "takes events" : isOn ? "failing" : sink.state;
  return h("article", { class: `card sink ${tone}`, "aria-label": `Sink ${sink.name}` },
    h("h2", {}, sink.name, " ", h("span", { class: "soft kind" }, sink.kind)),
    h("p", {}, h("span", { class: `pill ${tone}` }, icon(ok ? "ok" : sink.state === "paused" ? "hold" : "bad"), word)),
    sink.reason && !ok ? h("p", { class: "reason" }, sentence(sink.reason)) : null,
    facts([
      ["Waiting", h("span", { class: sink.waiting ? "strong" : "" }, String(sink.waiting),
        sink.oldestWaitingSeconds === null ? "" : `, the oldest for ${roughly(sink.oldestWaitingSeconds)}`)],
      ["Breaker", BREAKERS[sink.circuit] ?? sink.circuit],
      ["Delivered", `${sink.delivered} since the start`],
      ["Dead letters", h("span", { class: sink.deadLetters ? "strong bad" : "" }, String(sink.deadLetters ?? "not known"))],
    ]),
    sink.may ? h("p", { class: "actions" },
      isOn ? sinkButton(sink, "pause", "Pause", `Pause ${sink.name}`, `${sink.name} is paused: its deliveries wait.`)
        : sinkButton(sink, "resume", "Resume", `Resume ${sink.name}`, `${sink.name} is resumed.`),
      sinkButton(sink, "ping", "Send a test message", `Send a test message to ${sink.name}`, `A test message for ${sink.name} is recorded.`)) : null);
}

function sinkButton({ name }, action, text, label, done) {
  return h("button", { class: action === "resume" ? "" : "plain", type: "button", "data-key": action === "ping" ? "ping" : "pause", "aria-label": label,
    on: { click: event => act(event, `v1/sinks/${encodeURIComponent(name)}/${action}`, done) } }, text);
}

function renderGroup({ name, count }) {
  return h("li", {}, h("span", { class: "what" }, h("strong", {}, name), ` has ${plural(count, "dead letter")}.`),
    h("button", { class: "plain", type: "button", "data-key": "all", on: { click: event => sendAll(event, name) } }, `Send all of ${name} again`));
}

function renderDeadLetter(one) {
  return h("tr", {},
    h("td", {}, time(one.recorded)), h("td", {}, one.sink),
    h("td", {}, typeName(one.type), one.eventId ? h("span", { class: "soft small block" }, one.eventId) : null),
    h("td", { class: "reason" }, sentence(one.reason ?? "no reason is known"), h("span", { class: "soft small block" },
      `${plural(one.attempts, "try").replace("trys", "tries")}${one.lastStatus ? `, last status ${one.lastStatus}` : ""}`)),
    h("td", { class: "last" }, one.isConfigured ? sendAgain(one) : h("span", { class: "soft small" }, "its sink is not configured any more")));
}

function sendAgain(one) {
  return one.may && one.state === "parked" ? h("button", {
    class: "plain small", type: "button", "data-key": "again", "aria-label": `Send ${typeName(one.type)} to ${one.sink} again`,
    on: { click: event => act(event, `v1/dead-letters/${one.id}/redeliver`, `It is sent to ${one.sink} again.`) },
  }, "Send again") : null;
}

const TONES = { delivered: "good", parked: "bad", waiting: "warn", superseded: "" };
const STATES = { delivered: "delivered", parked: "given up", waiting: "waiting", superseded: "replaced by a newer one" };

/** Make a row of the table of an event's deliveries. */
export function deliveryRow(one) {
  return h("tr", {},
    h("td", {}, time(one.recorded)), h("td", {}, one.sink), h("td", {}, typeName(one.type)),
    h("td", { class: "reason" }, h("span", { class: `pill ${TONES[one.state] ?? ""}` }, STATES[one.state] ?? one.state),
      one.attempts > 1 ? ` after ${one.attempts} tries` : "",
      one.reason && one.state !== "delivered" ? h("span", { class: "soft small block" }, sentence(one.reason)) : null,
      one.state === "waiting" && one.nextAttempt ? h("span", { class: "soft small block" }, "next try ", time(one.nextAttempt, "next")) : null),
    h("td", { class: "last" }, sendAgain(one)));
}

/** Look now, and when a delivery has had its time. */
function look() {
  want();
  setTimeout(want, 1000);
}

/** Do something that is asked for once, and say what came of it. */
async function once(button, work, failed) {
  if (button.getAttribute("aria-disabled")) return;
  button.setAttribute("aria-disabled", "true");
  try {
    announce(await work(), "good");
  } catch (failure) {
    announce(failed(failure), "bad");
  }
  button.removeAttribute("aria-disabled");
  look();
}

const act = (event, path, done) => once(event.currentTarget, () => post(path).then(() => done), failure =>
  (failure.status === 0 ? "The relay cannot be reached: it is not known whether it was done." : sentence(failure.message)));

const sendAll = (event, sink) => once(event.currentTarget, async () => {
  const answer = await post("v1/dead-letters/redeliver", { sink });
  return `${plural(answer.redelivered, "dead letter")} of ${sink}: sent again.`;
}, failure => sentence(failure.message));
