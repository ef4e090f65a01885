"""`GET /`: the page for people, to which links in messages lead.

It holds no data: its scripts call the API with the reader's credentials. Its files are in
`relay/api/page/`, and are read for each call, so that a relay without readers spends no memory.
"""

from __future__ import annotations

import asyncio
from importlib import resources

from aiohttp import web

from relay.api.calls import Call, get
from relay.api.responses import Problem, bytes_response, page_headers

_DIRECTORY = resources.files("relay.api").joinpath("page")
_FILES = frozenset(file.name for file in _DIRECTORY.iterdir())
_CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}
_HEADERS = page_headers("'self'")


@get(
    "/",
    "the page for people: what is scheduled, what happened, and the relay's health",
    access="public",
    media_types=("text/html",),
)
async def show_index(_call: Call) -> web.Response:
    return await _send("index.html")


@get(
    "/page/{file}",
    "the scripts and the style of the page",
    access="public",
    media_types=("text/javascript", "text/css", "text/html"),
    problems=(404,),
)
async def show_file(_call: Call, file: str) -> web.Response:
    if file not in _FILES:
        raise Problem(404, "no such file of the page")
    return await _send(file)


async def _send(name: str) -> web.Response:
    content = await asyncio.to_thread(_DIRECTORY.joinpath(name).read_bytes)
    return bytes_response(200, content, _CONTENT_TYPES[name.rpartition(".")[2]], _HEADERS)
