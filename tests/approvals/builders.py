"""Builds events, rules, requests and statuses for tests of approvals, and a state file for them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import orjson
from jsonschema import Draft202012Validator

from relay.approvals import ApprovalsSettings, ClaimedGrant
from relay.approvals.engine import ApprovalEngine
from relay.approvals.request import (
    Caller,
    DecisionAnswer,
    DecisionKind,
    DecisionRequest,
    Request,
    Right,
    Rights,
)
from relay.approvals.standing_holds import CreateRequest, EndRequest, StandingHoldBody
from relay.approvals.status import ApprovalStatus, first_matching_rule
from relay.errors import SourceError
from relay.events.build import CATALOG, Origin, cloudevent_schema, common_event_data
from relay.events.cloudevent import CloudEvent
from relay.events.data_types import NO_REMARKS, remarks_in
from relay.events.match import Match
from relay.events.model import Document, ScheduledEvent
from relay.events.timestamps import format_rfc3339
from relay.ingest import EventNews, Recorder, SuccessfulPoll
from relay.store import (
    Decision,
    Grant,
    GrantState,
    Mode,
    StandingHold,
    StateFileScopeAndVm,
    StoreSettings,
    TrackedEvent,
)
from relay.store.approvals import Memory
from relay.store.audit import verify_journal
from relay.store.file import StateFile, open_state_file
from relay.store.journal import JournalRow, read_all_rows
from relay.store.retention import prune_all_tables
from relay.store.transaction import Route, Transaction
from tests.clocks import NOON, ManualClock
from tests.events.strategies import make_event

T = TypeVar("T")
_SCHEMAS = {each.name: Draft202012Validator(cloudevent_schema(each)) for each in CATALOG}
ORIGIN = Origin("prod", "vm-0")
BOOT_ID = "boot-1"
NO_EVENTS = ("claim", "answer", "mode")
"""The kinds of rows of a journal that are none."""
SETTINGS = ApprovalsSettings.model_validate(
    {
        "rules": [
            {"name": "users", "match": {"event_source": ["User"]}, "approve": "automatic"},
            {
                "name": "databases",
                "match": {"event_type": ["Reboot"]},
                "approve": {
                    "votes": 2,
                    "from": ["group:oncall", "client:drain"],
                    "expires": "5m",
                    "close_before": "60s",
                },
            },
            {
                "name": "one",
                "match": {"event_type": ["Redeploy"]},
                "approve": {"votes": 1, "from": ["group:oncall"]},
            },
        ],
        "groups": {"oncall": ["client:alice", "client:bob"]},
    }
)
"""Automatic for users. A Reboot needs two votes within five minutes, a Redeploy one vote.

