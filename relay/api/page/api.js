// Calls the relay. Paths are relative, so that a proxy may serve the relay under a path.

const KEY = "imds-relay key";
const TIMEOUT = 20000;
const OWN_PAGE = { "X-Requested-With": "imds-relay" }; // no page of another site can send it
const SILENCE = 40000; // a stream says something every 15 s

/** A call that failed. `status` is 0 if the relay was not reached. */
export class Failure extends Error {
  constructor(status, detail, body = {}) {
    super(detail);
    this.status = status;
    this.body = body;
  }
}

// A key is kept in this tab only, and never in the URL.
export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: value => sessionStorage.setItem(KEY, value),
  remove: () => sessionStorage.removeItem(KEY),
};

function headers(more) {
  const value = key.get();
  return { ...(value && { Authorization: `Bearer ${value}` }), ...more };
}

async function send(path, options, signal) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", redirect: "error", referrerPolicy: "no-referrer", ...options, signal });
  } catch (error) {
    throw new Failure(0, "the relay cannot be reached", { error });
  }
  if (response.ok) return response;
  let body = {};
  try { body = await response.json(); } catch { /* a proxy answers what it likes */ }
  throw new Failure(response.status, body.detail ?? `the answer was ${response.status}`, body);
}

async function json(path, options) {
  const response = await send(path, options, AbortSignal.timeout(TIMEOUT));
  try {
    return await response.json();
  } catch {
    throw new Failure(0, "the relay's answer broke off");
  }
}

export function get(path) {
  return json(path, { headers: headers() });
}

export function post(path, body, more = {}) {
  return json(path, {
    method: "POST",
    headers: headers({ ...OWN_PAGE, ...(body && { "Content-Type": "application/json" }), ...more }),
    ...(body && { body: JSON.stringify(body) }),
  });
}

/** Whether signing in is possible, and who is signed in; a relay without it does not know the path. */
export async function session() {
  try {
    return await json("v1/session", { headers: headers() });
  } catch (failure) {
    if (failure.status === 404) return { signIn: null, principal: null, name: null, can: [] };
    throw failure;
  }
}

export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map(byte => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * Read the stream after a position of the journal until it ends or `signal` aborts it.
 *
 * `onEvent` gets each CloudEvent with its position, and null for a frame that has only a position.
 */
export async function readStream(position, onEvent, signal) {
  const silence = new AbortController();
  let timer = setTimeout(() => silence.abort(), SILENCE);
  try {
    const response = await send("v1/stream",
      { headers: headers({ Accept: "text/event-stream", ...(position !== null && { "Last-Event-ID": String(position) }) }) },
      AbortSignal.any([signal, silence.signal]));
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { value, done } = await reader.read().catch(error => {
        throw new Failure(0, "the stream broke off", { error });
      });
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENCE);
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) readFrame(frame, onEvent);
    }
  } finally {
    clearTimeout(timer);
  }
}

function readFrame(frame, onEvent) {
  let position = null, data = null, said = null;
  for (const line of frame.split("\n")) {
    if (line.startsWith("id: ")) position = Number(line.slice(4));
    if (line.startsWith("data: ")) data = line.slice(6);
    if (line.startsWith("said: ")) said = JSON.parse(line.slice(6));
  }
  if (position !== null) onEvent(position, data === null ? null : { ...JSON.parse(data), said });
}
