"""``approve``, ``hold`` and ``release`` decide about one event, ``holds`` about all that match.

A standing hold keeps the relay from starting every event that can meet its conditions, for a time.
``approvals`` is the switch.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

import typer

from relay.cli._options import (
    AZURE_PROCEEDS,
    AllPages,
    DefaultGroup,
    EventId,
    Reason,
    argument,
    option,
)
from relay.cli._output import CommandFailed, format_local_time, print_lines, print_to_stderr
from relay.cli._tables import print_page
from relay.cli.client import Client, RelayCall, RelayCommand
from relay.cli.events import (
    describe_holds_in_force,
    describe_limit_waits,
    event_fields,
    get_event,
    vote_count,
)
from relay.errors import ConfigError
from relay.events.timestamps import format_rfc3339
from relay.sentences import describe_conditions
from relay.settings import join_names, parse_duration

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


# --- standing holds


Over = Annotated[bool, option("--over", None, "Also those that were ended or expired.")]
HoldId = Annotated[str, argument("HOLD", "Its id, or a unique beginning of it.")]

holds = typer.Typer(
    cls=DefaultGroup, help="List, add and end standing holds. Without a verb: list."
)


@holds.command("list", cls=RelayCommand)
async def list_holds(call: RelayCall, *, over: Over = False, all_pages: AllPages = False) -> None:
    """List standing holds: holds by conditions and for a time, also of events still to come.

    `imds-relay hold` holds one event that exists.
    """
    query = {"over": "true"} if over else {}
    page = call.for_people(await call.relay.pages("standing-holds", all_pages=all_pages, **query))
    columns = ("hold", "state", "from", "until", "by", "events", "reason")
    print_page(page, columns, _hold_row, empty="no standing holds")
    if page["items"]:
        print_to_stderr(AZURE_PROCEEDS)


def _hold_row(hold: Mapping[str, Any]) -> tuple[object, ...]:
    state = hold["state"]
    if "endedBy" in hold:
        state += f" by {hold['endedBy']}"
    return (
        hold["holdId"][:8],
        state,
        format_local_time(hold["starts"], relative=hold["state"] == "upcoming"),
        format_local_time(hold["ends"], relative=hold["state"] == "active"),
        hold["principal"],
        describe_conditions(hold),
        hold["reason"],
    )


@holds.command("add", cls=RelayCommand)
async def add_hold(
    call: RelayCall,
    *,
    reason: Annotated[str, option("--reason", "TEXT", "Why. It is shown wherever the hold is.")],
    duration: Annotated[
        str | None, option("--for", "DURATION", "How long it holds, such as 90m, 8h or 3d.")
    ] = None,
    starts: Annotated[
        str | None,
        option(
            "--starts",
            "TIME",
            "From when it holds, such as 2026-12-24T18:00, in local time without a zone. "
            "Default: now.",
        ),
    ] = None,
    ends: Annotated[
        str | None, option("--ends", "TIME", "Until when it holds, instead of --for.")
    ] = None,
    types: Annotated[
        list[str] | None, option("--type", "TYPE", "An EventType such as Reboot; more than once.")
    ] = None,
    sources: Annotated[list[str] | None, option("--source", "SOURCE", "Platform or User.")] = None,
    resources: Annotated[
        list[str] | None,
        option(
            "--resource",
            "PATTERN",
            "Machines such as 'db-*'; more than once. One matching machine is enough.",
        ),
    ] = None,
    scopes: Annotated[
        list[str] | None, option("--scope", "PATTERN", "Of a hub: scopes such as 'prod-*'.")
    ] = None,
    every_event: Annotated[
        bool, option("--every-event", None, "Hold every event: there are no conditions.")
    ] = False,
) -> None:
    """Keep this relay from starting every event that can meet conditions, also later ones.

    What Azure does not say about an event counts as a condition that is met. Azure proceeds at
    NotBefore regardless, and other relays and Azure Resource Manager can still approve.
    """
    lists = {"event_type": types, "event_source": sources, "resources": resources, "scope": scopes}
    conditions = {key: values for key, values in lists.items() if values}
    if bool(conditions) == every_event:
        raise ConfigError(
            "expected conditions, such as --type Reboot or --resource 'db-*', or --every-event, "
            f"got {'both' if every_event else 'neither'}"
        )
    times = _times_of_hold(starts, ends, duration)
    hold = await call.relay.post(
        "standing-holds", body={"match": conditions, "reason": reason, **times}
    )
    print_to_stderr(AZURE_PROCEEDS)
    call.for_people(hold)
    print_lines(
        f"standing hold {hold['holdId'][:8]} holds {describe_conditions(hold)} "
        f"from {format_local_time(hold['starts'], relative=False)} "
        f"until {format_local_time(hold['ends'])}; "
        f"it ends early with: imds-relay holds end {hold['holdId'][:8]}"
    )


def _times_of_hold(starts: str | None, ends: str | None, lasts: str | None) -> dict[str, str]:
    """Return ``starts`` and ``ends`` of the request. Raises ConfigError."""
    if (ends is None) == (lasts is None):
        got = "neither" if ends is None else "both"
        raise ConfigError(f"expected one of --for and --ends, got {got}")
    first = _parse_time("--starts", starts) if starts is not None else None
    if ends is not None:
        last = _parse_time("--ends", ends)
    else:
        try:
            last = (first or datetime.now(UTC)) + timedelta(seconds=parse_duration(lasts))
        except ValueError as error:
            raise ConfigError(f"--for: {error}") from None
        except OverflowError:
            raise ConfigError(
                "--for: expected a time that a calendar has, got a later one"
            ) from None
    times = {"ends": format_rfc3339(last)}
    return times if first is None else {"starts": format_rfc3339(first), **times}


def _parse_time(option_name: str, text: str) -> datetime:
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ConfigError(f"{option_name}: expected a time such as 2026-12-24T18:00") from None


@holds.command("end", cls=RelayCommand)
async def end_hold(call: RelayCall, hold: HoldId, *, reason: Reason = None) -> None:
    """End a standing hold early. Rules and votes are weighed again."""
    page = await call.relay.pages("standing-holds", all_pages=True)
    ids = [found["holdId"] for found in page["items"] if found["holdId"].startswith(hold.lower())]
    if len(ids) > 1:
        names = ", ".join(ids[:5])
        raise CommandFailed(f"{hold!r} begins several ids: {names}. Give more of the one you mean")
    if not ids or not hold:
        raise CommandFailed("no such standing hold that is not over; see imds-relay holds")
    body = {"reason": reason} if reason else {}
    answer = call.for_people(await call.relay.post("standing-holds", ids[0], "end", body=body))
    print_lines(
        f"standing hold {answer['holdId'][:8]} is ended: events that rules and votes allow can "
        "start within seconds"
    )
