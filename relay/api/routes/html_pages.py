"""`GET /`: the page for people, to which links in messages lead.

It holds no data. The scripts of the page at `/` call the API with the reader's credentials. Its
files are in `relay/api/page/` and are read for each call, so that a relay without readers spends no
memory on them.
"""

from __future__ import annotations

import asyncio
from importlib import resources

from aiohttp import web

from relay.api.schema.html_headers_and_problems import html_page_security_headers
from relay.api.schema.responses import Problem, make_bytes_http_response
from relay.api.schema.route import Call, Route

_DIRECTORY = resources.files("relay.api").joinpath("page")
_FILES = frozenset(file.name for file in _DIRECTORY.iterdir())
_CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}
_HEADERS = html_page_security_headers(script_source="'self'", style_source="'self'")


async def _open_old_link(_call: Call) -> web.Response:
    # Relative, because a proxy may serve the relay below a path. Without a fragment of its own the
    # browser would keep that of the link.
    return make_bytes_http_response(303, b"", _CONTENT_TYPES["html"], {"Location": "./#/"})


async def _show_index_page(_call: Call) -> web.Response:
    return await _send_file("index.html")


async def _show_file(call: Call) -> web.Response:
    name = call.request.match_info["file"]
    if name not in _FILES:
        raise Problem(404, "no such file of the page")
    return await _send_file(name)


async def _send_file(name: str) -> web.Response:
    content = await asyncio.to_thread(_DIRECTORY.joinpath(name).read_bytes)
    return make_bytes_http_response(200, content, _CONTENT_TYPES[name.rpartition(".")[2]], _HEADERS)


ROUTES = (
    Route(
        method="GET",
        path="/",
        summary="the page for people: what is scheduled, what happened, and the relay's health",
        handler=_show_index_page,
        access="public",
        media_types=("text/html",),
    ),
    Route(
        method="GET",
        path="/page/{file}",
        summary="the scripts and the style of the page",
        handler=_show_file,
        access="public",
        media_types=("text/javascript", "text/css", "text/html"),
        problem_statuses=(404,),
    ),
    Route(
        method="GET",
        path="/approve",
        summary="where links in older messages led: goes on to the page",
        handler=_open_old_link,
        status=303,
        access="public",
        media_types=("text/html",),
    ),
)
