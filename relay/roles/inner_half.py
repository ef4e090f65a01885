"""The inner half of a relay: what follows from its configuration, apart from who the relay is.

A reload leaves it and enters it again, as a stop and a start would: the engine, the gate, the
chats and the other sinks, the dispatcher, the callers, and the consumer of approvals over RabbitMQ.
The store, the listeners of the API and the poller (or the hub) go on. If the new half cannot be
entered, the earlier one is entered again.

Nothing is lost in between. What is recorded waits in the store, and what was decided before the
gate was left is recorded before the next one is in force. A call that can change something waits
for the new half (`ServerState.settled`); a decision that still comes to the gate that was left is
refused with 503. A StartRequest that is in flight is waited for.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from relay.api.server import Server
from relay.api.state import Relay
from relay.approvals.gate import Gate
from relay.clock import Clock
from relay.config import Config
from relay.config.model import start_warnings
from relay.events.build import RecordRelayEvent
from relay.imds.poller import Poller
from relay.roles.parts import running
from relay.store.retention import prune_forever
from relay.store.sqlite import Store

LEAVE_TIMEOUT = 10.0
"""Seconds for a reload to leave a half: to give sinks time to send, and to cancel their tries."""
_log = logging.getLogger(__name__)


class RunningRelay:
    """A started relay, and the inner half that it has now."""

    def __init__(
        self,
        config: Config,
        server: Server,
        store: Store,
        clock: Clock,
        report: RecordRelayEvent,
        enter: Callable[[Config], AbstractAsyncContextManager[Relay]],
        name: str,
        poller: Poller | None = None,
    ) -> None:
        """``enter`` enters the half of a role; ``poller`` takes the source's settings."""
        self.config = config
        self.relay: Relay
        self.server = server
        self.store = store
        self._clock = clock
        self._report = report
        self._enter_role = enter
        self._name = name
        self._poller = poller
        self._group: asyncio.TaskGroup
        self._task: asyncio.Task[None]
        self._must_leave: asyncio.Event

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Enter the half, and leave it in the end. If it fails meanwhile, the body ends with it.

        The API answers for the relay until the body has ended; if it fails, to the end.
        """
        state = self.server.state
        async with asyncio.TaskGroup() as self._group:
            await self._enter(self.config)
            try:
                _log.info("%s runs; the API listens on %s", self._name, self.server.address)
                state.attach_relay(self.relay)
                yield
                state.detach_relay()
            finally:
                await self._leave()
                state.settled.set()

    async def change(self, config: Config) -> None:
        """Leave the half, and enter it with another configuration.

        Raises ConfigError, or what a sink raises; then the earlier configuration is in force. If
        that cannot be entered again, the relay ends.
        """
        state, before = self.server.state, self.config
        use_api = self.server.prepare_reload(config.api)
        if isinstance(self.relay.gate, Gate):
            await self.relay.gate.stop_start_requests(within=math.inf)
        await self._leave()
        try:
            await self._enter(config)
        except Exception:
            await self._enter(before, is_last_resort=True)
            raise
        else:
            use_api()
            self.config = config
        finally:
            state.replace_relay(self.relay)
            state.settled.set()
        if (config.approvals, config.api) != (before.approvals, before.api):
            now = self._clock.now()
            self.store.submit(lambda tx: tx.messages.refresh_all(now), fail_open=True)
        known = set(start_warnings(before))
        for warning in start_warnings(config):
            if warning not in known:
                _log.warning("%s", warning)

    async def _enter(self, config: Config, *, is_last_resort: bool = False) -> None:
        entered: asyncio.Future[Relay] = asyncio.get_running_loop().create_future()
        self._must_leave = asyncio.Event()
        self._task = self._group.create_task(
            self._hold(config, entered, self._must_leave, is_last_resort=is_last_resort),
            name="inner half",
        )
        try:
            self.relay = await asyncio.shield(entered)
        except BaseException:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=LEAVE_TIMEOUT)
            raise

    async def _hold(
        self,
        config: Config,
        entered: asyncio.Future[Relay],
        must_leave: asyncio.Event,
        *,
        is_last_resort: bool,
    ) -> None:
        """Enter a half, and leave it in the same task: contexts of tasks need that."""
        self.store.settings = config.store
        if self._poller is not None:
            self._poller.use_source_settings(config.source)
        try:
            async with (
                self._enter_role(config) as relay,
                running(retention=prune_forever(self.store, self._clock, self._report)),
            ):
                entered.set_result(relay)
                await must_leave.wait()
        except Exception as error:
            is_entered = entered.done()
            if not is_entered:
                entered.set_exception(error)
            if must_leave.is_set():
                # Nothing depends on it any more. A sink can raise anything while it disconnects.
                _log.exception("a part of the relay ended with an error while it was left")
            elif is_entered or is_last_resort:
                raise

    async def _leave(self) -> None:
        """Leave it. An installed sink can refuse to be canceled: then nobody waits any more."""
        self._must_leave.set()
        _, unfinished = await asyncio.wait({self._task}, timeout=LEAVE_TIMEOUT)
        if unfinished:
            _log.error("the tries of a sink do not end, and go on")
