"""Renders chat messages with confirmation links, and calls the routes behind the links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from relay.chat.context import make_chat_context
from relay.store.transaction import Transaction
from tests.api.running_relay import EVENT_ID, RecordingSinkSettings, Response, RunningRelay


@dataclass(frozen=True, slots=True)
class MessageLinks:
    """A message's code, and the tokens of its links by decision."""

    tokens: Mapping[str, str]
    code: str

    @property
    def wrong_code(self) -> str:
        """A code that the message does not show."""
        return f"{(int(self.code) + 1) % 10**6:06d}"


async def render_message(
    relay: RunningRelay, sink: str = "ops", *, event_id: str = EVENT_ID
) -> MessageLinks:
    """Update a sink's message about the event, and return what it shows.

    `event_id` is the key of the event in the store, in any case.
    """
    chat = make_chat_context(
        relay.store, relay.gate.engine, relay.clock, f"http://127.0.0.1:{relay.server.port}"
    )

    def read_last_change(tx: Transaction) -> Any:
        position = tx.journal.position_of_last_change_of_event(event_id.lower())
        assert position is not None
        return tx.journal.require_event_at_position(position)

    update = await chat.messages.plan_update(
        RecordingSinkSettings(name=sink, kind="box"),
        await relay.store.read(read_last_change),
        in_chat=False,
    )
    assert update is not None
    assert update.card is not None
    assert update.card.code is not None
    await chat.messages.mark_shown(update, "ref")
    return MessageLinks(
        {button.decision: (button.url or "").partition("#")[2] for button in update.card.buttons},
        update.card.code,
    )


async def post_preview(relay: RunningRelay, token: str) -> Response:
    """POST /v1/confirmations/look."""
    return await relay.call("POST", "/v1/confirmations/look", {"token": token}, by=None)


async def post_confirmation(
    relay: RunningRelay,
    token: str,
    code: str | None = None,
    *,
    by: str | None = "alice",
    **more: Any,
) -> Response:
    """POST /v1/confirmations."""
    body = {"token": token, **({"code": code} if code is not None else {}), **more}
    return await relay.call("POST", "/v1/confirmations", body, by=by)


_PASSED_ON = (
    *("Content-Type", "Authorization", "Cookie", "Origin"),
    *("Sec-Fetch-Site", "Sec-Fetch-Dest", "X-Requested-With"),
)
"""Headers that the proxy passes on to the relay."""


def proxy_application(relay: RunningRelay, path: str, seen: list[web.Request]) -> web.Application:
    """Return a proxy that serves the relay under a path and records requests in `seen`."""

    async def forward(request: web.Request) -> web.Response:
        seen.append(request)
        target = f"http://127.0.0.1:{relay.server.port}/{request.match_info['rest']}"
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        async with relay.session.request(
            request.method,
            target,
            data=await request.read(),
            headers=headers,
            params=request.query,
            allow_redirects=False,
        ) as answer:
            return web.Response(
                status=answer.status, body=await answer.read(), headers=answer.headers
            )

    application = web.Application()
    application.router.add_route("*", path + "/{rest:.*}", forward)
    return application
