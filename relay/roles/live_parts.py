"""The parts of a running relay that a reload changes, and how it changes them.

A reload has two halves. `LiveParts.prepare_configuration_take_over` makes everything that is new,
and may fail: then nothing has changed. What it returns takes everything over, and cannot be
refused: if it fails, the relay ends, and its service manager starts it with the new configuration.

Decisions change at one moment. In one step of the event loop the credentials, the callers and the
sinks change, and one piece of work is submitted to the store, which runs work in the order of its
submission. That work changes the rules and the route of events, and gives new sinks the live
events. So a decision that a caller was let in for by the earlier configuration is also judged by
the earlier rules, and no event misses a sink or reaches it twice.

A role calls these methods in this order: `connect_sinks` and `attach_gate`
(only `DecidingParts`), then `make_replaceable_input_tasks`. It sets ``inputs`` when the tasks run.
Then `relay.roles.reload` may call `prepare_configuration_take_over` and `run_prepared_take_over`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override  # in typing from Python 3.12

from relay.api.server import Server
from relay.api.state import Relay
from relay.approvals.engine import ApprovalEngine
from relay.approvals.gate import Gate
from relay.approvals.request import Caller
from relay.chat import ChatSink
from relay.chat.context import ChatContext, make_chat_context
from relay.clock import Clock
from relay.config import Config
from relay.config.warnings import start_warnings
from relay.delivery.dispatcher import Dispatcher, NewAndRetiredWorkers, SinkStates, matching_sinks
from relay.events.build import RecordRelayEvent
from relay.roles.parts import InputTasks, callers_by_amqp_user, make_approval_consumer
from relay.roles.sink_connections import ConnectedSink, SinkConnections
from relay.sinks import SinkSettings
from relay.store.retention import prune_forever
from relay.store.sqlite import Store
from relay.store.transaction import Transaction

if TYPE_CHECKING:
    from relay.amqp.approval_consumer import ApprovalConsumer
    from relay.imds.client import ImdsClient
    from relay.imds.poller import Poller

TakeOver = Callable[[], Coroutine[Any, Any, None]]
CONNECT_TIMEOUT = 10.0
"""Seconds for a sink of a reload to be made. It need not reach its destination."""
_APPROVALS_INPUT = "approvals over AMQP"
_log = logging.getLogger(__name__)


class LiveParts:
    """What a reload changes in every role: the API, polling, and retention."""

    def __init__(
        self,
        config: Config,
        *,
        server: Server,
        store: Store,
        clock: Clock,
        report: RecordRelayEvent,
    ) -> None:
        self.config = config
        """The configuration in force."""
        self.server = server
        self.store = store
        self.clock = clock
        self.report = report
        self.inputs: InputTasks
        """The tasks of the running relay. The role sets it."""
        self.polling: tuple[Poller, ImdsClient] | None = None
        """The poller of this VM and its client, which use the settings of the source.

        The role sets it; None on a hub.
        """

    def make_replaceable_input_tasks(self) -> dict[str, Coroutine[Any, Any, object]]:
        """Return the tasks that a reload may replace, by name."""
        return {"retention": prune_forever(self.store, self.clock, self.report)}

    async def prepare_configuration_take_over(self, config: Config) -> TakeOver:
        """Make what another configuration needs; return what takes it over.

        Raises ConfigError, or what a sink raises; then nothing has changed.
        """
        use_api = self.server.prepare_reload(config.api)

        async def take_over() -> None:
            use_api()
            await self._use_other_settings(config)

        return take_over

    async def run_prepared_take_over(self, take_over: TakeOver) -> None:
        """Take a configuration over. If that fails, the relay ends."""
        await self.inputs.run_task_until_done("reload", take_over())

    async def _use_other_settings(self, config: Config) -> None:
        before, self.config = self.config, config
        if self.polling is not None:
            for part in self.polling:
                part.use_source_settings(config.source)
        if config.store != before.store:
            self.store.settings = config.store
            await self.inputs.replace_task(
                "retention", prune_forever(self.store, self.clock, self.report)
            )


class DecidingParts(LiveParts):
    """What a reload also changes in a relay that tells and decides: a plain relay or a hub."""

    def __init__(
        self,
        config: Config,
        *,
        server: Server,
        store: Store,
        clock: Clock,
        report: RecordRelayEvent,
        engine: ApprovalEngine,
        connections: SinkConnections,
        use_role: Callable[[Config], object] = lambda _: None,
        before_approvals: Callable[[], Coroutine[Any, Any, object]] | None = None,
    ) -> None:
        """``use_role`` takes over what only this role has from a configuration.

        ``before_approvals`` is waited for before approvals are taken from RabbitMQ.
        """
        super().__init__(config, server=server, store=store, clock=clock, report=report)
        self._engine = engine
        self._connections = connections
        self._use_role = use_role
        self._before_approvals = before_approvals
        self._chat = make_chat_context(store, engine, clock, config.api.public_url)
        self._sinks: dict[str, ConnectedSink] = {}
        self._amqp_callers: dict[str, Caller] = {}
        # Set by `connect_sinks` and `attach_gate`:
        self._dispatcher: Dispatcher
        self._consumer: ApprovalConsumer | None
        self._newest = config
        self._gate: Gate
        self._relay: Relay

    # --- the start

    async def connect_sinks(self) -> Dispatcher:
        """Connect the sinks, and return the dispatcher to them, which has read what waits."""
        self._sinks = await self._connect_new_or_changed_sinks(self.config, self._chat)
        self._dispatcher = Dispatcher(
            _settings_with_sinks(self._sinks),
            self.store,
            self.clock,
            self.report,
        )
        await self._dispatcher.begin()
        return self._dispatcher

    @property
    def chats(self) -> dict[str, ChatSink]:
        """The chat sinks by name."""
        return {
            name: connected.sink
            for name, connected in self._sinks.items()
            if connected.decisions is not None
        }

    def attach_gate(self, gate: Gate, relay: Relay) -> Relay:
        """Let chats and RabbitMQ decide at this gate; return the relay with its approvals link."""
        self._gate = gate
        self._use_callers(self.config)
        self._consumer = self._make_consumer(self.config, relay)
        self._relay = replace(relay, approvals_link=self._consumer)
        return self._relay

    @override
    def make_replaceable_input_tasks(self) -> dict[str, Coroutine[Any, Any, object]]:
        inputs = super().make_replaceable_input_tasks()
        if self._consumer is not None:
            inputs[_APPROVALS_INPUT] = self._run_consumer(self._consumer)
        return inputs

    # --- a reload

    @override
    async def prepare_configuration_take_over(self, config: Config) -> TakeOver:
        use_api = self.server.prepare_reload(config.api)
        chat = self._chat
        if config.api.public_url != self.config.api.public_url:
            chat = make_chat_context(self.store, self._engine, self.clock, config.api.public_url)
        async with asyncio.timeout(CONNECT_TIMEOUT):
            sinks = await self._connect_new_or_changed_sinks(config, chat)

        async def take_over() -> None:
            self._chat = chat
            before, old_sinks = self.config, self._sinks
            leaving = [each for each in old_sinks.values() if each not in sinks.values()]
            replacement, states = self._switch_decision_configuration(
                config, sinks, leaving, use_api
            )
            sink_states = await states
            self._gate.wake()
            await self._dispatcher.end_change_of_configured_sinks(replacement, sink_states)
            for connected in leaving:
                connected.request_disconnect()
            await self._replace_input_tasks(before, config)
            await self._use_other_settings(config)
            earlier = set(start_warnings(before))
            for warning in start_warnings(config):
                if warning not in earlier:
                    _log.warning("%s", warning)

        return take_over

    def _switch_decision_configuration(
        self,
        config: Config,
        sinks: dict[str, ConnectedSink],
        leaving: list[ConnectedSink],
        use_api: Callable[[], None],
    ) -> tuple[NewAndRetiredWorkers, asyncio.Future[SinkStates]]:
        """Change everything that decisions follow from, in one step; see the module's docstring."""
        has_changed_rules = (config.approvals, config.api) != (
            self.config.approvals,
            self.config.api,
        )
        use_api()
        self._use_role(config)
        if any(connected not in self._sinks.values() for connected in sinks.values()):
            self._gate.restart_tell_first_waits()
        self._sinks = sinks
        for connected in leaving:
            if connected.decisions is not None:
                connected.decisions.detach_gate()
        self._use_callers(config)
        self._replace_api_relay(replace(self._relay, chats=self.chats))
        replacement = self._dispatcher.begin_change_of_configured_sinks(_settings_with_sinks(sinks))
        now = self.clock.now()
        reconcile = self._dispatcher.reconcile_work(now)
        self._newest = config
        # What was submitted before goes to the sinks of before.
        self.store.use_route(partial(matching_sinks, sinks=config.sinks))

        def change(tx: Transaction) -> SinkStates:
            states = reconcile(tx)
            if has_changed_rules:
                tx.messages.refresh_all(now)
            # Of two reloads on a full disk, only the first may be repeated afterwards.
            newest = self._newest
            self._engine.use_settings(newest.approvals, newest.api.resources_by_client_principal)
            return states

        return replacement, self.store.submit(change, fail_open=True)

    def _use_callers(self, config: Config) -> None:
        """Take the callers of chats and of RabbitMQ from a configuration."""
        for connected in self._sinks.values():
            if connected.decisions is not None:
                connected.decisions.use_callers(
                    config.approvals, config.api.rights_by_client_principal
                )
                connected.decisions.attach_gate(self._gate.submit)
        self._amqp_callers.clear()
        self._amqp_callers.update(callers_by_amqp_user(config.api.clients))

    async def _replace_input_tasks(self, before: Config, after: Config) -> None:
        if _approval_consumer_settings(before) != _approval_consumer_settings(after):
            await self.inputs.stop_task(_APPROVALS_INPUT)
            self._consumer = self._make_consumer(after, self._relay)
            self._replace_api_relay(replace(self._relay, approvals_link=self._consumer))
            if self._consumer is not None:
                self.inputs.start_task(_APPROVALS_INPUT, self._run_consumer(self._consumer))

    # --- parts

    async def _connect_new_or_changed_sinks(
        self, config: Config, chat: ChatContext
    ) -> dict[str, ConnectedSink]:
        """Return the sinks of a configuration. Those that are connected already stay."""
        sinks: dict[str, ConnectedSink] = {}
        new: list[ConnectedSink] = []
        try:
            for settings in config.sinks:
                known = self._sinks.get(settings.name)
                if known is None or not _is_sink_unchanged(known, settings, chat):
                    known = await self._connections.connect_sink_in_own_task(settings, config, chat)
                    new.append(known)
                sinks[settings.name] = known
        except BaseException:
            for connected in new:
                connected.request_disconnect()
            raise
        return sinks

    def _make_consumer(self, config: Config, relay: Relay) -> ApprovalConsumer | None:
        rejections = self.server.state.rejection_log
        return make_approval_consumer(config, relay, rejections, self._amqp_callers)

    async def _run_consumer(self, consumer: ApprovalConsumer) -> None:
        if self._before_approvals is not None:
            await self._before_approvals()
        await consumer.run()

    def _replace_api_relay(self, relay: Relay) -> None:
        """Let the API use these parts."""
        self._relay = relay
        self.server.state.replace_relay(relay)


def _is_sink_unchanged(known: ConnectedSink, settings: SinkSettings, chat: ChatContext) -> bool:
    is_reached_elsewhere = known.decisions is not None and known.public_url != chat.public_url
    return known.settings == settings and not is_reached_elsewhere


def _settings_with_sinks(
    sinks: dict[str, ConnectedSink],
) -> dict[str, tuple[SinkSettings, Any]]:
    return {name: (connected.settings, connected.sink) for name, connected in sinks.items()}


def _approval_consumer_settings(config: Config) -> object:
    """Return what the consumer of approvals is made from; None if there is none."""
    settings = config.approvals.amqp
    return None if settings is None else (settings, config.approval_answers_exchange)
