"""The scheduled event, and the changes between two documents: laws, and a table of each kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.events.model import (
    Document,
    ScheduledEvent,
    add_underscore_prefixed_names,
    diff_events_with_document,
    other_instance_names,
)
from tests.events.strategies import DOCUMENTS, make_event, normalized


def shuffled(document: Document) -> st.SearchStrategy[Document]:
    """Return the document with events, resources and the case of EventIds in any order."""
    events = st.permutations(document.events).flatmap(
        lambda events: st.tuples(*(_shuffled_event(event) for event in events))
    )
    return st.builds(Document, st.just(document.incarnation), events)


def _shuffled_event(event: ScheduledEvent) -> st.SearchStrategy[ScheduledEvent]:
    return st.builds(
        lambda event_id, resources: dataclasses.replace(
            event, event_id=event_id, resources=tuple(resources)
        ),
        st.sampled_from([event.event_id.lower(), event.event_id.upper()]),
        st.permutations(event.resources),
    )


def by_key(events: Iterable[ScheduledEvent]) -> dict[str, ScheduledEvent]:
    return {event.lowercase_event_id: event for event in events}


@given(DOCUMENTS.flatmap(lambda document: st.tuples(st.just(document), shuffled(document))))
def test_the_order_and_the_case_of_ids_change_nothing(documents: tuple[Document, Document]) -> None:
    document, shuffled_document = documents
    assert diff_events_with_document(document.events, shuffled_document) == ()


@given(DOCUMENTS, DOCUMENTS)
def test_the_old_document_and_its_changes_give_the_new_one(old: Document, new: Document) -> None:
    live = by_key(old.events)
    for change in diff_events_with_document(old.events, new):
        if change.kind == "ended":
            del live[change.event.lowercase_event_id]
        else:
            live[change.event.lowercase_event_id] = change.event
    expected = {event.lowercase_event_id: normalized(event) for event in new.events}
    assert {key: normalized(event) for key, event in live.items()} == expected


@given(DOCUMENTS, DOCUMENTS)
def test_the_kind_of_a_change_follows_from_both_states(old: Document, new: Document) -> None:
    previous, current = by_key(old.events), by_key(new.events)
    for change in diff_events_with_document(old.events, new):
        key = change.event.lowercase_event_id
        before, after = previous.get(key), current.get(key)
        if after is None:
            expected = "ended"
        elif after.is_started and (before is None or not before.is_started):
            expected = "started"
        else:
            expected = "scheduled" if before is None else "updated"
        assert change.kind == expected
        assert change.event == (after or before)


@given(DOCUMENTS, DOCUMENTS)
def test_changed_holds_what_differs_with_its_value_before(old: Document, new: Document) -> None:
    previous = by_key(old.events)
    for change in diff_events_with_document(old.events, new):
        before = previous.get(change.event.lowercase_event_id)
        if change.kind == "ended" or before is None:
            assert change.changed == {}
            continue
        assert change.changed
        data = before.to_cloudevent_data()
        assert all(data[name] == value for name, value in change.changed.items())
        was, is_now = normalized(before), normalized(change.event)
        different = {name for name, value in is_now.items() if value != was[name]}
        assert set(change.changed) == different


@pytest.mark.parametrize(
    ("changes", "is_another"),
    [
        ({"event_type": "Reboot"}, True),
        ({"event_source": "User"}, True),
        ({"resources": ("WestNO_0",)}, True),
        ({"not_before": None}, True),
        ({"duration": 6}, True),
        ({"event_status": "Started"}, True),
        ({"event_id": "A-1"}, True),
        ({"event_id": "c7061bac-afdc-4513-b24b-aa5f13a16123"}, False),
        ({"resources": ("WestNO_1", "WestNO_0")}, False),
        ({"description": None}, False),
        ({"resource_type": None}, False),
    ],
)
def test_a_revision_is_what_approvers_decide_on(changes: dict[str, Any], is_another: bool) -> None:
    assert (make_event(**changes).revision != make_event().revision) is is_another


# --- the names of a machine in both notations of scale sets


@pytest.mark.parametrize(
    ("name", "scale_set", "others"),
    [
        ("web_18", None, ["web00000i"]),
        ("web00000i", None, ["web_18"]),
        ("web_18", "Frontends", ["Frontends00000i"]),
        ("web00000i", "frontends", ["frontends_18", "web_18"]),
        ("web_0", None, ["web000000"]),
        ("web_1234567890", None, ["web_1234_312745860"]),  # no machine has that name
        ("db-1", None, []),
        ("", None, []),
    ],
)
def test_a_name_of_a_scale_set_has_another_notation(
    name: str, scale_set: str | None, others: list[str]
) -> None:
    assert list(other_instance_names(name, scale_set)) == others


@given(st.integers(0, 36**5))
def test_the_two_notations_lead_to_each_other(number: int) -> None:
    (computer_name,) = other_instance_names(f"web_{number}")
    assert f"web_{number}" in other_instance_names(computer_name)


def test_old_versions_of_the_api_put_a_prefix_before_a_name() -> None:
    assert add_underscore_prefixed_names(frozenset({"a", "b"})) == {"a", "_a", "b", "_b"}
