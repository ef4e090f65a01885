"""GET /v1/stream: resumes without gap or repeat, in bounded memory for slow readers."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from relay.api.connections import ServerLimits
from relay.api.settings import ApiSettings
from relay.events.build import CATALOG
from tests.api.running_relay import CLIENTS, EVENT_ID, RunningRelay, make_event, run_relay
from tests.eventually import eventually

KEEP_ALIVE_INTERVAL = ServerLimits().stream_keep_alive_interval


@dataclass(frozen=True, slots=True)
class Message:
    """One block of lines, by field."""

    fields: Mapping[str, str]

    @property
    def event(self) -> Any:
        return orjson.loads(self.fields["data"])


def open_stream(
    relay: RunningRelay, last: str | None = None, session: aiohttp.ClientSession | None = None
) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    """Open a stream of bob, after the event that he had last."""
    headers = {"Authorization": "Bearer bearer-test-key-of-bob"}
    headers |= {"Last-Event-ID": last} if last is not None else {}
    url = f"http://127.0.0.1:{relay.server.port}/v1/stream"
    return (session or relay.session).get(url, headers=headers)


@asynccontextmanager
async def following(
    relay: RunningRelay, last: str | None = None
) -> AsyncIterator[AsyncIterator[Message]]:
    """A stream, and its messages as they come; comments left out."""
    async with open_stream(relay, last) as response:
        assert (response.status, response.headers["Content-Type"]) == (200, "text/event-stream")
        yield _messages(response)


async def _messages(response: aiohttp.ClientResponse) -> AsyncIterator[Message]:
    block: dict[str, str] = {}
    async for raw in response.content:
        line = raw.decode().removesuffix("\n")
        name, _, value = line.partition(": ")
        if line == "" and block:
            yield Message(block)
            block = {}
        elif name:
            block[name] = value


async def _take(messages: AsyncIterator[Message], count: int) -> list[Message]:
    messages_taken: list[Message] = []
    async with asyncio.timeout(60):
        while len(messages_taken) < count:
            message = await anext(messages)
            if "data" in message.fields:
                messages_taken.append(message)
    return messages_taken


async def test_a_recorded_event_is_streamed_at_once_and_unchanged(relay: RunningRelay) -> None:
    async with following(relay) as messages:
        await relay.decide()
        (message,) = await _take(messages, 1)
    head = await relay.store.read(lambda tx: tx.head())
    ((_, event),) = await relay.store.read(lambda tx: tx.journal.events_after(head.position - 1, 2))
    assert message.fields == {
        "id": str(head.position),
        "journalhead": str(head),
        "event": "io.imdsrelay.approval.recorded.v1",
        "said": '"client:alice voted to approve, 1 of 2."',
        "data": event.body.decode(),
    }


async def test_a_stream_sends_where_it_begins_before_the_first_event(relay: RunningRelay) -> None:
    """An id without data is no event, and is kept by every consumer that follows the standard."""
    async with following(relay) as messages:
        begun = await anext(messages)
    head = await relay.store.read(lambda tx: tx.head())
    assert begun.fields == {"id": str(head.position), "journalhead": str(head)}
    for last in (str(head), str(head.position)):
        async with following(relay, last) as messages:
            assert await anext(messages) == begun


async def test_a_stream_resumes_without_gap_or_repeat(tmp_path: Path) -> None:
    async with run_relay(tmp_path, sinks=()) as relay:
        events = [make_event(event_id=f"event-{number}") for number in range(60)]
        seen: list[str] = []
        last = "0"

        async def record() -> None:
            for count in range(1, len(events) + 1):
                await relay.observe(*events[:count])

        async with asyncio.TaskGroup() as group:
            group.create_task(record())
            while len(seen) < len(events):
                async with following(relay, last) as messages:
                    for message in await _take(messages, min(7, len(events) - len(seen))):
                        seen.append(message.event["subject"])
                        last = message.fields["id"]
        assert seen == [recorded.event_id for recorded in events]


async def test_journal_rows_that_are_no_cloudevents_are_skipped(relay: RunningRelay) -> None:
    await relay.call("PUT", "/v1/approvals/mode", {"mode": "dry-run"})
    await relay.decide()
    async with following(relay, "0") as messages:
        types = [message.event["type"].split(".", 2)[2] for message in await _take(messages, 2)]
    assert types == ["event.scheduled.v1", "approval.recorded.v1"]


@pytest.mark.parametrize("last", ["999999", f"1:{'a' * 64}", f"999999:{'a' * 64}"])
async def test_an_id_of_another_journal_begins_anew(relay: RunningRelay, last: str) -> None:
    """The state file was set aside: to send again is better than to leave out."""
    async with following(relay, last) as messages:
        assert (await anext(messages)).fields == {"id": "0", "journalhead": f"0:{'0' * 64}"}
        (message,) = await _take(messages, 1)
    assert message.event["subject"] == EVENT_ID


async def test_an_invalid_last_event_id_is_400(relay: RunningRelay) -> None:
    for last in ("x", "-1", "1.0", "9" * 19, "1 2", "1:", f"1:{'A' * 64}"):
        headers = {"Last-Event-ID": last}
        assert (await relay.call("GET", "/v1/stream", headers=headers)).status == 400, last


async def test_a_silent_stream_sends_comments(tmp_path: Path) -> None:
    limits = ServerLimits(stream_keep_alive_interval=0.05)
    async with (
        run_relay(tmp_path, limits=limits) as relay,
        open_stream(relay) as response,
        asyncio.timeout(60),
    ):
        comments = 0
        async for line in response.content:
            comments += line.startswith(b":")
            if comments == 3:
                break


async def test_streams_end_when_the_relay_does(relay: RunningRelay) -> None:
    async with following(relay) as first, following(relay, "0") as second:
        await _take(second, 1)
        await anext(first)
        relay.server.state.detach_relay()
        async with asyncio.timeout(KEEP_ALIVE_INTERVAL - 1):
            assert [message async for message in first] == []
            assert [message async for message in second] == []


async def test_a_server_with_streams_stops_promptly(tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as session:
        async with run_relay(tmp_path) as relay:
            response = await open_stream(relay, session=session).__aenter__()
            assert response.status == 200
            began = time.monotonic()
        assert time.monotonic() - began < KEEP_ALIVE_INTERVAL - 1  # it waits for none of them
        response.close()


async def test_a_reader_that_does_not_read_is_dropped_and_others_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "relay.api.routes.stream")
    limits = ServerLimits(stream_send_timeout=3.0)
    with socket.socket() as slow_reader:
        async with run_relay(tmp_path, sinks=(), limits=limits) as relay:
            slow_reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow_reader.connect(("127.0.0.1", relay.server.port))
            slow_reader.sendall(
                b"GET /v1/stream HTTP/1.1\r\nHost: x\r\n"
                b"Authorization: Bearer bearer-test-key-of-bob\r\n"
                b"Last-Event-ID: 0\r\n\r\n"
            )
            text = "x" * 100_000
            big = [make_event(event_id=f"event-{n}", description=text) for n in range(100)]
            async with following(relay) as messages:
                await relay.observe(*big)
                await _take(messages, len(big))
                await eventually(lambda: "was dropped" in caplog.text)
                content = await asyncio.to_thread(_read_all, slow_reader)
                assert not content.endswith(b"0\r\n\r\n")  # aborted, not completed
                await relay.observe(*big, make_event())
                (message,) = await _take(messages, 1)
                assert message.event["subject"] == EVENT_ID
            await _no_open_streams(relay)


async def _no_open_streams(relay: RunningRelay) -> None:
    await eventually(lambda: len(relay.server.state.stream_wakeups) == 0)


def _read_all(sock: socket.socket) -> bytes:
    sock.settimeout(5)
    content = b""
    while chunk := sock.recv(2**20):
        content += chunk
    return content


async def test_the_number_of_streams_is_limited(tmp_path: Path) -> None:
    async with run_relay(tmp_path, limits=ServerLimits(max_streams=2)) as relay:
        async with following(relay), following(relay):
            assert (await relay.call("GET", "/v1/stream")).status == 429
        await _no_open_streams(relay)


async def test_head_of_a_stream_is_not_answered_with_one(relay: RunningRelay) -> None:
    assert (await relay.call("HEAD", "/v1/stream")).status == 405


def test_no_type_could_break_out_of_its_line() -> None:
    assert all(event_type.type.isprintable() for event_type in CATALOG)


@pytest.mark.parametrize("change", [{"can": ["approve"]}, {"key": "bearer-test-key-of-nobody"}])
async def test_a_reload_ends_streams_of_a_client_that_has_changed(
    relay: RunningRelay, change: dict[str, Any]
) -> None:
    """What was withdrawn, a right or a key, must not live on in a stream. Others stay."""
    before = relay.server.state.callers.settings
    others = [client for client in CLIENTS if client["name"] != "bob"]
    async with open_stream(relay) as response:
        for clients, ended in ((CLIENTS[:2], False), ([*others, CLIENTS[1] | change], True)):
            changed = ApiSettings.model_validate({"clients": clients})
            relay.server.prepare_reload(before.model_copy(update={"clients": changed.clients}))()
            assert (relay.server.state.stream_wakeups == {}) == ended
        await response.read()
