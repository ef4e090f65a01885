"""``approve``, ``hold``, ``release`` and ``approvals``: decide about events."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from relay.cli._client import Client
from relay.cli._connection import with_client
from relay.cli._event_text import event_summary, vote_count
from relay.cli._exit_codes import CommandFailed
from relay.cli._options import AsJson, EventId
from relay.cli._output import (
    format_local_time,
    join_names,
    print_json,
    print_output,
    print_status,
)
from relay.errors import ConfigError

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
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
_AZURE_PROCEEDS = (
    "Azure proceeds at NotBefore regardless, and other relays and Azure Resource Manager "
    "can still approve."
)


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
    """Approve an event. If the rules are satisfied, Azure may start it before its time.

    Shows the event and asks. Where nobody can be asked, --revision or --yes is needed.
    """
    if not (yes or revision or sys.stdin.isatty()):
        raise ConfigError(
            "standard input is no terminal, so nobody can be asked: give --revision for one state "
            "of the event, or --yes for its current state"
        )
    shown = await relay.get("events", event)
    _print_question(shown)
    if not yes and sys.stdin.isatty() and not _is_confirmed():
        raise CommandFailed("nothing was approved")
    answer = await decide(relay, shown, "approve", revision=revision, reason=reason)
    if as_json:
        print_json(answer)
        return
    votes = vote_count(answer) if answer["required"] else f"rule {answer['rule']}"
    match answer["state"]:
        case "granted":
            print_output(f"granted ({votes}): the StartRequest follows")
        case "pending":
            print_output(f"recorded, and pending: {votes}")
        case "held":
            print_output(
                f"recorded, and held ({votes}): somebody holds this event; "
                "`imds-relay release` ends a hold"
            )
        case state:
            print_output(f"{state} ({votes})")


def _print_question(event: Mapping[str, Any]) -> None:
    for name, value in event_summary(event):
        if value is not None:
            print_status(f"{name:<11} {value}")
    machines = len(event["resources"])
    scope = f", for all {machines} machines" if machines > 1 else ""
    print_status(
        f"Approval lets Azure start it at once{scope}. "
        "Without it Azure proceeds at NotBefore regardless."
    )


def _is_confirmed() -> bool:
    # The event loop's own handler of Ctrl-C would cancel its task and then wait for the answer.
    loop_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return typer.confirm("Approve this?", err=True)
    except typer.Abort:
        print_status("")  # ends the line of the question
        return False
    finally:
        signal.signal(signal.SIGINT, loop_handler)


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
    answer = await decide(relay, shown, "hold", revision=revision, reason=reason)
    print_status(_AZURE_PROCEEDS)
    if as_json:
        print_json(answer)
        return
    machines = join_names(shown["resources"]) or "no machine"
    not_before = format_local_time(shown["notBefore"])
    details = f"{machines}, not before {not_before}" if not_before else machines
    print_output(
        f"held: this relay sends no StartRequest for {shown['eventType'] or 'event'} of {details} "
        "until it is released"
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
    answer = await decide(relay, shown, "release", revision=revision, reason=reason)
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


@with_client
async def approvals(
    relay: Client,
    mode: Literal["on", "dry-run", "off"],
    *,
    as_json: AsJson = False,
) -> None:
    """Turn approvals on, off, or to a dry run that decides everything and sends nothing.

    The relay remembers the mode. The stricter of this mode and the configuration applies.
    """
    answer = await relay.put("approvals", "mode", body={"mode": mode})
    if as_json:
        print_json(answer)
        return
    text = f"approvals are {answer['mode']}"
    if answer["mode"] != mode:
        text += (
            f", not {mode}: the configuration is stricter (approvals.enabled, approvals.dry_run)"
        )
    print_output(text)


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
    if reason:
        body["reason"] = reason
    answer: dict[str, Any] = await relay.post("approvals", body=body)
    return answer
