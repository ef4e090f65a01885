// The page: who reads it, which view is shown, and whether it is up to date.

import { announce, h, setText } from "./dom.js";
import { key, post, session } from "./api.js";
import * as store from "./store.js";
import { state } from "./store.js";
import { LABELS, openDecision, updateNotices } from "./decide.js";
import { renderEvent } from "./event.js";
import { renderFleet } from "./fleet.js";
import { renderLog } from "./log.js";
import { eventHref, renderNow, tickCards } from "./now.js";
import { renderSinks } from "./sinks.js";
import { clock, duration, eventTitle, now, roughly, sentence, tick } from "./words.js";

const $ = id => document.getElementById(id);
const VIEW = "imds-relay view";
const VIEWS = { now: renderNow, log: renderLog, sinks: renderSinks, fleet: renderFleet, event: renderEvent };
let shownView = "", prepared = null, signedIn = { signIn: null, principal: null };

// --- views

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return ""; // not of an address of this page
  }
}

/** Read the view of the address, and the decision that a link in a message prepares in it. */
function readAddress() {
  const [, name = "", ...parts] = location.hash.split("/");
  const [scope, id, decision, revision] = parts.map(decoded);
  const isEvent = name === "event" && scope && id;
  prepared = isEvent && revision && Object.hasOwn(LABELS, decision) ? { decision, revision } : null;
  if (isEvent) return { name, scope, id };
  return { name: ["log", "sinks", "fleet"].includes(name) ? name : "now" };
}

/** Ask about the decision of a link, once its event is read. */
function openPrepared() {
  const { detail, view } = state;
  if (!prepared || !detail) return;
  const { decision, revision } = prepared;
  prepared = null;
  // Whoever reloads the page, or comes back to it, is not asked again.
  history.replaceState(null, "", eventHref({ scope: view.scope, eventId: view.id }));
  if (detail === "unknown") return;
  if (detail.approval.decisions.includes(decision)) openDecision(decision, { ...detail, revision });
  else announce(`“${LABELS[decision]}” is not possible for you now: see how the event stands.`, "bad");
}

function navigate() {
  const isChange = shownView !== "";
  state.view = readAddress();
  state.detail = state.rule = null;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === state.view.name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  shownView = "";
  if (store.isSignedIn()) store.want();
  render();
  if (isChange && store.isSignedIn()) {
    scrollTo(0, 0);
    ($("view").querySelector("h1") ?? $("content")).focus({ preventScroll: true });
  }
}

function render() {
  renderLink();
  if (!store.isSignedIn()) return;
  const status = state.status;
  $("bar").hidden = $("view").hidden = !status;
  if (!status) return;
  $("enter").hidden = true;
  setText($("relay-name"), status.hub ? `hub ${status.relay}` : `${status.relay} · ${status.scope}`);
  const hasSession = !store.hasKey() && Boolean(signedIn.signIn);
  const isSamePerson = signedIn.principal === status.caller.principal; // another tab can change it
  setText($("principal"), (hasSession && isSamePerson && signedIn.name) || status.caller.principal);
  $("principal").title = status.caller.principal;
  $("leave").hidden = !store.hasKey() && !hasSession;
  setText($("leave"), hasSession ? "Sign out" : "Forget key");
  document.querySelector("[data-view=fleet]").hidden = !status.hub;
  renderScopes();
  renderBadge();
  const address = JSON.stringify(state.view);
  if (shownView !== address) $("view").replaceChildren();
  VIEWS[state.view.name]($("view"));
  shownView = address;
  openPrepared();
  updateNotices();
  renderTitle();
}

function renderBadge() {
  const wrong = state.sinks.filter(sink => sink.state !== "on" || sink.failing || sink.deadLetters > 0).length;
  $("sinks-badge").hidden = !wrong;
  $("sinks-badge").replaceChildren(...(wrong ? [String(wrong), h("span", { class: "hidden" }, " need attention")] : []));
}

/** On a hub, let the reader look at one scope. */
function renderScopes() {
  if (!state.status.hub || $("scope")) return;
  const select = h("select", { id: "scope", on: { change: () => {
    state.scope = select.value || null;
    store.want();
    render();
  } } }, h("option", { value: "" }, "All scopes"));
  document.querySelector("nav").after(h("label", { id: "scope-label", class: "inline" }, h("span", {}, "Scope "), select));
  store.want("fleet");
}

function fillScopes() {
  const select = $("scope");
  if (!select) return;
  const known = new Set([...(state.fleet?.agents ?? []), ...state.live, ...(state.recent ?? [])].map(one => one.scope));
  for (const option of select.options) known.delete(option.value);
  for (const scope of [...known].sort()) select.append(h("option", { value: scope }, scope));
}

function renderTitle() {
  const next = state.live.find(item => item.eventStatus !== "Started" && Date.parse(item.notBefore) > now());
  const what = next ? `${roughly((Date.parse(next.notBefore) - now()) / 1000)}: ${eventTitle(next)}`
    : state.live.length ? eventTitle(state.live[0]) : "nothing is scheduled";
  const title = `${state.link === "lost" ? "? " : ""}${what} – ${state.status.relay}`;
  if (document.title !== title) document.title = title;
}

