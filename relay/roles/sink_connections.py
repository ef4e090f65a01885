"""Connects sinks, each in a task of its own, so that a reload can replace one and leave the others.

A context manager must be left in the task that entered it.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from relay.chat import ChatSettings
from relay.chat.context import ChatContext, ChatDecisionSubmitter
from relay.clock import Clock
from relay.config import Config, sink_modules
from relay.sinks import SinkSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ConnectedSink:
    """A sink that is connected."""

    settings: SinkSettings
    sink: Any
    public_url: str | None
    """What links and callbacks of a chat begin with; None for other sinks."""
    decisions: ChatDecisionSubmitter | None
    """Takes what people decide in a chat; None for other sinks."""
    _close: asyncio.Event

    def request_disconnect(self) -> None:
        """Disconnect soon."""
        self._close.set()


class SinkConnections:
    """The tasks that hold sinks connected. Leaving the context disconnects all."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._group = asyncio.TaskGroup()
        self._close_events: set[asyncio.Event] = set()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for close in self._close_events:
            close.set()
        await self._group.__aexit__(kind, error, traceback)

    async def connect_sink_in_own_task(
        self, settings: SinkSettings, config: Config, chat: ChatContext
    ) -> ConnectedSink:
        """Return a sink that is connected until it is closed. Raises what the sink raises.

        A chat decides nothing before its `ChatDecisionSubmitter` has a gate.
        """
        module = sink_modules()[settings.kind]
        connection: AbstractAsyncContextManager[Any]
        decisions, public_url = None, None
        if isinstance(settings, ChatSettings):
            decisions = ChatDecisionSubmitter(
                config.approvals, self._clock, config.api.rights_by_client_principal
            )
            public_url = chat.public_url
            context = replace(chat, decisions=decisions)
            connection = module.connect(settings, self._clock, context)
        else:
            connection = module.connect(settings, self._clock)
        close = asyncio.Event()
        entered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._close_events.add(close)
        task = self._group.create_task(
            self._hold_connection_until_closed(settings.name, connection, entered, close),
            name=f"connection of sink {settings.name}",
        )
        try:
            sink = await entered
        except asyncio.CancelledError:
            task.cancel()
            raise
        return ConnectedSink(settings, sink, public_url, decisions, close)

    async def _hold_connection_until_closed(
        self,
        name: str,
        connection: AbstractAsyncContextManager[Any],
        entered: asyncio.Future[Any],
        close: asyncio.Event,
    ) -> None:
        """Hold a connection until it is to be closed. If it fails before, the relay ends."""
        try:
            async with AsyncExitStack() as stack:
                try:
                    sink = await stack.enter_async_context(connection)
                except Exception as error:  # noqa: BLE001  # whoever connects gets it
                    if not entered.done():
                        entered.set_exception(error)
                    return
                if not entered.done():
                    entered.set_result(sink)
                    await close.wait()
        except Exception:
            if not close.is_set():
                raise
            _log.exception("sink %s: internal error while it was disconnected", name)
        finally:
            self._close_events.discard(close)
            if not entered.done():
                entered.cancel()
