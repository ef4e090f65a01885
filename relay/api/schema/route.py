"""The shape of one call: what the server runs, and what /openapi.json is made from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web
from pydantic import BaseModel

from relay.api import Relay
from relay.api.schema.problems import Problem
from relay.approvals.request import Caller, Right

Access = Literal["anyone", "proof", "key", "key or loopback", "signature"]
"""Whose calls are heard: anyone's; those that prove themselves to the route, which gives back what the address was charged; those
with a bearer key (or on the local socket); or a client's signed ones."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call on its way. ``content`` is what the route's ``read`` made of it, ``found`` what its ``find`` found."""

    request: web.Request
    caller: Caller
    body: bytes
    content: Any
    attached: Relay | None
    found: Any = None

    @property
    def relay(self) -> Relay:
        """The running relay. Raises Problem 503 while there is none."""
        if self.attached is None:
            raise Problem(
                503,
                "the relay is starting or stopping: nothing can be read or decided now, try again",
            )
        return self.attached


@dataclass(frozen=True, slots=True)
class Parameter:
    """A query parameter or header that a call may have."""

    name: str
    place: Literal["query", "header"]
    description: str
    pattern: str = r"^.+$"
    required: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """One call of the API. Its steps run in this order, and only where the one before had nothing to refuse."""

    method: Literal["GET", "POST", "PUT"]
    path: str
    summary: str
    handle: Callable[[Call], Awaitable[web.StreamResponse]]
    """Does it, and answers."""
    responses: Mapping[int, Any]
    """Status of each answer that is no problem, and the type of its body."""
    access: Access = "key"
    needs: Right | None = None
    """What the caller must be allowed to do; where it depends on the event, the gate decides."""
    parse: Callable[[web.Request, bytes], Any] | None = None
    """Reads body, query and headers. Raises Problem 400, 422, MalformedError, WrongFieldError."""
    lookup: Callable[[Call], Awaitable[Any]] | None = None
    """Looks up what the path names. Raises Problem 404."""
    body: type[BaseModel] | None = None
    """The body that it takes; None: it takes none."""
    parameters: tuple[Parameter, ...] = ()
    media: tuple[str, ...] = ("application/json",)
    """The content types that its answers may have."""
    problem_statuses: tuple[int, ...] = field(default=())
    """Statuses of problems beyond those that follow from the rest."""
