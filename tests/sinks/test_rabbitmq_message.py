"""RabbitMQ, the pure parts: the section, the routing key, the message, and what an answer means."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from aio_pika import exceptions as amqp
from aiormq.exceptions import ChannelAccessRefused
from hypothesis import given
from hypothesis import strategies as st
from pamqp.commands import Basic
from pamqp.common import FieldTable
from pamqp.header import ContentHeader
from pydantic import ValidationError

from relay.amqp.publisher import MAX_TEXT_BYTES, PublishResult, routing_key
from relay.errors import Deferred, Failure, Rejected
from relay.events.cloudevent import CloudEvent
from relay.sinks.rabbitmq.sink import interpret_publish_result
from tests.builders import cloudevent
from tests.sinks.rabbitmq_consumer import content_header, message_properties, settings

KEY = "event.scheduled.freeze.prod-vmss-a-1f0c33ab"
SMALLEST_FRAME = 4096
"""Bytes, eight of which are not payload: `frame-min-size` of AMQP 0-9-1."""


def test_the_section_takes_an_exchange_name_and_a_way_to_declare() -> None:
    """What a URL is: tests/amqp/test_broker_url.py."""
    for word in (True, False, "passive"):
        assert settings("amqp://h/", declare=word).declare == word
    for other in ("yes", "active", None):
        with pytest.raises(ValidationError, match="declare"):
            settings("amqp://h/", declare=other)
    for name in ("", "a b", "x" * 128, "påvirker"):
        with pytest.raises(ValidationError, match="exchange"):
            settings("amqp://h/", name)


# --- the routing key


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("event.scheduled", {"eventtype": "Reboot"}, "event.scheduled.reboot"),
        ("event.ended", {"eventtype": None}, "event.ended.none"),
        ("event.started", {"eventtype": "Live Migration 2.0"}, "event.started.live_migration_2_0"),
        ("startrequest.accepted", {}, "startrequest.accepted.freeze"),
        ("relay.sink-failing", {"subject": "On.Call"}, "relay.sink-failing.on_call"),
        ("relay.source-lost", {"subject": None}, "relay.source-lost.none"),
    ],
)
def test_a_key_says_what_happened_and_where(name: str, changes: dict[str, Any], key: str) -> None:
    assert routing_key(cloudevent(name, **changes)) == f"{key}.prod-vmss-a-1f0c33ab"


_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)


@given(name=_text, eventtype=_text, scope=_text)
def test_a_routing_key_is_four_plain_words_that_fit(name: str, eventtype: str, scope: str) -> None:
    """Lower case, nothing outside [a-z0-9_-], never empty, at most 255 bytes in all."""
    key = routing_key(cloudevent(name, eventtype=eventtype, scope=scope))
    assert re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+){3}", key)
    assert len(key) <= 255


# --- the message


def test_a_message_asks_for_nothing_that_a_consumer_or_broker_could_trip_over() -> None:
    """See docs/protocol.md#no-reply_to and #one-bad-publish-closes-the-channel."""
    message = message_properties(cloudevent())
    asked = (message.reply_to, message.user_id, message.expiration, message.priority)
    assert asked == (None, None, None, None)


def test_a_message_about_the_relay_has_no_correlation_id() -> None:
    assert message_properties(cloudevent("relay.source-lost", subject=None)).correlation_id is None


def test_copies_that_are_too_long_for_their_place_are_left_out() -> None:
    """To AMQP 1.0 readers they can be binary (docs/protocol.md#headers-of-256-bytes)."""
    event = cloudevent(subject="å" * 128)
    message = message_properties(event)
    assert message.correlation_id is None
    assert "ce-subject" not in _headers(event)
    assert _headers(event)["ce-scope"] == event.scope
    assert "ce-subject" in _headers(cloudevent(subject="å" * 127))


def _headers(event: CloudEvent) -> FieldTable:
    headers = message_properties(event).headers
    assert headers is not None
    return headers


@given(st.dictionaries(st.text("abcxyz019", min_size=1, max_size=20), _text, max_size=10), _text)
def test_every_event_can_go_on_the_wire(extensions: dict[str, str], event_id: str) -> None:
    """A message that cannot be encoded would be tried for ever."""
    attributes: dict[str, Any] = {f"x{name}": value for name, value in extensions.items()}
    event = cloudevent(subject=event_id, **attributes)
    assert content_header(event)


