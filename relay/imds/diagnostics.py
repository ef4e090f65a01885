"""Looks at the metadata service for `doctor`. Instance metadata is read freely; the document of events only where asked to."""

from __future__ import annotations

from collections.abc import Callable

from relay.clock import Clock
from relay.diagnostics import Finding, failure, ok, warning
from relay.errors import DocumentError, SourceError
from relay.events.model import parse_document
from relay.imds import SourceSettings
from relay.imds.client import ImdsClient
from relay.imds.discovery import Instance, parse_instance

CLOCK_OFFSET_WARNING, MAX_CLOCK_OFFSET = 5.0, 60.0
"""Seconds that this clock may be off before somebody should know; and before good signatures and tokens are refused."""
_TRIES, _PAUSE = 3, 1.0
NOT_POLLED = (
    "not read: the first read ever switches the feature on for this VM, may take two minutes, and from then on Azure waits for approval of "
    "what users start. Read it with --poll, or start the relay"
)


async def diagnose(
    settings: SourceSettings,
    clock: Clock,
    *,
    needed: bool,
    poll: bool,
    running: bool,
    progress: Callable[[str], object],
) -> tuple[list[Finding], Instance | None]:
    """What the service says, and which VM this is where it knows.

    ``needed``: scope or relay follow from instance metadata. ``poll``: also read the document. ``running``: a relay does
    so already, here. ``progress`` hears what is waited for.
    """
    async with ImdsClient(settings, clock) as client:
        about, instance = f"metadata service {settings.url}", None
        try:
            instance = parse_instance(await _instance(client, clock))
        except SourceError as error:
            if error.status == 404 and not needed:
                found = warning(
                    about,
                    "it knows no instance metadata (404)",
                    "none on a simulator; on Azure see source.url",
                )
            else:
                found = failure(
                    about,
                    error.reason,
                    "this must run on an Azure VM, and nothing may block the way to that address",
                )
            return [found, *([await _events(client, progress)] if poll else [])], None
        findings = [
            ok(about, f"this is VM {instance.name}, vmId {instance.vm_id}"),
            *_clock(client),
        ]
        if poll:
            findings.append(await _events(client, progress))
        else:
            findings.append(
                ok("scheduled events", "the running relay reads them" if running else NOT_POLLED)
            )
    return findings, instance


async def _instance(client: ImdsClient, clock: Clock) -> bytes:
    """Instance metadata, tried again: the calls of a VM are counted together, and somebody else's may be one too many."""
    for _ in range(_TRIES - 1):
        try:
            return await client.read_instance()
        except SourceError as error:
            if error.status is None or error.status == 404:
                raise
        await clock.sleep(_PAUSE)
    return await client.read_instance()


def _clock(client: ImdsClient) -> list[Finding]:
    if client.clock_offset is None:
        return []
    off, about = abs(client.clock_offset), "clock"
    said = f"this machine's clock is {off:.0f} s {'behind' if client.clock_offset > 0 else 'ahead of'} the metadata service's"
    remedy = "synchronise it (chrony, systemd-timesyncd): signatures, tokens and NotBefore are compared with it"
    if off > MAX_CLOCK_OFFSET:
        return [failure(about, said, remedy)]
    return [
        warning(about, said, remedy)
        if off > CLOCK_OFFSET_WARNING
        else ok(about, "it agrees with the metadata service's")
    ]


async def _events(client: ImdsClient, progress: Callable[[str], object]) -> Finding:
    about = "scheduled events"
    progress("reading the document of events: the first time that may take two minutes")
    try:
        document = parse_document(await client.read_document())
    except DocumentError as error:
        return failure(about, error.reason, "see source.api_version; else ask Azure's support")
    except SourceError as error:
        return failure(
            about,
            error.reason,
            "the relay would try again for ever; see that nothing blocks the way",
        )
    return ok(about, f"the document holds {len(document.events)} events")
