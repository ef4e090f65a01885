"""Messages with links, for tests of the page behind them: made by the board that all chats have, over a real store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from relay.chat.context import make_chat_context
from relay.outbox.transaction import Transaction
from tests.api.running_relay import EVENT_ID, Answer, BoxSettings, Running


@dataclass(frozen=True, slots=True)
class Message:
    """What a message shows: the token of each link, by its decision, and the code."""

    tokens: Mapping[str, str]
    code: str

    @property
    def wrong_code(self) -> str:
        """One that it does not show."""
        return f"{(int(self.code) + 1) % 10**6:06d}"


async def message(relay: Running, sink: str = "ops", *, event_id: str = EVENT_ID) -> Message:
    """What a sink's message about the event shows now, after it was edited."""
    chat = make_chat_context(
        relay.store, relay.gate.service, relay.clock, f"http://127.0.0.1:{relay.server.port}"
    )

    def last(tx: Transaction) -> Any:
        position = tx.journal.last_change_position(event_id.lower())
        assert position is not None
        return tx.journal.event(position)

    notice = await chat.messages.plan_update(
        BoxSettings(name=sink), await relay.store.read(last), in_chat=False
    )
    assert notice is not None
    assert notice.card is not None
    assert notice.card.code is not None
    await chat.messages.mark_shown(notice, "ref")
    return Message(
        {one.decision: (one.url or "").partition("#")[2] for one in notice.card.buttons},
        notice.card.code,
    )


async def look(relay: Running, token: str) -> Answer:
    """POST /v1/confirmations/look."""
    return await relay.call("POST", "/v1/confirmations/look", {"token": token}, by=None)


async def confirm(
    relay: Running, token: str, code: str | None = None, *, by: str | None = "alice", **more: Any
) -> Answer:
    """POST /v1/confirmations."""
    body = {"token": token, **({"code": code} if code is not None else {}), **more}
    return await relay.call("POST", "/v1/confirmations", body, by=by)


def proxy(relay: Running, path: str, seen: list[web.Request]) -> web.Application:
    """Stands before the relay, at this path of its own, and remembers what passes."""

    async def forward(request: web.Request) -> web.Response:
        seen.append(request)
        there = f"http://127.0.0.1:{relay.server.port}/{request.match_info['rest']}"
        headers = {
            name: request.headers[name]
            for name in ("Content-Type", "Authorization")
            if name in request.headers
        }
        async with relay.session.request(
            request.method, there, data=await request.read(), headers=headers
        ) as answer:
            return web.Response(
                status=answer.status, body=await answer.read(), headers=answer.headers
            )

    application = web.Application()
    application.router.add_route("*", path + "/{rest:.*}", forward)
    return application
