"""Reads the messages of `relay.fleet.messages` from bytes that anybody may have sent. Pure.

`read_message` returns a message, or raises UnusableMessage. It is strict about every field that is
used, and ignores fields that a later version adds. It does not prove who sent the message:
`relay.fleet.routing` does, and `ReceivedMessage.require_sent_by` compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, ValidationError

from relay.amqp.message_verification import UnusableMessage
from relay.events.build import Origin, relay_event
from relay.events.catalog import CATALOG
from relay.events.cloudevent import TYPE_PREFIX, TYPE_VERSION, CloudEvent, event_name
from relay.events.model import relay_word
from relay.fleet.messages import (
    MAX_BODY_BYTES,
    MESSAGES,
    PRINTABLE,
    ChangeData,
    Content,
    EndedData,
    Message,
    MessageId,
    Name,
    Number,
    Strict,
    Time,
    cloudevent_type,
)
from relay.fleet.routing import AuthorizedSender
from relay.settings import first_error_path_and_message


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedMessage:
    """A message that was read. Nothing in it proves who sent it."""

    origin: Origin
    """The relay that the message names as its sender."""
    at: datetime
    """When the sender made the message, by its own clock."""
    content: Content

    def require_sent_by(self, sender: AuthorizedSender, kind: str, hub: Origin) -> None:
        """Raise UnusableMessage if it is not what its key says, or of the ``hub`` itself."""
        if self.origin == hub:
            raise UnusableMessage("it names the hub itself as its sender")
        if (self.origin.scope, relay_word(self.origin.relay)) != (sender.scope, sender.relay):
            raise UnusableMessage("its body names another relay than its routing key")
        if kind != ("relay" if isinstance(self.content, CloudEvent) else self.content.routed_as):
            raise UnusableMessage("its body is of another kind than its routing key")


def read_message(body: bytes) -> ReceivedMessage:
    """Return a message with its sender and time. Raises UnusableMessage, and nothing else."""
    if len(body) > MAX_BODY_BYTES:
        raise UnusableMessage(f"its body has more than {MAX_BODY_BYTES} bytes")
    try:
        fields = orjson.loads(body)
        envelope = _Envelope.model_validate(fields)
        reader = _READERS.get(envelope.type)
        if reader is None:
            raise UnusableMessage(f"its type is unknown: {envelope.type!r:.100}")
        content = reader(envelope, fields)
    except orjson.JSONDecodeError as error:
        raise UnusableMessage(f"its body is not JSON: {error}") from None
    except orjson.JSONEncodeError as error:
        raise UnusableMessage(f"its body cannot be written as JSON: {error}") from None
    except ValidationError as error:
        path, problem = first_error_path_and_message(error)
        raise UnusableMessage(f"its body is no message of a fleet: {path}: {problem}") from None
    return ReceivedMessage(origin=envelope.origin, at=envelope.time, content=content)


class _Envelope(Strict):
    specversion: Literal["1.0"]
    id: MessageId
    type: str
    source: str
    time: Time
    scope: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,80}$")]
    relay: Name
    subject: str | None = None
    journalhead: Annotated[str | None, Field(pattern=r"^[0-9]{1,18}:[0-9a-f]{64}$")] = None
    data: dict[str, Any]

    @property
    def origin(self) -> Origin:
        return Origin(self.scope, self.relay)


class _RelayEventData(Strict):
    sink: Annotated[str | None, Field(max_length=128, pattern=PRINTABLE)]
    reason: Annotated[str, Field(max_length=10_000)]
    count: Number


def _read_model(model: type[Message | ChangeData], envelope: _Envelope, _: Any) -> Content:
    return model.model_validate({**envelope.data, "journalhead": envelope.journalhead})


def _read_relay_event(envelope: _Envelope, fields: Any) -> CloudEvent:
    """Return a ``relay.*`` as an agent recorded it. The hub records it too, with the same id.

    So the id must be that of its content: an agent that chose it could choose the id that an event
    of another scope will have, and consumers would drop that event as a repeat.
    """
    data = _RelayEventData.model_validate(envelope.data)
    if envelope.journalhead is None:
        raise UnusableMessage("it has no journalhead")
    expected = relay_event(
        event_name(envelope.type),
        envelope.origin,
        envelope.time,
        sink=data.sink,
        reason=data.reason,
        count=data.count,
        head=envelope.journalhead,
    )
    for name in ("source", "subject", "id", "time"):
        if fields.get(name) != expected.attributes.get(name):
            raise UnusableMessage(f"its {name} is not that of its content")
    return expected


_MODELS: Mapping[str, type[Message | ChangeData]] = {
    **{cloudevent_type(model.kind): model for model in MESSAGES},
    **{
        f"{TYPE_PREFIX}event.{change}{TYPE_VERSION}": EndedData if change == "ended" else ChangeData
        for change in ("scheduled", "updated", "started", "ended")
    },
}
_READERS: Mapping[str, Callable[[_Envelope, Any], Content]] = {
    **{type_: partial(_read_model, model) for type_, model in _MODELS.items()},
    **{
        definition.type: _read_relay_event
        for definition in CATALOG
        if definition.name.startswith("relay.")
    },
}
