"""The state file: one SQLite file with all that the relay remembers.

This module defines the facts that the file holds, as the other packages see them, and
`EventKeyFormat`, which makes the keys of events. `file` opens the file, `sqlite` runs transactions
on it, and `transaction` is what work can do in one, with a module for each group of tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Json
from typing_extensions import override  # in typing from Python 3.12

from relay.events import fast_dataclass
from relay.events.cloudevent import CloudEvent, delivery_priority
from relay.events.data_types import Remarks
from relay.events.match import Match
from relay.events.model import ScheduledEvent
from relay.settings import Duration, Section

Mode = Literal["on", "dry-run", "off"]
"""Of approvals. dry-run: votes count for this time only, and nothing is granted."""
EntryState = Literal["waiting", "delivered", "superseded", "parked"]
"""superseded: it need not be sent any more. parked: the entry is a dead letter."""
GrantState = Literal["granted", "sent", "accepted", "failed", "refused"]
"""sent: a StartRequest was claimed, and may have been sent. failed: the relay gave up without a
final answer. refused: IMDS answered 400."""
AttemptOutcome = Literal["delivered", "deferred", "parked", "error"]
"""error: the code of the sink raised an unexpected error."""
SinkState = Literal["on", "paused", "disabled"]
"""paused: by an operator. disabled: its receiver asked the relay to stop."""


def _check_names_file(path: Path) -> Path:
    if not path.name:
        raise ValueError("expected a file such as /var/lib/imds-relay/relay.db")
    return path


class StoreSettings(Section):
    """Where the relay remembers."""

    path: Annotated[Path, AfterValidator(_check_names_file)] = Path("relay.db")
    """SQLite; never on a temporary disk. Nobody else may write in its folder. Unit file and image
    set /var/lib/imds-relay/relay.db."""
    retain: Duration = 30 * 86400.0
    """How long deliveries and attempts are kept, dead letters too."""
    dead_letters: int = Field(default=10_000, gt=0)
    """How many dead letters are kept. Of more, refusals go first, and ``event.*`` last."""
    audit_retain: Duration = 400 * 86400.0
    """How long the journal is kept."""


@dataclass(frozen=True, slots=True)
class StateFileScopeAndVm:
    """The owner of a state file. ``vm_id``: None if IMDS knows none. A hub's has many scopes."""

    scope: str
    vm_id: str | None
    is_hub: bool = False


@dataclass(frozen=True, slots=True)
class EventKeyFormat:
    """Makes the keys by which a state file knows the events of Azure.

    A relay has the events of one scope, so their EventIds identify them. A hub (``with_scope``) has
    those of many. Two scopes can have the same EventId, so there the key names the scope, too. No
    name of a scope has an ``@``, so the last one in a key ends the EventId, whatever that holds.
    """

    with_scope: bool = False

    def make_key(self, scope: str, event_id: str) -> str:
        """Return the key of an event: ``<eventid>``, on a hub ``<eventid>@<scope>``."""
        return f"{event_id.lower()}@{scope}" if self.with_scope else event_id.lower()


SINGLE_SCOPE = EventKeyFormat()


@dataclass(frozen=True, slots=True)
class JournalHead:
    """The last row of the journal: its position (0: no rows) and hash (64 hexadecimal digits)."""

    position: int
    hash: str

    @override
    def __str__(self) -> str:
        return f"{self.position}:{self.hash}"


@fast_dataclass(frozen=True, kw_only=True)
class TrackedEvent:
    """An event of Azure in the store, from when it appears in the document until it leaves.

    This is one occurrence of its EventId. An EventId that comes back gets a new one with the next
    ``number``; ``position`` is where it begins in the journal. ``data`` is that of ``event.*``.
    ``live``: the event is in the document. ``boot_id`` is that of this VM when the event was last
    neither due nor approved. ``last_event_id`` is that of the last CloudEvent about its state.
    """

    id: int
    scope: str
    key: str
    number: int
    position: int
    data: Json[dict[str, Any]]
    revision: str
    live: bool
    boot_id: str | None
    first_seen: str
    last_changed: str
    outcome: str | None
    last_event_id: str

    @cached_property
    def event(self) -> ScheduledEvent:
        return ScheduledEvent.from_cloudevent_data(self.data)

    @property
    def reference(self) -> str:
        """What people and programs call the event: its EventId, on a hub ``<EventId>@<scope>``."""
        event_id: str = self.data["eventId"]
        return event_id if self.key == event_id.lower() else f"{event_id}@{self.scope}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A vote, hold or release that was accepted.

    ``recorded_event_id`` and ``position`` are those of its ``approval.recorded`` in the journal.
    ``message_id`` is that of the AMQP message that brought it. A vote of a ``dry_run`` counts in
    none but a dry run.
    """

    approval_id: str
    decision: Literal["approve", "hold", "release"]
    principal: str
    channel: str
    revision: str
    remarks: Remarks
    at: datetime
    expires: datetime | None
    dry_run: bool
    message_id: str | None
    recorded_event_id: str = ""
    position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingHold:
    """A hold by conditions and for a time, which can be older than the events that it is about.

    ``ended_by`` is None if it expired. ``position`` is that of its ``standing-hold.created``.
    """

    hold_id: str
    conditions: Match
    starts: datetime
    ends: datetime
    principal: str
    channel: str
    reason: str
    created: datetime
    ended: datetime | None = None
    ended_by: str | None = None
    position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A granted approval and its StartRequest.

    ``id`` is the position of its ``approval.granted`` in the journal. ``attempts`` counts the
    StartRequests that were sent, ``status`` is the HTTP status of the last answer, and ``cause``
    is the causationid of its events. ``is_answered``: what came of the last StartRequest is known.
    """

    id: int
    occurrence: int
    revision: str
    rule: str
    approval_id: str
    state: GrantState
    attempts: int
    status: int | None
    cause: str
    is_answered: bool = False

    @property
    def is_open(self) -> bool:
        """Whether its StartRequest has no final answer yet."""
        return self.state in ("granted", "sent")

    @property
    def may_have_been_accepted(self) -> bool:
        """Whether IMDS may have accepted a StartRequest for it: only the last answer is stored."""
        return self.attempts > 1 or (self.attempts == 1 and self.status != 400)  # HTTP


@fast_dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One event that waits for one sink. Entries with the same ``ordering_key`` go in order.

    ``event_key`` is None if it is about no event of Azure. ``next_at`` is when it is tried again;
    None: at once. ``event`` is None if it must be read from the journal, at ``position``.
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

    @property
    def type_family(self) -> str:
        """The first part of the type, such as ``event`` or ``approval``."""
        return self.type.partition(".")[0]

    @property
    def priority(self) -> int:
        """How early it is sent; see `relay.events.cloudevent.delivery_priority`."""
        return delivery_priority(self.type)


@fast_dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try to deliver an entry. ``elapsed`` is in seconds, ``response`` at most 1 KiB."""

    at: datetime
    elapsed: float
    outcome: AttemptOutcome
    status: int | None = None
    reason: str | None = None
    response: str | None = None

    @property
    def ended_at(self) -> datetime:
        return self.at + timedelta(seconds=self.elapsed)


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """The first answer to a request. Another body with the same id is a conflict."""

    principal: str
    request_id: str
    digest: str
    status: int
    body: Json[dict[str, Any]]
    at: datetime


@fast_dataclass(frozen=True, slots=True)
class RecordedEvent:
    """A journaled event. ``event_key`` is None if it is of no event of Azure."""

    position: int
    id: str
    name: str
    event_key: str | None
    scope: str
    event: CloudEvent | None
    entries: tuple[Entry, ...]
