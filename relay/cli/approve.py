"""``approve``: votes for an event, after it was shown and confirmed."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from relay.cli._client import Client
from relay.cli._connection import with_client
from relay.cli._decision import Reason, Revision, decide
from relay.cli._event_lookup import get_event
from relay.cli._event_text import (
    describe_limit_waits,
    describe_standing_holds_in_force,
    event_fields,
    vote_count,
)
from relay.cli._exit_codes import CommandFailed
from relay.cli._options import AsJson, EventId
from relay.cli._output import print_json, print_lines, print_to_stderr
from relay.errors import ConfigError

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


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
    shown = await get_event(relay, event)
    _print_event_to_approve(shown)
    if not yes and sys.stdin.isatty() and not _is_confirmed():
        raise CommandFailed("nothing was approved")
    answer = await decide(relay, shown, "approve", revision=revision, reason=reason)
    if as_json:
        print_json(answer)
        return
    votes = vote_count(answer) if answer["required"] else f"rule {answer['rule']}"
    match answer["state"]:
        case "granted":
            print_lines(f"granted ({votes}): the StartRequest follows")
        case "waiting":
            print_lines(f"approved, and waiting ({votes}) for {describe_limit_waits(answer)}")
        case "pending":
            print_lines(f"recorded, and pending: {votes}")
        case "held":
            standing = describe_standing_holds_in_force(answer.get("standingHolds", ()))
            print_lines(
                f"recorded, and held ({votes}): {standing or 'somebody'} holds this event; "
                f"`imds-relay {'holds end' if standing else 'release'}` ends a hold"
            )
        case state:
            print_lines(f"{state} ({votes})")


def _print_event_to_approve(event: Mapping[str, Any]) -> None:
    for name, value in event_fields(event):
        if value is not None:
            print_to_stderr(f"{name:<11} {value}")
    machines = len(event["resources"])
    scope = f", for all {machines} machines" if machines > 1 else ""
    print_to_stderr(
        f"Approval lets Azure start it at once{scope}. "
        "Without it Azure proceeds at NotBefore regardless."
    )


def _is_confirmed() -> bool:
    # The event loop's own handler of Ctrl-C would cancel its task and then wait for the answer.
    loop_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return typer.confirm("Approve this?", err=True)
    except typer.Abort:
        print_to_stderr("")  # ends the line of the question
        return False
    finally:
        signal.signal(signal.SIGINT, loop_handler)
