"""``release``: ends a hold."""

from __future__ import annotations

from relay.cli._client import Client
from relay.cli._connection import with_client
from relay.cli._decision import AZURE_PROCEEDS, Reason, Revision, decide
from relay.cli._event_text import describe_waits
from relay.cli._options import AsJson, EventId
from relay.cli._output import print_json, print_output


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
    answer = await decide(relay, shown, "release", revision=revision, reason=reason)
    if as_json:
        print_json(answer)
        return
    match answer["state"]:
        case "granted":
            print_output(
                "released, and granted: rules and votes are satisfied, the StartRequest follows"
            )
        case "waiting":
            print_output(f"released and approved, and waiting for {describe_waits(answer)}")
        case "pending":
            print_output(f"released; pending: {answer['votes']} of {answer['required']} votes")
        case "released":
            print_output("released; nobody has voted")
        case "held":
            print_output(f"released; somebody else still holds it. {AZURE_PROCEEDS}")
        case state:
            print_output(state)
