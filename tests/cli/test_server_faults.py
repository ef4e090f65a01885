"""Verbs that call no relay, or a relay that breaks the connection; and ``tail``."""

from __future__ import annotations

import asyncio
import re
import signal
from typing import Any

import orjson
import pytest
from aiohttp import web

from relay.approvals.status import approval_json_fields
from tests.approvals.builders import build_status
from tests.builders import DATA
from tests.cli.command import read_until, run_async, serve_handler, start_process

EVENT = {**DATA, "eventId": "E", "eventType": "Reboot", "resources": ["a"], "durationSeconds": None}
SHOWN = EVENT | {"scope": "s", "outcome": None}
STANDING = {**approval_json_fields(build_status()), "mayVote": []}
VOTE: dict[str, Any] = {"approvalId": "i", "eventId": "E", "decision": "approve", "rule": "r"}
ANSWER = VOTE | {"state": "granted", "votes": 1, "required": 1}


async def test_an_approval_whose_answer_was_lost_is_sent_again_under_the_same_id() -> None:
    requests: list[tuple[str, bytes]] = []

    async def handler(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({**SHOWN, "items": [], "next": None, "approval": STANDING})
        requests.append((request.headers["Idempotency-Key"], await request.read()))
        if len(requests) < 3:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response(ANSWER, status=202)

    async with serve_handler(handler) as url:
        result = await run_async("approve", "E", "--url", url, "--yes")
        assert (result.code, result.out) == (0, "granted (1 of 1 vote): the StartRequest follows\n")
        assert len(requests) == 3
        assert len(set(requests)) == 1
        assert orjson.loads(requests[0][1])["scope"] == SHOWN["scope"]  # a hub has others
        await run_async("approve", "E", "--url", url, "--yes")
        assert len({key for key, _ in requests}) == 2


@pytest.mark.parametrize(
    ("status", "body", "code", "sentence"),
    [
        (200, "<html>", 1, "expected an answer in JSON from"),
        (200, "", 1, "expected an answer in JSON from"),
        (200, "[]", 1, "expected an answer in JSON from"),
        (404, "<html>", 1, "expected a relay's answer, got HTTP 404"),
        (302, "", 1, "expected a relay's answer, got HTTP 302"),
        (500, "[]", 1, "expected a relay's answer, got HTTP 500"),
        (503, '{"detail": "try again"}', 1, "try again"),
        (403, '{"detail": "not you"}', 3, "refused: not you"),
    ],
    ids=["HTML", "empty", "list", "404 HTML", "redirect", "500 list", "503 problem", "403 problem"],
)
async def test_every_answer_that_is_none_is_a_sentence(
    status: int, body: str, code: int, sentence: str
) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body, headers={"Location": "/elsewhere"})

    async with serve_handler(handler) as url:
        result = await run_async("events", "--url", url, "--key", "k")
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith(f"imds-relay: {sentence}")
    assert len(result.err.splitlines()) == 1


# --- tail


def head(position: int, journal: str = "a") -> str:
    return f"{position}:{journal * 64}"


def frame(position: int, reason: str = "") -> bytes:
    """An event as the stream has it."""
    event = {
        "type": "io.imdsrelay.event.scheduled.v1",
        "time": "2026-04-11T22:26:58Z",
        "data": {**EVENT, "description": reason},
    }
    place = f"id: {position}\njournalhead: {head(position)}\n"
    return b"%sevent: x\ndata: %s\n\n" % (place.encode(), orjson.dumps(event))


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (f"journalhead: {head(7)}\n", "connected again; no event is missing"),
        (f"journalhead: {head(7, 'b')}\n", "connected again; events may be missing: "),
        (f"journalhead: {head(0)}\n", "connected again; events may be missing: "),
        ("", "connected again; events may be missing: "),
    ],
    ids=["the same journal", "another journal", "the beginning of a journal", "no journal"],
)
async def test_tail_goes_on_where_it_was_and_says_if_any_is_missing(first: str, said: str) -> None:
    last_event_ids: list[str | None] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        last_event_ids.append(request.headers.get("Last-Event-ID"))
        if len(last_event_ids) == 3:
            return web.json_response({"detail": "the relay is starting"}, status=503)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if len(last_event_ids) <= 2:
            await response.write(f": here\n\nid: 6\r\njournalhead: {head(6)}\n\r\n".encode())
        if len(last_event_ids) == 2:
            await response.write(frame(7) + frame(8)[:30])  # broken off in the middle of the second
        elif len(last_event_ids) == 4:
            await response.write(f"id: 7\n{first}\n".encode() + frame(8, reason="x" * 300_000))
            await asyncio.sleep(3600)
        return response

    form = ["--json"] if first else []  # once as people see it
    async with serve_handler(handler) as url, start_process("tail", "--url", url, *form) as tail:
        lines = [await read_until(tail.stdout, "\n") for _ in range(2)]
        tail.send_signal(signal.SIGINT)
        async with asyncio.timeout(60):
            assert await tail.wait() == 0
        assert tail.stderr is not None
        status_lines = (await tail.stderr.read()).decode()
    assert last_event_ids == [None, head(6), head(7), head(7)]
    if form:
        types = [orjson.loads(line)["type"] for line in lines]
        assert types == ["io.imdsrelay.event.scheduled.v1"] * 2
    else:
        told = "event.scheduled        Reboot E of a  Azure announced a Reboot of a."
        assert [line.partition("  ")[2] for line in lines] == [f"{told}\n"] * 2  # behind the time
    assert "; trying again until the relay answers\n" in status_lines
    second, third = re.findall("^connected again; .*", status_lines, re.MULTILINE)
    assert second == "connected again; no event is missing"
    assert third.startswith(said)
    assert "Traceback" not in status_lines


async def test_tail_without_a_relay_ends_with_a_sentence() -> None:
    async with start_process("tail", "--url", "http://127.0.0.1:1") as tail:
        status_lines = await read_until(tail.stderr, "Is the relay running?")
        assert await tail.wait() == 1
    assert status_lines.startswith("imds-relay: no relay answers at http://127.0.0.1:1")


@pytest.mark.parametrize("arguments", [("show", "E" * 36), ("deliveries", "7")])
async def test_a_long_log_is_shown_in_part_or_with_all_pages(arguments: tuple[str, str]) -> None:
    log = "history" if arguments[0] == "show" else "log"
    pages = {None: ([3, 4], "3"), "3": ([1, 2], "1"), "1": ([0], None)}

    async def answer(request: web.Request) -> web.Response:
        rows, following = pages[request.query.get("cursor")]
        return web.json_response({log: rows, "next": following})

    async with serve_handler(answer) as url:
        first = (await run_async(*arguments, "--url", url, "--json")).json
        everything = (await run_async(*arguments, "--url", url, "--json", "--all")).json
    assert first == {log: [3, 4], "next": "3"}
    assert everything == {log: [0, 1, 2, 3, 4], "next": None}


async def test_the_beginning_of_two_standing_holds_ends_neither() -> None:
    calls: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        calls.append(request.method)
        holds = [{"holdId": f"ab{number}" + "0" * 29} for number in range(2)]
        return web.json_response({"items": holds, "next": None})

    async with serve_handler(answer) as url:
        result = await run_async("holds", "end", "AB", "--url", url)
    assert (result.code, "'AB' begins several ids: ab00" in result.err) == (1, True)
    assert calls == ["GET"]
