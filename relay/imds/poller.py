"""Polls the document of scheduled events, and reports when its source is lost and is back.

Each document with new bytes goes to the recorder, in one transaction of the store. Whoever sends a
StartRequest first wants a document that was asked for from now on (`read_with_imds_time`). That
read is the next poll, which then begins at once; all who ask before it begins share it. After a
failure it waits as every poll does: the service asked for that pause, or needs it.
`ImdsStartRequestPort` does both for the gate: the fresh read, and the StartRequest.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256

from relay.approvals import ClaimedGrant
from relay.clock import Clock, Histogram
from relay.errors import (
    DocumentTooLarge,
    SourceError,
    SourceRefused,
    SourceUnavailable,
    StoreUnavailable,
)
from relay.events.build import RecordRelayEvent
from relay.events.model import Document
from relay.imds import SourceSettings
from relay.imds.calls import retry_delay
from relay.imds.client import ImdsClient
from relay.imds.document import parse_document, shows_all_types
from relay.ingest import DatedRead, Recorder, SuccessfulPoll
from relay.logs import LogOnce, log_extra
from relay.store import Grant
from relay.store.sqlite import Store

FIRST_ANSWER_TIMEOUT = 150.0
"""Seconds without a usable answer after which the source is lost, if there was none before.

The first answer may take 130 seconds (docs/protocol.md#the-first-call).
"""
ANSWER_TIMEOUT = 90.0
"""Seconds after the last usable answer after which the source is lost.

The service may answer 410 for 70 seconds (docs/protocol.md#statuses-to-retry).
"""
MIN_GAP = 5.0
"""Seconds: a shorter pause in polling is no gap."""
LARGE_BODY = 64 * 1024
"""Bytes from which a document is parsed in a thread: it takes a few milliseconds or more."""
MIN_WATCH_INTERVAL = 0.5
_POLL_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
"""Seconds: the buckets of polls. The first answer may take 130 seconds."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Poller:
    settings: SourceSettings
    client: ImdsClient
    recorder: Recorder
    store: Store
    clock: Clock
    report: RecordRelayEvent
    last_read_at: datetime | None
    """When the document was last read; None if it never was."""
    jitter: Callable[[], float] = random.random
    lost_reason = "the metadata service gives no usable answer"

    def __post_init__(self) -> None:
        self.lost = False
        self.polls = 0
        self.failures = 0
        """Failed polls in a row."""
        self.poll_seconds = Histogram(_POLL_BOUNDS)
        self.last_document: Document | None = None
        """The document that this process read last; None: it read none yet."""
        self._started_at = self.clock.monotonic()
        self._last_digest: bytes | None = None  # of the bytes that were recorded last
        self._last_read_monotonic: float | None = None
        self._state_log = LogOnce(_log)
        self._last_error: SourceError | None = None  # of the last poll, if it failed
        self._poll_requested = asyncio.Event()
        self._next_read: asyncio.Future[DatedRead[Document]] = asyncio.Future()
        """What the next poll reads, for those who ask before it begins."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._poll_forever(), name="source: poll")
            group.create_task(self._watch_for_source_loss(), name="source: watch")

    @property
    def read_age(self) -> float | None:
        """The seconds since the document was last read; None: this process read none yet."""
        if self._last_read_monotonic is None:
            return None
        return self.clock.monotonic() - self._last_read_monotonic

    @property
    def clock_offset(self) -> float | None:
        """The seconds that our clock is certainly ahead of the service's; None: not known."""
        skew = self.client.clock_skew
        return None if skew is None else 0.0 - skew  # no -0.0

    def use_source_settings(self, settings: SourceSettings) -> None:
        if settings.interval != self.settings.interval:
            self._poll_requested.set()  # ends the pause, which has the earlier interval
        self.settings = settings
        self.client.use_source_settings(settings)

    async def read_with_imds_time(self) -> DatedRead[Document]:
        """Read and record with a call that begins from now on. Raises SourceError."""
        self._poll_requested.set()
        return await asyncio.shield(self._next_read)  # others wait for it too

    async def _poll_forever(self) -> None:
        read = self._next_read
        try:
            while True:
                began = self.clock.monotonic()
                read, self._next_read = self._next_read, asyncio.Future()
                self._poll_requested.clear()
                self.polls += 1
                try:
                    result = await self._poll()
                except SourceError as error:
                    self._note_failure(error)
                    _fail(read, error)
                else:
                    self._note_success()
                    read.set_result(result)
                await self._wait_for_next_poll(began)
        finally:
            for waiting in (read, self._next_read):
                _fail(waiting, SourceUnavailable("the relay stops, and reads no more"))

    async def _poll(self) -> DatedRead[Document]:
        """Read once. If the bytes are the same as the last ones, there is nothing to record."""
        read = await self.client.read_document()
        # Before it is parsed: a fleet orders what its agents say by this time.
        now, monotonic = self.clock.now(), self.clock.monotonic()
        self.poll_seconds.observe(monotonic - read.asked_monotonic)
        digest = sha256(read.content).digest()
        is_new = digest != self._last_digest
        document = None if is_new else self.last_document
        if document is None:
            document = await self._parse(read.content)
        result = DatedRead(document, read.imds_time, read.asked_at, read.asked_monotonic)
        del read  # its body can be 4 MiB, and to record it needs memory, too
        if is_new:
            poll = SuccessfulPoll(document, now, self._has_gap(now, monotonic))
            try:
                await self.store.transact(lambda tx: self.recorder.record(tx, poll), fail_open=True)
            except StoreUnavailable as error:
                raise SourceUnavailable(f"the document could not be recorded: {error}") from error
            self._last_digest, self.last_document = digest, document
        self._last_read_monotonic, self.last_read_at = monotonic, now
        return result

    async def _parse(self, body: bytes) -> Document:
        version = self.settings.api_version
        if len(body) < LARGE_BODY:
            return parse_document(body, version)
        return await asyncio.to_thread(parse_document, body, version)  # others run meanwhile

    def _has_gap(self, now: datetime, monotonic: float) -> bool:
        """Whether an event may have come and gone. A freeze stops one clock, one can be set."""
        if self.last_read_at is None:
            return True
        if self._last_read_monotonic is None and not shows_all_types(self.settings.api_version):
            return True  # a newer version may have shown what this one leaves out
        seconds = (now - self.last_read_at).total_seconds()
        if self._last_read_monotonic is not None:
            seconds = max(seconds, monotonic - self._last_read_monotonic)
        elif seconds < 0:
            return True  # the clock was set back while the relay was down
        return seconds > max(3 * self.settings.interval, MIN_GAP)

    async def _wait_for_next_poll(self, began: float) -> None:
        interval = self.settings.interval
        if self._last_error is None:
            seconds = began + interval - self.clock.monotonic()
            await self.clock.wait(self._poll_requested, seconds)
            return
        # Fresh reads wait too.
        retry_after = self._last_error.retry_after
        delay = retry_delay(self.failures, retry_after, interval, self.jitter())
        await self.clock.sleep(delay)

    def _note_failure(self, error: SourceError) -> None:
        self.failures += 1
        self._last_error = error
        level = logging.ERROR if isinstance(error, SourceRefused) else logging.WARNING
        self._state_log.log_if_changed(
            level,
            "the metadata service gave no usable answer: %s",
            error.reason,
            extra=log_extra(reason=error.reason, status=error.status),
        )
        if isinstance(error, DocumentTooLarge) and not self.lost:
            # It will not pass by itself, and events may be hidden from now on.
            self.lost = True
            self.report(
                "relay.source-lost",
                "the document of scheduled events is larger than 4 MiB and is not read: "
                "what is in it is not known, and nothing is reported as ended",
            )

    def _note_success(self) -> None:
        if self.failures and not self.lost:
            self._state_log.log_if_changed(logging.INFO, "the metadata service answers again")
        self.failures, self._last_error = 0, None
        if self.lost:
            self.lost = False
            self.report("relay.source-recovered", "the metadata service answers again")

    async def _watch_for_source_loss(self) -> None:
        """Report the loss of the source, even while a call hangs."""
        while True:
            if self._last_read_monotonic is None:
                since, timeout = self._started_at, FIRST_ANSWER_TIMEOUT
            else:
                since, timeout = self._last_read_monotonic, ANSWER_TIMEOUT
            seconds_left = since + timeout - self.clock.monotonic()
            if seconds_left <= 0 and not self.lost:
                reason = self._last_error.reason if self._last_error else "no answer came"
                self.lost = True
                self.report("relay.source-lost", f"no usable answer for {timeout:g} s: {reason}")
            # The first answer may come during the sleep, and then the shorter timeout applies.
            await self.clock.sleep(min(max(seconds_left, MIN_WATCH_INTERVAL), ANSWER_TIMEOUT))


def _fail(read: asyncio.Future[DatedRead[Document]], error: SourceError) -> None:
    if not read.done():
        read.set_exception(error)
        read.exception()  # perhaps nobody waits for it


@dataclass(frozen=True, slots=True)
class ImdsStartRequestPort:
    """Polls and StartRequests share a client: the fresh read counts as the next poll."""

    poller: Poller

    async def refresh_event(self, _scope: str, _grant: Grant) -> None:
        await self.poller.read_with_imds_time()

    def choose_agent(self, _scope: str, _grant: Grant) -> None:
        """Return None: this relay sends its StartRequests itself."""

    async def send_start_request(self, _scope: str, claim: ClaimedGrant) -> None:
        await self.poller.client.send_start_request(claim.event_id)
