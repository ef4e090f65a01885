"""``hold``: keeps this relay from approving an event."""

from __future__ import annotations

from relay.cli._client import Client
from relay.cli._connection import with_client
from relay.cli._decision import AZURE_PROCEEDS, Reason, Revision, decide
from relay.cli._event_lookup import get_event
from relay.cli._options import AsJson, EventId
from relay.cli._output import (
    format_local_time,
    join_names,
    print_json,
    print_lines,
    print_to_stderr,
)


@with_client
async def hold(
    relay: Client,
    event: EventId,
    *,
    revision: Revision = None,
    reason: Reason = None,
    as_json: AsJson = False,
) -> None:
    """Keep this relay from approving an event, whatever rules and votes say.

    Azure proceeds at NotBefore regardless, and other relays and Azure Resource Manager can still
    approve.
    """
    shown = await get_event(relay, event)
    answer = await decide(relay, shown, "hold", revision=revision, reason=reason)
    print_to_stderr(AZURE_PROCEEDS)
    if "notice" in answer:
        print_to_stderr(f"Note: {answer['notice']}.")
    if as_json:
        print_json(answer)
        return
    machines = join_names(shown["resources"]) or "no machine"
    not_before = format_local_time(shown["notBefore"])
    details = f"{machines}, not before {not_before}" if not_before else machines
    print_lines(
        f"held: this relay sends no StartRequest for {shown['eventType'] or 'event'} of {details} "
        "until it is released"
    )
