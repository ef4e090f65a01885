"""The load of a trial: events come, change, are approved or held, start and end.

Each event waits for the journal before its next change. So a change that is not in the journal in
the end was lost, and was not merely overtaken.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from chaos.judge import Offer, read_changes
from relay.simulator import Event, Plan, Simulator
from tests.journey.relay_process import RelayProcess

KEYS = {"alice": "a-bearer-key-of-alice-in-chaos", "bob": "a-bearer-key-of-bob-in-chaos"}
"""The clients, by name. Both votes are a quorum."""
RULE = {
    "name": "two",
    "match": {"event_type": ["Reboot"]},
    "approve": {"votes": 2, "from": [f"client:{name}" for name in KEYS]},
}
CLIENTS = [
    {"name": name, "key": key, "can": ["read", "approve", "hold"]} for name, key in KEYS.items()
]
LIVES = 12
"""Events that happen at the same time."""
NOTICE = 7 * 86_400.0
"""Seconds to NotBefore. Votes end there, also by a clock that is wrong by an hour."""
LOOK_INTERVAL = 0.1
"""Seconds between two looks into the journal."""
CALL_INTERVAL = 0.2
"""Seconds until a call is repeated that had no answer."""
CALL_TIMEOUT = 10.0
START_TIMEOUT = 600.0
"""Seconds in which Azure must have got the StartRequest of an event that has its quorum.

While parts of a fleet are killed in turns, several tries can fail."""


class Load:
    """Lets events happen to some VMs until it is stopped."""

    def __init__(
        self,
        azure: Simulator,
        target: RelayProcess,
        chance: random.Random,
        *,
        vms: tuple[str, ...] = ("vm-0",),
        scope: str | None = None,
    ) -> None:
        """``scope`` is part of a decision, where an EventId is not enough."""
        self.offer = Offer()
        self._azure = azure
        self._target = target
        self._chance = chance
        self._vms = vms
        self._scope = scope
        self._stopping = asyncio.Event()
        self._seen: dict[str, list[str]] = {}
        self._looked = asyncio.Event()
        self._failure: Exception | None = None
        self.finished = 0
        """Events that have ended and were recorded."""

    async def run(self) -> None:
        """Let events happen until `stop`; return when the last of them has ended."""
        try:
            async with asyncio.TaskGroup() as group:
                looking = group.create_task(self._look())
                async with asyncio.TaskGroup() as lives:
                    for _ in range(LIVES):
                        lives.create_task(self._live())
                looking.cancel()
        except Exception as error:
            self._failure = error
            self._looked.set()
            raise

    def stop(self) -> None:
        self._stopping.set()

    async def wait_until_busy(self, more: int = 3) -> None:
        """Wait until some more events have ended: the load runs. Raises RuntimeError if not."""
        goal = self.finished + more
        while self.finished < goal:
            if self._failure is not None:
                raise RuntimeError("the load has failed") from self._failure
            await self._looked.wait()

    # --- one event

    async def _live(self) -> None:
        stories: list[Callable[[Event], Awaitable[None]]] = [
            self._approved,
            self._approved,
            self._not_approved,
            self._held,
            self._canceled,
        ]
        while not self._stopping.is_set():
            story = self._chance.choice(stories)
            plan = Plan(
                resources=(self._chance.choice(self._vms),),
                notice=NOTICE,
                starts_after=0.05,
                lasts=None,
            )
            event = self._azure.schedule(plan)
            await self._recorded(event, "event.scheduled")
            await story(event)
            self.finished += 1

    async def _approved(self, event: Event) -> None:
        self.offer.granted.add(event.event_id.lower())
        for voter in KEYS:
            await self._decide(voter, event, "approve")
        await self._azure.wait_until_started(event, within=START_TIMEOUT)
        await self._goes_on(event)

    async def _not_approved(self, event: Event) -> None:
        """Only a part of the quorum votes. Azure starts by itself."""
        await self._decide(self._chance.choice([*KEYS]), event, "approve")
        self._azure.start(event)
        await self._goes_on(event)

    async def _held(self, event: Event) -> None:
        """Both vote, but there is a hold."""
        holder = self._chance.choice([*KEYS])
        await self._decide(holder, event, "hold")
        for voter in KEYS:
            await self._decide(voter, event, "approve")
        self._azure.start(event)
        await self._goes_on(event)

    async def _canceled(self, event: Event) -> None:
        """One votes, Azure changes the event and takes it back."""
        await self._decide("alice", event, "approve")
        self._azure.update_event(event, resources=(*event.resources, "vm-of-somebody-else"))
        await self._recorded(event, "event.updated")
        self._azure.cancel(event)
        await self._recorded(event, "event.ended")

    async def _goes_on(self, event: Event) -> None:
        await self._recorded(event, "event.started")
        self._azure.end(event)
        await self._recorded(event, "event.ended")

    # --- the relay

    async def _recorded(self, event: Event, change: str) -> None:
        """Azure has made a change: wait until the journal has it."""
        key = event.event_id.lower()
        self.offer.add(key, change)
        number = len(self.offer.changes[key])
        while len(self._seen.get(key, ())) < number:
            await self._looked.wait()

    async def _look(self) -> None:
        position = 0
        while True:
            changes = await asyncio.to_thread(read_changes, self._target.store, position)
            for _, event_id, change in changes:
                self._seen.setdefault(event_id, []).append(change)
            position = changes[-1][0] if changes else position
            self._looked.set()
            self._looked = asyncio.Event()
            await asyncio.sleep(LOOK_INTERVAL)

    async def _decide(self, voter: str, event: Event, decision: str) -> None:
        """Decide about the event as it is now, again and again until there is an answer."""
        while True:
            shown = await self._call(voter, "GET", f"/v1/events/{event.event_id}{self._query}")
            if shown is not None and shown[0] == 200:
                body = {
                    "eventId": event.event_id,
                    "decision": decision,
                    "revision": shown[1]["revision"],
                }
                if self._scope is not None:
                    body["scope"] = self._scope
                answer = await self._call(voter, "POST", "/v1/approvals", body)
                if answer is not None and answer[0] in (202, 409):
                    # 409: it was granted and sent in the meantime, by an answer that was lost.
                    return
            await asyncio.sleep(CALL_INTERVAL)

    @property
    def _query(self) -> str:
        return f"?scope={self._scope}" if self._scope is not None else ""

    async def _call(
        self, voter: str, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, Any] | None:
        headers = {"Authorization": f"Bearer {KEYS[voter]}"}
        if body is not None:
            headers["Idempotency-Key"] = f"{voter}-{body['decision']}-{body['revision']}"
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                return await self._target.call(method, path, body, headers)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None
