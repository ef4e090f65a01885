"""A relay without a fleet: it polls, tells, decides, and sends its StartRequests itself.

`start` puts its parts together. The poller records events in the store. The dispatcher delivers
them to the sinks. The gate decides, and sends StartRequests through the client of the poller.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial

from relay.api.state import Relay
from relay.approvals.engine import ApprovalEngine
from relay.approvals.gate import Gate
from relay.clock import Clock
from relay.config import Config
from relay.imds.client import ImdsClient
from relay.imds.poller import ImdsStartRequestPort
from relay.ingest import names_this_vm
from relay.roles.inner_half import RunningRelay, deciding
from relay.roles.parts import identify_relay, make_poller, open_api, open_store_with_log, polling
from relay.store import StateFileScopeAndVm

_log = logging.getLogger(__name__)


@asynccontextmanager
async def start(config: Config, clock: Clock) -> AsyncIterator[RunningRelay]:
    """Start a relay, yield it, and drain it in the end."""
    async with AsyncExitStack() as stack:
        server = await open_api(config, clock, stack)
        client = await stack.enter_async_context(ImdsClient(config.source, clock))
        identity = await identify_relay(config, client, clock)
        origin = identity.origin

        owner = StateFileScopeAndVm(origin.scope, identity.vm_id)
        store, report = await open_store_with_log(config, owner, origin, config.sinks, clock, stack)
        if not store.trusted:
            _log.warning(
                "cannot verify the VM ID, and the state file is bound to one VM: approvals are off"
            )

        poller = await make_poller(config, client, identity, store, clock, report)
        port = ImdsStartRequestPort(poller)
        names_us = partial(names_this_vm, resource_names=identity.names)
        make_relay = partial(Relay, store=store, source=poller, origin=origin, clock=clock)

        def enter(config: Config) -> AbstractAsyncContextManager[Relay]:
            engine = ApprovalEngine(
                config.approvals,
                origin,
                trusted=store.trusted,
                client_resources=config.api.resources_by_client_principal,
            )
            gate = Gate(engine, store, port, clock, names_us)
            return deciding(config, server, store, clock, report, gate=gate, make_relay=make_relay)

        name = f"relay {origin.relay} of scope {origin.scope}"
        running_relay = RunningRelay(config, server, store, clock, report, enter, name, poller)
        async with running_relay.entered(), polling(poller, store):
            yield running_relay
