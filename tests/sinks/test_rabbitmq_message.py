"""RabbitMQ, the pure parts: the section, the routing key, the message, and what an answer means."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from aio_pika import exceptions as amqp
from aio_pika.abc import DeliveryMode
from aiormq.exceptions import ChannelAccessRefused
from hypothesis import given
from hypothesis import strategies as st
from pamqp.commands import Basic
from pamqp.common import FieldTable
from pamqp.header import ContentHeader
from pydantic import ValidationError

from relay.amqp.event_message import MAX_TEXT_BYTES, content_header, routing_key
from relay.amqp.publisher import PublishResult
from relay.errors import Deferred, DeliveryError, Failure, Rejected
from relay.events.cloudevent import CloudEvent
from relay.sinks.rabbitmq.sink import interpret_publish_result
from tests.builders import EVENT_ID, cloudevent
from tests.sinks.rabbitmq_consumer import message_properties, settings

KEY = "event.scheduled.freeze.prod-vmss-a-1f0c33ab"
SMALLEST_FRAME = 4096
"""Bytes, eight of which are not payload: `frame-min-size` of AMQP 0-9-1."""


# --- the section


def test_the_defaults_are_those_of_the_documentation() -> None:
    section = settings("amqp://guest:guest@127.0.0.1:5672/")
    assert (section.exchange, section.declare, section.events) == (
        "azure.scheduledevents",
        True,
        ("*",),
    )


@pytest.mark.parametrize("word", [True, False, "passive"])
def test_declare_is_true_passive_or_false(word: object) -> None:
    assert settings("amqp://h/", declare=word).declare == word


@pytest.mark.parametrize("word", ["yes", "active", None])
def test_declare_is_nothing_else(word: object) -> None:
    with pytest.raises(ValidationError, match="declare"):
        settings("amqp://h/", declare=word)


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hunter2@h/",
        "amqp:///hunter2",
        "amqp://user:hunter2@h:99999/",
        "amqp://hunter2:x@h:port/",
        "",
    ],
)
def test_a_url_that_names_no_broker_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(ValidationError, match="expected a URL such as amqps://") as refused:
        settings(url)
    assert "hunter2" not in str(refused.value)


def test_a_url_is_required() -> None:
    with pytest.raises(ValidationError, match="expected url or url_file, got neither"):
        settings(None)


@pytest.mark.parametrize("name", ["", "a b", "x" * 128, "påvirker"])
def test_an_exchange_name_is_one_that_amqp_allows(name: str) -> None:
    with pytest.raises(ValidationError, match="exchange"):
        settings("amqp://h/", name)


# --- the routing key


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("event.scheduled", {"eventtype": "Reboot"}, "event.scheduled.reboot.prod-vmss-a-1f0c33ab"),
        ("event.ended", {"eventtype": None}, "event.ended.none.prod-vmss-a-1f0c33ab"),
        (
            "event.started",
            {"eventtype": "Live Migration 2.0"},
            "event.started.live_migration_2_0.prod-vmss-a-1f0c33ab",
        ),
        ("startrequest.accepted", {}, "startrequest.accepted.freeze.prod-vmss-a-1f0c33ab"),
        (
            "relay.sink-failing",
            {"subject": "On.Call"},
            "relay.sink-failing.on_call.prod-vmss-a-1f0c33ab",
        ),
        ("relay.source-lost", {"subject": None}, "relay.source-lost.none.prod-vmss-a-1f0c33ab"),
    ],
)
def test_a_routing_key_says_what_happened_to_what_and_where(
    name: str, changes: dict[str, Any], key: str
) -> None:
    assert routing_key(cloudevent(name, **changes)) == key


_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)


@given(name=_text, eventtype=_text, scope=_text)
def test_a_routing_key_is_always_four_plain_words_that_fit(
    name: str, eventtype: str, scope: str
) -> None:
    """Lower case, nothing outside [a-z0-9_-], never empty, at most 255 bytes in all."""
    key = routing_key(cloudevent(name, eventtype=eventtype, scope=scope))
    assert re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+){3}", key)
    assert len(key) <= 255


# --- the message


def test_a_message_carries_the_event_and_its_name_tags() -> None:
    event = cloudevent()
    message = message_properties(event)
    assert message.delivery_mode == DeliveryMode.PERSISTENT
    assert message.content_type == "application/cloudevents+json; charset=utf-8"
    assert (message.message_id, message.correlation_id) == (event.id, EVENT_ID)
    assert (message.message_type, message.app_id) == (
        "io.imdsrelay.event.scheduled.v1",
        "imds-relay",
    )
    assert message.headers == {f"ce-{name}": value for name, value in event.attributes.items()}


def test_a_message_asks_for_nothing_that_a_consumer_or_broker_could_trip_over() -> None:
    """No reply_to (docs/protocol.md#no-reply_to), no priority, no user_id or expiration.

    A broker could close the channel for the last two, see
    docs/protocol.md#one-bad-publish-closes-the-channel.
    """
    message = message_properties(cloudevent())
    assert (message.reply_to, message.user_id, message.expiration, message.priority) == (
        None,
        None,
        None,
        None,
    )


def test_a_message_about_the_relay_has_no_correlation_id() -> None:
    assert message_properties(cloudevent("relay.source-lost", subject=None)).correlation_id is None


def test_copies_that_are_too_long_for_their_place_are_left_out() -> None:
    """The body has everything; such a header can be binary to AMQP 1.0 readers.

    See docs/protocol.md#headers-of-256-bytes.
    """
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
def test_every_event_makes_a_message_that_can_go_on_the_wire(
    extensions: dict[str, str], event_id: str
) -> None:
    """A message that cannot be encoded would be tried for ever."""
    attributes: dict[str, Any] = {f"x{name}": value for name, value in extensions.items()}
    event = cloudevent(subject=event_id, **attributes)
    assert content_header(event)


@pytest.mark.parametrize("user", [None, "vmss-a", "ø" * 127])
@pytest.mark.parametrize("expiration", [None, 120_000])
def test_a_message_of_a_fleet_names_its_user_and_can_expire(
    user: str | None, expiration: int | None
) -> None:
    event = cloudevent()
    raw = content_header(event, user_id=user, expiration=expiration)
    properties = ContentHeader()
    properties.unmarshal(raw)
    assert (properties.properties.user_id, properties.properties.expiration) == (
        user,
        None if expiration is None else str(expiration),
    )
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
    assert len(_headers(event)) == len(
        {"specversion", "id", "type", "subject", "time", "datacontenttype", *foreign, *ours}
    )
    assert len(content_header(event, user_id="u" * 128)) <= SMALLEST_FRAME - 8


# --- what an answer means


def _returned() -> amqp.PublishError:
    frame = Basic.Return(reply_code=312, reply_text="NO_ROUTE", exchange="x", routing_key=KEY)
    error = amqp.PublishError.__new__(
        amqp.PublishError
    )  # its own constructor wants a whole message
    error.frame = frame
    return error


TOPIC = (
    f"ACCESS_REFUSED - access to topic '{KEY}' in exchange 'x' in vhost '/' "
    "refused for user 'least'"
)


def test_a_confirm_is_delivered() -> None:
    assert interpret_publish_result(Basic.Ack(), KEY, 10, relay_declares=True).status is None


def test_a_return_is_delivered_and_told() -> None:
    receipt = interpret_publish_result(_returned(), KEY, 10, relay_declares=True)
    assert (receipt.status, receipt.response) == (312, f"NO_ROUTE: no queue is bound for {KEY}")


@pytest.mark.parametrize(
    ("answer", "relay_declares", "kind", "failure", "status", "word"),
    [
        (amqp.DeliveryError(None, Basic.Nack()), True, Deferred, "transient", None, "nack"),
        (
            amqp.ChannelNotFoundEntity("NOT_FOUND - no exchange 'x'"),
            False,
            Deferred,
            "slow",
            404,
            "set declare: true",
        ),
        (
            amqp.ChannelNotFoundEntity("NOT_FOUND - no exchange 'x'"),
            True,
            Deferred,
            "transient",
            None,
            "NOT_FOUND",
        ),
        (
            ChannelAccessRefused("ACCESS_REFUSED - access to exchange 'x'"),
            True,
            Deferred,
            "slow",
            403,
            "grant the user write",
        ),
        (ChannelAccessRefused(TOPIC), True, Deferred, "slow", 403, "topic"),
        (
            ChannelAccessRefused(TOPIC.replace("access to", "write access to")),
            True,
            Deferred,
            "slow",
            403,
            "topic",
        ),
        (
            ChannelAccessRefused(TOPIC.replace("freeze", "reboot")),
            True,
            Deferred,
            "transient",
            None,
            "channel closed",
        ),
        (
            amqp.ChannelPreconditionFailed("message size 10 is larger than configured max size 5"),
            True,
            Rejected,
            None,
            406,
            "size",
        ),
        (
            amqp.ChannelPreconditionFailed("message size 100 is larger than the max size 5"),
            True,
            Deferred,
            "transient",
            None,
            "size",
        ),
        (
            amqp.ConnectionClosed(320, "CONNECTION_FORCED - shutdown"),
            True,
            Deferred,
            "transient",
            None,
            "shutdown",
        ),
        (asyncio.CancelledError(), True, Deferred, "transient", None, "heartbeat"),
        (Exception(), True, Deferred, "transient", None, "same id"),
        (None, True, Deferred, "transient", None, "expected the broker to confirm"),
    ],
)
def test_an_answer_that_is_no_confirm_says_what_to_do_next(
    answer: PublishResult,
    relay_declares: bool,
    kind: type[DeliveryError],
    failure: Failure | None,
    status: int | None,
    word: str,
) -> None:
    """Another message closed the channel, with another topic or size: this one is retried."""
    with pytest.raises(kind) as raised:
        interpret_publish_result(answer, KEY, 10, relay_declares=relay_declares)
    assert word in raised.value.reason
    assert raised.value.status == status
    assert getattr(raised.value, "failure", None) == failure
