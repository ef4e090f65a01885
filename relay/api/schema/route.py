"""Declares the routes of the API. The server runs them, and /openapi.json describes them.

Each module of `relay.api.routes` lists its routes in `ROUTES`. The return type of a handler is the
declaration of its response: the server sends what the handler returns, and OpenAPI describes it.

A page of a list is `{"items": […], "next": cursor or null}`; `?cursor=` requests the next. It has
the newest rows first, and a cursor is the id of the last row of a page. One
event or delivery has pages of what happened: the newest page first, but each with its oldest row
first. Their cursor is the position in the journal, or the number of the attempt, of that row.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Protocol, TypeVar, get_args, get_type_hints

from aiohttp import web
from pydantic import BaseModel, ValidationError

from relay.api import Relay
from relay.api.auth.sessions import Session
from relay.api.schema.responses import Problem
from relay.api.server.state import ServerState
from relay.approvals.request import Caller, MalformedJsonBody, Right, read_json
from relay.store.transaction import Transaction
from relay.validation import first_error_path_and_message

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
    route: Route

    @property
    def body(self) -> Any:
        """The body as an instance of `Route.body`.

        Raises Problem 400 for anything but a JSON object with unique keys, and Problem 422 for the
        first invalid field.
        """
        assert self.route.body is not None  # noqa: S101  # the handler is of a route with a body
        try:
            fields = read_json(self.content)
        except MalformedJsonBody as error:
            raise Problem(400, str(error)) from None
        if not isinstance(fields, dict):
            raise Problem(400, "expected a JSON object")
        try:
            return self.route.body.model_validate(fields)
        except ValidationError as error:
            field, message = first_error_path_and_message(error)
            raise Problem(422, f"{field}: {message}", field=field) from None

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
    """Those that the handler reads, before it reads the body and does anything."""
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


PAGE_SIZE = 100
MAX_DETAIL_ROWS = 200
"""Rows of each list inside one event or one delivery: the newest of what happened."""
CURSOR = Parameter(
    name="cursor",
    place="query",
    description="`next` of the page before",
    pattern=r"^[0-9]{1,18}$",
)


class _HasId(Protocol):
    @property
    def id(self) -> int: ...


_Row = TypeVar("_Row", bound=_HasId)


def parse_cursor(request: web.Request) -> int | None:
    """Return the id that precedes the page; None for the first page. Raises Problem 422."""
    value = CURSOR.read_from_query(request, "`next` of another page")
    return None if value is None else int(value)


def split_page(rows: Sequence[_Row]) -> tuple[Sequence[_Row], str | None]:
    """Return the rows of a page and the cursor of the next page; None after the last page.

    The caller reads one row more than fits: it shows that there is another page.
    """
    page = rows[:PAGE_SIZE]
    return page, str(page[-1].id) if len(rows) > PAGE_SIZE else None


def page_route(
    path: str,
    summary: str,
    handler: Callable[[Call], Awaitable[Any]],
    *,
    filters: tuple[Parameter, ...] = (),
    problem_statuses: tuple[int, ...] = (),
) -> Route:
    """Return a route whose response is a page, for callers with the right to read.

    ``filters`` are query parameters beside the cursor.
    """
    return Route(
        method="GET",
        path=path,
        summary=summary,
        handler=handler,
        needs="read",
        is_large=True,
        parameters=(CURSOR, *filters),
        problem_statuses=problem_statuses,
    )
