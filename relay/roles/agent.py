"""An agent of a fleet: it polls and records, reports to the hub, and carries out its orders.

`start` puts its parts together. Its only sink is that of `relay.fleet.agent`: the sinks of the
configuration are the hub's. It decides nothing, and passes decisions of local programs to the hub.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext

from relay import __version__
from relay.api.state import Relay
from relay.approvals.engine import ApprovalEngine
from relay.clock import Clock
from relay.config import Config
from relay.delivery.dispatcher import Dispatcher
from relay.fleet.agent.agent import Agent, ImdsClock, ReportSinkSettings
from relay.fleet.link import AgentLink
from relay.fleet.messages import MAX_NAMES, Pulse
from relay.fleet.settings import AgentSettings
from relay.imds.client import ImdsClient
from relay.roles.inner_half import RunningRelay
from relay.roles.parts import (
    DRAIN_TIMEOUT,
    drain,
    identify_relay,
    make_poller,
    open_api,
    open_store_with_log,
    polling,
    running,
)
from relay.store import StateFileScopeAndVm


@asynccontextmanager
async def start(config: Config, fleet: AgentSettings, clock: Clock) -> AsyncIterator[RunningRelay]:
    """Start an agent, yield it, and drain it in the end."""
    async with AsyncExitStack() as stack:
        server = await open_api(config, clock, stack)
        client = await stack.enter_async_context(ImdsClient(config.source, clock))
        identity = await identify_relay(config, client, clock)
        origin = identity.origin

        sink = ReportSinkSettings()
        owner = StateFileScopeAndVm(origin.scope, identity.vm_id)
        store, report = await open_store_with_log(config, owner, origin, [sink], clock, stack)
        machine = Pulse.model_construct(  # not checked: the hub refuses what it cannot use
            vm_id=identity.vm_id,
            version=__version__,
            zone=(identity.instance.zone or None) if identity.instance is not None else None,
            names=tuple(sorted(identity.names or ()))[:MAX_NAMES],
            live=None,
        )
        # Nothing is approved here. The engine only tells the API that.
        no_approvals = config.approvals.model_copy(update={"enabled": False})
        link = AgentLink(fleet, origin, clock)
        dispatcher = Dispatcher({sink.name: (sink, link)}, store, clock, report)
        await dispatcher.begin()
        imds_clock = ImdsClock(lambda: client.clock_skew)
        poller = await make_poller(config, client, identity, store, imds_clock, report)
        reports = dispatcher.get_worker(sink.name)
        agent = Agent(
            link,
            origin,
            machine,
            poller,
            client,
            ApprovalEngine(no_approvals, origin),
            clock,
            reports_wait=lambda: reports.waiting > 0,
        )
        relay = Relay(
            store=store,
            gate=agent.votes,
            dispatcher=dispatcher,
            source=poller,
            origin=origin,
            clock=clock,
        )

        # Nothing that an agent may reload makes another of these parts.
        name = f"agent {origin.relay} of scope {origin.scope}"
        running_relay = RunningRelay(
            config, server, store, clock, report, lambda _: nullcontext(relay), name, poller
        )
        async with running(agent=agent.run(), delivery=dispatcher.run()):
            try:
                async with running_relay.entered(), polling(poller, store):
                    yield running_relay
            finally:
                await agent.orders.stop(DRAIN_TIMEOUT / 2)
                await drain(dispatcher)
