"""``doctor``: whether this machine and its configuration would let the relay do its work. It changes nothing and tells nobody."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import asdict
from typing import Annotated, Any

import typer

from relay.amqp import approval_consumer as approvals_over_amqp
from relay.amqp.diagnostics import diagnose as examine_broker
from relay.api.diagnostics import diagnose as examine_api
from relay.cli._exit_codes import EXIT_DONE, EXIT_FAILED
from relay.cli._output import pluralize, print_json, print_output, print_status, print_table
from relay.cli.check import warnings_of
from relay.cli.events import AsJson
from relay.cli.run import ConfigFile
from relay.clock import Clock, SystemClock
from relay.config import Config, Loaded, load, sink_members
from relay.config.file_permissions import exposed_secret_files
from relay.diagnostics import Finding, ok
from relay.imds.diagnostics import diagnose as examine_source
from relay.imds.discovery import Instance, derive_scope, resource_names
from relay.outbox.diagnostics import diagnose as examine_store
from relay.sinks import SinkSettings

Poll = Annotated[
    bool,
    typer.Option(
        "--poll",
        help="Also read the document of events. The first read ever switches the feature on for this VM and may take two minutes; "
        "from then on Azure waits for approval of reboots that users start.",
    ),
]


def doctor(*, config: ConfigFile = None, poll: Poll = False, as_json: AsJson = False) -> None:
    """Look whether the relay would do its work here: configuration, metadata service, clock, state file, sinks, API, secrets.

    It looks as far as a handshake: nothing is posted, made or approved, and Azure's feature is not switched on without --poll.
    Run it as the user that the service has. A wrong configuration ends it with 2, as ever; anything that failed with 1.
    """
    loaded = load(config)
    findings = asyncio.run(_examined(loaded, SystemClock(), poll=poll))
    if as_json:
        print_json([asdict(one) for one in findings])
    else:
        print_table(
            ("", "what", "how it is"),
            [(one.state, one.subject, one.line) for one in findings],
            empty="",
        )
        wrong = [sum(one.state == state for one in findings) for state in ("warning", "failed")]
        print_output("", f"{pluralize(wrong[0], 'warning')}, {wrong[1]} failed")
    raise typer.Exit(EXIT_FAILED if any(one.state == "failed" for one in findings) else EXIT_DONE)


async def _examined(loaded: Loaded, clock: Clock, *, poll: bool) -> list[Finding]:
    config = loaded.config
    findings = [
        ok("configuration", f"{loaded.file or 'the defaults: there is no file'}"),
        *exposed_secret_files(loaded),
    ]
    findings += [Finding("rules", "warning", one) for one in warnings_of(config)]
    at_api, runs = await examine_api(config.api)
    needed = "auto" in (config.scope, config.relay)
    at_source, instance = await examine_source(
        config.source, clock, required=needed, poll=poll, running=runs, progress=print_status
    )
    scope = (
        config.scope
        if config.scope != "auto"
        else derive_scope(instance)
        if instance is not None
        else None
    )
    vm_id = instance.vm_id if instance is not None else None
    at_store = await asyncio.to_thread(examine_store, config.store, scope=scope, vm_id=vm_id)
    at_sinks = await asyncio.gather(
        *(_sink(one, clock, scope or "unknown") for one in config.sinks)
    )
    findings += [
        *at_api,
        *at_source,
        *_names(config, instance),
        *at_store,
        *(one for found in at_sinks for one in found),
    ]
    if config.approvals.amqp is not None:
        amqp = config.approvals.amqp
        parts = approvals_over_amqp.topology(config.answers_on, scope or "unknown")
        queue = approvals_over_amqp.queue_of(config.answers_on, scope or "unknown")
        findings += await examine_broker(
            "approvals.amqp", amqp.targets(), parts, amqp.declare, reads=queue
        )
    return findings


async def _sink(settings: SinkSettings, clock: Clock, scope: str) -> list[Finding]:
    diagnose: Any = getattr(sink_members()[settings.kind], "diagnose", None)
    if diagnose is None:
        return [
            ok(
                f"sink {settings.name}",
                "of this kind nothing can be seen without sending: imds-relay ping",
            )
        ]
    found: list[Finding] = await diagnose(settings, clock, scope)
    return found


def _names(config: Config, instance: Instance | None) -> list[Finding]:
    if instance is None:
        return []
    scope = derive_scope(instance) if config.scope == "auto" else config.scope
    names = ", ".join(
        sorted(
            one for one in resource_names(instance, socket.gethostname()) if not one.startswith("_")
        )
    )
    return [ok("names", f"scope {scope}; events mean this VM where they name {names}")]
