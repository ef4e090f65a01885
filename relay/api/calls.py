"""Declares the routes of the API, and takes each call through its checks: `aiohttp_handler`.

`get`, `post` and `put` stand above a handler. Its arguments are what it reads of a call: a value of
the query or of a header (`Parameter`), the part of the path, or the model of the body. Its return
type is its response: the server sends what the handler returns, and OpenAPI describes it.

The order of the checks is that of docs/api.md#order-of-checks. The server listens before its role
has started the relay: a handler that uses the relay earlier fails with 503.

A page of a list is `{"items": […], "next": cursor or null}`; `?cursor=` requests the next. It has
the newest rows first, and a cursor is the id of the last row of a page. One event or delivery has
pages of what happened: the newest page first, but each with its oldest row first. Their cursor is
the position in the journal, or the number of the attempt, of that row.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from pydantic import BaseModel, ValidationError

from relay.api.callers import ANONYMOUS, Access
from relay.api.connections import connection_of, send_response
from relay.api.responses import Problem, json_response, problem_page
from relay.api.state import Relay, ServerState
from relay.approvals.request import Caller, MalformedJsonBody, Right, read_json
from relay.settings import first_error_path_and_message
from relay.store.transaction import Transaction

T = TypeVar("T")
MAX_BODY_BYTES = 64 * 1024
PAGE_SIZE = 100
MAX_DETAIL_ROWS = 200
"""Rows of each list inside one event or one delivery: the newest of what happened."""


@dataclass(frozen=True, slots=True)
class Call:
    request: web.Request
    server: ServerState
    caller: Caller
    content: bytes
    relay_in_force: Relay | None
    """The relay whose callers let this call in. What it decides goes to the gate of that one."""

    @property
    def relay(self) -> Relay:
        """The running relay. Raises Problem 503 while it starts or stops."""
        if self.relay_in_force is None or self.server.relay is None:
            raise Problem(503, "the relay is starting or stopping; try again")
        return self.relay_in_force

    async def run_long_read(self, work: Callable[[Transaction], T]) -> T:
        """Run work that reads a page from the store. Few calls do so at once."""
        async with self.server.long_reads:
            return await self.relay.store.read(work)


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument in the query or in a header: how it is read, and what OpenAPI says about it."""

    name: str
    description: str
    pattern: str
    expected: str
    """What the value should be, for people."""
    parse: Callable[[str], Any] = str
    place: Literal["query", "header"] = "query"
    other_headers: tuple[str, ...] = ()
    """Those that may come in place of this one, or beside it with the same value."""

    def read(self, request: web.Request) -> Any:
        """Return the value, None without one. Raises Problem: 422, of a header 400."""
        if self.place == "query":
            values = request.query.getall(self.name, [])
        else:
            names = (self.name, *self.other_headers)
            values = list({each for name in names for each in request.headers.getall(name, [])})
        if not values:
            return None
        if len(values) > 1 or re.fullmatch(self.pattern, values[0], re.ASCII) is None:
            text = f"{self.name}: expected {self.expected}, once"
            if self.place == "header":
                raise Problem(400, text)
            raise Problem(422, text, field=self.name)
        return self.parse(values[0])


Cursor = Annotated[
    int | None,
    Parameter(
        "cursor", "`next` of the page before", r"^[0-9]{1,18}$", "`next` of another page", int
    ),
]
Scope = Annotated[
    str | None,
    Parameter(
        "scope",
        "only events of this scope; a hub has events of several",
        r"^[a-z0-9-]{1,80}$",
        "the name of a scope",
    ),
]


def flag(name: str, description: str) -> Parameter:
    return Parameter(name, description, r"^(true|false)$", "true or false", "true".__eq__)


RouteFunction = TypeVar("RouteFunction", bound=Callable[..., Awaitable[Any]])
Method = Literal["GET", "POST", "PUT"]
ROUTES: list[Route] = []
"""Every route, once the modules of `relay.api.routes` are imported."""


@dataclass(frozen=True, kw_only=True)
class Route:
    method: Method
    path: str
    summary: str
    function: Callable[..., Awaitable[Any]]
    """Returns the body of the response, or a complete `web.StreamResponse`."""
    status: int = 200
    media_types: tuple[str, ...] = ("application/json",)
    """Of a successful response, as the status is."""
    access: Access = "key"
    needs: Right | None = None
    """The right that the caller needs. The gate checks rights that depend on the event."""
    is_large: bool = False
    """Whether the answer is a page: few of a caller are built or sent at once."""
    shows_problems: bool = False
    """Whether problems are pages for people: a browser opens this route as a page."""
    problems: tuple[int, ...] = ()
    """The statuses of further problems that the handler raises: not 404 about the path's part."""

    @functools.cached_property
    def arguments(self) -> Mapping[str, Any]:
        """The parameters and the body's model, by argument; another one is in the path."""
        hints = get_type_hints(self.function, include_extras=True)
        return {
            name: get_args(hint)[1] if get_origin(hint) is Annotated else hint
            for name, hint in hints.items()
            if hint is not Call and name != "return"
        }

    @property
    def parameters(self) -> list[Parameter]:
        return [each for each in self.arguments.values() if isinstance(each, Parameter)]

    @property
    def body(self) -> type[BaseModel] | None:
        return next((each for each in self.arguments.values() if _is(each, BaseModel)), None)

    @property
    def response_type(self) -> Any:
        """The type of the response's body. Who returns only complete responses sends text."""
        returned = get_type_hints(self.function)["return"]
        members = get_args(returned) if isinstance(returned, UnionType) else (returned,)
        return next((each for each in members if not _is(each, web.StreamResponse)), str)

    def read(self, request: web.Request, content: bytes) -> dict[str, Any]:
        """Return the function's arguments. Raises Problem 400, 422."""
        found: dict[str, Any] = {}
        for name, argument in self.arguments.items():
            if isinstance(argument, Parameter):
                found[name] = argument.read(request)
            elif _is(argument, BaseModel):
                found[name] = _read_body(argument, content)
            else:
                (found[name],) = request.match_info.values()
        return found


