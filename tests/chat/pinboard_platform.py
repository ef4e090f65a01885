"""A chat platform as a package outside of the relay would add it: a pinboard in this process.

The entry point that makes the relay find it is written by the test. People answer by calls whose
body names them; a real platform would have to prove who they are.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import ClassVar, Literal

import orjson
from typing_extensions import override

from relay.approvals.principals import PrincipalForm
from relay.chat import AnswerableChatSettings, CallbackRefused, Reply
from relay.chat.context import ChatContext
from relay.chat.live_message import LiveMessageSink
from relay.clock import Clock
from tests.chat.wall_platform import Wall


class Settings(AnswerableChatSettings):
    principals: ClassVar = PrincipalForm("pinboard", "<board>/<user>", r"[a-z]+/[a-z0-9]+")

    kind: Literal["pinboard"]


class Pinboard(LiveMessageSink):
    """One pinboard, with buttons."""

    def __init__(self, settings: Settings, context: ChatContext, clock: Clock) -> None:
        super().__init__(settings, context, board, clock, in_chat=True)
        self._context = context
        self._sink = settings

    @override
    async def handle_callback(self, headers: Mapping[str, str], body: bytes) -> Reply:
        """Take the answer of the user in the header X-User."""
        call = orjson.loads(body)
        caller = self._context.decisions.caller(headers["X-User"], self._sink)
        if caller is None:
            raise CallbackRefused("nobody knows this user")
        button = board.cards[call["pin"]].buttons[0]
        answer = await self._context.decisions.decide(
            caller,
            event_id=button.event_id,
            decision=button.decision,
            revision=button.revision,
            request_id=call["click"],
        )
        return {"status": answer.status, "principal": caller.principal}


board = Wall()


@asynccontextmanager
async def connect(
    settings: Settings, clock: Clock, context: ChatContext
) -> AsyncIterator[Pinboard]:
    pinboard = Pinboard(settings, context, clock)
    async with pinboard.refreshing():
        yield pinboard
