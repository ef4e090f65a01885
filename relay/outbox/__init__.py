"""WHAT WE REMEMBER: one SQLite file with the journal, the snapshot, the approvals and one entry per sink and event.

This is the contract: the facts that the file holds, as the rest of the relay sees them. `sqlite` keeps the file and
runs transactions, `transaction` is what can be done in one, `journal` is the hash chain, `file` knows whose file it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from typing_extensions import override  # in typing from Python 3.12

from relay.events.cloudevent import CloudEvent
from relay.events.model import Event
from relay.settings import Duration, Section

Mode = Literal["on", "dry-run", "off"]
EntryState = Literal["waiting", "delivered", "superseded", "parked"]
GrantState = Literal["granted", "sent", "accepted", "failed", "refused"]
"""failed: given up before an answer that says yes or no; refused: IMDS answered 400 to a StartRequest for this event alone."""
AttemptOutcome = Literal["delivered", "deferred", "parked", "error"]
SinkState = Literal["on", "paused", "disabled"]


class StoreSettings(Section):
    """Where the relay remembers."""

    path: Path = Path("relay.db")
    """SQLite; never on a temporary disk. Unit file and image set /var/lib/imds-relay/relay.db."""
    retain: Duration = 30 * 86400.0
    """How long deliveries and attempts are kept, dead letters too."""
    dead_letters: int = Field(default=10_000, gt=0)
    """How many dead letters are kept: of more, the oldest go."""
    audit_retain: Duration = 400 * 86400.0
    """How long the journal is kept."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose file it is. ``vm_id`` is None where the metadata service knows none."""

    scope: str
    vm_id: str | None


@dataclass(frozen=True, slots=True)
class Head:
    """Where the journal ends: the last row's position (0: none yet) and its hash, 64 hexadecimal digits."""

    position: int
    hash: str

    @override
    def __str__(self) -> str:
        """As the ``journalhead`` attribute has it."""
        return f"{self.position}:{self.hash}"


@dataclass(frozen=True, slots=True)
class Occurrence:
    """An EventId from when it appeared in the document until it left it. ``data`` is that of ``event.*``."""

    id: int
    key: str
    number: int
    data: dict[str, Any]
    revision: str
    live: bool
    boot_id: str | None
    first_seen: str
    last_changed: str
    outcome: str | None
    last_event_id: str

    @property
    def event(self) -> Event:
        """The event as last seen."""
        return Event.from_fields(self.data)


@dataclass(frozen=True, slots=True)
class Decision:
    """A vote, hold or release that was accepted. ``counts``: a vote that still counts, a hold that still holds."""

    approval_id: str
    occurrence: int
    decision: Literal["approve", "hold", "release"]
    principal: str
    channel: str
    revision: str
    reason: str | None
    at: datetime
    expires: datetime | None
    dry_run: bool
    counts: bool
    recorded_event_id: str
    message_id: str | None


@dataclass(frozen=True, slots=True)
class Grant:
    """An approval that was granted, and what became of its StartRequest. ``cause`` is its events' causationid."""

    id: int
    occurrence: int
    revision: str
    rule: str
    approval_id: str
    granted_at: datetime
    state: GrantState
    attempts: int
    status: int | None
    dry_run: bool
    cause: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One event for one sink, as it waits. Times are moments in UTC; ``lane`` is what keeps order among entries.

    ``event`` is at hand when the entry was just recorded; otherwise it is read from the journal before it is sent.
    """

    id: int
    sink: str
    position: int
    ordering_key: str
    type: str
    event_key: str | None
    not_before: datetime | None
    attempts: int
    next_at: datetime | None
    recorded: datetime
    event: CloudEvent | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """How one try to deliver went. ``took`` is in seconds."""

    at: datetime
    elapsed: float
    outcome: AttemptOutcome
    status: int | None = None
    reason: str | None = None
    response: str | None = None

    @property
    def ended_at(self) -> datetime:
        """When it was over."""
        return self.at + timedelta(seconds=self.elapsed)


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """What a request was answered the first time, and the digest of its body."""

    digest: str
    status: int
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """One event as it was journalled, with the entries made for it: what listeners of the store are handed."""

    position: int
    event: CloudEvent
    entries: tuple[Entry, ...]
