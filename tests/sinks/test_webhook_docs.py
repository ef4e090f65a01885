"""docs/webhooks.md: the receivers accept deliveries, and the relay accepts its approval."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from docs import generate
from relay import signature
from relay.clock import SystemClock
from relay.errors import Deferred
from relay.sinks.webhook import connect
from tests import documented
from tests.builders import DATA, cloudevent
from tests.eventually import eventually
from tests.ports import listens, reserve
from tests.programs import command_of, running
from tests.sinks.http_receiver import good, listening
from tests.sinks.webhook_sink import OTHER_SECRET, SECRET, settings

PAGE = "docs/webhooks.md"
TEXT = (documented.ROOT / PAGE).read_text(encoding="utf-8")
APPROVAL = documented.block(PAGE, "python", "Approving")
RECEIVERS = ("page", "receiver.py", "receiver.mjs", "receiver.go")
"""The receiver of the page, and those among the examples."""


@asynccontextmanager
async def receiving(receiver: str, folder: Path) -> AsyncIterator[tuple[int, asyncio.StreamReader]]:
    """The receiver as a process: its port and what it prints."""
    command = [sys.executable, "-c", documented.block(PAGE, "python", "A receiver")]
    if receiver != "page":
        command = await asyncio.to_thread(command_of, receiver, folder)
    (port,) = reserve(1)
    async with running(*command, SECRET=SECRET, PORT=str(port)) as printed:
        await eventually(lambda: listens(port))
        yield port, printed


@pytest.mark.timeout(600)  # Go compiles its library first
@pytest.mark.parametrize("receiver", RECEIVERS)
async def test_each_receiver_takes_every_type_and_no_forgery(receiver: str, tmp_path: Path) -> None:
    """A sink without `events` sends every type, with and without a subject, or without machines."""
    unknown = cloudevent("approval.refused", data={**DATA, "resources": None})
    events = [*generate.examples(), unknown]
    assert {bool(event.subject) for event in events} == {True, False}
    async with receiving(receiver, tmp_path) as (port, printed):
        url = f"http://127.0.0.1:{port}/{'' if receiver == 'receiver.py' else 'azure'}"
        if receiver == "receiver.py":
            assert (await printed.readline()).startswith(b"waiting for events at http://127.0.0.1:")
        both = settings(url=url, secrets=[OTHER_SECRET, SECRET])
        async with connect(both, SystemClock()) as sink:
            for event in (*events, *events):
                assert (await sink.deliver(event)).status == 204
        async with connect(settings(url=url, secrets=[OTHER_SECRET]), SystemClock()) as forger:
            with pytest.raises(Deferred) as caught:
                await forger.deliver(cloudevent("event.ended"))
        assert (caught.value.status, caught.value.failure) == (401, "slow")
        lines = [(await printed.readline()).decode().split() for _ in events]
    if receiver == "receiver.py":  # it prints the time before the type, and no subject
        assert [line[1] for line in lines] == [event.type for event in events]
        return
    assert [line[0] for line in lines] == [event.type for event in events]
    named = [event for event in events if event.subject]
    types = {event.type for event in named}
    subjects = [line[1] for line in lines if line[0] in types]
    assert subjects == [event.subject for event in named]


async def test_the_request_of_the_page_has_the_headers_of_a_request() -> None:
    shown, _, body = documented.block(PAGE, "http", "The request").partition("\n\n")
    async with (
        listening(good) as receiver,
        connect(settings(url=f"http://127.0.0.1:{receiver.port}/azure"), SystemClock()) as sink,
    ):
        await sink.deliver(cloudevent())
    (received,) = receiver.requests
    line, *headers = shown.splitlines()
    assert line == received.line
    sent = {name.lower(): value for name, value in received.headers.items()}
    ids = re.compile(r"[\w+/]{20,}=?|\d{10}")
    for name, value in (header.split(": ", 1) for header in headers):
        assert ids.sub("", sent[name.lower()]) == ids.sub("", value)
    sent_event, shown_event = json.loads(received.body), json.loads(body)
    assert shown_event.keys() < sent_event.keys()
    assert shown_event["data"].keys() < sent_event["data"].keys()


async def test_the_approval_of_the_page_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    event = cloudevent()
    async with listening(good) as relay:
        monkeypatch.setenv("CALLBACK_SECRET", SECRET)
        monkeypatch.setenv("RELAY_URL", f"http://127.0.0.1:{relay.port}")
        program: dict[str, Any] = {}
        exec(APPROVAL, program)  # noqa: S102  # the test is about this program
        approve: Callable[[Any], int] = program["approve"]
        assert await asyncio.to_thread(approve, json.loads(event.body)) == 204
    (received,) = relay.requests
    assert received.line == "POST /v1/callbacks/db-drain HTTP/1.1"
    signed = signature.verify([SECRET], received.headers, received.body, datetime.now(UTC))
    assert signed == f"approve-{event.id}"
    assert json.loads(received.body) == {
        "eventId": event.subject,
        "decision": "approve",
        "revision": event.data["revision"],
        "reason": "drained",
    }
