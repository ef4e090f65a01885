"""Lists in pages: ``{"items": […], "next": cursor or null}``, taken up by ``?cursor=``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from relay.api.schema.problems import Problem
from relay.api.schema.route import Parameter

PAGE = 100
"""Items on one page."""
CURSOR = Parameter("cursor", "query", "`next` of the page before", pattern=r"^[0-9]{1,18}$")
_CURSOR = re.compile(CURSOR.pattern, re.ASCII)


def cursor(request: web.Request, _body: bytes) -> int | None:
    """The id behind which the page begins; None for the first. Raises Problem 422."""
    given = request.query.getall("cursor", [])
    if not given:
        return None
    if len(given) > 1 or _CURSOR.fullmatch(given[0]) is None:
        raise Problem(422, "cursor: expected `next` of another page, once", field="cursor")
    return int(given[0])


def page(items: Sequence[Any], ids: Sequence[int]) -> dict[str, Any]:
    """A page of the items that were found, of which there may be one more than fit; ``ids`` are theirs."""
    more = len(items) > PAGE
    return {"items": list(items[:PAGE]), "next": str(ids[PAGE - 1]) if more else None}
