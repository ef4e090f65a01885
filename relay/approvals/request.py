"""One request to decide about one state of one event, whichever channel it came by. Pure.

`DecisionBody` is the JSON body, `DecisionRequest` the request of an authenticated caller, and
`DecisionAnswer` what the caller gets back. `engine` decides the request.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

import orjson
from pydantic import Field, ValidationError

from relay.events.data_types import NO_REMARKS, Remarks, remarks_in
from relay.settings import RequestBody, first_error_path_and_message

_NO_CONTROLS = r"^[^\x00-\x1f\x7f-\x9f]+$"
DecisionKind = Literal["approve", "hold", "release"]
Right = Literal["read", "approve", "hold", "operate"]
HOLD_NOTICE = (
    "a hold stops this relay alone: Azure proceeds at NotBefore regardless, "
    "and other relays and Azure Resource Manager can approve"
)
"""Part of every text about a hold (docs/guarantees.md#a-hold-stops-this-relay-only)."""


@dataclass(frozen=True, slots=True)
class Rights:
    can: frozenset[Right]
    resources: tuple[str, ...] | None = None
    """Patterns that must cover every resource of the event; None: no limit. With ``each_resource``
    others may cover the rest."""
    limits: tuple[tuple[str, ...], ...] = ()
    """Lists of patterns, each of which must cover every resource, whatever the rule says."""

    @property
    def are_limited(self) -> bool:
        return self.resources is not None or bool(self.limits)


@dataclass(frozen=True, slots=True)
class Caller:
    principal: str
    channel: str
    """http, callback, amqp, local, fleet, or the name of a chat."""
    rights: Rights


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    caller: Caller
    at: datetime
    request_id: str | None = None
    """A repeat has the same id and the same ``digest``; None: a repeat cannot be recognized."""
    digest: str = ""
    """SHA-256 of what a repeat has in common with it: the body, and where it went."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRequest(Request):
    """One request to approve an event, to hold it, or to release a hold."""

    event_id: str
    decision: DecisionKind
    revision: str
    remarks: Remarks = field(default_factory=lambda: NO_REMARKS)
    scope: str | None = None
    """The scope that the body names."""
    arrival_scope: str | None = None
    """The scope for which the request arrived, as RabbitMQ checked it; None: the body alone says.

    A request that names another scope is about no event.
    """
    message_id: str | None = None
    """The ``message_id`` of the AMQP message that carried the request."""


@dataclass(frozen=True, slots=True)
class DecisionAnswer:
    status: int
    body: Mapping[str, Any]
    """The JSON of the answer; for a refusal the members of its problem."""
    repeat: bool = False
    """Whether this is the first answer to the same request again."""
    is_transient: bool = False

    @property
    def accepted(self) -> bool:
        return self.status < 300  # HTTP


def refuse(
    status: int, reason: str, field: str | None = None, *, is_transient: bool = False
) -> DecisionAnswer:
    """Return the answer to a request that is refused; ``field`` is what the caller can correct."""
    body = {"detail": reason} if field is None else {"detail": reason, "field": field}
    return DecisionAnswer(status, body, is_transient=is_transient)


class MalformedJsonBody(ValueError):
    """The body is not a JSON object."""


class InvalidField(ValueError):
    """A field is missing or wrong. ``field`` is its name."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.field = name
        self.problem = problem


class DecisionBody(RequestBody):
    """The body of ``POST /v1/approvals``, of a signed callback, and of a message."""

    # An unknown EventId becomes the CloudEvents subject, which allows no control characters.
    eventId: str = Field(min_length=1, max_length=256, pattern=_NO_CONTROLS)  # noqa: N815  # the API's name
    """The EventId; compared without case."""
    decision: DecisionKind
    revision: str = Field(min_length=1, max_length=128)
    """The revision of the state that the approver saw."""
    reason: str | None = Field(default=None, max_length=1000)
    """For the audit."""
    ticket: str | None = Field(default=None, min_length=1, max_length=64, pattern=_NO_CONTROLS)
    """The change or ticket that allows the decision, for the audit: CHG-1234."""
    scope: str | None = Field(default=None, max_length=80)
    """Guards against a request that reached the wrong relay."""

    def to_request(
        self,
        caller: Caller,
        at: datetime,
        raw: bytes,
        *,
        arrival_scope: str | None = None,
        request_id: str | None = None,
        message_id: str | None = None,
    ) -> DecisionRequest:
        """Return the request of this caller. ``raw`` are the bytes of the body."""
        digested = raw if arrival_scope is None else f"{arrival_scope}\n".encode() + raw
        return DecisionRequest(
            caller=caller,
            event_id=self.eventId,
            decision=self.decision,
            revision=self.revision,
            at=at,
            remarks=remarks_in(self.model_dump()),
            scope=self.scope,
            arrival_scope=arrival_scope,
            request_id=request_id,
            digest=hashlib.sha256(digested).hexdigest(),
            message_id=message_id,
        )


def read_json(raw: bytes) -> object:
    """Parse JSON. Raises MalformedJsonBody if it is not JSON or an object has a key twice.

    Parsers differ in which of two values they take (RFC 8259, section 4). A proxy that let the
    request pass may have read another decision than this relay would.
    """
    try:
        parsed: object = orjson.loads(raw)
        json.loads(raw, object_pairs_hook=_reject_repeated_keys)
    except (orjson.JSONDecodeError, RecursionError) as error:
        raise MalformedJsonBody(f"expected a JSON object: {error}") from error
    return parsed


def _reject_repeated_keys(pairs: list[tuple[str, object]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise MalformedJsonBody(
                f"expected a JSON object with every key once, {key!r:.80} comes again"
            )
        seen.add(key)


def validate_body(fields: object) -> DecisionBody:
    """Validate parsed JSON. Raises MalformedJsonBody for no object, InvalidField for a field."""
    if not isinstance(fields, dict):
        raise MalformedJsonBody("expected a JSON object")
    try:
        return DecisionBody.model_validate(fields)
    except ValidationError as error:
        path, message = first_error_path_and_message(error)
        raise InvalidField(path or "body", message) from error
