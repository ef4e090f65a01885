"""What travels in a fleet is read back as it was sent; anything else is an unusable message."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from docs.generate import examples
from relay.amqp.connection import UnusableMessage
from relay.events.build import Origin, common_event_data
from relay.events.cloudevent import CloudEvent
from relay.events.model import ScheduledEvent
from relay.fleet.messages import (
    MAX_ASKED,
    MAX_BODY_BYTES,
    MAX_LIVE_EVENTS,
    MAX_NAMES,
    MAX_REASON,
    ChangeData,
    EndedData,
    Message,
    Pulse,
    PulseRequest,
    StartOrder,
    StartResult,
    VoteAnswer,
    VoteMessage,
    read_message,
)
from relay.fleet.routing import AuthorizedSender, parse_agent_routing_key, report_key
from relay.imds.document import parse_document
from tests.depth import depth
from tests.sinks.rabbitmq_consumer import content_header

ORIGIN = Origin("vmss-a-1f0c33ab", "VMSS-A_0")
HUB = Origin("hub", "hub-0")
NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
HEAD = "17:" + "ab" * 32
RECORDED = [event for event in examples() if event.name.startswith(("event.", "relay."))]
LIVE = tuple(dict(event.data) for event in RECORDED if event.name == "event.scheduled")


def seen(*live: dict[str, Any]) -> tuple[ChangeData, ...]:
    return tuple(ChangeData.model_construct(**event) for event in live)


PULSE = Pulse(
    vm_id="0b8f5c0e-3f1d-4c8e-9d2a-6e5f4a3b2c1d",
    version="0.1.0",
    zone="2",
    names=("vmss-a_0", "vmss-a-0"),
    live=seen(*LIVE),
    poll_age=0.25,
    clock_offset=-1.5,
)
ORDER = StartOrder(
    grant=7,
    attempt=2,
    event_id="C7061BAC-AFDC-4513-B24B-AA5F13A16123",
    revision="0123456789abcdef",
    deadline=NOW + timedelta(seconds=5),
    journalhead=HEAD,
    vm_id="0b8f5c0e",
)
MESSAGES: list[Message] = [
    PULSE,
    Pulse(version="0.1.0", names=(), live=None),
    VoteMessage(
        nonce="n-1",
        request_id="r-1",
        user="local:root",
        body={"eventId": "C7", "decision": "approve"},
    ),
    ORDER,
    ORDER.model_copy(update={"journalhead": None, "vm_id": None}),
    StartResult(grant=7, attempt=2, result="refused", status=400, reason="IMDS answered 400"),
    StartResult(grant=7, attempt=2, result="stale", status=None, reason=None),
    VoteAnswer(nonce="n-1", status=202, body={"approvalId": "5f0c", "state": "waiting"}),
    PulseRequest(event_ids=("C7061BAC",)),
]
BODIES = [
    *(message.to_event(ORIGIN, NOW).body for message in MESSAGES),
    *(e.body for e in RECORDED),
]


def names(message: Message) -> str:
    return type(message).__name__


def unusable(body: bytes) -> str:
    with pytest.raises(UnusableMessage) as refused:
        read_message(body)
    return str(refused.value)


def changed(body: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    fields = orjson.loads(body)
    change(fields)
    return orjson.dumps(fields)


# --- there and back


@pytest.mark.parametrize("message", MESSAGES, ids=names)
def test_a_message_is_read_as_it_was_sent(message: Message) -> None:
    event = message.to_event(ORIGIN, NOW)
    received = read_message(event.body)
    assert received.content == message
    assert (received.origin, received.at) == (ORIGIN, NOW)


@pytest.mark.parametrize("message", MESSAGES, ids=names)
def test_a_message_is_a_cloudevent_whose_id_differs_from_any_other(message: Message) -> None:
    event = message.to_event(ORIGIN, NOW)
    assert event.type == f"io.imdsrelay.fleet.{message.kind}.v1"
    assert event.attributes["source"] == "imds://vmss-a-1f0c33ab/relays/VMSS-A_0"
    others = [
        *(other.to_event(ORIGIN, NOW) for other in MESSAGES if other is not message),
        message.to_event(Origin(ORIGIN.scope, "other"), NOW),
        message.to_event(ORIGIN, NOW + timedelta(microseconds=1)),
    ]
    assert event.id not in {other.id for other in others}
    assert event.id == message.to_event(ORIGIN, NOW).id
    assert content_header(event, user_id="vmss-a", expiration=1)


@pytest.mark.parametrize("event", RECORDED, ids=lambda event: event.name)
def test_what_an_agent_recorded_arrives_as_it_was_recorded(event: CloudEvent) -> None:
    received = read_message(event.body)
    content = received.content
    if isinstance(content, CloudEvent):
        assert (content.body, content.attributes) == (event.body, event.attributes)
    else:
        assert isinstance(content, ChangeData)
        assert isinstance(content, EndedData) == (event.name == "event.ended")
        assert content.model_dump().items() <= event.data.items()
        assert content.to_scheduled_event() == ScheduledEvent.from_cloudevent_data(event.data)
    kind, scope, relay = parse_agent_routing_key(report_key(event, received.origin))
    received.require_sent_by(AuthorizedSender(scope, relay, "vmss-a"), kind, HUB)


def test_whatever_the_reader_of_azure_takes_is_taken_from_an_agent() -> None:
    entry = {
        "EventId": "\xa0 strange é",
        "EventType": "N\u0000w",
        "Resources": ["x" * 5000, ""],
        "NotBefore": "at noon",
        "Description": "d" * 100_000,
        "DurationInSeconds": 2**53 - 1,
    }
    document = orjson.dumps({"DocumentIncarnation": -(2**63), "Events": [entry]})
    parsed = parse_document(document)
    data = common_event_data(parsed.events[0], parsed.incarnation)
    sent = PULSE.model_copy(update={"live": seen(data)}).to_event(ORIGIN, NOW)
    pulse = read_message(sent.body).content
    assert isinstance(pulse, Pulse)
    assert pulse.live is not None
    assert tuple(event.to_scheduled_event() for event in pulse.live) == parsed.events


def test_fields_of_a_later_version_are_ignored() -> None:
    def add(fields: dict[str, Any]) -> None:
        fields["later"] = [1]
        fields["data"]["later"] = {"a": 1}
        if "live" in fields["data"]:
            fields["data"]["live"][0]["later"] = 1

    assert read_message(changed(BODIES[0], add)).content == PULSE
    for event in RECORDED:
        assert read_message(changed(event.body, add)).content == read_message(event.body).content


@pytest.mark.parametrize(
    "live",
    [
        tuple({**LIVE[0], "eventId": f"e{number}"} for number in range(MAX_LIVE_EVENTS + 1)),
        ({**LIVE[0], "description": "x" * MAX_BODY_BYTES},),
    ],
    ids=["too many", "too large"],
)
def test_a_pulse_whose_events_do_not_fit_says_nothing_of_them(live: tuple[Any, ...]) -> None:
    sent = PULSE.model_copy(update={"live": seen(*live)}).to_event(ORIGIN, NOW)
    assert read_message(sent.body).content == PULSE.model_copy(update={"live": None})


# --- what is unusable


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "expected a JSON object"),
        (b"{}", "specversion: Field required"),
        (b" " * (MAX_BODY_BYTES + 1), "more than 1048576 bytes"),
        (b"[" * 2000, "not JSON"),
    ],
)
def test_what_is_no_cloudevent_is_unusable(body: bytes, reason: str) -> None:
    assert reason in unusable(body)


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(fields: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for parent in parents:
            fields = fields[parent]
        fields[last] = value

    return change


@pytest.mark.parametrize(
    ("message", "path", "value"),
    [
        (PULSE, "specversion", "0.3"),
        (PULSE, "id", "A" * 32),
        (PULSE, "type", "io.imdsrelay.fleet.unknown.v1"),
        (PULSE, "type", "io.imdsrelay.approval.granted.v1"),
        (PULSE, "time", "noon"),
        (PULSE, "time", "9999-12-31T23:59:59Z"),
        (PULSE, "scope", "UPPER"),
        (PULSE, "relay", "a\nb"),
        (PULSE, "data", None),
        (PULSE, "data/live", [{**LIVE[0], "resources": None}]),
        (PULSE, "data/live", [{**LIVE[0], "eventId": ""}]),
        (PULSE, "data/live", [{**LIVE[0], "durationSeconds": 1.5}]),
        (PULSE, "data/live", [{**LIVE[0], "documentIncarnation": 2**63}]),
        (PULSE, "data/live", [LIVE[0], {**LIVE[0], "eventId": LIVE[0]["eventId"].lower()}]),
        (PULSE, "data/live", [LIVE[0]] * (MAX_LIVE_EVENTS + 1)),
        (PULSE, "data/names", ["x"] * (MAX_NAMES + 1)),
        (PULSE, "data/pollAge", -1),
        (PULSE, "data/pollAge", 1e300),
        (ORDER, "journalhead", "17"),
        (ORDER, "data/grant", 2**63),
        (ORDER, "data/attempt", True),
        (ORDER, "data/deadline", "soon"),
        (ORDER, "data/eventId", "e" * 257),
        (ORDER, "data/eventId", "e\x00"),
        (MESSAGES[2], "data/body", {"reason": "x" * 70_000}),
        (MESSAGES[2], "data/requestId", "two words"),
        (MESSAGES[2], "data/user", ""),
        (MESSAGES[5], "data/result", "done"),
        (MESSAGES[5], "data/reason", "x" * (MAX_REASON + 1)),
        (MESSAGES[7], "data/status", 600),
        (MESSAGES[8], "data/eventIds", ["e"] * (MAX_ASKED + 1)),
    ],
)
def test_a_message_with_a_wrong_value_is_unusable(message: Message, path: str, value: Any) -> None:
    body = message.to_event(ORIGIN, NOW).body
    assert read_message(changed(body, lambda _: None)).content == message
    assert unusable(changed(body, _set(path, value)))


def test_a_body_that_is_nested_too_deep_to_be_written_again_is_unusable() -> None:
    text = f'{{"a":{"[" * 500}{"]" * 500}}}'.encode()
    body = BODIES[2]
    start = body.index(b'"body"') + len(b'"body":')
    end = body.index(b"}", start) + 1
    assert "cannot be written" in unusable(body[:start] + text + body[end:])


ABOUT_RELAYS = [event for event in RECORDED if event.name.startswith("relay.")]


@pytest.mark.parametrize("event", ABOUT_RELAYS, ids=lambda event: event.name)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("subject", "another"),
        ("source", "imds://another"),
        ("source", "imds://westno-4f7a9c21/relays/another"),
        ("relay", "another"),
        ("time", "2022-04-11T22:11:58+00:00"),
        ("time", "Mon, 11 Apr 2022 22:11:58 GMT"),
    ],
)
def test_an_event_about_a_relay_whose_attributes_contradict_its_content_is_unusable(
    event: CloudEvent, name: str, value: str
) -> None:
    assert unusable(changed(event.body, _set(name, value)))


@pytest.mark.parametrize("event", ABOUT_RELAYS, ids=lambda event: event.name)
def test_an_agent_chooses_the_id_of_no_relay_event(event: CloudEvent) -> None:
    """Consumers would drop an event of another scope that has the id later."""
    body = changed(event.body, _set("id", "ab" * 16))
    assert "its id is not that of its content" in unusable(body)
    for path, value in (("data/reason", "x"), ("journalhead", HEAD)):
        assert "its id is not" in unusable(changed(event.body, _set(path, value)))
    assert "no journalhead" in unusable(changed(event.body, _set("journalhead", None)))


@pytest.mark.parametrize(
    ("body", "key", "reason"),
    [
        (BODIES[0], "pulse.vmss-a-1f0c33ab.vmss-a_1", "another relay"),
        (BODIES[0], "pulse.vmss-b-1f0c33ab.vmss-a_0", "another relay"),
        (BODIES[0], "vote.vmss-a-1f0c33ab.vmss-a_0", "another kind"),
        (BODIES[3], "start.vmss-a-1f0c33ab.vmss-a_0", "another kind"),
        (BODIES[8], "pulse.vmss-a-1f0c33ab.vmss-a_0", "another kind"),
        (RECORDED[0].body, "relay.x.x.westno-4f7a9c21.westno_0", "another kind"),
        (PULSE.to_event(HUB, NOW).body, "pulse.hub.hub-0", "the hub itself"),
    ],
)
def test_a_body_that_contradicts_its_key_is_unusable(body: bytes, key: str, reason: str) -> None:
    kind, scope, relay = parse_agent_routing_key(key)
    with pytest.raises(UnusableMessage, match=reason):
        read_message(body).require_sent_by(AuthorizedSender(scope, relay, "vmss-a"), kind, HUB)


# --- any bytes at all

_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**65)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(
        ["", "1.0", "ab" * 16, "2026-01-02T03:04:05Z", "0001-01-01", "accepted", HEAD]
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


def harmless(body: bytes) -> None:
    """Assert that the bytes are a message that can be sent again, or unusable."""
    try:
        received = read_message(body)
    except UnusableMessage:
        return
    content = received.content
    if isinstance(content, CloudEvent):
        assert read_message(content.body).content == content
        assert content_header(content)
    elif isinstance(content, ChangeData):
        assert len(content.to_scheduled_event().revision) == 16
    else:
        assert read_message(content.to_event(received.origin, received.at).body).content == content
        for event in (isinstance(content, Pulse) and content.live) or ():
            assert len(event.to_scheduled_event().revision) == 16


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_unusable(body: bytes) -> None:
    harmless(body)


@settings(max_examples=depth(400, 60))
@given(st.data())
def test_a_message_with_any_part_replaced_is_a_message_or_unusable(data: st.DataObject) -> None:
    fields = copy.deepcopy(orjson.loads(data.draw(st.sampled_from(BODIES))))
    for _ in range(data.draw(st.integers(1, 3))):
        node: Any = fields
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if isinstance(node[key], dict | list) and node[key] and data.draw(st.booleans()):
                node = node[key]
                continue
            if data.draw(st.booleans()) or not isinstance(node, dict):
                node[key] = data.draw(_json)
            else:
                del node[key]
            break
    try:
        body = orjson.dumps(fields)
    except orjson.JSONEncodeError:  # an integer of more than 64 bits
        return
    harmless(body)
