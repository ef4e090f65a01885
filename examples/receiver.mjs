// Receives webhooks of the relay and prints them (Node 20, nothing installed).
// SECRET is the secret of the sink (whsec_…), PORT the port, 8000 by default.

import { createServer } from "node:http";
import { createHmac, timingSafeEqual } from "node:crypto";
import { text } from "node:stream/consumers";

const key = Buffer.from(process.env.SECRET.replace("whsec_", ""), "base64"), seen = new Set();

function verified({ "webhook-id": id, "webhook-timestamp": at, "webhook-signature": given = "" }, body) {
  const mine = Buffer.from("v1," + createHmac("sha256", key).update(`${id}.${at}.${body}`).digest("base64"));
  const fits = given.split(" ").some((one) => one.length === mine.length && timingSafeEqual(Buffer.from(one), mine));
  return fits && Math.abs(Date.now() / 1000 - at) < 300;
}

createServer(async (request, response) => {
  const body = await text(request);
  if (!verified(request.headers, body)) return response.writeHead(401).end();
  const event = JSON.parse(body);
  if (!seen.has(event.id)) console.log(event.type, event.subject ?? ""); // your work, or a queue for it
  seen.add(event.id); // only now: if the work fails, the relay sends again
  response.writeHead(204).end();
}).listen(process.env.PORT ?? 8000, "127.0.0.1");
