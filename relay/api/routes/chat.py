"""``/v1/chat/{sink}``: what a chat platform itself calls, when somebody there clicks or types. The platform's member proves it."""

from __future__ import annotations

from aiohttp import web

from relay.api.schema.problems import Problem
from relay.api.schema.responses import COMMON_HEADERS, json_response
from relay.api.schema.route import Call, Route
from relay.api.server.connection import mark_authenticated, request_peer
from relay.api.server.pipeline import RequestPipeline
from relay.chat import CallbackRefused


def routes(desk: RequestPipeline) -> tuple[Route, ...]:
    """The one call; who is refused counts as a stranger, like whoever comes with a wrong key."""

    async def hear(call: Call) -> web.StreamResponse:
        peer, now = request_peer(call.request), desk.clock.monotonic()
        name = call.request.match_info["sink"]
        chat = call.relay.chats.get(name)
        if chat is None:
            raise Problem(404, "no chat sink of this name")
        try:
            reply = await chat.handle_callback(call.request.headers, call.body)
        except CallbackRefused as error:
            desk.rejections.unauthenticated_call(peer, f"chat {name}: {error}", now)
            raise Problem(
                error.status,
                "the call proves nothing, or cannot be read; the relay's log says more",
            ) from None
        desk.by_address.refund(peer.network, now)
        mark_authenticated(call.request)
        return (
            json_response(200, reply.body)
            if reply.body is not None
            else web.Response(headers=COMMON_HEADERS)
        )

    return (
        Route(
            "POST",
            "/v1/chat/{sink}",
            "a chat platform's own interaction, proved in the platform's own way",
            hear,
            {200: dict},
            access="proof",
            problem_statuses=(401, 404),
        ),
    )