// --- is it up to date?

const LINKS = {
  connecting: ["", "Connecting …"], live: ["good", "Live"], polling: ["warn", "Every 10 s"],
  paused: ["", "Paused"], lost: ["bad", "Connection lost"],
};

function renderLink() {
  const [tone, text] = LINKS[state.link];
  $("live").className = tone;
  setText($("live"), text);
  const isLost = state.link === "lost", problem = state.problem;
  $("lost").hidden = !store.isSignedIn() || !(isLost || problem || state.link === "polling");
  if ($("lost").hidden) return setText($("lost-title"), "");
  $("lost").className = `banner ${isLost || problem ? "bad" : "warn"}`;
  setText($("lost-title"), isLost ? `Connection lost: ${sentence(state.linkReason)}`
    : problem ? `The relay could not answer: ${sentence(problem)}` : `No live updates: ${sentence(state.linkReason)} The page asks every 10 s.`);
  renderAge();
}

function renderAge() {
  if ($("lost").hidden) return;
  const age = (performance.now() - state.heardAt) / 1000;
  const retry = Math.max(0, Math.ceil((state.retryAt - performance.now()) / 1000));
  const shown = state.heardAt ? `What you see is from ${clock(now() - age * 1000)}, ${duration(age)} ago.` : "Nothing was read yet.";
  setText($("lost-age"), state.link === "lost" ? `${shown} ${retry ? `Next try in ${retry} s.` : "Trying now …"}` : shown);
  $("try-now").hidden = state.link !== "lost";
}

// --- who reads

async function enter(message = "") {
  $("view").hidden = $("bar").hidden = true;
  $("enter").hidden = false;
  $("lost").hidden = true;
  document.title = "Sign in – imds-relay";
  try {
    signedIn = await session();
  } catch { /* the field for a key works without it */ }
  const canSignIn = Boolean(signedIn.signIn);
  $("sign-in-part").hidden = !canSignIn;
  $("key-summary").hidden = !canSignIn;
  if (canSignIn) {
    // A path: a proxy may serve the relay under a path of its own.
    $("sign-in").setAttribute("href", signedIn.signIn.slice(1));
    $("key-part").open = store.hadKey();
  }
  setText($("enter-wrong"), store.hadKey() ? "" : message);
  showKeyError(store.hadKey() ? message : "");
  (canSignIn && !$("key-part").open ? $("sign-in") : $("key")).focus();
}

function showKeyError(message) {
  $("key-wrong").textContent = message;
  if (message) $("key").setAttribute("aria-invalid", "true");
  else $("key").removeAttribute("aria-invalid");
}

function leave(failure) {
  const hadKey = store.hadKey();
  store.end();
  key.remove();
  shownView = "";
  if ($("decide").open) $("decide").close();
  const messages = {
    401: hadKey ? "The relay does not know this key, or it is not valid any more."
      : "Your session has ended. Sign in again.",
    403: `You may not read here: ${failure?.message ?? ""}.`,
  };
  enter(failure ? messages[failure.status] ?? sentence(failure.message) : "");
}

$("enter").addEventListener("submit", event => {
  event.preventDefault();
  const value = $("key").value.trim();
  if (!value) return showKeyError("The key is missing."), $("key").focus();
  if (!/^[\x21-\x7e]+$/.test(value)) {
    return showKeyError("This cannot be a key: it contains spaces or other invalid characters."), $("key").focus();
  }
  showKeyError("");
  key.set(value);
  $("key").value = "";
  store.begin();
  render();
});

// Entra ID sends the browser back to the page without its fragment: this tab keeps the view.
$("sign-in").addEventListener("click", () => sessionStorage.setItem(VIEW, location.hash));

$("leave").addEventListener("click", async () => {
  const hadKey = store.hasKey();
  try {
    if (!hadKey) await post("sign-out");
  } catch (failure) {
    return announce(`You are not signed out: ${failure.message}`, "bad");
  }
  leave(null);
  announce(hadKey ? "The key is forgotten." : "You are signed out.");
});
$("try-now").addEventListener("click", store.tryNow);
addEventListener("hashchange", navigate);
addEventListener("pagehide", () => { $("key").value = ""; });
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && store.isSignedIn() && state.link === "live") store.want();
});
document.querySelector(".skip").addEventListener("click", event => {
  event.preventDefault();
  $("content").focus();
});
store.watch(() => { render(); fillScopes(); }, leave);
setInterval(() => {
  if (document.hidden) return;
  tick();
  tickCards();
  renderAge();
  if (state.status && store.isSignedIn()) renderTitle();
  store.poll();
}, 1000);

async function start() {
  const view = sessionStorage.getItem(VIEW);
  sessionStorage.removeItem(VIEW);
  if (view && !location.hash) history.replaceState(null, "", view);
  navigate();
  if (!store.hasKey()) {
    try {
      signedIn = await session();
    } catch { /* without an answer, the reader gives a key */ }
    if (!signedIn.principal) return enter();
  }
  store.begin();
  render();
}
start();
