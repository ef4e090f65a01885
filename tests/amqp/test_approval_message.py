"""What a message for approvals says and who says it: every letter is a decision of a known client, or unusable with a reason."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from typing import Any, cast

import orjson
import pytest
from aiormq.abc import AbstractChannel, DeliveredMessage
from hypothesis import given
from hypothesis import strategies as st
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from relay.amqp.approval_message import UnusableMessage, parse_message
from relay.amqp.frames import MAX_BODY_BYTES
from relay.api import Client

EXCHANGE, KEY = "azure.scheduledevents.approvals", "approve.prod"
CLIENTS = (
    Client(name="db-drain", amqp_user="drain", can=("approve",)),
    Client(name="http-only", can=("approve",)),
)
WISH: dict[str, Any] = {"eventId": "C7061BAC", "decision": "approve", "revision": "9f2c"}


def letter(
    body: bytes | None = None, exchange: str = EXCHANGE, key: str = KEY, **properties: Any
) -> DeliveredMessage:
    """A message as it comes from the broker: a good one, but for what is given."""
    given = Basic.Properties(**{"message_id": "m", "user_id": "drain", **properties})
    raw = orjson.dumps(WISH) if body is None else body
    delivery = Basic.Deliver("tag", 1, redelivered=False, exchange=exchange, routing_key=key)
    return DeliveredMessage(
        delivery, ContentHeader(0, len(raw), given), raw, cast("AbstractChannel", None)
    )


def why(message: DeliveredMessage) -> str:
    """Why it cannot be used."""
    with pytest.raises(UnusableMessage) as refused:
        parse_message(message, EXCHANGE, KEY, CLIENTS)
    return str(refused.value)


def test_a_good_letter_is_its_clients_decision() -> None:
    caller, identity, body = parse_message(letter(), EXCHANGE, KEY, CLIENTS)
    assert (caller.principal, caller.channel, identity) == ("client:db-drain", "amqp", "m")
    assert (body.eventId, body.decision, body.revision) == ("C7061BAC", "approve", "9f2c")


@pytest.mark.parametrize(
    ("properties", "because"),
    [
        ({"user_id": None}, "no user_id"),
        ({"user_id": ""}, "no user_id"),
        ({"user_id": "stranger"}, "no client's amqp_user"),
        ({"user_id": "DRAIN"}, "no client's amqp_user"),  # RabbitMQ tells users apart by case
        ({"user_id": "db-drain"}, "no client's amqp_user"),  # a client's name is not its user
        ({"user_id": "None"}, "no client's amqp_user"),
        ({"message_id": None}, "no message_id"),
        ({"message_id": ""}, "no message_id"),
        ({"message_id": "a\x00b"}, "control characters"),
        ({"message_id": "a\x85b"}, "control characters"),
        (
            {"key": "approve.other"},
            "not published to azure.scheduledevents.approvals with the routing key approve.prod",
        ),
        ({"key": "APPROVE.PROD"}, "not published to"),
        ({"key": ""}, "not published to"),
        ({"exchange": ""}, "not published to"),
        ({"exchange": "azure.scheduledevents"}, "not published to"),
        ({"headers": {"x-death": [{"queue": "trap"}]}}, "dead letter"),
    ],
)
def test_what_nobody_vouches_for_or_came_another_way_is_unusable(
    properties: dict[str, Any], because: str
) -> None:
    assert because in why(letter(**properties))


_NO_TEXT: tuple[Any, ...] = (1, 1.5, True, [], {}, ["x"])
_WRONG = [
    *((name, value) for name in WISH for value in (*_NO_TEXT, None, "")),
    *((name, value) for name in ("reason", "scope") for value in _NO_TEXT),
    *(("decision", value) for value in ("Approve", "approve ", "deny", "granted")),
    *(("eventId", value) for value in ("a\nb", "x" * 257)),
    ("revision", "x" * 129),
    ("reason", "x" * 1001),
    ("scope", "x" * 81),
    ("principal", "client:operator"),
    ("channel", "local"),
]


@pytest.mark.parametrize(
    "body",
    [
        *(orjson.dumps({**WISH, name: value}) for name, value in _WRONG),
        b"",
        b" ",
        b"\xff\xfe{\x00}\x00",
        b"\xef\xbb\xbf{}",
        b"no json",
        orjson.dumps(WISH)[:-1] + b',"decision":"approve"}',
        b"{",
        b"null",
        b"true",
        b"1",
        b'"approve"',
        b"[]",
        b"{}",
        b"[" * 2000,
        b'{"eventId": NaN}',
        b'{"eventId": "\\ud800", "decision": "approve", "revision": "r"}',
        b"eventId=x&decision=approve&revision=r",
        b"<approve/>",
        b'{"specversion": "1.0", "data": null}',
        b'{"specversion": "1.0", "data": []}',
        b'{"specversion": "1.0", "data": "{}"}',
        b'{"specversion": "1.0", "data_base64": "e30="}',
        orjson.dumps({name: value for name, value in WISH.items() if name != "revision"}),
    ],
    ids=lambda body: body[:40].decode(errors="replace"),
)
def test_a_body_that_is_no_decision_is_unusable(body: bytes) -> None:
    """Of wrong types nothing is made right: "1" is no 1, and one more field may be a misspelt one."""
    assert why(letter(body)).startswith(
        ("its body is no decision: ", f"it has no body, or one of more than {MAX_BODY_BYTES} bytes")
    )


@pytest.mark.parametrize(
    "properties",
    [
        {"content_type": "application/json"},
        {"content_type": "application/cloudevents+json; charset=utf-8"},
        {
            "content_type": "text/plain",
            "content_encoding": "UTF-8",
        },  # what some libraries put on any string
        {"content_type": "application/octet-stream"},
        {"content_type": "application/xml"},
        {"content_type": None},
        {
            "reply_to": "azure.scheduledevents",
            "correlation_id": "x",
            "message_type": "y",
            "app_id": "z",
            "priority": 9,
            "expiration": "1",
        },
        {"timestamp": datetime(1970, 1, 1, tzinfo=UTC), "delivery_mode": 1},
        {
            "headers": {
                "ce-type": "io.imdsrelay.approval.granted.v1",
                "user_id": "operator",
                "CC": ["x"],
                "x-delivery-count": 3,
            }
        },
    ],
)
def test_nothing_else_of_a_letter_counts(properties: dict[str, Any]) -> None:
    """The body says what it is by being one; what anybody can write beside it is not asked for, nor believed."""
    caller, identity, body = parse_message(letter(**properties), EXCHANGE, KEY, CLIENTS)
    assert (caller.principal, identity, body.eventId) == ("client:db-drain", "m", "C7061BAC")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda one: st.lists(one, max_size=3),
)
_FIELDS = st.dictionaries(
    st.sampled_from([*WISH, "reason", "scope", "specversion", "data"]), _JSON | st.just(WISH)
)


@given(
    st.binary(max_size=60) | st.builds(orjson.dumps, _FIELDS),
    st.text(max_size=5) | st.none(),
    st.sampled_from(["drain", "x", None]),
)
def test_any_letter_is_a_decision_or_unusable(
    body: bytes, message_id: str | None, user_id: str | None
) -> None:
    """Nothing else is raised: an error of our own would bury it as one of ours."""
    message = letter(body, message_id=message_id, user_id=user_id)
    with contextlib.suppress(UnusableMessage):
        caller, identity, decision = parse_message(message, EXCHANGE, KEY, CLIENTS)
        assert (caller.principal, identity, user_id) == ("client:db-drain", message_id, "drain")
        assert decision.decision in {"approve", "hold", "release"}


def test_a_client_without_a_user_is_nobody_over_amqp() -> None:
    """Not even for a user whom nobody names."""
    for user_id in ("http-only", "", None):
        assert why(letter(user_id=user_id))
