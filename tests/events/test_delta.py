"""What changed between two documents: laws, and a table of kinds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.events.delta import Change, apply, diff
from relay.events.model import Document, Event
from tests.events.strategies import DOCUMENTS, make_event, normalized


def shuffled(document: Document) -> st.SearchStrategy[Document]:
    """The same document with events, resources and cases of EventIds in any order."""
    turned = st.permutations(document.events).flatmap(
        lambda events: st.tuples(*(_turned(one) for one in events))
    )
    return st.builds(Document, st.just(document.incarnation), turned)


def _turned(one: Event) -> st.SearchStrategy[Event]:
    ids = st.sampled_from([one.event_id.lower(), one.event_id.upper()])
    return st.builds(
        lambda name, names: dataclasses.replace(one, event_id=name, resources=tuple(names)),
        ids,
        st.permutations(one.resources),
    )


def meaning(changes: tuple[Change, ...]) -> dict[str, Any]:
    """The changes by EventId, without any order."""
    return {
        change.event.key: (
            change.kind,
            normalized(change.event),
            change.before and normalized(change.before),
            {
                name: sorted(value) if isinstance(value, list) else value
                for name, value in change.changed.items()
            },
        )
        for change in changes
    }


@given(DOCUMENTS)
def test_a_document_does_not_differ_from_itself(document: Document) -> None:
    assert diff(document.events, document) == ()


@given(DOCUMENTS.flatmap(lambda document: st.tuples(st.just(document), shuffled(document))))
def test_the_order_of_events_and_resources_and_the_case_of_ids_say_nothing(
    both: tuple[Document, Document],
) -> None:
    document, other = both
    assert diff(document.events, other) == ()


@given(DOCUMENTS, DOCUMENTS)
def test_applying_the_delta_gives_the_new_document(old: Document, new: Document) -> None:
    live = apply(old.events, diff(old.events, new))
    assert {key: normalized(one) for key, one in live.items()} == {
        one.key: normalized(one) for one in new.events
    }


@given(DOCUMENTS, DOCUMENTS)
def test_there_is_at_most_one_change_for_each_event_id(old: Document, new: Document) -> None:
    keys = [change.event.key for change in diff(old.events, new)]
    assert len(keys) == len(set(keys))


@given(
    DOCUMENTS,
    DOCUMENTS.flatmap(lambda document: st.tuples(st.just(document), shuffled(document))),
    st.randoms(),
)
def test_order_does_not_matter_to_the_delta(
    old: Document, new: tuple[Document, Document], chance: Any
) -> None:
    turned = list(old.events)
    chance.shuffle(turned)
    assert meaning(diff(old.events, new[0])) == meaning(diff(turned, new[1]))


@given(DOCUMENTS, DOCUMENTS, st.none() | st.integers())
def test_the_incarnation_neither_suppresses_nor_forges_a_change(
    old: Document, new: Document, incarnation: int | None
) -> None:
    """It skips numbers, starts again lower, and may stay the same.

    See docs/protocol.md#the-document-incarnation.
    """
    assert diff(old.events, dataclasses.replace(new, incarnation=incarnation)) == diff(
        old.events, new
    )


@given(DOCUMENTS, DOCUMENTS)
def test_the_kind_of_a_change_follows_from_both_states(old: Document, new: Document) -> None:
    before, after = {one.key: one for one in old.events}, {one.key: one for one in new.events}
    for change in diff(old.events, new):
        was, now = before.get(change.event.key), after.get(change.event.key)
        if now is None:
            expected = "ended"
        elif now.is_started and (was is None or not was.is_started):
            expected = "started"
        else:
            expected = "scheduled" if was is None else "updated"
        assert change.kind == expected
        assert change.before == was
        assert change.event == (now or was)


@given(DOCUMENTS, DOCUMENTS)
def test_changed_holds_what_moved_with_the_value_before_and_nothing_else(
    old: Document, new: Document
) -> None:
    for change in diff(old.events, new):
        if change.kind == "ended" or change.before is None:
            assert change.changed == {}
            continue
        was, now = change.before.to_fields(), change.event.to_fields()
        assert change.changed
        assert all(change.changed[name] == was[name] for name in change.changed)
        moved = {
            name
            for name, value in normalized(change.event).items()
            if value != normalized(change.before)[name]
        }
        assert set(change.changed) == moved
        assert set(now) >= moved


@given(DOCUMENTS, DOCUMENTS)
def test_what_the_document_holds_comes_first_in_its_order_then_what_is_gone(
    old: Document, new: Document
) -> None:
    changes = diff(old.events, new)
    arrived = [change.event.key for change in changes if change.kind != "ended"]
    assert [change.kind == "ended" for change in changes] == sorted(
        change.kind == "ended" for change in changes
    )
    assert arrived == [one.key for one in new.events if one.key in arrived]


@pytest.mark.parametrize(
    ("before", "after", "kind", "changed"),
    [
        (None, {}, "scheduled", {}),
        (None, {"event_status": None}, "scheduled", {}),
        (None, {"event_status": "Paused"}, "scheduled", {}),
        (None, {"event_status": "Started"}, "started", {}),
        (
            {},
            {"event_status": "Started", "not_before": None},
            "started",
            {"eventStatus": "Scheduled", "notBefore": "2022-04-11T22:26:58Z"},
        ),
        (
            {"event_status": "Started"},
            {"event_status": "Started", "duration": 9},
            "updated",
            {"durationSeconds": 5},
        ),
        (
            {"event_status": "Started"},
            {"event_status": "STARTED"},
            "updated",
            {"eventStatus": "Started"},
        ),
        ({"event_status": "Started"}, {}, "updated", {"eventStatus": "Started"}),
        ({}, {"description": None}, "updated", {"description": "Paused."}),
        ({}, {"resources": ("WestNO_0",)}, "updated", {"resources": ["WestNO_0", "WestNO_1"]}),
        ({}, None, "ended", {}),
    ],
)
def test_each_way_from_one_state_to_the_next(
    before: dict[str, Any] | None, after: dict[str, Any] | None, kind: str, changed: dict[str, Any]
) -> None:
    previous = () if before is None else (make_event(**before),)
    current = () if after is None else (make_event(**after),)
    (change,) = diff(previous, Document(1, current))
    assert (change.kind, change.changed) == (kind, changed)