@pytest.mark.parametrize("user", [None, "vmss-a", "ø" * 127])
@pytest.mark.parametrize("expiration", [None, 120_000])
def test_a_fleets_message_names_user_and_expiry(user: str | None, expiration: int | None) -> None:
    event = cloudevent()
    raw = content_header(event, user_id=user, expiration=expiration)
    properties = ContentHeader()
    properties.unmarshal(raw)
    expires = None if expiration is None else str(expiration)
    assert (properties.properties.user_id, properties.properties.expiration) == (user, expires)
    properties.properties.user_id = properties.properties.expiration = None
    assert properties.marshal() == content_header(event)


def test_the_longest_header_fits_the_smallest_frame() -> None:
    """A header frame cannot be split. Even a broker with the smallest frame_max must accept it."""
    foreign = dict.fromkeys(
        ("partitionkey", "correlationid", "causationid", "eventtype", "eventsource"),
        "x" * MAX_TEXT_BYTES,
    )
    ours = {
        "source": f"imds://{'s' * 80}/relays/{'r' * 80}",
        "scope": "s" * 80,
        "relay": "r" * 80,
        "dataschema": "d" * 120,
        "notbefore": "2022-04-11T22:26:58.123456Z",
        "outcome": "completed",
        "journalhead": f"{2**63}:{'f' * 64}",
    }
    event = cloudevent("approval.granted", "x" * MAX_TEXT_BYTES, None, **foreign, **ours)
    core = {"specversion", "id", "type", "subject", "time", "datacontenttype"}
    assert len(_headers(event)) == len({*core, *foreign, *ours})
    assert len(content_header(event, user_id="u" * 128)) <= SMALLEST_FRAME - 8


# --- what an answer means


def _returned() -> amqp.PublishError:
    frame = Basic.Return(reply_code=312, reply_text="NO_ROUTE", exchange="x", routing_key=KEY)
    error = amqp.PublishError.__new__(amqp.PublishError)  # its constructor wants a message
    error.frame = frame
    return error


TOPIC = (
    f"ACCESS_REFUSED - access to topic '{KEY}' in exchange 'x' in vhost '/' "
    "refused for user 'least'"
)


def test_a_confirm_is_delivered_and_so_is_a_return_which_is_told() -> None:
    assert interpret_publish_result(Basic.Ack(), KEY, 10, relay_declares=True).status is None
    receipt = interpret_publish_result(_returned(), KEY, 10, relay_declares=True)
    assert (receipt.status, receipt.response) == (312, f"NO_ROUTE: no queue is bound for {KEY}")


NO_EXCHANGE = amqp.ChannelNotFoundEntity("NOT_FOUND - no exchange 'x'")
NO_ACCESS = ChannelAccessRefused("ACCESS_REFUSED - access to exchange 'x'")
SIZE = "message size {} is larger than configured max size 5"
FORCED = amqp.ConnectionClosed(320, "CONNECTION_FORCED - shutdown")


@pytest.mark.parametrize(
    ("answer", "relay_declares", "failure", "status", "word"),
    [
        (amqp.DeliveryError(None, Basic.Nack()), True, "transient", None, "nack"),
        (NO_EXCHANGE, False, "slow", 404, "set declare: true"),
        (NO_EXCHANGE, True, "transient", None, "NOT_FOUND"),
        (NO_ACCESS, True, "slow", 403, "grant the user write"),
        (ChannelAccessRefused(TOPIC), True, "slow", 403, "topic"),
        (ChannelAccessRefused(f"write {TOPIC}"), True, "slow", 403, "topic"),
        (
            ChannelAccessRefused(TOPIC.replace("freeze", "reboot")),
            *(True, "transient", None, "channel closed"),
        ),
        (amqp.ChannelPreconditionFailed(SIZE.format(10)), True, None, 406, "size"),
        (amqp.ChannelPreconditionFailed(SIZE.format(100)), True, "transient", None, "size"),
        (FORCED, True, "transient", None, "shutdown"),
        (asyncio.CancelledError(), True, "transient", None, "heartbeat"),
        (Exception(), True, "transient", None, "same id"),
        (None, True, "transient", None, "expected the broker to confirm"),
    ],
)
def test_an_answer_that_is_no_confirm_says_what_to_do_next(
    answer: PublishResult,
    relay_declares: bool,
    failure: Failure | None,
    status: int | None,
    word: str,
) -> None:
    """Another message closed the channel, with another topic or size: this one is retried."""
    with pytest.raises(Rejected if failure is None else Deferred) as raised:
        interpret_publish_result(answer, KEY, 10, relay_declares=relay_declares)
    assert word in raised.value.reason
    assert raised.value.status == status
    assert getattr(raised.value, "failure", None) == failure
