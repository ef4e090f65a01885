"""``approve``, ``hold`` and ``release`` decide about one event; ``approvals`` is the switch."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from relay.cli._events import (
    describe_holds_in_force,
    describe_limit_waits,
    event_fields,
    get_event,
    vote_count,
)
from relay.cli._options import AZURE_PROCEEDS, EventId, Reason, argument, option
from relay.cli._output import CommandFailed, format_local_time, print_lines, print_to_stderr
from relay.cli.client import Client, RelayCall
from relay.errors import ConfigError
from relay.settings import join_names

Revision = Annotated[
    str | None,
    option(
        "--revision",
        "REVISION",
        "The state that is meant. Default: the current one, which is shown.",
    ),
]
_FOLLOWS = "the StartRequest follows"
Ticket = Annotated[
    str | None,
    option("--ticket", "TICKET", "The change or ticket that allows it, such as CHG-1234."),
]


async def decide(
    relay: Client,
    event: Mapping[str, Any],
    decision: Literal["approve", "hold", "release"],
    revision: str | None = None,
    reason: str | None = None,
    ticket: str | None = None,
) -> Any:
    """Send a decision about this or another state of the event. Return the relay's answer."""
    body = {
        "eventId": event["eventId"],
        "decision": decision,
        "revision": revision or event["revision"],
        "scope": event["scope"],
        "reason": reason,
        "ticket": ticket,
    }
    return await relay.post("approvals", body={key: text for key, text in body.items() if text})


async def approve(
    call: RelayCall,
    event: EventId,
    *,
    revision: Revision = None,
    reason: Reason = None,
    ticket: Ticket = None,
    yes: Annotated[bool, option("--yes", None, "Do not ask.", "-y")] = False,
) -> None:
    """Approve an event. If the rules are satisfied, Azure may start it before its time.

    Shows the event and asks. Where nobody can be asked, --revision or --yes is needed.
    """
    shown = await get_event(call.relay, event)
    if not (yes or revision or sys.stdin.isatty()):
        raise ConfigError(
            "standard input is no terminal, so nobody can be asked: give --revision for one state "
            "of the event, or --yes for its current state"
        )
    for name, value in event_fields(shown):
        if value is not None:
            print_to_stderr(f"{name:<11} {value}")
    machines = len(shown["resources"])
    scope = f", for all {machines} machines" if machines > 1 else ""
    print_to_stderr(
        f"Approval lets Azure start it at once{scope}. "
        "Without it Azure proceeds at NotBefore regardless."
    )
    if not yes and sys.stdin.isatty() and not _is_confirmed():
        raise CommandFailed("nothing was approved")
    answer = await decide(call.relay, shown, "approve", revision, reason, ticket)
    call.for_people(answer)
    votes = vote_count(answer) if answer["required"] else f"rule {answer['rule']}"
    standing = describe_holds_in_force(answer.get("standingHolds", ()))
    sentences = {
        "granted": f"granted ({votes}): {answer.get('notice', _FOLLOWS)}",
        "waiting": f"approved, and waiting ({votes}) for {describe_limit_waits(answer)}",
        "pending": f"recorded, and pending: {votes}",
        "held": f"recorded, and held ({votes}): {standing or 'somebody'} holds this event; "
        f"`imds-relay {'holds end' if standing else 'release'}` ends a hold",
    }
    print_lines(sentences.get(answer["state"], f"{answer['state']} ({votes})"))


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


async def hold(
    call: RelayCall,
    event: EventId,
    *,
    revision: Revision = None,
    reason: Reason = None,
    ticket: Ticket = None,
) -> None:
    """Keep this relay from approving an event, whatever rules and votes say.

    Azure proceeds at NotBefore regardless, and other relays and Azure Resource Manager can still
    approve.
    """
    shown = await get_event(call.relay, event)
    answer = await decide(call.relay, shown, "hold", revision, reason, ticket)
    print_to_stderr(AZURE_PROCEEDS)
    if "notice" in answer:
        print_to_stderr(f"Note: {answer['notice']}.")
    call.for_people(answer)
    machines = join_names(shown["resources"]) or "no machine"
    not_before = format_local_time(shown["notBefore"])
    details = f"{machines}, not before {not_before}" if not_before else machines
    print_lines(
        f"held: this relay sends no StartRequest for {shown['eventType'] or 'event'} of {details} "
        "until it is released"
    )


async def release(
    call: RelayCall,
    event: EventId,
    *,
    revision: Revision = None,
    reason: Reason = None,
    ticket: Ticket = None,
) -> None:
    """End a hold. Rules and votes are weighed again."""
    shown = await get_event(call.relay, event)
    answer = await decide(call.relay, shown, "release", revision, reason, ticket)
    call.for_people(answer)
    holders = describe_holds_in_force(answer.get("standingHolds", ())) or "somebody else"
    sentences = {
        "granted": "released, and granted: rules and votes are satisfied, "
        + answer.get("notice", _FOLLOWS),
        "waiting": f"released and approved, and waiting for {describe_limit_waits(answer)}",
        "pending": f"released; pending: {vote_count(answer)}",
        "released": "released; nobody has voted",
        "held": f"released; {holders} still holds it. {AZURE_PROCEEDS}",
    }
    print_lines(sentences.get(answer["state"], answer["state"]))


async def approvals(
    call: RelayCall,
    mode: Annotated[Literal["on", "dry-run", "off"], argument("MODE", "on, dry-run or off.")],
) -> None:
    """Turn approvals on, off, or to a dry run that decides everything and sends nothing.

    The relay remembers the mode. The stricter of this mode and the configuration applies.
    """
    answer = call.for_people(await call.relay.put("approvals", "mode", body={"mode": mode}))
    stricter = f", not {mode}: the configuration is stricter (approvals.enabled, approvals.dry_run)"
    print_lines(f"approvals are {answer['mode']}{stricter if answer['mode'] != mode else ''}")
