"""What somebody asks: one decision about one state of one event, however it came in. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

DecisionKind = Literal["approve", "hold", "release"]
Right = Literal["read", "approve", "hold", "operate"]


@dataclass(frozen=True, slots=True)
class Rights:
    """What a principal may do. ``resources``: patterns that must cover every resource of the event; None: no limit."""

    can: frozenset[Right]
    resources: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as the door through which they came has established. ``channel``: http, callback, amqp, local, page and chats."""

    principal: str
    channel: str
    rights: Rights


@dataclass(frozen=True, slots=True)
class LinkUse:
    """By which link of a message a request came. ``code``: the one that is said to be in the message; None: none is said."""

    token: str = field(repr=False)
    code: str | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class DecisionRequest:
    """One request. ``request_id`` makes repeats known and comes with the ``digest`` of the body; ``message_id``: of AMQP.

    ``invited``: of the page behind a link.
    """

    caller: Caller
    event_id: str
    decision: DecisionKind
    revision: str
    at: datetime
    reason: str | None = None
    scope: str | None = None
    request_id: str | None = None
    digest: str = ""
    message_id: str | None = None
    link: LinkUse | None = None


@dataclass(frozen=True, slots=True)
class DecisionAnswer:
    """What the caller is told. ``status`` is that of HTTP; ``body`` the answer's JSON, for a refusal a problem's.

    ``repeat``: it is the first answer to the same request, given again.
    """

    status: int
    body: Mapping[str, Any]
    repeat: bool = False

    @property
    def accepted(self) -> bool:
        """Whether the decision was recorded."""
        return self.status == 202  # HTTP


class MalformedBody(ValueError):
    """The body is not a JSON object."""


class InvalidField(ValueError):
    """A field is missing or wrong. ``field`` names it."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.field = name
        self.problem = problem


class DecisionBody(BaseModel):
    """The body of ``POST /v1/approvals``, of a signed callback, and of a message."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    # It is told as it was sent, as `subject`, where CloudEvents allow no control characters.
    eventId: str = Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")  # noqa: N815  # the documented name
    """The EventId; compared without case."""
    decision: DecisionKind
    revision: str = Field(min_length=1, max_length=128)
    """The revision of the state that the approver saw."""
    reason: str | None = Field(default=None, max_length=1000)
    """For the audit."""
    scope: str | None = Field(default=None, max_length=80)
    """Guards against a request that reached the wrong relay."""

    def approval(
        self,
        caller: Caller,
        at: datetime,
        raw: bytes,
        *,
        request_id: str | None = None,
        message_id: str | None = None,
    ) -> DecisionRequest:
        """The request that this body makes when it comes from this caller; ``raw`` are its bytes."""
        return DecisionRequest(
            caller,
            self.eventId,
            self.decision,
            self.revision,
            at,
            self.reason,
            self.scope,
            request_id,
            hashlib.sha256(raw).hexdigest(),
            message_id,
        )


def parse_body(raw: bytes) -> DecisionBody:
    """Read the body. Raises MalformedError for what is no JSON object, WrongFieldError for the first wrong field."""
    return validate_body(read_json(raw))


def read_json(raw: bytes) -> object:
    """What JSON says, where it says one thing alone. Raises MalformedError for an object with a key twice, and what is no JSON.

    Of two values readers take the first, or the last, or refuse (RFC 8259, section 4): who stands between sender and relay,
    and let it pass, may have read another decision than we would.
    """
    try:
        said: object = orjson.loads(raw)
        json.loads(raw, object_pairs_hook=_once)
    except (orjson.JSONDecodeError, RecursionError) as error:
        raise MalformedBody(f"expected a JSON object: {error}") from error
    return said


def _once(pairs: list[tuple[str, object]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise MalformedBody(
                f"expected a JSON object with every key once, {key!r:.80} comes again"
            )
        seen.add(key)


def validate_body(fields: object) -> DecisionBody:
    """As `parse_body`, of what was JSON already."""
    if not isinstance(fields, dict):
        raise MalformedBody("expected a JSON object")
    try:
        return DecisionBody.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise InvalidField(
            ".".join(str(part) for part in first["loc"]) or "body", first["msg"]
        ) from error
