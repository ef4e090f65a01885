"""A message is the decision of a known client, or unusable for a stated reason."""

from __future__ import annotations

import contextlib
import hashlib
from datetime import UTC, datetime
from functools import partial
from typing import Any

import orjson
import pytest
from aiormq.abc import DeliveredMessage
from hypothesis import given
from hypothesis import strategies as st

from relay.amqp.approval_consumer import extract_message_of_verified_sender
from relay.amqp.connection import MAX_BODY_BYTES, UnusableMessage
from relay.amqp.topology import ApprovalsQueue, approvals_queue
from relay.api.settings import Client
from relay.approvals.amqp_handler import read_request
from relay.approvals.request import DecisionRequest
from relay.fleet.routing import hub_approvals_queue
from relay.roles.inner_half import callers_by_amqp_user
from tests import hostile
from tests.amqp.delivered import delivered

EXCHANGE, KEY = "azure.scheduledevents.approvals", "approve.prod"
QUEUE = approvals_queue("azure.scheduledevents", "prod")
CALLERS = callers_by_amqp_user(
    (
        Client(name="db-drain", amqp_user="drain", can=("approve",)),
        Client(name="http-only", can=("approve",)),
        Client(name="watcher", amqp_user="watcher", can=("read",)),
    )
)
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
DECISION: dict[str, Any] = {"eventId": "C7061BAC", "decision": "approve", "revision": "9f2c"}


def delivery(
    body: bytes | None = None, exchange: str = EXCHANGE, key: str = KEY, **properties: Any
) -> DeliveredMessage:
    """A message as the broker delivers it; a valid one, except for the arguments."""
    raw = orjson.dumps(DECISION) if body is None else body
    return delivered(exchange, key, raw, **{"message_id": "m", "user_id": "drain", **properties})


def request_in(message: DeliveredMessage, queue: ApprovalsQueue = QUEUE) -> DecisionRequest:
    """The request in a message, read as the consumer and its handler do."""
    return read_request(extract_message_of_verified_sender(message, queue), CALLERS, NOW)


def reason_against(message: DeliveredMessage) -> str:
    with pytest.raises(UnusableMessage) as refused:
        request_in(message)
    return str(refused.value)


def test_a_valid_message_is_a_decision_of_its_client() -> None:
    request = request_in(delivery())
    assert (request.caller.principal, request.caller.channel) == ("client:db-drain", "amqp")
    assert (request.request_id, request.message_id, request.at) == ("m", "m", NOW)
    assert (request.event_id, request.decision, request.revision) == ("C7061BAC", "approve", "9f2c")


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ({"user_id": None}, "no user_id"),
        ({"user_id": ""}, "no user_id"),
        ({"user_id": "stranger"}, "no client's amqp_user"),
        ({"user_id": "DRAIN"}, "no client's amqp_user"),  # RabbitMQ knows case
        ({"user_id": "db-drain"}, "no client's amqp_user"),  # a client's name is not its user
        ({"user_id": "http-only"}, "no client's amqp_user"),
        ({"user_id": "None"}, "no client's amqp_user"),
        ({"user_id": "watcher"}, "its client may decide nothing"),
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
def test_a_message_without_a_known_sender_or_from_elsewhere_is_unusable(
    properties: dict[str, Any], reason: str
) -> None:
    assert reason in reason_against(delivery(**properties))


@pytest.mark.parametrize(
    "body",
    [
        *hostile.NO_OBJECTS,
        *hostile.REPEATED_KEYS,
        *(
            orjson.dumps(hostile.with_wrong_field(DECISION, name, value))
            for name, value in hostile.WRONG_FIELDS
        ),
        b"{}",
        b'{"specversion": "1.0", "data": null}',
        b'{"specversion": "1.0", "data": []}',
        b'{"specversion": "1.0", "data": "{}"}',
        b'{"specversion": "1.0", "data_base64": "e30="}',
    ],
    ids=lambda body: repr(body[:40]),
)
def test_a_body_that_is_not_a_decision_is_unusable(body: bytes) -> None:
    no_body = f"it has no body, or one of more than {MAX_BODY_BYTES} bytes"
    assert reason_against(delivery(body)).startswith(("its body is not a decision: ", no_body))


