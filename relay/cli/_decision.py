"""What ``approve``, ``hold``, ``release`` and ``demo`` share: how to decide about an event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from relay.cli._client import Client

Revision = Annotated[
    str | None,
    typer.Option(
        "--revision",
        metavar="REVISION",
        help="The state that is meant. Default: the current one, which is shown.",
    ),
]
Reason = Annotated[
    str | None,
    typer.Option("--reason", metavar="TEXT", help="Recorded for the audit."),
]
AZURE_PROCEEDS = (
    "Azure proceeds at NotBefore regardless, and other relays and Azure Resource Manager "
    "can still approve."
)


async def decide(
    relay: Client,
    event: Mapping[str, Any],
    decision: Literal["approve", "hold", "release"],
    *,
    revision: str | None = None,
    reason: str | None,
) -> dict[str, Any]:
    """Send a decision about this or another state of the event. Return the relay's answer."""
    body = {
        "eventId": event["eventId"],
        "decision": decision,
        "revision": revision or event["revision"],
    }
    if "scope" in event:  # an older relay does not say it
        body["scope"] = event["scope"]
    if reason:
        body["reason"] = reason
    answer: dict[str, Any] = await relay.post("approvals", body=body)
    return answer
