"""`/v1/chat/{sink}`: calls of chat platforms when somebody clicks or types there.

The chat sink verifies that the platform made the call.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from relay.api.schema.responses import COMMON_HEADERS, Problem
from relay.api.schema.route import Call, Route
from relay.chat import CallbackRefused


async def _handle_callback(call: Call) -> dict[str, Any] | web.Response:
    name = call.request.match_info["sink"]
    sink = call.relay.chats.get(name)
    if sink is None:
        raise Problem(404, "no chat sink of this name")
    try:
        reply = await sink.handle_callback(call.request.headers, call.content)
    except CallbackRefused as error:
        detail = "the call proves nothing, or cannot be read; the relay's log says more"
        raise call.server.rates.refuse(
            call.request, f"chat {name}: {error}", Problem(error.status, detail)
        ) from None
    return web.Response(headers=COMMON_HEADERS) if reply.body is None else dict(reply.body)


ROUTES = (
    Route(
        method="POST",
        path="/v1/chat/{sink}",
        summary="a chat platform's own interaction, proved in the platform's own way",
        handler=_handle_callback,
        access="handler",
        problem_statuses=(401, 404),
    ),
)
