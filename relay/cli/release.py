"""``release``: ends a hold."""

from __future__ import annotations

from relay.cli._client import Client
from relay.cli._connection import with_client
from relay.cli._decision import AZURE_PROCEEDS, Reason, Revision, decide
from relay.cli._event_lookup import get_event
from relay.cli._event_text import describe_limit_waits, describe_standing_holds_in_force
from relay.cli._options import AsJson, EventId
from relay.cli._output import print_json, print_lines


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
    shown = await get_event(relay, event)
    answer = await decide(relay, shown, "release", revision=revision, reason=reason)
    if as_json:
        print_json(answer)
        return
    match answer["state"]:
        case "granted":
            print_lines(
                "released, and granted: rules and votes are satisfied, the StartRequest follows"
            )
        case "waiting":
            print_lines(f"released and approved, and waiting for {describe_limit_waits(answer)}")
        case "pending":
            print_lines(f"released; pending: {answer['votes']} of {answer['required']} votes")
        case "released":
            print_lines("released; nobody has voted")
        case "held":
            holders = (
                describe_standing_holds_in_force(answer.get("standingHolds", ())) or "somebody else"
            )
            print_lines(f"released; {holders} still holds it. {AZURE_PROCEEDS}")
        case state:
            print_lines(state)