def _route(
    method: Method, path: str, summary: str, **options: Any
) -> Callable[[RouteFunction], RouteFunction]:
    def add(function: RouteFunction) -> RouteFunction:
        ROUTES.append(
            Route(method=method, path=path, summary=summary, function=function, **options)
        )
        return function

    return add


get = functools.partial(_route, "GET")
post = functools.partial(_route, "POST")
put = functools.partial(_route, "PUT")
get_page = functools.partial(_route, "GET", needs="read", is_large=True)
"""A list's pages, for callers with the right to read."""


def aiohttp_handler(route: Route, server: ServerState) -> Handler:
    """Return the route as a handler for aiohttp."""

    async def handle(request: web.Request) -> web.StreamResponse:
        connection = connection_of(request)
        try:
            content = await _read_content(request, server.limits.body_timeout)
            _check_content_type(route, request)
            only_reads = route.method == "GET"
            while True:
                if not only_reads:
                    await server.settled.wait()
                callers = server.callers
                caller = await callers.identify(route.access, request, content, server.rates)
                # A token may have waited for keys over a reload.
                if server.callers is callers and (only_reads or server.settled.is_set()):
                    break
            # Who waits for a page may give way: a few readers could have all connections otherwise.
            connection.in_good_call = caller is not ANONYMOUS and not route.is_large
            _check_right(route, caller)
            call = Call(request, server, caller, content, server.relay)
            if not route.is_large:
                return await answer(call)
            async with server.large_answer(caller.principal):
                connection.in_good_call = True
                return await send_response(request, await answer(call), server.limits.send_timeout)
        except Problem as problem:
            if route.shows_problems:
                return problem_page(problem, request.path)
            raise
        finally:
            connection.in_good_call = False

    async def answer(call: Call) -> web.StreamResponse:
        result = await route.function(call, **route.read(call.request, call.content))
        if isinstance(result, web.StreamResponse):
            return result
        return json_response(route.status, result)

    return handle


def _check_right(route: Route, caller: Caller) -> None:
    if route.needs is not None and route.needs not in caller.rights.can:
        lacks = f"may not {route.needs}: it is not in the rights (can)"
        raise Problem(403, f"{caller.principal} {lacks}")


def check_content_length(request: web.Request) -> None:
    """Refuse a body that is announced as too long before reading it. Raises Problem 413."""
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise _content_too_long()


async def _read_content(request: web.Request, seconds: float) -> bytes:
    """Return the body. Raises Problem 413, 408, 400 or 417, ConnectionResetError."""
    expectation = request.headers.get("Expect", "")
    if expectation and expectation.lower() != "100-continue":
        raise Problem(417, "Expect: only 100-continue is understood", closes=True)
    if expectation and request.version >= HttpVersion11 and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        async with asyncio.timeout(seconds):
            return await request.read()
    except TimeoutError:
        raise Problem(408, f"the body did not arrive within {seconds:g} s", closes=True) from None
    except web.HTTPRequestEntityTooLarge:
        raise _content_too_long() from None
    except (web.RequestPayloadError, HttpProcessingError):
        raise Problem(400, "the body's framing is malformed", closes=True) from None
    except OSError as error:
        raise ConnectionResetError("the caller has disconnected") from error


def _content_too_long() -> Problem:
    return Problem(413, f"expected a body of at most {MAX_BODY_BYTES} bytes", closes=True)


def _check_content_type(route: Route, request: web.Request) -> None:
    # All values count: a proxy that unpacks bodies may read another one than we would.
    encodings = request.headers.getall("Content-Encoding", [])
    if any(encoding.strip().lower() != "identity" for encoding in encodings):
        headers = {"Accept-Encoding": "identity"}
        raise Problem(415, "expected a body without Content-Encoding", headers=headers)
    if route.body is None:
        return
    charset = (request.charset or "utf-8").lower()
    if request.content_type != "application/json" or charset not in ("utf-8", "utf8"):
        headers = {"Accept": "application/json"}
        raise Problem(415, "expected Content-Type: application/json, in UTF-8", headers=headers)


def _read_body(model: type[BaseModel], content: bytes) -> BaseModel:
    """Return the body. Raises Problem 400, or 422 for the first invalid field."""
    try:
        fields = read_json(content)
    except MalformedJsonBody as error:
        raise Problem(400, str(error)) from None
    if not isinstance(fields, dict):
        raise Problem(400, "expected a JSON object")
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        field, message = first_error_path_and_message(error)
        raise Problem(422, f"{field}: {message}", field=field) from None


def _is(found: Any, kind: type) -> bool:
    return isinstance(found, type) and issubclass(found, kind)
