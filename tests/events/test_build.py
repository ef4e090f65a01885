"""What the relay says of a change, a decision and itself: attributes, ids and outcomes.

See docs/events.md.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.events.build import (
    EndOutcome,
    Origin,
    approval_or_startrequest_event,
    change_event,
    common_event_data,
    determine_outcome,
    relay_event,
    transition_digest,
)
from relay.events.cloudevent import CloudEvent
from relay.events.model import (
    Change,
    ChangeKind,
    Document,
    ScheduledEvent,
    diff_events_with_document,
)
from tests.builders import DATA
from tests.events.strategies import DOCUMENTS, make_event

ORIGIN = Origin("prod-vmss-a-1f0c33ab", "westno-0")
AT = datetime(2022, 4, 11, 22, 11, 58, 250000, tzinfo=UTC)
HEAD = f"41:{'0f' * 32}"
ALWAYS = {
    "specversion",
    "id",
    "type",
    "source",
    "time",
    "datacontenttype",
    "dataschema",
    "scope",
    "relay",
}
ABOUT_EVENT = {"subject", "eventtype", "eventsource", "correlationid", "partitionkey"}


def change(kind: ChangeKind, **changes: Any) -> Change:
    started = {"event_status": "Started", "not_before": None} if kind == "started" else {}
    changed = {"description": "Before."} if kind == "updated" else {}
    return Change(kind, make_event(**started | changes), changed)


CANCELLATION = EndOutcome("canceled", "observed")


def build_event(
    of: Change,
    *,
    previous_count: int = 0,
    origin: Origin = ORIGIN,
    at: datetime = AT,
    incarnation: int | None = 2,
    approved_by_relay: bool = False,
    ended: EndOutcome = CANCELLATION,
) -> CloudEvent:
    return change_event(
        of,
        origin,
        at,
        data=common_event_data(of.event, incarnation),
        previous_count=previous_count,
        approved_by_relay=approved_by_relay,
        outcome=ended if of.kind == "ended" else None,
    )


# --- attributes of event.*


def test_a_scheduled_event_says_all_that_is_documented() -> None:
    cloudevent = build_event(change("scheduled"))
    assert cloudevent.attributes == {
        "specversion": "1.0",
        "id": cloudevent.id,
        "type": "io.imdsrelay.event.scheduled.v1",
        "source": "imds://prod-vmss-a-1f0c33ab",
        "subject": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        "time": "2022-04-11T22:11:58.250000Z",
        "datacontenttype": "application/json",
        "dataschema": "urn:imdsrelay:schema:event.scheduled.v1",
        "scope": "prod-vmss-a-1f0c33ab",
        "relay": "westno-0",
        "eventtype": "Freeze",
        "eventsource": "Platform",
        "notbefore": "2022-04-11T22:26:58Z",
        "correlationid": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        "partitionkey": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
    }
    own = {"description": "Paused.", "revision": make_event().revision}
    assert cloudevent.data == {**DATA, **own}


@pytest.mark.parametrize(
    ("kind", "more", "added"),
    [
        ("scheduled", {"notbefore"}, set()),
        ("updated", {"notbefore"}, {"changed"}),
        ("started", set(), {"changed", "approvedByRelay"}),
        ("ended", {"outcome"}, {"outcome", "evidence", "approvedByRelay"}),
    ],
)
def test_each_kind_of_change_has_its_attributes_and_data_and_no_other(
    kind: ChangeKind, more: set[str], added: set[str]
) -> None:
    made = change(kind, not_before="2022-04-11T22:26:58Z")
    cloudevent = build_event(made, approved_by_relay=True)
    assert set(cloudevent.attributes) == ALWAYS | ABOUT_EVENT | more
    assert set(cloudevent.data) == set(common_event_data(make_event(), 2)) | added
    assert cloudevent.data.get("approvedByRelay", True) is True
    assert cloudevent.type == f"io.imdsrelay.event.{kind}.v1"


# --- ids


@pytest.mark.parametrize("field", [each.name for each in dataclasses.fields(ScheduledEvent)])
def test_another_state_has_another_id(field: str) -> None:
    other = {"resources": ("x",), "duration": 6}.get(field, "other")
    assert build_event(change("updated", **{field: other})).id != build_event(change("updated")).id


def test_another_scope_or_change_has_another_id() -> None:
    ids = {
        build_event(change(kind, event_status="Started", not_before=None)).id
        for kind in get_args(ChangeKind)
    }
    assert len(ids) == 4
    elsewhere = build_event(change("scheduled"), origin=Origin("elsewhere", ORIGIN.relay))
    assert elsewhere.id != build_event(change("scheduled")).id


def test_case_of_the_event_id_and_order_of_the_resources_are_no_other_state() -> None:
    twisted = change(
        "updated", event_id=make_event().event_id.lower(), resources=("WestNO_1", "WestNO_0")
    )
    assert build_event(twisted).id == build_event(change("updated")).id


def history(documents: Iterable[Document], origin: Origin) -> list[CloudEvent]:
    """What a relay tells of these documents, counting as the journal does."""
    live: tuple[ScheduledEvent, ...] = ()
    counts: Counter[str] = Counter()
    cloudevent: list[CloudEvent] = []
    for document in documents:
        for item in diff_events_with_document(live, document):
            transition = transition_digest(item, origin)
            count, incarnation = counts[transition], document.incarnation
            cloudevent.append(
                build_event(item, previous_count=count, origin=origin, incarnation=incarnation)
            )
            counts[transition] += 1
        live = document.events
    return cloudevent


@given(st.lists(st.tuples(DOCUMENTS, st.integers(1, 3)), max_size=6))
def test_relays_that_saw_the_same_give_the_same_ids_however_often_they_looked(
    documents: list[tuple[Document, int]],
) -> None:
    often = [
        dataclasses.replace(item, incarnation=n) for item, times in documents for n in range(times)
    ]
    first = history((item for item, _ in documents), ORIGIN)
    second = history(often, Origin(ORIGIN.scope, "westno-1"))
    assert [item.id for item in first] == [item.id for item in second]


# --- outcomes

BEFORE, AFTER = (
    datetime(2022, 4, 11, 22, 26, 57, tzinfo=UTC),
    datetime(2022, 4, 11, 22, 26, 58, tzinfo=UTC),
)
COMPLETED, REBOOTED = ("completed", "observed"), ("completed", "rebooted")
CANCELED, UNKNOWN = ("canceled", "observed"), ("unknown", "none")


@pytest.mark.parametrize(
    ("state", "start_sent", "gap", "rebooted", "now", "outcome"),
    [
        # It was seen as started: it is over, whatever else.
        ({"event_status": "Started"}, False, False, False, BEFORE, COMPLETED),
        ({"event_status": "started"}, True, True, True, AFTER, COMPLETED),
        # Our own reboot proves it.
        ({}, True, True, True, BEFORE, REBOOTED),
        ({}, False, True, True, AFTER, REBOOTED),
        # Gone before it was due, nobody of us approved, and we looked all the time.
        ({}, False, False, False, BEFORE, CANCELED),
        ({"event_status": "scheduled"}, False, False, False, BEFORE, CANCELED),
        # Each of the reasons for doubt alone.
        ({}, True, False, False, BEFORE, UNKNOWN),
        ({}, False, True, False, BEFORE, UNKNOWN),
        ({}, False, False, False, AFTER, UNKNOWN),
        ({"not_before": None}, False, False, False, BEFORE, UNKNOWN),
        ({"not_before": "soon"}, False, False, False, BEFORE, UNKNOWN),
        ({"event_status": "Paused"}, False, False, False, BEFORE, UNKNOWN),
        ({"event_status": None}, False, False, False, BEFORE, UNKNOWN),
    ],
)
def test_an_outcome_claims_no_more_than_was_seen(
    state: dict[str, Any],
    start_sent: bool,
    gap: bool,
    rebooted: bool,
    now: datetime,
    outcome: tuple[str, str],
) -> None:
    facts = {"start_sent": start_sent, "gap": gap, "rebooted": rebooted}
    assert determine_outcome(make_event(**state), now, **facts) == outcome


# --- decisions and the relay itself


def test_a_decision_carries_the_event_and_points_at_its_cause_and_the_journal() -> None:
    data = common_event_data(make_event(), 2)
    cloudevent = approval_or_startrequest_event(
        "approval.granted",
        ORIGIN,
        AT,
        event=data,
        added={"decision": "approve"},
        cause="cause-1",
        head=HEAD,
    )
    assert set(cloudevent.attributes) == ALWAYS | ABOUT_EVENT | {"causationid", "journalhead"}
    assert cloudevent.attributes["source"] == "imds://prod-vmss-a-1f0c33ab/relays/westno-0"
    assert cloudevent.attributes["causationid"] == "cause-1"
    assert cloudevent.attributes["journalhead"] == HEAD
    assert cloudevent.attributes["dataschema"] == "urn:imdsrelay:schema:approval.granted.v1"
    assert cloudevent.data == {**data, "decision": "approve"}


def test_each_telling_of_the_relay_has_an_id_of_its_own() -> None:
    def cloudevent(at: datetime = AT, **changes: Any) -> str:
        fields: dict[str, Any] = {"sink": "bus", "reason": "r", "count": 1, "head": HEAD}
        return relay_event("relay.sink-failing", ORIGIN, at, **fields | changes).id

    assert cloudevent() == cloudevent()
    later = cloudevent(AT + timedelta(seconds=1))
    others = cloudevent(sink="drain"), cloudevent(reason="other"), cloudevent(head="42:bb")
    assert len({cloudevent(), later, *others}) == 5
