"""``hold`` and ``release``: keep this relay from approving an event, and end that again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relay.cli._client import Client
from relay.cli._connection import with_client
from relay.cli._decision import Reason, Revision, decide
from relay.cli._options import AsJson, EventId
from relay.cli._output import (
    format_local_time,
    join_names,
    print_json,
    print_output,
    print_status,
)

_AZURE_PROCEEDS = (
    "Azure proceeds at NotBefore regardless, and other relays and Azure Resource Manager "
    "can still approve."
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
    shown = await relay.get("events", event)
    answer = await decide(relay, shown, "hold", revision, reason)
    print_status(_AZURE_PROCEEDS)
    if as_json:
        print_json(answer)
    else:
        print_output(
            f"held: this relay sends no StartRequest for {_describe(shown)} until it is released"
        )


@with_client
async def release(
    relay: Client,
    event: EventId,
    *,
    revision: Revision = None,
    reason: Reason = None,
    as_json: AsJson = False,
) -> None:
    """End a hold. Rules and votes are weighed again."""
    shown = await relay.get("events", event)
    answer = await decide(relay, shown, "release", revision, reason)
    if as_json:
        print_json(answer)
        return
    match answer["state"]:
        case "granted":
            print_output(
                "released, and granted: rules and votes are satisfied, the StartRequest follows"
            )
        case "pending":
            print_output(f"released; pending: {answer['votes']} of {answer['required']} votes")
        case "released":
            print_output("released; nobody has voted")
        case "held":
            print_output(f"released; somebody else still holds it. {_AZURE_PROCEEDS}")
        case state:
            print_output(state)


def _describe(event: Mapping[str, Any]) -> str:
    machines = join_names(event["resources"]) or "no machine"
    not_before = format_local_time(event["notBefore"])
    suffix = f", not before {not_before}" if not_before else ""
    return f"{event['eventType'] or 'event'} of {machines}{suffix}"
