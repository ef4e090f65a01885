"""Describes the messages over RabbitMQ in both directions, as AsyncAPI 3.

`imds-relay schema asyncapi` prints the document for people who write consumers and approvers. It is
made from the code that sends, receives and declares the messages: names of queues contain
`{scope}`, a parameter of AsyncAPI, in the place of the relay's scope.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relay import __version__
from relay.amqp.event_message import MAX_TEXT_BYTES
from relay.amqp.topology import (
    Exchange,
    Queue,
    approvals_exchange_name,
    approvals_topology,
    events_topology,
)
from relay.approvals.request import DecisionBody
from relay.events.catalog import CATALOG, EventDefinition, cloudevent_schema
from relay.events.cloudevent import CONTENT_TYPE, is_about_event
from relay.sinks.rabbitmq import Settings as SinkSettings

Json = dict[str, Any]

_BINDING = {"bindingVersion": "0.3.0"}
_REPLIES = (
    "approval.recorded",
    "approval.granted",
    "approval.refused",
    "startrequest.accepted",
    "startrequest.failed",
)
_SCOPE = {"description": "the group of VMs that reads the same document: the relay's scope"}


def asyncapi_document(exchange: str = SinkSettings.model_fields["exchange"].default) -> Json:
    """Return the document for a sink with this `exchange`."""
    parts = (*events_topology(exchange), *approvals_topology(exchange, "{scope}"))
    exchanges = {part.name: part for part in parts if isinstance(part, Exchange)}
    queues = [part for part in parts if isinstance(part, Queue)]
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "imds-relay",
            "version": __version__,
            "description": "Scheduled events of Azure over RabbitMQ, and the decisions about them.",
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": CONTENT_TYPE,
        "servers": {"broker": _example_broker_server()},
        "channels": {
            "events": _events_channel(exchanges[exchange]),
            "approvals": _approvals_channel(exchanges[approvals_exchange_name(exchange)]),
            **{
                queue.name.removeprefix(f"{exchange}.").replace(".{scope}", "Queue"): (
                    _queue_channel(queue)
                )
                for queue in queues
            },
        },
        "operations": {"tell": _send_operation(), "decide": _receive_operation()},
        "components": {
            "messages": {
                **{event.name: _event_message(event) for event in CATALOG},
                **_decision_messages(),
            },
            "schemas": {"decision": _decision_schema()},
            "correlationIds": {
                "event": {
                    "description": "the EventId",
                    "location": "$message.payload#/correlationid",
                }
            },
            "securitySchemes": {
                "password": {"type": "userPassword"},
                "certificate": {
                    "type": "X509",
                    "description": "a client certificate, with auth=external",
                },
            },
        },
    }


def _example_broker_server() -> Json:
    return {
        "host": "broker.example.com",
        "protocol": "amqps",
        "protocolVersion": "0-9-1",
        "description": "the RabbitMQ of the sink's url; that of approvals.amqp may be another",
        "security": [
            {"$ref": "#/components/securitySchemes/password"},
            {"$ref": "#/components/securitySchemes/certificate"},
        ],
    }


def _events_channel(exchange: Exchange) -> Json:
    families = sorted({event.name.partition(".")[0] for event in CATALOG})
    changes = sorted({event.name.partition(".")[2] for event in CATALOG})
    return {
        "address": "{family}.{change}.{detail}.{scope}",
        "description": (
            "Bind a queue of your own. Lower case; every character outside [a-z0-9_-] is _."
        ),
        "messages": _message_references([event.name for event in CATALOG]),
        "parameters": {
            "family": {"description": "what it is about", "enum": families},
            "change": {"description": "what happened", "enum": changes},
            "detail": {
                "description": (
                    "the event type; of relay.* the sink's name; none where there is neither"
                )
            },
            "scope": _SCOPE,
        },
        "bindings": {"amqp": _exchange_binding(exchange)},
    }


def _approvals_channel(exchange: Exchange) -> Json:
    return {
        "address": "approve.{scope}",
        "description": (
            "Publish with exactly this key. "
            "Messages by CC and dead letters of other queues are not accepted."
        ),
        "messages": _message_references(["decision", "decisionEvent"]),
        "parameters": {"scope": _SCOPE},
        "bindings": {"amqp": _exchange_binding(exchange)},
    }


def _queue_channel(queue: Queue) -> Json:
    binding = {
        "is": "queue",
        "queue": {"name": queue.name, "durable": True, "exclusive": False, "autoDelete": False},
        **_queue_or_exchange_arguments_field(queue.all_arguments),
        **_BINDING,
    }
    key = ", ".join(queue.keys) or "(none)"
    channel: Json = {
        "address": queue.name,
        "description": f"Bound to the exchange {queue.source} with the key {key}.",
        "bindings": {"amqp": binding},
    }
    if "{scope}" in queue.name:
        channel["parameters"] = {"scope": _SCOPE}
    return channel


def _exchange_binding(exchange: Exchange) -> Json:
    return {
        "is": "routingKey",
        "exchange": {
            "name": exchange.name,
            "type": exchange.type,
            "durable": True,
            "autoDelete": False,
        },
        **_queue_or_exchange_arguments_field(exchange.arguments),
        **_BINDING,
    }


def _queue_or_exchange_arguments_field(arguments: Mapping[str, Any]) -> Json:
    return {"x-arguments": dict(arguments)} if arguments else {}


def _message_references(names: list[str]) -> Json:
    return {name: {"$ref": f"#/components/messages/{name}"} for name in names}


def _send_operation() -> Json:
    return {
        "action": "send",
        "channel": {"$ref": "#/channels/events"},
        "summary": (
            "Tell what happened, at least once, in order per EventId. "
            "Drop repeats by source and id."
        ),
        "bindings": {"amqp": {"deliveryMode": 2, "mandatory": True, "timestamp": True, **_BINDING}},
    }


def _receive_operation() -> Json:
    replies = [{"$ref": f"#/channels/events/messages/{name}"} for name in _REPLIES]
    return {
        "action": "receive",
        "channel": {"$ref": "#/channels/approvals"},
        "summary": (
            "Approve, hold or release. Acknowledged once the decision is on disk; "
            "a repeat of message_id does nothing."
        ),
        "description": (
            "Unusable messages become dead letters. "
            "The replies have the message_id as their causationid."
        ),
        "bindings": {"amqp": {"deliveryMode": 2, "ack": True, **_BINDING}},
        "reply": {"channel": {"$ref": "#/channels/events"}, "messages": replies},
    }


def _inline_definitions(schema: Any, definitions: Json) -> Any:
    """Return a schema with its definitions in the place of the references to them."""
    match schema:
        case {"$ref": str(reference), **others}:
            definition = definitions[reference.removeprefix("#/$defs/")]
            return {**_inline_definitions(definition, definitions), **others}
        case dict():
            return {name: _inline_definitions(item, definitions) for name, item in schema.items()}
        case list():
            return [_inline_definitions(item, definitions) for item in schema]
    return schema


def _event_message(event: EventDefinition) -> Json:
    schema = cloudevent_schema(event)
    # A reference of a schema leads to its own definitions, which are no part of this document.
    inlined = _inline_definitions(schema, schema.get("$defs", {}))
    payload = {name: value for name, value in inlined.items() if not name.startswith("$")}
    header = {"type": "string", "maxLength": MAX_TEXT_BYTES}
    message: Json = {
        "name": event.type,
        "title": event.name,
        "summary": event.when,
        "contentType": CONTENT_TYPE,
        "headers": {
            "type": "object",
            "properties": {
                **{f"ce-{name}": header for name in payload["properties"] if name != "data"},
            },
        },
        "payload": payload,
        "bindings": {"amqp": {"messageType": event.type, **_BINDING}},
        "x-amqp-properties": {
            "message_id": "the CloudEvent's id",
            "correlation_id": "the EventId; none on relay.* and standing-hold.*",
            "app_id": "imds-relay",
        },
    }
    if is_about_event(event.name):
        message["correlationId"] = {"$ref": "#/components/correlationIds/event"}
    return message


def _decision_messages() -> Json:
    reference = {"$ref": "#/components/schemas/decision"}
    common = {
        "contentType": "application/json",
        "bindings": {"amqp": _BINDING},
        "x-amqp-properties": {
            "message_id": "required: identifies a repeat, and is the causationid of the replies",
            "user_id": (
                "required: the user of the connection; "
                "identifies the client (api.clients[].amqp_user)"
            ),
        },
    }
    cloud_event = {
        "type": "object",
        "properties": {"specversion": {"const": "1.0"}, "data": reference},
        "required": ["specversion", "data"],
    }
    return {
        "decision": {"name": "decision", "title": "A decision", "payload": reference, **common},
        "decisionEvent": {
            "name": "decisionEvent",
            "title": "The same as a CloudEvent",
            "payload": cloud_event,
            **common,
        },
    }


def _decision_schema() -> Json:
    return {
        **DecisionBody.model_json_schema(),
        "title": "Decision",
        "description": "A decision about one state of one event.",
    }
