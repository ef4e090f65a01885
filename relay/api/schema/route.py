"""Declares the routes of the API. The server runs them, and /openapi.json describes them.

Each module of `relay.api.routes` lists its routes in `ROUTES`. The return type of a handler is the
declaration of its response: the server sends what the handler returns, and OpenAPI describes it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from aiohttp import web
from pydantic import BaseModel

from relay.api import Relay
from relay.api.auth.sessions import Session
from relay.api.schema.responses import Problem
from relay.api.server.state import ServerState
from relay.approvals.request import Caller, Right
from relay.store.transaction import Transaction

T = TypeVar("T")
SESSION = web.RequestKey("session", Session)
"""The session that authenticated a call. Only if its cookie did."""
Access = Literal[
    "public",
    "handler",
    "key",
    "key or public",
    "key or loopback",
    "key, loopback or public",
    "signature",
]
"""How the server identifies the caller.

public: not at all. handler: the handler checks a proof in the request. key: by a bearer key, the
cookie of a session, a certificate or the local socket. key or public: the same, but no caller is
refused: the others are anonymous, without rights. key or loopback: as key, and programs on this
machine need none. key, loopback or public: the same, and no caller is refused. signature: by a
Standard Webhooks signature.
"""
NEVER_REFUSED: tuple[Access, ...] = ("public", "key or public", "key, loopback or public")
"""Callers without good credentials are anonymous there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that has passed the checks before its handler. `Route` says what the fields hold."""

    request: web.Request
    server: ServerState
    caller: Caller
    content: bytes
    """The body as it was sent."""
    body: Any
    """The body as an instance of `Route.body`."""
    parameters: Any
    """The result of `Route.parse_parameters`."""

    @property
    def has_ended_session(self) -> bool:
        """Whether the call was authenticated by a session that has ended since."""
        session, sign_in = self.request.get(SESSION), self.server.sign_in
        return session is not None and (sign_in is None or not sign_in.sessions.is_open(session))

    @property
    def relay(self) -> Relay:
        """The running relay. Raises Problem 503 while it starts or stops."""
        if self.server.relay is None:
            raise Problem(503, "the relay is starting or stopping; try again")
        return self.server.relay

    async def run_long_read(self, work: Callable[[Transaction], T]) -> T:
        """Run work that reads a page from the store. Few calls do so at once."""
        async with self.server.long_reads:
            return await self.relay.store.read(work)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A query parameter or header of a call."""

    name: str
    place: Literal["query", "header"]
    description: str
    pattern: str = r"^.+$"
    required: bool = False

    def read_from_query(self, request: web.Request, expected: str) -> str | None:
        """Return the value of this query parameter; None without it.

        Raises Problem 422 if it comes twice or does not match. `expected` says what it should be.
        """
        values = request.query.getall(self.name, [])
        if not values:
            return None
        if len(values) > 1 or re.fullmatch(self.pattern, values[0], re.ASCII) is None:
            raise Problem(422, f"{self.name}: expected {expected}, once", field=self.name)
        return values[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A route of the API. `relay.api.server.pipeline` says in which order its checks run."""

    method: Literal["GET", "POST", "PUT"]
    path: str
    summary: str
    handler: Callable[[Call], Awaitable[Any]]
    """Returns the body of the response, or a complete `web.StreamResponse`."""
    status: int = 200
    """The status of a successful response."""
    media_types: tuple[str, ...] = ("application/json",)
    """The content types of a successful response."""
    access: Access = "key"
    needs: Right | None = None
    """The right that the caller needs. The gate checks rights that depend on the event."""
    parameters: tuple[Parameter, ...] = ()
    parse_parameters: Callable[[web.Request], Any] | None = None
    """Raises Problem 422 for a query parameter, and 400 for a header."""
    is_large: bool = False
    """Whether the answer is a page: few are built or sent at once."""
    body: type[BaseModel] | None = None
    """The model of the request's body."""
    shows_problems: bool = False
    """Whether problems are pages for people: a browser opens this route as a page."""
    problem_statuses: tuple[int, ...] = ()
    """The statuses of further problems that the handler raises."""

    @property
    def response_body_type(self) -> Any:
        """The type of the response's body: the return type of the handler.

        A handler that returns only complete responses sends text.
        """
        returned = get_type_hints(self.handler)["return"]
        members = get_args(returned) if isinstance(returned, UnionType) else (returned,)
        bodies = [member for member in members if not _is_response_class(member)]
        return bodies[0] if bodies else str


def _is_response_class(returned: Any) -> bool:
    return isinstance(returned, type) and issubclass(returned, web.StreamResponse)
