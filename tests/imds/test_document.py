"""The document: tolerant of what is unknown, strict about what is broken."""

from __future__ import annotations

import json
from typing import Any, get_args

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.clock import SystemClock
from relay.errors import DocumentError
from relay.events.match import Match
from relay.events.model import Document, ScheduledEvent
from relay.imds import SourceSettings
from relay.imds.client import ImdsClient
from relay.imds.document import API_VERSIONS, find_impossible_conditions, parse_document
from relay.simulator import VM, Plan, Setup, Simulator
from relay.simulator.event import EventType
from tests.events.strategies import azure_event, document_body, make_event

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
)
NAMES = tuple(azure_event())
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "EventId": st.sampled_from(["A", "a", "", " ", "B"]) | ANYTHING,
        "Resources": st.lists(st.sampled_from(["vm_0", "vm_1"])) | ANYTHING,
        "NotBefore": st.text("0123456789:-+TZ ,AprMonGT", max_size=30) | ANYTHING,
        **{
            name: st.sampled_from(["Freeze", "Started", "User", ""]) | ANYTHING
            for name in NAMES[1:]
            if name not in ("Resources", "NotBefore")
        },
    },
)


def parse_one_event(**changes: Any) -> ScheduledEvent:
    (parsed,) = parse_document(document_body(azure_event(**changes))).events
    return parsed


# --- whatever comes


@given(st.binary())
def test_bytes_are_a_document_or_a_document_error(anything: bytes) -> None:
    with pytest.raises(DocumentError):
        parse_document(anything)


@given(
    ANYTHING
    | st.fixed_dictionaries(
        {"Events": st.lists(ENTRIES, max_size=4) | ANYTHING},
        optional={"DocumentIncarnation": ANYTHING},
    )
)
def test_json_is_a_document_that_can_be_told_or_a_document_error(anything: object) -> None:
    """A parsed event never fails later: its revision, JSON and copy in the store are valid."""
    try:
        document = parse_document(json.dumps(anything).encode())
    except DocumentError:
        return
    assert document.incarnation is None or -(2**63) <= document.incarnation < 2**63
    for parsed in document.events:
        assert len(parsed.revision) == 16
        stored = orjson.loads(orjson.dumps(parsed.to_cloudevent_data()))
        assert ScheduledEvent.from_cloudevent_data(stored) == parsed
        assert parsed.not_before_time is None or parsed.not_before_time.tzinfo is not None
    assert len({parsed.lowercase_event_id for parsed in document.events}) == len(document.events)


def test_an_empty_body_is_an_error() -> None:
    """It would end every event (docs/protocol.md#an-empty-answer)."""
    for empty in (b"", b" ", b"\r\n\t "):
        with pytest.raises(DocumentError, match="empty body"):
            parse_document(empty)


@pytest.mark.parametrize(
    ("broken", "place"),
    [
        (b"{}", "Events"),
        (b'{"DocumentIncarnation":3}', "Events"),
        (b'{"DocumentIncarnation":3,"events":[]}', "Events"),
        (b'{"Events":null}', "Events"),
        (b'{"Events":{}}', "Events"),
        (b"[]", "document"),
        (b"null", "document"),
        (document_body("A"), "Events.0"),
        (document_body(azure_event(), None), "Events.1"),
        (document_body(azure_event(EventId=...)), "Events.0.EventId"),
        (document_body(azure_event(EventId=None)), "Events.0.EventId"),
        (document_body(azure_event(EventId="")), "Events.0.EventId"),
        (document_body(azure_event(EventId="  ")), "Events.0.EventId"),
        (document_body(azure_event(EventId=7)), "Events.0.EventId"),
        (document_body(azure_event(EventId="E-1\x00")), "Events.0.EventId"),
        (document_body(azure_event(EventId="\x85")), "Events.0.EventId"),
        (document_body(azure_event(EventId="x" * 257)), "Events.0.EventId"),
        (document_body(azure_event(Resources="WestNO_0")), "Events.0.Resources"),
        (document_body(azure_event(Resources=[None])), "Events.0.Resources.0"),
        (document_body(azure_event(EventType=7)), "Events.0.EventType"),
        (document_body(azure_event(EventStatus=["Started"])), "Events.0.EventStatus"),
    ],
)
def test_a_broken_document_is_an_error_that_names_the_place(broken: bytes, place: str) -> None:
    with pytest.raises(DocumentError, match=rf"expected a Scheduled Events document, {place}: "):
        parse_document(broken)


