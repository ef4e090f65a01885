"""Measures how long refusals in front delay an event at a webhook that takes 100 ms.

Once 20,000 refusals are about other EventIds, and once ten are about the EventId of the event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from bench.outbox import open_outbox, until
from bench.results import RELAY, Rounds, Section
from bench.run import Options
from bench.trial import webhook
from tests.builders import cloudevent

REFUSALS = 20_000
FOLDED_REFUSALS = 10
"""Refusals about one EventId that a client causes in a minute. Further ones are folded."""
ANSWER_TIME = 0.1
"""Seconds in which the endpoint answers."""


async def flood(options: Options) -> Section:
    """Measure the time from recording to arrival of an event."""
    rounds = Rounds()
    floods = (
        ("other EventIds", "EVENT-{}", options.scaled(REFUSALS), 2 * ANSWER_TIME),
        ("the same EventId", "EVENT", FOLDED_REFUSALS, (FOLDED_REFUSALS + 2) * ANSWER_TIME),
    )
    for _ in options.rounds("flood"):
        for about, subject, count, limit in floods:
            delay = await _delay(subject, count)
            name, aim = f"behind {count:,} refusals about {about}", f"≤ {limit * 1000:g} ms"
            rounds.add(name, "ms", RELAY, delay * 1000, aim)
    return Section(
        metric="flood",
        title="An event behind a flood of refusals",
        columns=(RELAY,),
        ratio=None,
        rows=rounds.rows(),
        note=(
            "Recorded to received, at a webhook that answers after "
            f"{ANSWER_TIME * 1000:g} ms. Those about the same EventId go first, because of the "
            "order per EventId. Store, dispatcher and endpoint share a process here."
        ),
    )


async def _delay(subject: str, count: int) -> float:
    arrivals: dict[str, float] = {}
    refusals = [cloudevent("approval.refused", subject.format(number)) for number in range(count)]
    event = cloudevent("event.scheduled", "EVENT")
    async with _slow_endpoint(arrivals) as url, open_outbox([webhook(url, "slow")]) as outbox:
        await outbox.record(refusals)
        await until(lambda: bool(arrivals))
        await outbox.record([event])
        recorded = time.monotonic()
        await until(lambda: event.id in arrivals)
        return arrivals[event.id] - recorded


@asynccontextmanager
async def _slow_endpoint(arrivals: dict[str, float]) -> AsyncIterator[str]:
    """Yield the URL of an endpoint that notes when each event arrived, by its id."""

    async def receive(request: web.Request) -> web.Response:
        arrivals.setdefault(request.headers["webhook-id"], time.monotonic())
        await asyncio.sleep(ANSWER_TIME)
        return web.Response(status=204)

    application = web.Application()
    application.router.add_post("/", receive)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()
