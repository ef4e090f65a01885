"""``doctor``: examines whether the relay would work here. It changes and sends nothing."""

from __future__ import annotations

import asyncio
import logging
import socket
import stat
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import SecretStr

from relay.amqp.diagnostics import diagnose as diagnose_broker
from relay.amqp.topology import approvals_queue
from relay.api.doctor import diagnose as diagnose_api
from relay.cli._options import AsJson, ConfigFile, option
from relay.cli._output import (
    EXIT_DONE,
    EXIT_FAILED,
    pluralize,
    print_json,
    print_lines,
    print_to_stderr,
)
from relay.cli._tables import print_table
from relay.clock import Clock, SystemClock
from relay.config import Config, LoadedConfig, load, load_kinds
from relay.config.model import config_warnings
from relay.events.build import Origin
from relay.fleet.diagnostics import diagnose_broker_for_agent, diagnose_broker_for_hub
from relay.fleet.routing import HUB, hub_approvals_queue
from relay.fleet.settings import HubSettings
from relay.imds.diagnostics import diagnose as diagnose_source
from relay.imds.instance_metadata import Instance, derive_scope, resource_names
from relay.logs import Finding, failure, ok, warning
from relay.settings import values_in
from relay.sinks import SinkSettings
from relay.store.diagnostics import diagnose as diagnose_store

Poll = Annotated[
    bool,
    option(
        "--poll",
        None,
        "Also read the document of events. The first read ever switches the feature on for "
        "this VM and may take two minutes. From then on Azure waits for approval of reboots that "
        "users start.",
    ),
]


def doctor(*, config: ConfigFile = None, poll: Poll = False, as_json: AsJson = False) -> None:
    """Examine whether the relay would work here.

    Examines configuration, metadata service, clock, state file, sinks, fleet, API and secrets. It
    connects to sinks, and posts, creates and approves nothing. It does not switch on Azure's
    feature without --poll. Run it as the service's user. The exit code is 2 for a wrong
    configuration, 1 if anything failed.
    """
    loaded = load(config)
    for library in ("aiormq", "asyncio"):  # they log on standard error what the findings say
        logging.getLogger(library).addHandler(logging.NullHandler())
    findings = asyncio.run(_diagnose(loaded, SystemClock(), poll=poll))
    failures = sum(finding.state == "failed" for finding in findings)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        rows = [(finding.state, finding.about, finding.line) for finding in findings]
        print_table(("", "what", "how it is"), rows, empty="")
        warnings = sum(finding.state == "warning" for finding in findings)
        print_lines("", f"{pluralize(warnings, 'warning')}, {failures} failed")
    raise typer.Exit(EXIT_FAILED if failures else EXIT_DONE)


async def _diagnose(loaded: LoadedConfig, clock: Clock, *, poll: bool) -> list[Finding]:
    config = loaded.config
    findings = [
        ok("configuration", f"{loaded.file or 'the defaults: there is no file'}"),
        *diagnose_secret_files(loaded),
        *(warning("configuration", text) for text in config_warnings(config)),
    ]
    api_findings, is_running = await diagnose_api(config.api, config.store.path)
    findings += api_findings
    instance: Instance | None = None
    own_scope: str | None = HUB
    if not isinstance(config.fleet, HubSettings):
        source_findings, instance = await diagnose_source(
            config.source,
            clock,
            required="auto" in (config.scope, config.relay),
            poll=poll,
            running=is_running,
            progress=print_to_stderr,
        )
        findings += source_findings
        own_scope = derive_scope(instance) if instance is not None else None
    scope = own_scope if config.scope == "auto" else config.scope
    if instance is not None:
        names = resource_names(instance, socket.gethostname())
        # The oldest api-version puts an underscore before each name.
        plain_names = ", ".join(sorted(name for name in names if not name.startswith("_")))
        message = f"scope {scope}; events mean this VM if they name {plain_names}"
        findings.append(ok("names", message))
    vm_id = instance.vm_id if instance is not None else None
    findings += await asyncio.to_thread(diagnose_store, config.store, scope=scope, vm_id=vm_id)
    for found in await asyncio.gather(
        *(_diagnose_sink(sink, clock, scope or "unknown") for sink in config.sinks)
    ):
        findings += found
    return findings + await _diagnose_brokers(config, scope, instance)


async def _diagnose_sink(settings: SinkSettings, clock: Clock, scope: str) -> list[Finding]:
    diagnose: Any = getattr(load_kinds().modules[settings.kind], "diagnose", None)
    if diagnose is None:
        message = "this kind of sink can only be tested by sending: imds-relay sink ping"
        return [ok(f"sink {settings.name}", message)]
    findings: list[Finding] = await diagnose(settings, clock, scope)
    return findings


async def _diagnose_brokers(
    config: Config, scope: str | None, instance: Instance | None
) -> list[Finding]:
    findings: list[Finding] = []
    fleet, amqp = config.fleet, config.approvals.amqp
    if isinstance(fleet, HubSettings):
        findings += await diagnose_broker_for_hub(fleet)
    elif fleet is not None:
        relay = config.relay
        if relay == "auto":
            relay = instance.name if instance is not None else ""
        origin = Origin(scope, relay) if scope and relay else None
        findings += await diagnose_broker_for_agent(fleet, origin)
    if amqp is not None:
        exchange = config.approval_answers_exchange
        queue = approvals_queue(exchange, scope or "unknown")
        if isinstance(fleet, HubSettings):
            queue = hub_approvals_queue(exchange)
        urls, parts = amqp.broker_urls(), queue.topology
        findings += await diagnose_broker(
            "approvals.amqp", urls, parts, amqp.declare, reads=(queue.name,)
        )
    return findings


def diagnose_secret_files(loaded: LoadedConfig) -> list[Finding]:
    public_keys = ("cert_file", "ca_file", "client_ca_file")
    files: dict[Path, str] = {}
    secrets: list[str] = []
    for path, value in values_in(loaded.config):
        key = str(path[-1]) if path else ""
        if isinstance(value, SecretStr) and value:
            secrets.append(".".join(map(str, path)))
        if isinstance(value, Path) and key.endswith("_file") and key not in public_keys:
            files[value] = ".".join(map(str, path))
    writable: list[Finding] = []
    if loaded.file is not None and secrets:
        files[loaded.file] = f"the configuration, which holds the secret {secrets[0]} itself"
    elif loaded.file is not None and loaded.file.stat().st_mode & stat.S_IWOTH:
        problem = f"everybody on this machine can write {loaded.file}, and so control the relay"
        writable = [failure("configuration", problem, f"chmod o-w {loaded.file}")]
    findings: list[Finding] = []
    for file, label in files.items():
        remedy = f"chmod o-rwx {file}"
        who = "everybody on this machine can"
        try:
            mode = file.stat().st_mode
        except OSError as error:
            problem = f"{file} ({label}) cannot be examined: {error.strerror}"
            remedy = "correct its path, or the rights of its folders"
            findings.append(failure("secrets", problem, remedy))
            continue
        if mode & stat.S_IWOTH:
            findings.append(failure("secrets", f"{who} write {file} ({label})", remedy))
        elif mode & stat.S_IROTH:
            findings.append(warning("secrets", f"{who} read {file} ({label})", remedy))
    good = f"nobody else can read their files ({len(files)})" if files else "no secret is in a file"
    return writable + (findings or [ok("secrets", good)])
