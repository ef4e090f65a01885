"""Drains the Kubernetes node on which it runs before Azure takes it away, and then votes for it.

It runs beside an agent or a plain relay, and uses its local socket. Before the vote for an event
that names this VM, `kubectl drain` cordons the node and evicts its pods. If that fails, there is no
vote: silence is never readiness. When no such event is left, the node is uncordoned, if this
program has cordoned it.

NODE=worker-1 RELAY_SOCKET=/run/imds-relay/relay.sock python drain_node.py
"""

from __future__ import annotations

import contextlib
import datetime as dt
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from typing import Any

NODE = os.environ["NODE"]
RELAY_SOCKET = os.environ.get("RELAY_SOCKET", "/run/imds-relay/relay.sock")
IMDS = os.environ.get("IMDS", "169.254.169.254")
MACHINE = os.environ.get("MACHINE", "")
"""The VM's name in events; by default IMDS tells it."""
TYPES = frozenset(os.environ.get("TYPES", "Reboot,Redeploy,Preempt,Terminate").split(","))
"""The types of events that need an empty node."""
KUBECTL = shlex.split(os.environ.get("KUBECTL", "kubectl"))
DRAIN = shlex.split(os.environ.get("DRAIN_OPTIONS", "--ignore-daemonsets --delete-emptydir-data"))
EVERY = float(os.environ.get("EVERY", "2"))
"""Seconds between two looks."""

MARK = "imds-relay/cordoned"
"""The annotation of a node that this program has cordoned. It outlives the program."""
FAILURES = (
    OSError,
    ValueError,
    LookupError,
    http.client.HTTPException,
    subprocess.CalledProcessError,
)
"""What IMDS, the relay and kubectl can raise."""
MARGIN = 20
"""How long before NotBefore an eviction ends, in seconds."""


def call(
    method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """Call the relay on its local socket. Return the status and the JSON of the answer."""
    connection = http.client.HTTPConnection("relay", timeout=15)
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.closing(connection):
        connection.sock.settimeout(15)
        connection.sock.connect(RELAY_SOCKET)
        connection.request(
            method,
            path,
            json.dumps(body) if body is not None else None,
            {"Content-Type": "application/json", **(headers or {})},
        )
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null")


def name_of_this_vm() -> str:
    """Return the name of this VM in events. Raises ValueError if IMDS does not tell it."""
    with contextlib.closing(http.client.HTTPConnection(IMDS, timeout=10)) as connection:
        path = "/metadata/instance/compute?api-version=2021-02-01"
        connection.request("GET", path, headers={"Metadata": "true"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise ValueError(f"IMDS answers {answer.status}")
        return str(json.load(answer)["name"])


def kubectl(*arguments: str) -> str:
    """Run kubectl, and return its output. Raises CalledProcessError if it fails."""
    done = subprocess.run([*KUBECTL, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def events_of(machine: str) -> list[dict[str, Any]] | None:
    """Return the events that need an empty node and are not over; None while nobody knows."""
    ready, _ = call("GET", "/readyz")
    status, answer = call("GET", "/v1/events")
    if ready != 200 or status != 200:
        return None
    return [
        event
        for event in answer["items"]
        if event["outcome"] is None
        and event["eventType"] in TYPES
        and machine.lower() in (name.lower() for name in event["resources"] or ())
    ]


def cordon_and_drain(event: dict[str, Any]) -> None:
    """Empty the node until shortly before NotBefore. Draining an empty node does no harm."""
    node = json.loads(kubectl("get", "node", NODE, "--output=json"))
    if not node["spec"].get("unschedulable"):  # else a person has cordoned it, and uncordons it
        kubectl("annotate", "node", NODE, f"{MARK}={event['eventId']}", "--overwrite")
    seconds = 300.0
    if event["notBefore"] is not None:
        not_before = dt.datetime.fromisoformat(event["notBefore"])
        seconds = (not_before - dt.datetime.now(dt.UTC)).total_seconds() - MARGIN
    kubectl("drain", NODE, *DRAIN, f"--timeout={max(seconds, 5):.0f}s")


def vote(event: dict[str, Any]) -> bool:
    """Vote for the event as it is now. Return whether the answer is final."""
    event_id, revision = event["eventId"], event["revision"]
    status, answer = call(
        "POST",
        "/v1/approvals",
        {"eventId": event_id, "decision": "approve", "revision": revision, "reason": "drained"},
        # The same for the same state: a second vote counts as a repeat.
        {"Idempotency-Key": f"drain-node-{event_id}-{revision}"},
    )
    said = answer.get("state") or answer.get("detail") or answer.get("title")
    print(f"{event_id}: {status} {said}", flush=True)
    return status in {202, 403, 409}  # 404: the hub has not heard of the event yet


def uncordon() -> None:
    """Let pods come back, if this program has sent them away."""
    node = json.loads(kubectl("get", "node", NODE, "--output=json"))
    if MARK in node["metadata"].get("annotations", {}):
        kubectl("uncordon", NODE)
        kubectl("annotate", "node", NODE, f"{MARK}-")
        print(f"{NODE}: uncordoned", flush=True)


def look(machine: str, voted: set[tuple[str, str]], *, was_busy: bool) -> bool:
    """Look at the events once, and act. Return whether an event of this VM is left."""
    events = events_of(machine)
    if events is None:
        return was_busy
    for event in events:
        state = (event["eventId"], event["revision"])
        if event["eventStatus"] == "Scheduled" and state not in voted:
            cordon_and_drain(event)
            if vote(event):
                voted.add(state)
    if was_busy and not events:
        voted.clear()
        uncordon()
    return bool(events)


def main() -> None:
    """Look again and again. What fails is tried again at the next look."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    voted: set[tuple[str, str]] = set()
    busy = True  # the node may be cordoned from before a restart
    machine = MACHINE
    while True:
        try:
            if not machine:
                machine = name_of_this_vm()
                print(f"draining {NODE} for events of {machine}", flush=True)
            busy = look(machine, voted, was_busy=busy)
        except FAILURES as error:
            print(f"again in {EVERY:g} s: {error}", file=sys.stderr, flush=True)
        time.sleep(EVERY)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(0)