A Freeze has no rule.
"""
BY_ALICE = {"votes": 1, "from": ["client:alice"]}
CLIENT_RESOURCES: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys(f"client:{name}" for name in ("alice", "bob", "carol", "drain", "eve")),
    "mtls:alice": None,
    "client:db": ("db-*",),
    "client:web": ("web-*",),
}
"""The clients that may approve, and the resources that they may decide for."""


def one_rule(approve: Any, **more: Any) -> ApprovalsSettings:
    """A section with one rule for all events, and ``more``."""
    rules = [{"name": "all", "approve": approve}]
    return ApprovalsSettings.model_validate({"rules": rules, **more})


async def decide_nothing(_request: object) -> DecisionAnswer:
    """Answer as a gate that is not in force."""
    return DecisionAnswer(503, {"detail": "nothing can be decided now, try again"})


def build_event(
    event_id: str = "E-1", *, due: float | None = 900.0, at: datetime = NOON, **changes: Any
) -> ScheduledEvent:
    """A Reboot of db-1 by the platform, with NotBefore ``due`` seconds after noon or ``at``."""
    fields: dict[str, Any] = {
        "event_id": event_id,
        "event_type": "Reboot",
        "resources": ("db-1",),
        "not_before": format_rfc3339(at + timedelta(seconds=due)) if due is not None else None,
        "description": None,
        "duration": None,
    }
    return make_event(**fields | changes)


def build_caller(
    name: str = "alice",
    *can: Right,
    resources: tuple[str, ...] | None = None,
    limits: tuple[tuple[str, ...], ...] = (),
    channel: str = "http",
) -> Caller:
    """A client with the rights given, or with approve and hold."""
    rights = Rights(frozenset(can or ("read", "approve", "hold")), resources, limits)
    return Caller(f"client:{name}", channel, rights)


def build_request(
    decision: DecisionKind = "approve",
    by: Caller | str = "alice",
    of: ScheduledEvent | None = None,
    *,
    at: datetime = NOON,
    **changes: Any,
) -> DecisionRequest:
    of = of or build_event()
    fields: dict[str, Any] = {
        "revision": of.revision,
        "digest": "d",
        "event_id": of.event_id,
        "remarks": remarks_in(changes),
    } | {name: value for name, value in changes.items() if name not in NO_REMARKS}
    channel = "amqp" if "message_id" in changes else "http"
    caller = build_caller(by, channel=channel) if isinstance(by, str) else by
    return DecisionRequest(caller=caller, decision=decision, at=at, **fields)


def build_creation(
    by: Caller | str = "eve",
    match: dict[str, Any] | None = None,
    *,
    at: datetime,
    starts: float | None = None,
    ends: float = 600.0,
    reason: str = "freeze",
) -> CreateRequest:
    """A request for a standing hold; ``starts`` and ``ends`` in seconds from then."""
    fields: dict[str, Any] = {"match": match or {}, "reason": reason}
    for name, seconds in (("starts", starts), ("ends", ends)):
        if seconds is not None:
            fields[name] = format_rfc3339(at + timedelta(seconds=seconds))
    caller = build_caller(by) if isinstance(by, str) else by
    return CreateRequest(caller=caller, at=at, body=StandingHoldBody.model_validate(fields))


def build_end(hold_id: str, by: Caller | str = "eve", *, at: datetime) -> EndRequest:
    caller = build_caller(by) if isinstance(by, str) else by
    return EndRequest(caller=caller, at=at, hold_id=hold_id)


REBOOT = build_event()
USER_REBOOT = build_event(event_source="User")
FREEZE = build_event(event_type="Freeze")
REDEPLOY = build_event(event_type="Redeploy")
STARTED = build_event(event_status="Started", not_before=None)
OPERATOR = build_caller("op", "operate")


def started(of: ScheduledEvent) -> ScheduledEvent:
    """The event as Azure shows it once it has started."""
    return replace(of, event_status="Started", not_before=None)


# --- without a file


def build_occurrence(of: ScheduledEvent | None = None, **changes: Any) -> TrackedEvent:
    of = of or build_event()
    fields: dict[str, Any] = {
        "id": 1,
        "scope": ORIGIN.scope,
        "key": of.lowercase_event_id,
        "number": 1,
        "position": 1,
        "data": common_event_data(of, 1),
        "revision": of.revision,
        "live": True,
        "boot_id": BOOT_ID,
        "first_seen": format_rfc3339(NOON),
        "last_changed": format_rfc3339(NOON),
        "outcome": None,
        "last_event_id": "t" * 32,
    }
    return TrackedEvent(**fields | changes)


def build_decision(
    decision: Literal["approve", "hold"] = "approve",
    by: str = "alice",
    of: ScheduledEvent | None = None,
    *,
    expires: float | None = None,
    **more: Any,
) -> Decision:
    """A vote or a hold that counts; ``expires`` in seconds after noon."""
    fields: dict[str, Any] = {
        "approval_id": f"{decision}-{by}",
        "decision": decision,
        "principal": f"client:{by}",
        "channel": "http",
        "revision": (of or build_event()).revision,
        "remarks": NO_REMARKS,
        "at": NOON,
        "expires": NOON + timedelta(seconds=expires) if expires is not None else None,
        "dry_run": False,
        "recorded_event_id": f"{decision}-{by}-told",
        "message_id": None,
    }
    return Decision(**fields | more)


VOTES = build_decision(), build_decision(by="bob")
"""The two votes that the rule of a Reboot needs."""


def build_grant(
    state: GrantState = "granted", of: ScheduledEvent | None = None, **changes: Any
) -> Grant:
    fields: dict[str, Any] = {
        "id": 1,
        "occurrence": 1,
        "revision": (of or build_event()).revision,
        "rule": "databases",
        "approval_id": "approve-alice",
        "state": state,
        "attempts": 0 if state == "granted" else 1,
        "status": {"accepted": 200}.get(state),
        "cause": "c",
    }
    return Grant(**fields | changes)


def build_standing_hold(
    seconds: float = 60.0, principal: str = "client:eve", **changes: Any
) -> StandingHold:
    """A standing hold of all events, from noon until so many seconds later."""
    fields: dict[str, Any] = {
        "hold_id": "h" * 32,
        "principal": principal,
        "channel": "http",
        "conditions": Match(),
        "starts": NOON,
        "ends": NOON + timedelta(seconds=seconds),
        "reason": "freeze",
        "created": NOON,
    }
    return StandingHold(**fields | changes)


def build_status(
    of: ScheduledEvent | None = None,
    *decisions: Decision,
    grants: Iterable[Grant] = (),
    mode: Mode = "on",
    now: float = 0.0,
    live: bool = True,
    settings: ApprovalsSettings = SETTINGS,
    in_flight: Iterable[Grant] = (),
) -> ApprovalStatus:
    """The status of an event's approval, ``now`` seconds after noon."""
    about = build_occurrence(of, live=live)
    moment = NOON + timedelta(seconds=now)
    rule = first_matching_rule(settings.rules, about, moment)
    return ApprovalStatus(
        occurrence=about,
        decisions=decisions,
        grants=tuple(grants),
        rule=rule,
        groups=settings.groups,
        mode=mode,
        now=moment,
        people=settings.people,
        resources_by_client=CLIENT_RESOURCES,
        in_flight=frozenset((grant.id, grant.attempts) for grant in in_flight),
    )


