"""What goes over RabbitMQ in both directions, as AsyncAPI 3, made from the code that sends, takes and declares it."""

from __future__ import annotations

from typing import Any

from relay import __version__
from relay.amqp.approval_consumer import topology as approvals_topology
from relay.amqp.topology import Exchange, Queue
from relay.approvals.request import DecisionBody
from relay.events.catalog import CATALOG, EventDefinition, event_schema
from relay.events.cloudevent import CONTENT_TYPE
from relay.sinks.rabbitmq import LONGEST_TEXT
from relay.sinks.rabbitmq import Settings as SinkSettings
from relay.sinks.rabbitmq import topology as events_topology

_BINDING = {"bindingVersion": "0.3.0"}
_ANSWERS = (
    "approval.recorded",
    "approval.granted",
    "approval.refused",
    "startrequest.accepted",
    "startrequest.failed",
)
_SCOPE = {"description": "the group of VMs that reads the same document: the relay's scope"}


def describe(exchange: str = SinkSettings.model_fields["exchange"].default) -> dict[str, Any]:
    """The document, with the names that follow from the name of the exchange."""
    parts = (*events_topology(exchange), *approvals_topology(exchange, "{scope}"))
    exchanges = {part.name: part for part in parts if isinstance(part, Exchange)}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "imds-relay",
            "version": __version__,
            "description": "Scheduled events of Azure over RabbitMQ, and the decisions about them.",
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": CONTENT_TYPE,
        "servers": {
            "broker": {
                "host": "broker.example.com",
                "protocol": "amqps",
                "protocolVersion": "0-9-1",
                "description": "the RabbitMQ of the sink's url; that of approvals.amqp may be another",
                "security": [
                    {"$ref": "#/components/securitySchemes/password"},
                    {"$ref": "#/components/securitySchemes/certificate"},
                ],
            }
        },
        "channels": {
            "events": {
                "address": "{family}.{change}.{detail}.{scope}",
                "description": "Bind a queue of your own. Lower case; every character outside [a-z0-9_-] is _.",
                "messages": {
                    kind.name: {"$ref": f"#/components/messages/{kind.name}"} for kind in CATALOG
                },
                "parameters": {
                    "family": {
                        "description": "what it is about",
                        "enum": sorted({kind.name.partition(".")[0] for kind in CATALOG}),
                    },
                    "change": {
                        "description": "what happened",
                        "enum": sorted({kind.name.partition(".")[2] for kind in CATALOG}),
                    },
                    "detail": {
                        "description": "the event type; of relay.* the sink's name; none where there is neither"
                    },
                    "scope": _SCOPE,
                },
                "bindings": {"amqp": _exchange(exchanges[exchange])},
            },
            "approvals": {
                "address": "approve.{scope}",
                "description": "Publish with this very key: what comes by CC, or as the dead letter of another queue, is not taken.",
                "messages": {
                    name: {"$ref": f"#/components/messages/{name}"}
                    for name in ("decision", "decisionEvent")
                },
                "parameters": {"scope": _SCOPE},
                "bindings": {"amqp": _exchange(exchanges[f"{exchange}.approvals"])},
            },
            **{
                part.name.removeprefix(f"{exchange}.").replace(".{scope}", "Queue"): _queue(part)
                for part in parts
                if isinstance(part, Queue)
            },
        },
        "operations": {
            "tell": {
                "action": "send",
                "channel": {"$ref": "#/channels/events"},
                "summary": "Tell what happened, at least once, in order per EventId. Drop repeats by source and id.",
                "bindings": {
                    "amqp": {"deliveryMode": 2, "mandatory": True, "timestamp": True, **_BINDING}
                },
            },
            "decide": {
                "action": "receive",
                "channel": {"$ref": "#/channels/approvals"},
                "summary": "Approve, hold or release. Acknowledged once the decision is on disk; a repeat of message_id does nothing.",
                "description": "What cannot be used goes to the dead letters. The answers bear the message_id as their causationid.",
                "bindings": {"amqp": {"deliveryMode": 2, "ack": True, **_BINDING}},
                "reply": {
                    "channel": {"$ref": "#/channels/events"},
                    "messages": [
                        {"$ref": f"#/channels/events/messages/{name}"} for name in _ANSWERS
                    ],
                },
            },
        },
        "components": {
            "messages": {**{kind.name: _event(kind) for kind in CATALOG}, **_decisions()},
            "schemas": {"decision": _decision()},
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


def _exchange(part: Exchange) -> dict[str, Any]:
    bound = {"name": part.name, "type": part.type, "durable": True, "autoDelete": False}
    return {"is": "routingKey", "exchange": bound, **_arguments(part.arguments), **_BINDING}


def _queue(part: Queue) -> dict[str, Any]:
    bound = {"name": part.name, "durable": True, "exclusive": False, "autoDelete": False}
    binding = {
        "is": "queue",
        "queue": bound,
        **_arguments({"x-queue-type": "quorum", **part.arguments}),
        **_BINDING,
    }
    channel: dict[str, Any] = {
        "address": part.name,
        "description": f"Bound to the exchange {part.source} with the key {part.key or '(none)'}.",
        "bindings": {"amqp": binding},
    }
    return {**channel, "parameters": {"scope": _SCOPE}} if "{scope}" in part.name else channel


def _arguments(arguments: Any) -> dict[str, Any]:
    return {"x-arguments": dict(arguments)} if arguments else {}


def _event(kind: EventDefinition) -> dict[str, Any]:
    payload = {
        name: value for name, value in event_schema(kind).items() if not name.startswith("$")
    }
    attributes = {
        name: {"type": "string", "maxLength": LONGEST_TEXT}
        for name in payload["properties"]
        if name != "data"
    }
    return {
        "name": kind.type,
        "title": kind.name,
        "summary": kind.when,
        "contentType": CONTENT_TYPE,
        "headers": {
            "type": "object",
            "properties": {f"ce-{name}": value for name, value in attributes.items()},
        },
        "payload": payload,
        **(
            {"correlationId": {"$ref": "#/components/correlationIds/event"}}
            if not kind.name.startswith("relay.")
            else {}
        ),
        "bindings": {"amqp": {"messageType": kind.type, **_BINDING}},
        "x-amqp-properties": {
            "message_id": "the CloudEvent's id",
            "correlation_id": "the EventId; none on relay.*",
            "app_id": "imds-relay",
        },
    }


def _decisions() -> dict[str, Any]:
    reference = {"$ref": "#/components/schemas/decision"}
    properties = {
        "message_id": "required: makes a repeat known, and is the causationid of the answers",
        "user_id": "required: the user whom the connection belongs to; names the client (api.clients[].amqp_user)",
    }
    cloud_event = {
        "type": "object",
        "properties": {"specversion": {"const": "1.0"}, "data": reference},
        "required": ["specversion", "data"],
    }
    common = {
        "contentType": "application/json",
        "bindings": {"amqp": _BINDING},
        "x-amqp-properties": properties,
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


def _decision() -> dict[str, Any]:
    return {
        **DecisionBody.model_json_schema(),
        "title": "Decision",
        "description": "What is wanted of which event, in which of its states.",
    }
