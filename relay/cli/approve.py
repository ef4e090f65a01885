"""``approve``, ``hold``, ``release`` and ``approvals``: what people decide."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from relay.cli._client import Client, with_client
from relay.cli._exit_codes import CommandFailed
from relay.cli._output import (
    format_local_time,
    join_names,
    pluralize,
    print_json,
    print_output,
    print_status,
)
from relay.cli.events import AsJson, EventId, about
from relay.errors import ConfigError

Revision = Annotated[
    str | None,
    typer.Option(
        "--revision",
        metavar="REVISION",
        show_default=False,
        help="The state that is meant. Without it: the one that is shown.",
    ),
]
Reason = Annotated[
    str | None, typer.Option("--reason", metavar="TEXT", show_default=False, help="For the audit.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

_REGARDLESS = "Azure proceeds at NotBefore regardless, and other relays and Azure Resource Manager can still approve."


@with_client
async def approve(
    relay: Client,
    event: EventId,
    *,
    revision: Revision = None,
    reason: Reason = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Approve an event: where the rules are satisfied, Azure may start it before its time.

    Shows what is approved, and asks. Where nobody can be asked, --revision or --yes is needed.
    """
    if not (yes or revision or sys.stdin.isatty()):
        raise ConfigError(
            "nobody can be asked here: give --revision with the state that is meant, or --yes for whatever it is now"
        )
    found = await relay.get("events", event)
    for name, value in about(found):
        if value is not None:
            print_status(f"{name:<11} {value}")
    everywhere = (
        f", for all {len(found['resources'])} machines" if len(found["resources"]) > 1 else ""
    )
    print_status(
        f"Approval lets Azure start it at once{everywhere}. Without it Azure proceeds at NotBefore regardless."
    )
    if not yes and sys.stdin.isatty() and not _agreed():
        raise CommandFailed("nothing was approved")
    answer = await _decide(relay, found, "approve", revision, reason)
    if as_json:
        print_json(answer)
        return
    votes = (
        f"{answer['votes']} of {pluralize(answer['required'], 'vote')}"
        if answer["required"]
        else f"rule {answer['rule']}"
    )
    said = {
        "granted": f"granted ({votes}): the StartRequest follows",
        "pending": f"recorded, and pending: {votes}",
        "held": f"recorded, and held ({votes}): somebody holds this event; `imds-relay release` ends a hold",
    }
    print_output(said.get(answer["state"], f"{answer['state']} ({votes})"))


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

    Azure proceeds at NotBefore regardless, and other relays and Azure Resource Manager can still approve.
    """
    found = await relay.get("events", event)
    answer = await _decide(relay, found, "hold", revision, reason)
    print_status(_REGARDLESS)
    if as_json:
        print_json(answer)
    else:
        print_output(
            f"held: this relay sends no StartRequest for {_named(found)} until it is released"
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
    found = await relay.get("events", event)
    answer = await _decide(relay, found, "release", revision, reason)
    if as_json:
        print_json(answer)
        return
    said = {
        "granted": "released, and granted: rules and votes are satisfied, the StartRequest follows",
        "pending": f"released; pending: {answer['votes']} of {answer['required']} votes",
        "released": "released; nobody has voted",
        "held": f"released; somebody else still holds it. {_REGARDLESS}",
    }
    print_output(said.get(answer["state"], answer["state"]))


@with_client
async def approvals(
    relay: Client,
    mode: Annotated[Literal["on", "dry-run", "off"], typer.Argument(show_default=False)],
    *,
    as_json: AsJson = False,
) -> None:
    """Turn approvals on, off, or to a dry run in which all is decided and nothing is sent. It is remembered.

    Of this switch and the configuration the stricter holds.
    """
    answer = await relay.put("approvals", "mode", body={"mode": mode})
    if as_json:
        print_json(answer)
        return
    now = answer["mode"]
    print_output(
        f"approvals are {now}"
        + (
            ""
            if now == mode
            else f", not {mode}: the configuration is stricter (approvals.enabled, approvals.dry_run)"
        )
    )


def _agreed() -> bool:
    # The event loop would take Ctrl-C for the end of its task, and wait on for the answer.
    of_the_loop = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return typer.confirm("Approve this?", err=True)
    except typer.Abort:
        print_status("")  # ends the line of the question
        return False
    finally:
        signal.signal(signal.SIGINT, of_the_loop)


def _named(event: Mapping[str, Any]) -> str:
    due = f", not before {format_local_time(event['notBefore'])}" if event["notBefore"] else ""
    return (
        f"{event['eventType'] or 'event'} of {join_names(event['resources']) or 'no machine'}{due}"
    )


async def _decide(
    relay: Client, event: dict[str, Any], decision: str, revision: str | None, reason: str | None
) -> dict[str, Any]:
    body = {
        "eventId": event["eventId"],
        "decision": decision,
        "revision": revision or event["revision"],
    }
    answer: dict[str, Any] = await relay.post(
        "approvals", body=body | ({"reason": reason} if reason else {})
    )
    return answer
