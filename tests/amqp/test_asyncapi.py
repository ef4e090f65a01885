"""`imds-relay schema asyncapi` describes what the code really sends and declares."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from jsonschema import Draft7Validator
from pydantic import ValidationError

from docs.generate import examples
from relay.amqp.event_message import routing_key
from relay.api.schema.asyncapi import asyncapi_document
from relay.approvals.request import DecisionBody
from relay.events.catalog import CATALOG
from relay.events.cloudevent import CloudEvent
from tests.sinks.rabbitmq_consumer import message_properties

MAIN = "azure.scheduledevents"


def at(document: Any, reference: str) -> Any:
    """What a reference leads to."""
    for part in reference.removeprefix("#/").split("/"):
        document = document[part]
    return document


def resolved(document: Any, value: Any) -> Any:
    """The value with what its references lead to in their place."""
    match value:
        case {"$ref": str(reference)}:
            return resolved(document, at(document, reference))
        case dict():
            return {name: resolved(document, item) for name, item in value.items()}
        case list():
            return [resolved(document, item) for item in value]
    return value


def test_every_reference_leads_somewhere() -> None:
    document = asyncapi_document()
    references = re.findall(r'"\$ref":"([^"]+)"', orjson.dumps(document).decode())
    assert len(references) > len(CATALOG)
    for reference in references:
        assert at(document, reference)


@pytest.mark.parametrize("event", examples(), ids=[kind.name for kind in CATALOG])
def test_what_is_sent_is_what_is_described(event: CloudEvent) -> None:
    """Body, headers, type and routing key of one event of each type."""
    document = asyncapi_document()
    message = resolved(document, document["channels"]["events"]["messages"][event.name])
    sent = message_properties(event)
    Draft7Validator(message["payload"]).validate(orjson.loads(event.body))
    Draft7Validator({**message["headers"], "additionalProperties": False}).validate(sent.headers)
    assert (sent.message_type, sent.content_type) == (
        message["bindings"]["amqp"]["messageType"],
        message["contentType"],
    )
    words = dict(
        zip(("family", "change", "detail", "scope"), routing_key(event).split("."), strict=True)
    )
    parameters = document["channels"]["events"]["parameters"]
    assert all(word in parameters[name].get("enum", [word]) for name, word in words.items())


WISH = {"eventId": "C7061BAC", "decision": "approve", "revision": "9f2c"}


@pytest.mark.parametrize(
    "fields",
    [
        WISH,
        {**WISH, "reason": "drained", "scope": None},
        {**WISH, "decision": "deny"},
        {**WISH, "x": 1},
        {"eventId": "C7061BAC"},
        {**WISH, "eventId": ""},
    ],
)
def test_what_is_taken_is_what_is_described(fields: dict[str, Any]) -> None:
    """Bare and as the data of a CloudEvent: the description allows what the relay allows."""
    document = asyncapi_document()
    messages = resolved(document, document["channels"]["approvals"]["messages"])
    try:
        allowed = bool(DecisionBody.model_validate(fields))
    except ValidationError:
        allowed = False
    assert Draft7Validator(messages["decision"]["payload"]).is_valid(fields) == allowed
    wrapped = {"specversion": "1.0", "id": "1", "source": "/db", "type": "drained", "data": fields}
    assert Draft7Validator(messages["decisionEvent"]["payload"]).is_valid(wrapped) == allowed


def test_names_and_arguments_are_those_of_the_documentation() -> None:
    declared = dict(_made(asyncapi_document()))
    quorum = {"x-queue-type": "quorum"}
    assert declared == {
        MAIN: ("topic", {"alternate-exchange": f"{MAIN}.unrouted"}),
        f"{MAIN}.approvals": ("topic", {}),
        f"{MAIN}.unrouted": ("queue", {**quorum, "x-max-length": 10_000}),
        f"{MAIN}.dead": ("queue", {**quorum, "x-max-length": 10_000}),
        f"{MAIN}.approvals.{{scope}}": (
            "queue",
            {
                **quorum,
                "x-single-active-consumer": True,
                "x-dead-letter-exchange": f"{MAIN}.dlx",
                "x-max-length": 1_000,
                "x-max-length-bytes": 8_388_608,
                "x-overflow": "reject-publish",
            },
        ),
    }
    assert {name.partition(".")[0] for name, _ in _made(asyncapi_document("other"))} == {"other"}


def _made(document: dict[str, Any]) -> Iterator[tuple[str, tuple[str, dict[str, Any]]]]:
    for channel in document["channels"].values():
        binding = channel["bindings"]["amqp"]
        item = binding.get("exchange") or binding["queue"]
        yield item["name"], (item.get("type", "queue"), binding.get("x-arguments", {}))