# --- on a file


def events_in(rows: Iterable[JournalRow], *names: str) -> list[CloudEvent]:
    """Return the CloudEvents in rows of a journal, or those with some names."""
    events = [CloudEvent.parse(row.body) for row in rows if row.kind not in NO_EVENTS]
    return [event for event in events if not names or event.name in names]


def write_damaged_row(tx: Transaction, kind: str, event_key: str | None = None) -> None:
    """Write a row that is in the chain, and that nobody can read."""
    tx.journal.append_non_event_row(NOON, kind, {"data": {}}, event_key=event_key)


def open_grants(tx: Transaction) -> list[Grant]:
    return [grant for grant, _ in tx.approvals.open_grants()]


class ApprovalFile:
    """A state file with an ApprovalEngine and a Recorder, without a gate or threads.

    Each method is one transaction; its changes are in the file when it returns.
    """

    def __init__(
        self,
        path: Path,
        settings: ApprovalsSettings = SETTINGS,
        *,
        clock: ManualClock | None = None,
        route: Route | None = None,
        is_hub: bool = False,
    ) -> None:
        self.path = path
        self.is_hub = is_hub
        self.clock = clock or ManualClock()
        self.settings = settings
        self.client_resources: Mapping[str, tuple[str, ...] | None] = CLIENT_RESOURCES
        self.boot_id = BOOT_ID
        self.trusted = True
        self._route: Route = route or (lambda _: ())
        self._opened: StateFile
        self._open()

    def _open(self) -> None:
        self._opened = open_state_file(
            self.path, StateFileScopeAndVm(ORIGIN.scope, "vm", self.is_hub), self.clock.now()
        )
        self._memory = Memory(self._opened.damaged)
        self.connection.execute("PRAGMA synchronous = OFF")  # no test cuts the power
        self._make_engine()
        self.recorder = Recorder(ORIGIN, self.boot_id, frozenset({"db-1"}))

    def _make_engine(self) -> None:
        self.engine = ApprovalEngine(
            self.settings, ORIGIN, trusted=self.trusted, client_resources=self.client_resources
        )

    def crash(self, settings: ApprovalsSettings | None = None, boot: str | None = None) -> None:
        """Lose what is not on disk, and start again, perhaps with other rules or after a boot."""
        self.close()
        self.settings, self.boot_id = settings or self.settings, boot or self.boot_id
        self._open()

    def reload(self, settings: ApprovalsSettings) -> None:
        self.settings = settings
        self._make_engine()

    def close(self) -> None:
        self._opened.close()

    @property
    def connection(self) -> sqlite3.Connection:
        return self._opened.connection

    def transact(self, work: Callable[[Transaction], T], *, memory: Memory | None = None) -> T:
        """``memory`` is that of another store over the same file."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            tx = Transaction(
                self.connection, self._route, self._opened.keys, memory=memory or self._memory
            )
            result = work(tx)
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")
        if memory is None:
            self._memory = tx.memory
        return result

    # what happens

    def record_document(
        self, *events: ScheduledEvent, gap: bool = False, step: bool = True
    ) -> None:
        """Record a document with these events; apply the transitions that follow if ``step``."""
        result = SuccessfulPoll(Document(1, events), self.clock.now(), gap)
        self.transact(lambda tx: self.recorder.record(tx, result))
        if step:
            self.apply_transitions()

    def record_in_scopes(self, event: ScheduledEvent, *scopes: str) -> None:
        now = self.clock.now()
        news = [EventNews(scope, now, event.event_id, event, 1) for scope in scopes]
        self.transact(lambda tx: self.recorder.record_observations(tx, news, now))
        self.apply_transitions()

    def apply_transitions(self) -> datetime | None:
        """Apply every transition that is due; return when the next is due by time alone."""
        self.transact(lambda tx: self.engine.check_all(tx, self.clock.now()))
        return self.engine.next_change

    def submit(
        self,
        decision: DecisionKind = "approve",
        by: Caller | str = "alice",
        of: ScheduledEvent | None = None,
        **changes: Any,
    ) -> DecisionAnswer:
        return self.decide(build_request(decision, by, of, at=self.clock.now(), **changes))

    def hold_ahead(self, by: Caller | str = "eve", *given: Any, **changes: Any) -> DecisionAnswer:
        """Ask for a standing hold, as `build_creation` builds it."""
        return self.decide(build_creation(by, *given, at=self.clock.now(), **changes))

    def end_ahead(self, hold_id: str, by: Caller | str = "eve") -> DecisionAnswer:
        return self.decide(build_end(hold_id, by, at=self.clock.now()))

    def decide(self, request: Request) -> DecisionAnswer:
        """Decide a request, and record what follows, in one transaction as the store does."""

        def work(tx: Transaction) -> DecisionAnswer:
            answer = self.engine.decide(tx, request)
            self.engine.follow_up(tx, self.clock.now())
            return answer

        return self.transact(work)

    def set_mode(self, mode: Mode) -> None:
        self.transact(lambda tx: tx.store_approval_mode(mode, "local:root", self.clock.now()))
        self.apply_transitions()

    def prune(self, *, retain: float = 0.0, audit_retain: float = 0.0, after: float = 0.0) -> None:
        """Forget what is older than these seconds, ``after`` seconds from now."""
        keep = StoreSettings(retain=retain, audit_retain=audit_retain)
        at = self.clock.now() + timedelta(seconds=after)
        self.transact(lambda tx: prune_all_tables(tx, keep, at))

    def claim(self, grants: Iterable[Grant] | None = None) -> list[ClaimedGrant]:
        """Claim every open grant or these, as the gate does last before it sends each."""

        def work(tx: Transaction) -> list[ClaimedGrant]:
            now = self.clock.now()
            known = open_grants(tx) if grants is None else grants
            claims = (self.engine.claim_grant(tx, grant, now) for grant in known)
            return [claim for claim in claims if claim is not None]

        return self.transact(work)

    def set_in_flight(self, *claims: ClaimedGrant) -> None:
        """Set which StartRequests are being sent, as the gate does."""
        self.engine.in_flight = {(claim.grant.id, claim.grant.attempts + 1) for claim in claims}

    def answer(self, claims: list[ClaimedGrant], error: SourceError | None) -> None:
        """Record what IMDS answered; None is 200."""
        for claim in claims:
            self.transact(
                partial(
                    self.engine.record_start_answer, claim=claim, error=error, now=self.clock.now()
                )
            )

    def accept(self, claims: list[ClaimedGrant]) -> None:
        self.answer(claims, None)

    # what is in the file

    @property
    def grants(self) -> list[Grant]:
        """Every grant of every occurrence, oldest occurrence first."""

        def read_grants(tx: Transaction) -> list[Grant]:
            rows = self.connection.execute("SELECT id FROM occurrence ORDER BY 1").fetchall()
            occurrences = [tx.occurrences.require_occurrence(number) for (number,) in rows]
            return [
                grant for each in occurrences for grant in tx.approvals.of_occurrence(each).grants
            ]

        return self.transact(read_grants)

    def status(self, event_id: str = "E-1") -> ApprovalStatus:
        def read_status(tx: Transaction) -> ApprovalStatus:
            newest = tx.occurrences.find_newest_occurrence(event_id.lower())
            assert newest is not None
            return self.engine.status(tx, newest, self.clock.now())

        return self.transact(read_status)

    def events(self, *names: str) -> list[CloudEvent]:
        """Return the CloudEvents in the journal, oldest first, or those with some names.

        The hash chain of the journal is checked too.
        """
        verify_journal(self.connection)
        return events_in(read_all_rows(self.connection), *names)

    def event_names(self) -> list[str]:
        """The names of the events in the journal, without those of Azure's changes."""
        return [each.name for each in self.events() if not each.name.startswith("event.")]

    def data(self, name: str) -> dict[str, Any]:
        """The data of the only event with this name."""
        (recorded,) = self.events(name)
        return dict(recorded.data)

    def cause(self, name: str) -> str | None:
        return self.events(name)[-1].attributes.get("causationid")


@contextmanager
def checked_file(folder: Path, settings: ApprovalsSettings = SETTINGS) -> Iterator[ApprovalFile]:
    """An empty state file. At the end every event in it is checked against its schema."""
    approvals = ApprovalFile(folder / "relay.db", settings)
    yield approvals
    for recorded in approvals.events():
        _SCHEMAS[recorded.name].validate(orjson.loads(recorded.body))
    approvals.close()


def decide(
    approvals: ApprovalFile, decision: DecisionKind, by: Caller | str, **changes: Any
) -> str:
    """Submit a request that must be accepted; return the state of the answer."""
    answer = approvals.submit(decision, by, **changes)
    assert answer.status == 202, answer
    return str(answer.body["state"])
