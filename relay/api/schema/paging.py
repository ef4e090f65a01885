"""Pages of lists: `{"items": […], "next": cursor or null}`. `?cursor=` requests the next page.

Pages of a list have the newest rows first, and a cursor is the id of the last row of a page. One
event or delivery has pages of what happened: the newest page first, but each with its oldest row
first. Their cursor is the position in the journal, or the number of the attempt, of that row. The
routes parse a cursor here, and declare themselves with `page_route`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from aiohttp import web

from relay.api.schema.route import Call, Parameter, Route

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
    parse_parameters: Callable[[web.Request], Any] = parse_cursor,
    problem_statuses: tuple[int, ...] = (),
) -> Route:
    """Return a route whose response is a page, for callers with the right to read.

    ``filters`` are query parameters beside the cursor. ``parse_parameters`` reads them and the
    cursor; its result, by default the cursor alone, is `Call.parameters` of the handler.
    """
    return Route(
        method="GET",
        path=path,
        summary=summary,
        handler=handler,
        needs="read",
        is_large=True,
        parameters=(CURSOR, *filters),
        parse_parameters=parse_parameters,
        problem_statuses=problem_statuses,
    )
