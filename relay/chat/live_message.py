"""The sink that all chat platforms share: it keeps one message per event up to date.

Each platform builds a `LiveMessageSink` around its `ChatPlatform`, which posts, edits and replies.
`deliver` gets a plan from `relay.chat.context`, calls the platform, and records what succeeded. A
task of the sink adds an entry to the store when time alone has changed a message, so the store
retries that update like any other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Protocol

from relay.chat import CallbackRefused, ChatSettings, MessageGone, Reply
from relay.chat.cards.card import Card
from relay.chat.cards.wording import timeline_line
from relay.chat.context import ChatContext, MessageUpdate
from relay.clock import Clock
from relay.errors import Deferred, StoreUnavailable
from relay.events.cloudevent import CloudEvent, is_about_event
from relay.sentences import Text
from relay.sinks import Receipt

REFRESH_INTERVAL = 60.0
"""Seconds between two edits because of time alone. Each event of a burst has its own deadline."""
_POSTED_AGAIN = "posted again"
_UP_TO_DATE = "the message is up to date"
_log = logging.getLogger(__name__)


@asynccontextmanager
async def background_task_until_exit(
    work: Coroutine[Any, Any, None], name: str
) -> AsyncIterator[None]:
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class ChatPlatform(Protocol):
    """What a platform can do.

    Each call raises Deferred and Rejected like a sink's ``deliver``, within its own timeout.
    """

    async def post(self, card: Card) -> str | None:
        """Post a message, return its name of at most 256 characters; None: it cannot be edited."""

    async def edit(self, ref: str, card: Card) -> None:
        """Replace the content of the message ``ref``. Raises MessageGone if it does not exist.

        A sink of another kind can have had the name of this sink: a ``ref`` of another form is a
        MessageGone, too.
        """

    async def reply_in_thread(self, ref: str | None, lines: Sequence[Text]) -> None:
        """Post lines in the thread of a message. Raises MessageGone if it does not exist.

        Without ``ref`` they are a message of their own; the first of several is its subject.
        """


class LiveMessageSink:
    """A chat sink. Each delivery brings one message up to date with everything recorded.

    ``in_chat``: cards get buttons that decide in the chat, instead of links to the page.
    """

    concurrency = 1
    longest_pause = 60.0

    def __init__(
        self,
        settings: ChatSettings,
        context: ChatContext,
        platform: ChatPlatform,
        clock: Clock,
        *,
        in_chat: bool = False,
    ) -> None:
        self.give_up_after = settings.give_up_after
        self._settings = settings
        self._messages = context.messages
        self._platform = platform
        self._clock = clock
        self._in_chat = in_chat

    async def deliver(self, event: CloudEvent) -> Receipt:
        """Return when the message about an event is up to date. Raises Deferred, Rejected."""
        if not is_about_event(event.name):
            await self._platform.reply_in_thread(None, [timeline_line(event)])
            return Receipt()
        try:
            update = await self._messages.plan_update(self._settings, event, in_chat=self._in_chat)
            return Receipt(response=await self._apply_update(update) if update else _UP_TO_DATE)
        except StoreUnavailable as error:
            raise Deferred(f"the content of the message cannot be read: {error}") from None

    async def handle_callback(self, headers: Mapping[str, str], body: bytes) -> Reply:  # noqa: ARG002  # refused unread
        """Raise CallbackRefused. The sink of a platform that calls the relay overrides this."""
        raise CallbackRefused(f"{self._settings.kind} never calls the relay")

    def refreshing(self) -> AbstractAsyncContextManager[None]:
        return background_task_until_exit(
            self._refresh_each_minute(), f"{self._settings.name}: refresh"
        )

    async def _apply_update(self, update: MessageUpdate) -> str:
        """Call the platform and record each success. Returns what was done, for the attempt log.

        A platform that cannot edit gets a new message only if Azure changed an event. Otherwise
        the history lines tell what is new.
        """
        card, ref, is_posted = update.card, update.message.ref, update.message.is_posted
        shown = told = ""
        only_lines_tell = ref is None and is_posted and not update.is_event_changed
        if card is not None and not only_lines_tell:
            if ref is None:
                ref = await self._platform.post(card)
                shown = _POSTED_AGAIN if is_posted else "posted"
            else:
                try:
                    await self._platform.edit(ref, card)
                    shown = "edited"
                except MessageGone:
                    ref = await self._platform.post(card)
                    shown = "posted anew: the message was deleted"
            await self._messages.mark_shown(update, ref)
        if update.history_lines and shown != _POSTED_AGAIN:
            heading = ((update.subject,),) if ref is None else ()
            with suppress(MessageGone):  # the message is posted anew when it changes next
                await self._platform.reply_in_thread(ref, (*heading, *update.history_lines))
                told = "followed up" if ref is None else "replied in its thread"
        if card is not None and only_lines_tell:
            # This clears refresh_at, from which a repeat sees that voting has closed since. Before
            # the lines are sent, it would lose the line "Voting closed" if sending fails.
            await self._messages.mark_shown(update, ref)
        await self._messages.mark_history_told(update)
        return ", ".join(filter(None, (shown, told))) or _UP_TO_DATE

    async def _refresh_each_minute(self) -> None:
        while True:
            try:
                await self._messages.enqueue_due_refreshes(self._settings.name)
            except StoreUnavailable:
                pass  # the relay reports a failing store by itself
            except Exception:  # noqa: BLE001  # without this task messages would get old unnoticed
                _log.exception(
                    "sink %s: internal error; messages are not refreshed until the next try",
                    self._settings.name,
                )
            await self._clock.sleep(REFRESH_INTERVAL)
