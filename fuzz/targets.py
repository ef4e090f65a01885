"""What is fuzzed: each parser of what others send, with what must be true of its result.

A target takes any bytes. It returns, or raises for a mistake of ours. Each error that a parser
documents is caught. `python -m fuzz` lets atheris invent the bytes; tests/test_fuzz.py gives each
target the kept corpus, which has one file for each target with one input in each line.
"""

from __future__ import annotations

import ast
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Final

import orjson

from relay.amqp.broker_url import parse_urls
from relay.amqp.connection import UnusableMessage
from relay.approvals.request import InvalidField, MalformedJsonBody, read_json, validate_body
from relay.chat import CallbackRefused
from relay.chat.platforms.mattermost import clicks as mattermost_clicks
from relay.chat.platforms.slack import clicks as slack_clicks
from relay.config import load
from relay.errors import ConfigError, DocumentError
from relay.events.build import common_event_data
from relay.events.model import diff_events_with_document
from relay.events.timestamps import format_rfc3339, format_sortable, parse_timestamp
from relay.fleet.messages import read_message
from relay.imds.discover import read_lease, read_reply
from relay.imds.document import API_VERSIONS, parse_document
from relay.imds.instance_metadata import derive_scope, parse_instance, resource_names
from relay.net.egress import is_refused, parse_address_literal, parse_receiver_url
from relay.net.http import parse_retry_after
from relay.settings import parse_duration
from relay.signature import SignatureRefused, sign, verify

NOW: Final = datetime(2026, 4, 11, 22, 26, 58, tzinfo=UTC)
SECRET: Final = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # noqa: S105  # of the tests


def _text(data: bytes) -> str:
    """Return bytes as the text that aiohttp would make of a header."""
    return data.decode("utf-8", "surrogateescape")


def document(data: bytes) -> None:
    """The document of events, in the newest version and in the oldest."""
    for api_version in (API_VERSIONS[-1], API_VERSIONS[0]):
        try:
            parsed = parse_document(data, api_version)
        except DocumentError:
            return
        keys = [event.lowercase_event_id for event in parsed.events]
        assert len(set(keys)) == len(keys), "expected each event once"
        for event in parsed.events:
            orjson.dumps(common_event_data(event, parsed.incarnation))
            assert event.revision
        assert diff_events_with_document(parsed.events, parsed) == (), (
            "expected no change of the same document"
        )


def instance(data: bytes) -> None:
    """Instance metadata, and the names that follow from it."""
    with suppress(DocumentError):
        parsed = parse_instance(data)
        scope = derive_scope(parsed)
        assert 1 <= len(scope) <= 80
        assert resource_names(parsed, "host")


def signature(data: bytes) -> None:
    """A signed callback: only what the secret signed is accepted."""
    head, _, body = data.partition(b"\n\n")
    headers = {
        name: value for name, _, value in (line.partition(": ") for line in _text(head).split("\n"))
    }
    with suppress(SignatureRefused):
        message_id = verify([SECRET], headers, body, NOW)
        values = {name.lower(): value for name, value in headers.items()}
        made = sign([SECRET], message_id, int(values["webhook-timestamp"]), body)
        assert made in values["webhook-signature"].split(" ")
    with suppress(CallbackRefused):
        mattermost_clicks.read_token(SECRET.encode(), _text(data))


def callback(data: bytes) -> None:
    """The body of an approval, over HTTP, AMQP or as a callback."""
    try:
        body = validate_body(read_json(data))
    except (MalformedJsonBody, InvalidField) as error:
        str(error).encode()  # it goes into an answer
        return
    assert body.decision in ("approve", "hold", "release")
    assert 1 <= len(body.eventId) <= 256
    orjson.dumps(body.model_dump())


def chat(data: bytes) -> None:
    """What Slack and Mattermost send."""
    with suppress(CallbackRefused):
        parsed = mattermost_clicks.parse_payload(data)
        if isinstance(parsed, mattermost_clicks.Click):
            mattermost_clicks.user_of_trigger(parsed.trigger_id)
    with suppress(ValueError):
        payload = orjson.loads(data)
        for parse in (slack_clicks.parse_click, slack_clicks.parse_command):
            with suppress(slack_clicks.Unreadable):
                str(parse(payload)).encode()


def fleet(data: bytes) -> None:
    """A message of an agent or a hub."""
    with suppress(UnusableMessage):
        message = read_message(data)
        assert message.at.tzinfo is not None


def date(data: bytes) -> None:
    """Times, pauses and durations in text."""
    text = _text(data)
    moment = parse_timestamp(text)
    if moment is not None:
        assert moment.tzinfo is UTC
        assert parse_timestamp(format_rfc3339(moment)) == moment
        assert parse_timestamp(format_sortable(moment)) == moment
    pause = parse_retry_after(text, NOW, maximum=3600.0)
    assert pause is None or 0 <= pause <= 3600
    with suppress(ValueError):
        seconds = parse_duration(text)
        assert seconds >= 0
        assert math.isfinite(seconds)


@cache
def _configuration() -> Path:
    return Path(tempfile.mkdtemp(prefix="imds-relay-fuzz-")) / f"{os.getpid()}.yaml"


def yaml(data: bytes) -> None:
    """The configuration: it is accepted, or an error says what is wrong."""
    file = _configuration()
    file.write_bytes(data)
    try:
        load(file, {"NAME": "value"})
    except ConfigError as error:
        str(error).encode()  # it is printed


def address(data: bytes) -> None:
    """URLs of receivers and brokers, and hosts: a guarded address is never accepted."""
    text = _text(data)
    with suppress(ValueError):
        url = parse_receiver_url(text, allow_http=True)
        literal = parse_address_literal(url.raw_host or "")
        assert literal is None or not is_refused(literal)
    with suppress(ValueError):
        for broker in parse_urls(text):
            literal = parse_address_literal(broker.host or "")
            assert literal is None or not is_refused(literal)


def dhcp(data: bytes) -> None:
    """The answer of a DHCP server, and leases."""
    with suppress(ValueError):
        read_reply(data, data[4:8], data[28:34])
    read_lease(data.decode("ascii", "replace"))


TARGETS: Final[Mapping[str, Callable[[bytes], None]]] = {
    target.__name__: target
    for target in (
        *(document, instance, signature, callback, chat, fleet),
        *(date, yaml, address, dhcp),
    )
}

CORPUS: Final = Path(__file__).parent / "corpus"


def kept_inputs(name: str) -> list[bytes]:
    """Return the corpus of a target."""
    return [ast.literal_eval(line) for line in (CORPUS / name).read_text("ascii").splitlines()]
