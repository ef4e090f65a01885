"""``holds``: lists standing holds; ``holds add`` makes them, and ``holds end`` ends them early.

A standing hold keeps the relay from starting every event that can meet its conditions, for a time.
`imds-relay hold` holds one event that exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from relay.cli._options import AZURE_PROCEEDS, AllPages, DefaultGroup, Reason, argument, option
from relay.cli._output import CommandFailed, format_local_time, print_lines, print_to_stderr
from relay.cli._tables import print_page
from relay.cli.client import Client, RelayCall, RelayCommand
from relay.errors import ConfigError
from relay.events.timestamps import format_rfc3339
from relay.sentences import describe_conditions
from relay.settings import parse_duration

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
async def add(
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
async def end(call: RelayCall, hold: HoldId, *, reason: Reason = None) -> None:
    """End a standing hold early. Rules and votes are weighed again."""
    found = await _find_hold(call.relay, hold)
    body = {"reason": reason} if reason else {}
    path = ("standing-holds", found["holdId"], "end")
    answer = call.for_people(await call.relay.post(*path, body=body))
    print_lines(
        f"standing hold {answer['holdId'][:8]} is ended: events that rules and votes allow can "
        "start within seconds"
    )


async def _find_hold(relay: Client, text: str) -> Mapping[str, Any]:
    """Return the standing hold with this id, or with this beginning. Raises CommandFailed."""
    page = await relay.pages("standing-holds", all_pages=True)
    matching = [hold for hold in page["items"] if hold["holdId"].startswith(text.lower())]
    if len(matching) > 1:
        names = ", ".join(hold["holdId"] for hold in matching[:5])
        raise CommandFailed(f"{text!r} begins several ids: {names}. Give more of the one you mean")
    if not matching or not text:
        raise CommandFailed("no such standing hold that is not over; see imds-relay holds")
    found: Mapping[str, Any] = matching[0]
    return found
