"""Receives webhooks of the relay and prints them. Nothing is installed.

SECRET is the secret of the sink (whsec_…), and PORT the port, 8000 by default. docs/webhooks.md
says what a receiver should do. `receiver.mjs` and `receiver.go` do the same.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = base64.b64decode(os.environ["SECRET"].removeprefix("whsec_"))
SECONDS = 300
"""How old a request may be."""
seen: set[str] = set()


class Receiver(BaseHTTPRequestHandler):
    """Takes one request."""

    def do_POST(self) -> None:  # http.server wants this name
        """Print an event that is new, and answer 204; or 401 without a valid signature."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self._is_valid(body):
            self.send_error(401)
            return
        event = json.loads(body)
        if event["id"] not in seen:
            data = event["data"]
            about = data.get("eventType") or data.get("sink") or ""
            print(event["time"], event["type"], about, *(data.get("resources") or ()), flush=True)
            seen.add(event["id"])  # only now: if the work fails, the relay sends again
        self.send_response(204)
        self.end_headers()

    def _is_valid(self, body: bytes) -> bool:
        sent = self.headers.get("webhook-timestamp", "")
        if not sent.isdecimal() or abs(time.time() - int(sent)) > SECONDS:
            return False
        signed = f"{self.headers.get('webhook-id', '')}.{sent}.".encode() + body
        digest = base64.b64encode(hmac.digest(KEY, signed, hashlib.sha256)).decode()
        given = self.headers.get("webhook-signature", "").split()
        return any(hmac.compare_digest(f"v1,{digest}".encode(), one.encode()) for one in given)

    def log_request(self, *_: object) -> None:  # type: ignore[explicit-override]  # typing has it from 3.12 on
        """Print nothing about requests."""


if __name__ == "__main__":
    address = ("127.0.0.1", int(os.environ.get("PORT", "8000")))
    print(f"waiting for events at http://{address[0]}:{address[1]}", flush=True)
    with ThreadingHTTPServer(address, Receiver) as server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