# --- field by field


def test_every_field_is_read() -> None:
    assert parse_document(document_body(azure_event())) == Document(2, (make_event(),))


def test_what_azure_left_blank_or_out_is_none() -> None:
    for name, attribute in (
        ("EventType", "event_type"),
        ("EventStatus", "event_status"),
        ("ResourceType", "resource_type"),
        ("NotBefore", "not_before"),
        ("Description", "description"),
        ("EventSource", "event_source"),
    ):
        for blank in ("", " ", "\t", None, ...):
            assert getattr(parse_one_event(**{name: blank}), attribute) is None, name


def test_what_azure_adds_in_future_passes_as_it_came() -> None:
    event = {"EventType": "Quake", "EventStatus": "Paused", "Novelty": {"a": [1]}}
    parsed = parse_one_event(**event, ResourceType="Rack", EventSource="Martian")
    assert (parsed.event_type, parsed.event_status) == ("Quake", "Paused")
    assert (parsed.resource_type, parsed.event_source) == ("Rack", "Martian")
    assert not parsed.is_started


def test_a_duration_is_whole_seconds_or_unknown() -> None:
    """Azure writes -1 for unknown. Garbage is unknown too.

    A fraction is rounded up, so that no rule takes 8.1 s for 8.
    """
    for written, seconds in ((5, 5), (0, 0), ("9", 9), (" 9 ", 9), (8.0, 8), (8.1, 9)):
        assert parse_one_event(DurationInSeconds=written).duration == seconds
    arabic_five = "\u0665"
    texts = ("-1", "", "nine", "1_0", arabic_five, "9" * 25)
    others: list[Any] = [-1, -7, -0.5, 1e20, 2**53, 2**63, True, None, ..., [5], {}]
    for unknown in (*texts, *others):
        assert parse_one_event(DurationInSeconds=unknown).duration is None, unknown


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("Mon, 11 Apr 2022 22:26:58 GMT", "2022-04-11T22:26:58Z"),
        # It is a Monday: Azure gets it wrong at times.
        ("Fri, 11 Apr 2022 22:26:58 GMT", "2022-04-11T22:26:58Z"),
        ("Mon, 11 Apr 2022 22:26:58", "2022-04-11T22:26:58Z"),
        ("2022-04-11T22:26:58Z", "2022-04-11T22:26:58Z"),
        ("2022-04-11T22:26:58", "2022-04-11T22:26:58Z"),
        ("2022-04-12T00:26:58+02:00", "2022-04-11T22:26:58Z"),
        ("2022-04-11T22:26:58.1234567Z", "2022-04-11T22:26:58.123456Z"),
        ("when we get to it", "when we get to it"),
        ("Mon, 99 Apr 2022 22:26:58 GMT", "Mon, 99 Apr 2022 22:26:58 GMT"),
        ("", None),
        (None, None),
        (..., None),
    ],
)
def test_not_before_is_rfc_3339_if_it_can_be_read(written: Any, expected: str | None) -> None:
    parsed = parse_one_event(NotBefore=written)
    assert parsed.not_before == expected
    is_a_time = expected is not None and expected.startswith("2022")
    assert (parsed.not_before_time is not None) == is_a_time


def test_the_incarnation_is_a_hint_and_never_an_error() -> None:
    whole = (7, 0, -3, 2**63 - 1)
    others: list[Any] = [2**63, 1e30, 1.5, "7", True, None, []]
    for written in (*whole, *others):
        document = parse_document(document_body(azure_event(), incarnation=written))
        assert document.incarnation == (written if written in whole else None)
        assert document.events == (make_event(),)


# --- an EventId twice in one document


