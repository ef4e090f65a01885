"""Receivers answer with errors, hang, drip, and send a gigabyte or a bomb."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from chaos.faults import Fault, Place, under_load
from chaos.trial import Trial, Wiring
from tests.journey.relay_process import webhook
from tests.sinks.http_receiver import Behaviour, Connection, listening, says

FAILS_FOR = 3.0
"""Seconds in which the webhook that is judged answers with errors."""
STATUSES = (301, 400, 404, 408, 410, 429, 500, 503)
PIECE = b"x" * 65536
BOMB = gzip.compress(b"\0" * (64 * 1024 * 1024), compresslevel=9)


async def _fail(running: Trial) -> None:
    """Let the webhook answer with an error, or not at all for longer than a delivery may take."""
    if running.chance.random() < 0.2:
        running.box.may_answer.clear()
    else:
        running.box.status = running.chance.choice(STATUSES)
    await asyncio.sleep(FAILS_FOR)
    running.box.status = 204
    running.box.may_answer.set()
    # 410 means that nobody wants more, so the relay disables the sink until somebody resumes it.
    await running.process.call("POST", "/v1/sinks/drain/resume")
    await running.load.wait_until_busy(1)


async def _send_gigabyte(connection: Connection) -> None:
    await connection.request()
    await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n")
    for _ in range(16384):
        await connection.send(PIECE)


async def _send_bomb(connection: Connection) -> None:
    await connection.request()
    await connection.answer(500, {"Content-Encoding": "gzip"}, BOMB)


async def _refuse(connection: Connection) -> None:
    await connection.request()
    await connection.answer(410)


HOSTILE: dict[str, Behaviour] = {
    "drips": says(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", drip=b"."),
    "hangs": says(),
    "gigabyte": _send_gigabyte,
    "bomb": _send_bomb,
    "gone": _refuse,
}


@asynccontextmanager
async def _with_hostile_receivers(_: Place) -> AsyncIterator[Wiring]:
    async with AsyncExitStack() as stack:
        sinks = []
        for name, behaviour in HOSTILE.items():
            receiver = await stack.enter_async_context(listening(behaviour))
            sinks.append(webhook(receiver.url, name, events=["*"], timeout="2s"))
        yield Wiring(more_sinks=sinks)


async def _go_on(running: Trial) -> None:
    await running.load.wait_until_busy()


FAULTS = (
    Fault(
        name="receiver-errors",
        text=f"the webhook answers {', '.join(map(str, STATUSES))} or not at all, for "
        f"{FAILS_FOR:g} s",
        quick=6,
        full=60,
        run=under_load(_fail),
    ),
    Fault(
        name="receivers-hostile",
        text="five more webhooks drip, hang, send a gigabyte, send a bomb of gzip, and answer 410",
        quick=3,
        full=20,
        run=under_load(_go_on, _with_hostile_receivers),
    ),
)
