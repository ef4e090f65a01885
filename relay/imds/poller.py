"""Reads the document for ever, and is the one way through which anything is said to IMDS: the gate's port.

One conversation, so that a StartRequest goes before the next poll, and the fresh read before it counts as that poll.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from datetime import datetime

from relay.clock import Clock
from relay.errors import SourceError, SourceRefused, SourceUnavailable, StoreUnavailable
from relay.events.model import parse_document
from relay.imds import SourceSettings
from relay.imds.client import ImdsClient
from relay.imds.rate_limit import retry_delay
from relay.ingest.recorder import PollResult, Recorder
from relay.outbox.sqlite import Store

FIRST_ANSWER_TIMEOUT = 150.0
"""Seconds without a usable answer after which the source counts as lost, before there was one: the first may take 130."""
ANSWER_TIMEOUT = 90.0
"""The same after the first: the service may answer 410 for 70 seconds while it updates.

See docs/protocol.md#statuses-to-retry.
"""

_log = logging.getLogger(__name__)

Say = Callable[[str, str | None, str, int], None]


class Poller:
    """Polls, and records what it sees."""

    def __init__(
        self,
        settings: SourceSettings,
        client: ImdsClient,
        recorder: Recorder,
        store: Store,
        clock: Clock,
        *,
        say: Say,
        last_read: datetime | None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.lost = False
        """Whether there has been no usable answer for too long."""
        self.polls = 0
        self.failures = 0
        """Polls in a row without a usable answer."""
        self._settings = settings
        self._client = client
        self._recorder = recorder
        self._store = store
        self._clock = clock
        self._say = say
        self._chance = chance
        self._began = clock.monotonic()
        self._seen: bytes | None = None  # the bytes that were recorded last
        self._seen_at: float | None = None
        self._seen_wall = last_read
        self._told: str | None = None
        self._rest: float | None = None  # what the service asked for, in seconds
        self._asked: list[asyncio.Future[None]] = []
        self._ask = asyncio.Event()

    @property
    def last_read_at(self) -> datetime | None:
        """When the document was last read; None when it never was."""
        return self._seen_wall

    async def run(self) -> None:
        """Poll until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._poll_for_ever(), name="source: poll")
            group.create_task(self._watch(), name="source: watch")

    async def read_fresh(self) -> None:
        """Read the document with a call begun from now on, and have what it holds recorded. Raises SourceError."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked.append(future)
        self._ask.set()
        await future

    async def start(self, event_ids: Sequence[str]) -> None:
        """Send one StartRequest for these events; return on 200. Raises SourceRefused on 400, else SourceUnavailable."""
        await self._client.send_start_request(event_ids)

    async def _poll_for_ever(self) -> None:
        while True:
            began = self._clock.monotonic()
            asked, self._asked = self._asked, []
            self._ask.clear()
            self.polls += 1
            try:
                await self._poll()
            except SourceError as error:
                self._failed(error)
                for future in asked:
                    if not future.done():
                        future.set_exception(error)
            else:
                self._succeeded()
                for future in asked:
                    if not future.done():
                        future.set_result(None)
            if self.failures:
                # Whoever asks for a fresh read waits too: the service asked for this rest, or needs it.
                await self._clock.sleep(
                    retry_delay(self.failures, self._rest, self._settings.interval, self._chance())
                )
            else:
                await self._pause(began + self._settings.interval - self._clock.monotonic())

    async def _poll(self) -> None:
        """One read. An idle poll, whose bytes are those of the last, does no more than compare them."""
        body = await self._client.read_document()
        now, monotonic = self._clock.now(), self._clock.monotonic()
        if body != self._seen:
            sighting = PollResult(parse_document(body), now, self._gap(now, monotonic))
            try:
                await self._store.transact(
                    lambda tx: self._recorder.record(tx, sighting), fail_open=True
                )
            except StoreUnavailable as error:
                raise SourceUnavailable(f"what was read could not be recorded: {error}") from error
            self._seen = body
        self._seen_at, self._seen_wall = monotonic, now

    def _gap(self, now: datetime, monotonic: float) -> bool:
        """Whether polling paused for so long that an event may have started and ended unseen.

        Measured by both clocks: one stands still while the VM is frozen, the other may be set.
        """
        if self._seen_wall is None:
            return True
        passed = (now - self._seen_wall).total_seconds()
        if self._seen_at is not None:
            passed = max(passed, monotonic - self._seen_at)
        elif passed < 0:
            return True  # the clock was set back while the relay was down: how long that was, nobody knows
        return passed > max(3 * self._settings.interval, 5.0)

    async def _pause(self, seconds: float) -> None:
        """Return after so many seconds, or when somebody asks for a fresh read."""
        async with asyncio.TaskGroup() as group:
            waits: list[asyncio.Task[object]] = [
                group.create_task(self._clock.sleep(max(0.0, seconds))),
                group.create_task(self._ask.wait()),
            ]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    def _failed(self, error: SourceError) -> None:
        self.failures += 1
        self._rest = error.retry_after if isinstance(error, SourceUnavailable) else None
        if error.reason != self._told:
            self._told = error.reason
            level = logging.ERROR if isinstance(error, SourceRefused) else logging.WARNING
            _log.log(level, "the metadata service gave no usable answer: %s", error.reason)

    def _succeeded(self) -> None:
        if self.failures:
            _log.info("the metadata service answers again")
        self.failures, self._rest, self._told = 0, None, None
        if self.lost:
            self.lost = False
            self._say("relay.source-recovered", None, "the metadata service answers again", 1)

    async def _watch(self) -> None:
        """Say that the source is lost when it is: also while a call hangs."""
        while True:
            since, patience = (
                (self._began, FIRST_ANSWER_TIMEOUT)
                if self._seen_at is None
                else (self._seen_at, ANSWER_TIMEOUT)
            )
            left = since + patience - self._clock.monotonic()
            if left <= 0 and not self.lost:
                self.lost = True
                reason = self._told or "no answer came"
                _log.error(
                    "the metadata service is lost, no usable answer for %.0f s: %s",
                    patience,
                    reason,
                )
                self._say(
                    "relay.source-lost", None, f"no usable answer for {patience:g} s: {reason}", 1
                )
            # Not longer than the shorter patience: the first answer may come meanwhile, and from then on it holds.
            await self._clock.sleep(min(max(left, 0.5), ANSWER_TIMEOUT))
