"""Checks the metadata service for ``imds-relay doctor``.

It always reads instance metadata. It reads the document of events only on request, because the
first read switches the feature on (docs/protocol.md#the-first-call).
"""

from __future__ import annotations

from collections.abc import Callable

from relay.clock import Clock
from relay.errors import DocumentError, SourceError
from relay.imds import DISCOVER, SourceSettings
from relay.imds.client import ImdsClient
from relay.imds.document import parse_document
from relay.imds.instance_metadata import Instance, parse_instance
from relay.logs import Finding, failure, ok, warning

CLOCK_SKEW_WARNING = 5.0
"""Seconds between the clocks that are worth a warning."""
MAX_CLOCK_SKEW = 60.0
"""Seconds between the clocks from which receivers refuse good signatures and tokens."""
NOT_POLLED = (
    "not read: the first read switches the feature on for this VM and may take two minutes. "
    "From then on Azure waits for approval of reboots that users start. "
    "Read it with --poll, or start the relay"
)
NOT_SEARCHED = (
    f"not searched: a place where it may be is asked for the document. It is {NOT_POLLED}"
)


async def diagnose(
    settings: SourceSettings,
    clock: Clock,
    *,
    required: bool,
    poll: bool,
    running: bool,
    progress: Callable[[str], object],
) -> tuple[list[Finding], Instance | None]:
    """Return the findings about the service, and which VM this is if the service knows.

    ``required``: the scope or the name of the relay depends on instance metadata. ``poll``: also
    read the document. ``running``: a relay on this VM reads it already. ``progress`` is called
    before a step that takes long.
    """
    if settings.url == DISCOVER and not (poll or running):
        return [ok("metadata service", NOT_SEARCHED)], None
    async with ImdsClient(settings, clock) as client:
        findings: list[Finding] = []
        instance: Instance | None = None
        if settings.url == DISCOVER:
            progress("searching the metadata service")
        try:
            instance = parse_instance(await _read_instance(client, clock))
        except SourceError as error:
            subject = f"metadata service {settings.url}"
            if client.is_outside_virtual_network and not required:
                message = "it has no instance metadata, as is usual outside virtual networks"
                findings.append(ok(f"metadata service {client.base_url}", message))
            elif error.status == 404 and not required:
                remedy = "this is normal on a simulator; on Azure check source.url"
                findings.append(warning(subject, "it has no instance metadata (404)", remedy))
            else:
                remedy = "the relay tries again; if it goes on, check source.url"
                if error.status is None:  # nobody answered
                    remedy = "this must run on an Azure VM, and nothing may block the way there"
                findings.append(failure(subject, error.reason, remedy))
        else:
            message = f"this is VM {instance.name}, vmId {instance.vm_id}"
            findings.append(ok(f"metadata service {client.base_url}", message))
            findings += _check_clock(client.clock_skew)
        if poll:
            progress("reading the document of events: the first read may take two minutes")
            findings.append(await _check_events(client, settings.api_version))
        elif instance is not None:
            message = "the running relay reads them" if running else NOT_POLLED
            findings.append(ok("scheduled events", message))
    return findings, instance


async def _read_instance(client: ImdsClient, clock: Clock) -> bytes:
    """Try several times: other programs on the VM may have used up the rate limit."""
    for _ in range(2):
        try:
            return await client.read_instance_metadata_body()
        except SourceError as error:
            if error.status is None or error.status == 404:
                raise
        await clock.sleep(1.0)
    return await client.read_instance_metadata_body()


def _check_clock(skew: float | None) -> list[Finding]:
    if skew is None:
        return []
    seconds, direction = abs(skew), "behind" if skew > 0 else "ahead of"
    message = f"this machine's clock is {seconds:.0f} s {direction} the metadata service's"
    remedy = (
        "synchronize it (chrony, systemd-timesyncd): "
        "signatures, tokens and NotBefore are compared with it"
    )
    if seconds > MAX_CLOCK_SKEW:
        return [failure("clock", message, remedy)]
    if seconds > CLOCK_SKEW_WARNING:
        return [warning("clock", message, remedy)]
    return [ok("clock", "it agrees with the metadata service's")]


async def _check_events(client: ImdsClient, api_version: str) -> Finding:
    try:
        document = parse_document((await client.read_document()).content, api_version)
    except SourceError as error:
        remedy = "check that nothing blocks the connection; a running relay keeps trying"
        if isinstance(error, DocumentError):
            remedy = "check source.api_version; else ask Azure's support"
        return failure("scheduled events", error.reason, remedy)
    return ok("scheduled events", f"the document holds {len(document.events)} events")
