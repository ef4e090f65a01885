// A service that makes room before maintenance: it drains the machines of an event, and then approves it over the same broker.
// The same as drain.py, in JavaScript; text to start from.
//
//   cp ../tests/examples/package*.json . && npm ci --ignore-scripts && AMQP_URL=amqp://drain:secret@127.0.0.1:5672/ node drain.mjs

import { execFile } from "node:child_process";
import { once } from "node:events";
import { setTimeout as pause } from "node:timers/promises";
import { promisify } from "node:util";
import amqp from "amqplib";

const { AMQP_URL = "amqp://guest:guest@127.0.0.1:5672/", EXCHANGE = "azure.scheduledevents", MACHINES = ".*" } = process.env;
const QUEUE = "drain";
const CHANGE = "io.imdsrelay.event.";
const MAX_BYTES = 255; // the length of a message id or routing key in AMQP
const MINE = new RegExp(`^(${MACHINES})$`, "i");
const run = promisify(execFile);

// The event in a message. Throws where there is none, or where a field that we use is missing.
function read(content) {
  const event = JSON.parse(content);
  const { source, id, type, scope, data } = event;
  const used = [source, id, type];
  const sent = [`${QUEUE}-${id}`];
  if (String(type).startsWith(CHANGE)) {
    if (data.resources !== null && !Array.isArray(data.resources)) {
      throw new Error("resources is neither null nor a list");
    }
    used.push(scope, data.eventId, data.eventStatus, data.revision, ...(data.resources ?? []));
    sent.push(`approve.${scope}`);
  }
  const good = (text) => typeof text === "string" && text !== "" && !text.includes("\0");
  if (typeof data !== "object" || data === null || !used.every(good)) throw new Error("no event");
  if (sent.some((text) => Buffer.byteLength(text) > MAX_BYTES)) {
    throw new Error("the id or the scope is too long for an approval");
  }
  return event;
}

// Whether it is for us to decide: it still waits, and concerns our machines alone, as approving frees all of them.
function wanted({ type, data }) {
  const names = data.resources ?? [];
  return type.startsWith(CHANGE) && data.eventStatus === "Scheduled" && names.length > 0 && names.every((name) => MINE.test(name));
}

// Resolves once the decision is in the relay's queue.
async function approve(event, out) {
  const { eventId, revision } = event.data;
  const body = Buffer.from(JSON.stringify({ eventId, decision: "approve", revision, reason: "drained" }));
  let returned = false;
  const back = () => { returned = true; };
  out.once("return", back);
  out.publish(`${EXCHANGE}.approvals`, `approve.${event.scope}`, body, {
    contentType: "application/json",
    persistent: true,
    mandatory: true,
    messageId: `${QUEUE}-${event.id}`, // the same for the same state: should we say it twice, it counts once
    userId: decodeURIComponent(new URL(AMQP_URL).username), // the broker checks that we are who we say
  });
  await out.waitForConfirms();
  out.off("return", back);
  if (returned) throw new Error(`no relay takes decisions for ${event.scope}`);
}

async function handle(event, out) {
  if (String(event.causationid).startsWith(`${QUEUE}-`)) {
    console.log("answered:", event.type, event.subject, event.data.refusal ?? "");
  } else if (wanted(event)) {
    for (const name of event.data.resources) await run("true", [name]); // your work; it must bear being done twice
    await approve(event, out);
    console.log("drained and approved:", event.type, event.subject);
  }
}

async function serve() {
  const connection = await amqp.connect(AMQP_URL, { heartbeat: 10, clientProperties: { connection_name: QUEUE } });
  try {
    const closed = once(connection, "close");
    connection.on("error", (error) => console.error(error.message));
    const incoming = await connection.createChannel();
    const out = await connection.createConfirmChannel(); // a refused publish closes its channel, and is not to take the consumer along
    const failed = new Promise((_, reject) => [incoming, out].forEach((channel) => channel.on("error", reject)));
    await incoming.prefetch(1);
    await incoming.assertQueue(QUEUE, { durable: true, arguments: { "x-queue-type": "quorum", "x-single-active-consumer": true } });
    for (const key of ["event.scheduled.#", "event.updated.#", "approval.refused.#", "startrequest.#"]) {
      await incoming.bindQueue(QUEUE, EXCHANGE, key);
    }
    const seen = new Set(); // a real service keeps this where it keeps its results, in one transaction
    const stopped = new Promise((_, reject) => {
      const take = async (message) => {
        if (message === null) throw new Error("the queue is there no more");
        let event;
        try {
          event = read(message.content);
        } catch {
          return incoming.reject(message, false); // taking up again what is no event mends nothing
        }
        const key = `${event.source} ${event.id}`;
        if (!seen.has(key)) await handle(event, out);
        seen.add(key);
        incoming.ack(message); // only now: until here it would come again
      };
      incoming.consume(QUEUE, (message) => take(message).catch(reject)).catch(reject);
    });
    await Promise.race([closed, failed, stopped]);
  } finally {
    await connection.close().catch(() => {});
  }
}

for (const name of ["SIGINT", "SIGTERM"]) process.once(name, () => process.exit(0));
for (;;) {
  await serve().catch((error) => console.error(error.message)); // what was not acknowledged comes again
  await pause(5000);
}