def test_of_two_entries_the_started_one_holds_with_the_resources_of_both() -> None:
    lower = azure_event()["EventId"].lower()
    started = {"EventId": lower, "EventStatus": "Started", "NotBefore": ""}
    entries = azure_event(Resources=["b"]), azure_event(**started, Resources=["c", "a"])
    (parsed,) = parse_document(document_body(*entries)).events
    assert (parsed.event_id, parsed.event_status, parsed.not_before) == (lower, "Started", None)
    assert parsed.resources == ("a", "b", "c")


def test_two_entries_count_as_the_graver_type() -> None:
    """A rule for a Freeze must not approve what is a Reboot for another machine."""
    for *types, gravest in (
        ("Freeze", "Reboot", "Reboot"),
        ("Reboot", "Redeploy", "Redeploy"),
        ("Redeploy", "Preempt", "Preempt"),
        ("Preempt", "Terminate", "Terminate"),
        ("Terminate", "Quake", "Quake"),
        ("Freeze", None, "Freeze"),
        ("freeze", "REBOOT", "Freeze", "REBOOT"),
    ):
        for order in (types, types[::-1]):
            entries = [azure_event(EventType=event_type) for event_type in order]
            (parsed,) = parse_document(document_body(*entries)).events
            assert parsed.event_type == gravest


# --- versions of the API, against the simulator, which serves them all

SINCE = {"Freeze": "", "Reboot": "", "Redeploy": "", "Preempt": "2017-11", "Terminate": "2019-01"}
"""The version that was the first to know a type."""
SETUP = Setup(vms=(VM("web_0"), VM("web_1")), rate_limit=None)


async def read(url: str, api_version: str) -> tuple[ScheduledEvent, ...]:
    settings = SourceSettings(url=url, api_version=api_version)
    async with ImdsClient(settings, SystemClock()) as client:
        return parse_document((await client.read_document()).content, api_version).events


@pytest.mark.parametrize("api_version", API_VERSIONS)
async def test_each_version_shows_what_it_knows_and_the_rest_is_unknown(api_version: str) -> None:
    async with Simulator(SETUP) as sim:
        for kind in get_args(EventType):
            sim.schedule(
                Plan(type=kind, resources=("web_0", "web_1"), source="User", duration=7, id=kind)
            )
        sim.schedule(Plan(type="Reboot", id="started", started=True))
        newest = {event.event_id: event for event in await read(sim.url, "2020-07-01")}
        events = {event.event_id: event for event in await read(sim.url, api_version)}
    types = {name for name, since in SINCE.items() if api_version >= since}
    assert set(events) == types | {"started"}
    for name, event in events.items():
        same = newest[name]
        resources = ("web_0",) if name == "started" else ("web_0", "web_1")
        assert event.resources == same.resources == resources
        assert (event.not_before, event.event_status) == (same.not_before, same.event_status)
        assert (event.not_before is None) is (name == "started")
        assert event.description == (same.description if api_version >= "2019-04" else None)
        assert event.event_source == (same.event_source if api_version >= "2019-08" else None)
        assert event.duration == (same.duration if api_version >= "2020-07" else None)
    assert newest["Reboot"].event_source == "User"
    assert newest["Reboot"].duration == 7
    assert newest["Reboot"].description


@pytest.mark.parametrize(
    ("match", "since"),
    [
        ({"event_source": ["User"]}, "2019-08-01"),
        ({"duration": {"max": "8s"}}, "2020-07-01"),
        ({"event_type": ["terminate"]}, "2019-01-01"),
        ({"event_type": ["Preempt"]}, "2017-11-01"),
        ({"event_type": ["Terminate", "PREEMPT"]}, "2017-11-01"),
        ({"event_type": ["Terminate", "Reboot"]}, ""),
        ({"event_type": ["SomethingNew"]}, ""),
        ({"resources": ["web_*"]}, ""),
        ({}, ""),
    ],
)
def test_a_condition_that_no_version_can_meet_is_named(match: dict[str, Any], since: str) -> None:
    conditions = Match.model_validate(match)
    for api_version in API_VERSIONS:
        reasons = list(find_impossible_conditions(conditions, api_version))
        assert len(reasons) == (api_version < since)
        assert all(since in reason and next(iter(match)) in reason for reason in reasons)
