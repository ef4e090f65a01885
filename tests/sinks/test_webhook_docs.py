"""docs/webhooks.md: its receiver accepts deliveries, and the relay accepts its approval."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from relay import signature
from relay.clock import SystemClock
from relay.errors import Deferred
from relay.sinks.webhook import connect
from tests.builders import cloudevent
from tests.ports import reserve
from tests.sinks.http_receiver import good, listening
from tests.sinks.webhook_sink import OTHER_SECRET, SECRET, settings

PAGE = Path(__file__).parents[2] / "docs" / "webhooks.md"
RECEIVER, APPROVAL = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@asynccontextmanager
async def documented_receiver() -> AsyncIterator[tuple[int, asyncio.StreamReader]]:
    """The receiver of the page as a process: its port and what it prints."""
    (port,) = reserve(1)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RECEIVER),
        env={**os.environ, "SECRET": SECRET, "PORT": str(port)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    assert process.returncode is None
                    await asyncio.sleep(0.02)
                else:
                    writer.close()
                    await writer.wait_closed()
                    break
        yield port, process.stdout
    finally:
        process.kill()
        await process.communicate()


async def test_the_receiver_of_the_page_takes_an_event_once_and_no_forgery() -> None:
    first, second = cloudevent(), cloudevent("event.started")
    async with documented_receiver() as (port, printed):
        url = f"http://127.0.0.1:{port}/azure"
        async with connect(
            settings(url=url, secrets=[OTHER_SECRET, SECRET]), SystemClock()
        ) as sink:
            for event in (first, first, second):
                assert (await sink.deliver(event)).status == 204
        async with connect(settings(url=url, secrets=[OTHER_SECRET]), SystemClock()) as forger:
            with pytest.raises(Deferred) as caught:
                await forger.deliver(cloudevent("event.ended"))
        assert (caught.value.status, caught.value.failure) == (401, "slow")
        lines = [(await printed.readline()).decode().split() for _ in range(2)]
    assert lines == [[event.type, event.subject] for event in (first, second)]


async def test_the_approval_of_the_page_is_what_the_relay_verifies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    assert (
        signature.verify([SECRET], received.headers, received.body, datetime.now(UTC))
        == f"approve-{event.id}"
    )
    assert json.loads(received.body) == {
        "eventId": event.subject,
        "decision": "approve",
        "revision": event.data["revision"],
        "reason": "drained",
    }


def test_the_page_says_what_each_failure_comes_to() -> None:
    for status in ("2xx", "408", "409", "425", "429", "5xx", "410"):
        assert f"`{status}`" in PAGE.read_text(encoding="utf-8")
