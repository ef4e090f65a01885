"""Keeps messages current: the one sink that all chat platforms are, each with its own way to post, edit and tell."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from relay.chat import ChatSettings, MessageGone
from relay.chat.board import ChatBoard, MessageUpdate
from relay.chat.cards.card import Card, Text
from relay.chat.cards.timeline import timeline_line
from relay.clock import Clock
from relay.errors import Deferred, StoreUnavailable
from relay.events.cloudevent import CloudEvent
from relay.sinks import Receipt

_LOOK_AT_LATEST = 60.0
"""Seconds after which moments are looked at again: the clock may have been set, or the switch of the approvals turned."""
_log = logging.getLogger(__name__)


class Platform(Protocol):
    """What a platform can do. Each call raises Deferred and Rejected as a sink's ``deliver`` does, within its own timeout."""

    async def post(self, card: Card) -> str | None:
        """Post a message; returns how the platform names it, at most 256 characters, None where it cannot be edited later."""

    async def edit(self, ref: str, card: Card) -> None:
        """Have a message show this card instead. Never called where ``post`` returns None. Raises MessageGone."""

    async def reply_in_thread(self, ref: str | None, lines: Sequence[Text]) -> None:
        """Say these lines in a message's thread. Raises MessageGone.

        Without ``ref`` they are a short follow-up by themselves; about an event, the first line then says which.
        """


class LiveMessageSink:
    """A chat sink. One delivery at a time: each one brings its message up to date with everything that was recorded."""

    concurrency = 1
    longest_pause = 60.0

    def __init__(
        self,
        settings: ChatSettings,
        board: ChatBoard,
        platform: Platform,
        clock: Clock,
        *,
        in_chat: bool = False,
    ) -> None:
        self.give_up_after = settings.give_up_after
        self._settings = settings
        self._board = board
        self._platform = platform
        self._clock = clock
        self._in_chat = in_chat
        self._changed = asyncio.Event()

    async def deliver(self, event: CloudEvent) -> Receipt:
        """Return when the message about the event shows how it stands. Raises Deferred, Rejected."""
        if event.name.startswith("relay."):
            await self._platform.reply_in_thread(None, [timeline_line(event)])
            return Receipt()
        try:
            notice = await self._board.plan_update(self._settings, event, in_chat=self._in_chat)
            if notice is None:
                return Receipt(response="its message shows all there is")
            return await self._bring(notice)
        except StoreUnavailable as error:
            raise Deferred(f"what the message should show cannot be read: {error}") from None
        finally:
            self._changed.set()

    @asynccontextmanager
    async def refreshing(self) -> AsyncIterator[None]:
        """While this context lasts, messages are looked at again when time alone has changed what they should show."""
        task = asyncio.create_task(self._watch(), name=f"{self._settings.name}: time")
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _bring(self, notice: MessageUpdate) -> Receipt:
        ref, did = notice.ref, []
        if notice.card is not None and notice.ref is not None:
            try:
                await self._platform.edit(notice.ref, notice.card)
                did.append("edited")
            except MessageGone:
                ref = await self._platform.post(notice.card)
                did.append("posted anew: the message was deleted")
            await self._board.mark_shown(notice, ref)
        elif notice.card is not None and not notice.posted:
            ref = await self._platform.post(notice.card)
            did.append("posted")
            await self._board.mark_shown(notice, ref)
        elif notice.card is not None:
            if notice.updated:
                await self._platform.post(
                    notice.card
                )  # it cannot be edited; what it says is not so any more, and its buttons are void
                did.append("posted again")
            await self._board.mark_shown(notice, None)
        if notice.history_lines and "posted again" not in did:
            with suppress(MessageGone):  # it is posted anew when it changes next
                await self._platform.reply_in_thread(
                    ref,
                    notice.history_lines
                    if ref is not None
                    else ((notice.subject,), *notice.history_lines),
                )
                did.append("told")
        await self._board.mark_history_told(notice)
        return Receipt(response=", ".join(did) or "its message shows all there is")

    async def _watch(self) -> None:
        while True:
            self._changed.clear()
            try:
                moment = await self._board.next_refresh(self._settings.name)
                now = self._clock.now()
                if moment is not None and moment <= now:
                    await self._board.refresh(self._settings.name)
                    continue
                pause = (
                    min((moment - now).total_seconds(), _LOOK_AT_LATEST)
                    if moment is not None
                    else _LOOK_AT_LATEST
                )
            except StoreUnavailable:
                pause = _LOOK_AT_LATEST
            except Exception:  # noqa: BLE001  # whatever it is: nobody would miss this task until its messages are hours old
                _log.exception(
                    "sink %s: an error in the relay's own code keeps its messages from changing with time",
                    self._settings.name,
                )
                pause = _LOOK_AT_LATEST
            await self._wait(pause)

    async def _wait(self, seconds: float) -> None:
        """Return when a message was changed, or after so many seconds."""
        async with asyncio.TaskGroup() as group:
            waits = [
                group.create_task(self._changed.wait()),
                group.create_task(self._clock.sleep(seconds)),
            ]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
