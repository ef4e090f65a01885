// What the page knows, and how it stays up to date.
//
// The stream says that something happened, and the page then reads what it shows. So it shows what
// the relay says, and computes nothing from events. What no event tells is read every few seconds,
// while somebody looks.

import { Failure, get, key, readStream } from "./api.js";
import { eventName, now, setClock } from "./words.js";

const GAP = 500; // between two readings
const POLL = 5000;
const POLL_WITHOUT_STREAM = 10000;
const POLL_EVENTS = 60000;
const HIDDEN = 30000; // then a tab that nobody sees gives its connection back
const RETRIES = [1, 2, 4, 8, 15];
const LOG_START = 100;
const LOG_SIZE = 300;
const MAX_PAGES = 10;

const empty = () => ({
  status: null, live: [], hasMoreLive: false, recent: null, recentNext: null, sinks: [], deadLetters: null, deadLettersNext: null,
  standingHolds: [], fleet: null, detail: null, rule: null, log: [], scope: null,
  /** connecting, live, lost, polling (no stream can be had), or paused (nobody sees the tab). */
  link: "connecting", linkReason: "", retryAt: 0, heardAt: 0,
  /** Why the last reading failed, though the relay is there. */
  problem: null,
});
export const state = { ...empty(), view: { name: "now" } };

let render = () => {}, leave = () => {};
let usedKey = false, session = null, position = null, wanted = new Set(), isReading = false, lastRead = 0;
let wake = () => {}, polledAt = 0, eventsPolledAt = 0, hiddenSince = 0, seenMoments = 0;

/** Call `onChange` when something changed, and `onLeave` when the key is no good any more. */
export function watch(onChange, onLeave) {
  render = onChange;
  leave = onLeave;
}

/** Lists of which the page shows the newest, and older ones when somebody asks for them. */
const LISTS = {
  recent: () => events({ live: "false" }),
  deadLetters: () => "v1/dead-letters?",
};

/** Return the address of the events of the scope that is shown. */
const events = which => `v1/events?${new URLSearchParams({ ...which, ...(state.scope && { scope: state.scope }) })}`;

const readPage = (address, cursor) => get(cursor ? `${address}&cursor=${cursor}` : address);

/** Read a list page by page, while there are more and `isWanted(pages, items)`. */
async function readPages(address, isWanted) {
  const items = [];
  let next = null, pages = 0;
  do {
    const answer = await readPage(address, next);
    items.push(...answer.items);
    next = answer.next;
    pages += 1;
  } while (next && isWanted(pages, items.length));
  return { items, next };
}

/** Read a list again, as far as it is shown. */
async function readShown(kind) {
  const { items, next } = await readPages(LISTS[kind](), (_, count) => count < (state[kind]?.length ?? 0));
  Object.assign(state, { [kind]: items, [`${kind}Next`]: next });
}

const READERS = {
  async status() {
    const before = state.status;
    state.status = await get("v1/status");
    setClock(state.status.now);
    if (before && before.mode !== state.status.mode) want(); // no CloudEvent tells of it, and it changes every event
  },
  async live() {
    const { items, next } = await readPages(events({ live: "true" }), pages => pages < MAX_PAGES);
    state.live = items.sort(byNotBefore);
    state.hasMoreLive = next !== null;
  },
  recent: () => readShown("recent"),
  async sinks() {
    state.sinks = (await get("v1/sinks")).items;
  },
  deadLetters: () => readShown("deadLetters"),
  async standingHolds() {
    try {
      state.standingHolds = (await get("v1/standing-holds")).items;
    } catch (failure) {
      if (failure.status !== 409) throw failure; // the hub of this agent has the standing holds
      state.standingHolds = [];
    }
  },
  async fleet() {
    state.fleet = state.status?.hub ? await get("v1/fleet") : null;
  },
  async detail() {
    const { scope, id } = state.view;
    if (!id) return;
    const path = `v1/events/${encodeURIComponent(id)}`, where = `?${new URLSearchParams({ scope })}`;
    try {
      const [detail, rule] = await Promise.all([get(path + where), get(`${path}/rule${where}`)]);
      detail.history.forEach((event, number) => { event.said = detail.said[number]; });
      if (state.view.id === id) Object.assign(state, { detail, rule });
    } catch (failure) {
      if (failure.status !== 404) throw failure;
      if (state.view.id === id) Object.assign(state, { detail: "unknown", rule: null });
    }
  },
};

function byNotBefore(one, other) {
  const moment = item => (item.eventStatus === "Started" ? 0 : Date.parse(item.notBefore) || Infinity);
  return moment(one) - moment(other) || one.firstSeen.localeCompare(other.firstSeen);
}

/** What each view shows beside status, live and sinks. */
const EXTRA = { now: ["recent", "standingHolds"], log: [], sinks: ["deadLetters"], fleet: ["fleet"], event: ["detail"] };

/** Read these parts soon: `live`, `sinks` and so on; none means all that the view shows. */
export function want(...parts) {
  for (const part of parts.length ? parts : ["status", "live", "sinks", ...EXTRA[state.view.name]]) wanted.add(part);
  readWanted();
}

async function readWanted() {
  if (isReading || !session) return;
  isReading = true;
  const current = session;
  while (wanted.size && current === session) {
    const pause = lastRead + GAP - performance.now();
    if (pause > 0) await new Promise(done => setTimeout(done, pause));
    const parts = [...wanted];
    wanted = new Set();
    lastRead = performance.now();
    try {
      await Promise.all(parts.map(part => READERS[part]()));
      if (current !== session) break;
      state.problem = null;
      if (["live", "polling"].includes(state.link)) state.heardAt = performance.now();
    } catch (failure) {
      if (current !== session) break;
      fail(failure);
    }
    render();
  }
  isReading = false;
  if (session && current !== session) readWanted();
}