@pytest.mark.parametrize(
    "properties",
    [
        {"content_type": "application/json"},
        {"content_type": "application/cloudevents+json; charset=utf-8"},
        {"content_type": "text/plain", "content_encoding": "UTF-8"},  # some libraries do
        {"content_type": "application/octet-stream"},
        {"content_type": "application/xml"},
        {"content_type": None},
        {"reply_to": "azure.scheduledevents", "correlation_id": "x", "message_type": "y"},
        {"app_id": "z", "priority": 9, "expiration": "1"},
        {"timestamp": datetime(1970, 1, 1, tzinfo=UTC), "delivery_mode": 1},
        {"headers": {"ce-type": "io.imdsrelay.approval.granted.v1", "user_id": "operator"}},
        {"headers": {"CC": ["x"], "x-delivery-count": 3}},
    ],
)
def test_other_properties_and_headers_do_not_matter(properties: dict[str, Any]) -> None:
    """The sender chooses them freely, so they prove nothing."""
    request = request_in(delivery(**properties))
    assert (request.caller.principal, request.message_id) == ("client:db-drain", "m")
    assert request.event_id == "C7061BAC"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda values: st.lists(values, max_size=3),
)
_FIELDS = st.dictionaries(
    st.sampled_from([*DECISION, "reason", "scope", "specversion", "data"]),
    _JSON | st.just(DECISION),
)


@given(
    st.binary(max_size=60) | st.builds(orjson.dumps, _FIELDS),
    st.text(max_size=5) | st.none(),
    st.sampled_from(["drain", "x", None]),
)
def test_any_message_is_a_decision_or_unusable(
    body: bytes, message_id: str | None, user_id: str | None
) -> None:
    """No other error is raised: it would count as an internal error."""
    with contextlib.suppress(UnusableMessage):
        request = request_in(delivery(body, message_id=message_id, user_id=user_id))
        assert (request.caller.principal, user_id) == ("client:db-drain", "drain")
        assert (request.request_id, request.message_id) == (message_id, message_id)
        assert request.decision in {"approve", "hold", "release"}


# --- the queue of a hub

hub_request_in = partial(request_in, queue=hub_approvals_queue("azure.scheduledevents"))
"""The request in a message of the queue for all scopes."""


@pytest.mark.parametrize("scope", ["prod", "vmss-a-1f0c33ab", "hub", "0", "x" * 80])
def test_on_a_hub_the_routing_key_names_the_scope(scope: str) -> None:
    request = hub_request_in(delivery(key=f"approve.{scope}"))
    assert (request.arrival_scope, request.scope) == (scope, None)


@pytest.mark.parametrize(
    "key",
    [
        *("approve", "approve.", "approve..prod", "approve.a.b", "APPROVE.prod", "approve.Prod"),
        *("hold.prod", "x.approve.prod", "approve.prod\n", "approve.pr od", "approve.pr_od"),
        *("", "approve.*", "approve." + "x" * 81),
    ],
)
def test_on_a_hub_a_key_that_names_no_scope_is_unusable(key: str) -> None:
    with pytest.raises(UnusableMessage, match=r"the routing key approve\.\*"):
        hub_request_in(delivery(key=key))


def test_on_a_hub_the_body_can_repeat_the_scope_but_not_change_it() -> None:
    body = orjson.dumps({**DECISION, "scope": "prod"})
    for scope in ("prod", "test"):
        request = hub_request_in(delivery(body, key=f"approve.{scope}"))
        assert (request.arrival_scope, request.scope) == (scope, "prod")


def test_on_a_hub_one_id_for_two_scopes_is_no_repeat_and_on_a_relay_the_digest_stays() -> None:
    """The digests of a relay are on disk: an update must not turn a repeat into a conflict."""
    prod, test = (hub_request_in(delivery(key=f"approve.{name}")) for name in ("prod", "test"))
    assert prod.digest != test.digest
    assert prod == hub_request_in(delivery(key="approve.prod"))
    body = orjson.dumps(DECISION)
    assert request_in(delivery(body)).digest == hashlib.sha256(body).hexdigest()
    assert request_in(delivery(body)).arrival_scope is None
