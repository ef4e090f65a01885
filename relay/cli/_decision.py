"""What ``approve``, ``hold`` and ``release`` share: their options, and the call that decides."""

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
        show_default=False,
        help="The state that is meant. Default: the current one, which is shown.",
    ),
]
Reason = Annotated[
    str | None,
    typer.Option("--reason", metavar="TEXT", show_default=False, help="Recorded for the audit."),
]


async def decide(
    relay: Client,
    event: Mapping[str, Any],
    decision: Literal["approve", "hold", "release"],
    revision: str | None,
    reason: str | None,
) -> dict[str, Any]:
    """Send a decision about an event. Return the relay's answer."""
    body = {
        "eventId": event["eventId"],
        "decision": decision,
        "revision": revision or event["revision"],
    }
    if reason:
        body["reason"] = reason
    answer: dict[str, Any] = await relay.post("approvals", body=body)
    return answer