function fail(failure) {
  if (!(failure instanceof Failure)) throw failure;
  if (failure.status === 401 || (failure.status === 403 && !state.status)) return leave(failure);
  state.problem = failure.status === 403 ? null : failure.message;
}

/** Read one more page of a list. */
export async function more(kind) {
  const next = `${kind}Next`, cursor = state[next];
  if (!cursor) return;
  state[next] = null; // a second click reads nothing twice
  try {
    const answer = await readPage(LISTS[kind](), cursor);
    state[kind] = [...state[kind], ...answer.items];
    state[next] = answer.next;
  } catch (failure) {
    state[next] = cursor;
    throw failure;
  }
  render();
}

// --- the stream

/** Read with the key or the session that this browser has. */
export function begin() {
  end();
  usedKey = key.get() !== null;
  session = new AbortController();
  follow(session);
  want();
}

/** Stop, and forget everything. */
export function end() {
  session?.abort();
  session = null;
  position = null;
  wanted = new Set();
  Object.assign(state, empty());
}

/** Try to connect now. */
export function tryNow() {
  wake();
}

async function follow(current) {
  for (let failures = 0; current === session;) {
    const attempt = new AbortController();
    const stop = () => attempt.abort();
    current.signal.addEventListener("abort", stop);
    try {
      await READERS.status();
      if (current !== session) return;
      position ??= Math.max(0, (state.status.position ?? 0) - LOG_START);
      const watching = watchVisibility(attempt);
      try {
        await readStream(position, (at, event) => {
          if (current !== session) return;
          failures = 0;
          hear(at, event);
        }, attempt.signal);
      } finally {
        clearInterval(watching);
      }
      lose("the relay has ended the stream: it may be restarting");
    } catch (failure) {
      if (current !== session) return;
      if (failure.status === 401 || (failure.status === 403 && !state.status)) return leave(failure);
      if (attempt.signal.aborted) {
        state.link = "paused";
      } else if (failure.status === 429) {
        state.link = "polling";
        state.linkReason = failure.message;
        want();
      } else {
        if (!(failure instanceof Failure)) console.error(failure);
        lose(failure.message);
      }
    } finally {
      current.signal.removeEventListener("abort", stop);
    }
    if (current !== session) return;
    const seconds = state.link === "polling" ? 60 : RETRIES[Math.min(failures, RETRIES.length - 1)];
    failures += 1;
    state.retryAt = performance.now() + seconds * 1000;
    render();
    await (state.link === "paused" ? untilVisible() : untilRetry(seconds));
  }
}

function hear(at, event) {
  const isNew = state.link !== "live";
  state.link = "live";
  state.heardAt = performance.now();
  position = at;
  if (event !== null) {
    state.log = [{ at, event }, ...state.log].slice(0, LOG_SIZE);
    const name = eventName(event);
    want("live", ...(name.startsWith("relay.") ? ["sinks", "status"] : []), ...EXTRA[state.view.name]);
  }
  if (isNew) want();
  render();
}

function lose(reason) {
  state.link = "lost";
  state.linkReason = reason;
}

function untilRetry(seconds) {
  return new Promise(done => {
    const waiting = new AbortController();
    wake = () => { waiting.abort(); done(); };
    setTimeout(wake, seconds * 1000);
    addEventListener("online", wake, { signal: waiting.signal });
  });
}

async function untilVisible() {
  while (document.hidden) await new Promise(done => document.addEventListener("visibilitychange", done, { once: true }));
}

/** A browser has few connections to a relay: a hidden tab must not keep one of them forever. */
function watchVisibility(attempt) {
  return setInterval(() => {
    hiddenSince = document.hidden ? hiddenSince || performance.now() : 0;
    if (hiddenSince && performance.now() - hiddenSince > HIDDEN) attempt.abort();
  }, 1000);
}

/** Look once a second for what is due. */
export function poll() {
  if (!session || document.hidden || !["live", "polling"].includes(state.link)) return;
  const at = performance.now();
  if (at - polledAt > (state.link === "live" ? POLL : POLL_WITHOUT_STREAM)) {
    polledAt = at;
    const waits = state.view.name === "event" && state.detail?.deliveries?.some(one => one.state === "waiting");
    want("status", "sinks", ...(state.view.name === "fleet" ? ["fleet"] : []), ...(waits ? ["detail"] : []),
      ...(state.link === "polling" ? ["live", ...EXTRA[state.view.name]] : []));
  }
  if (at - eventsPolledAt > POLL_EVENTS || momentsPassed()) {
    eventsPolledAt = at;
    want("live", ...EXTRA[state.view.name]);
  }
}

/** Whether a time came that changes what may be decided: NotBefore, or the end of voting. */
function momentsPassed() {
  const passed = state.live.flatMap(item => [item.notBefore, item.approval.closes, ...item.approval.holds.map(hold => hold.until)])
    .filter(text => text && Date.parse(text) <= now()).length;
  const isMore = passed > seenMoments;
  seenMoments = passed;
  return isMore;
}

export const isSignedIn = () => session !== null;
export const hasKey = () => key.get() !== null;

/** Whether the reader used a key, and not a session. */
export const hadKey = () => usedKey;
