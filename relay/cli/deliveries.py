"""``deliveries``, ``dead-letters`` and ``redeliver``: what was sent, given up, and goes again."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from relay.cli._events import (
    whole_event_id,
    with_short_event_ids,
)
from relay.cli._options import AllPages, AsJson
from relay.cli._output import (
    format_duration,
    format_local_time,
    pluralize,
    print_json,
    print_lines,
    print_to_stderr,
)
from relay.cli._tables import print_fields, print_page, print_table, show_progress_bar
from relay.cli.client import Client, RelayCall
from relay.events.catalog import CATALOG
from relay.events.cloudevent import event_name
from relay.events.timestamps import format_rfc3339, parse_timestamp
from relay.settings import parse_duration
from relay.suggestions import describe_choices

_COLUMNS = ("id", "sink", "what", "event", "state", "when", "reason")


async def deliveries(
    call: RelayCall,
    delivery: Annotated[
        str | None, typer.Argument(metavar="ID", help="An id of the list: shows its tries.")
    ] = None,
    *,
    all_pages: AllPages = False,
    as_json: AsJson = False,
) -> None:
    """List what was sent and what waits, or show one delivery with its tries."""
    if delivery is None:
        page = await call.relay.get_first_or_all_pages("deliveries", all_pages=all_pages)
        print_deliveries(page, empty="nothing was sent", as_json=as_json)
        return
    details = await call.relay.get_details_with_log(
        "deliveries", delivery, log="log", all_pages=all_pages
    )
    if as_json:
        print_json(details)
        return
    print_fields(
        [
            ("id", details["id"]),
            ("sink", details["sink"]),
            ("what", event_name(details["type"])),
            ("event", details["eventId"]),
            ("state", details["state"]),
            ("reason", details["reason"]),
        ]
    )
    print_lines("")
    rows = [
        (
            format_local_time(attempt["at"], relative=False),
            format_duration(attempt["tookSeconds"]),
            attempt["outcome"],
            attempt["status"],
            attempt["reason"] or attempt["answer"],
        )
        for attempt in details["log"]
    ]
    columns = ("tried", "took", "outcome", "status", "answer")
    print_table(columns, rows, empty="it was not tried yet")
    if details["next"] is not None:
        print_to_stderr("there were more tries before: --all")


def print_deliveries(page: Mapping[str, Any], *, empty: str, as_json: bool) -> None:
    """Print a page of deliveries or dead letters."""
    shown = page if as_json else with_short_event_ids(page)
    print_page(shown, _COLUMNS, _delivery_row, empty=empty, as_json=as_json)


def _delivery_row(delivery: Mapping[str, Any]) -> tuple[object, ...]:
    time = delivery["settled"] or delivery["nextAttempt"] or delivery["recorded"]
    return (
        delivery["id"],
        delivery["sink"],
        event_name(delivery["type"]),
        delivery["eventId"],
        f"{delivery['state']}, {pluralize(delivery['attempts'], 'try')}",
        format_local_time(time, relative=False),
        delivery["reason"],
    )


async def dead_letters(
    call: RelayCall, *, all_pages: AllPages = False, as_json: AsJson = False
) -> None:
    """List the deliveries that were given up, and why. `imds-relay redeliver` sends one again."""
    page = await call.relay.get_first_or_all_pages("dead-letters", all_pages=all_pages)
    print_deliveries(page, empty="no dead letters", as_json=as_json)


async def redeliver(
    call: RelayCall,
    dead_letter: Annotated[
        str | None,
        typer.Argument(
            metavar="ID", help="An id of `imds-relay dead-letters`. Without it, the options select."
        ),
    ] = None,
    *,
    sink: Annotated[
        str | None,
        typer.Option(
            "--sink",
            metavar="SINK",
            help="Those of this sink.",
        ),
    ] = None,
    event_type: Annotated[
        str | None,
        typer.Option(
            "--type",
            metavar="TYPE",
            help="Such as event.scheduled.",
        ),
    ] = None,
    event: Annotated[
        str | None,
        typer.Option(
            "--event",
            metavar="EVENT",
            help="Those about this EventId, or a unique beginning of it.",
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="WHEN",
            help="Those given up since then: 2h ago, or 2026-04-11T22:26:58Z.",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every dead letter.")] = False,
) -> None:
    """Send a dead letter again at once, or all that match every given option, oldest first."""
    if event is not None:
        event = await whole_event_id(call.relay, event)
    conditions = {
        "sink": sink,
        "type": None if event_type is None else _parse_event_type(event_type),
        "eventId": event,
        "since": _parse_since(since),
    }
    selection = {name: value for name, value in conditions.items() if value is not None}
    is_by_id = dead_letter is not None
    is_by_options = bool(selection) or every
    if is_by_id == is_by_options:
        raise typer.BadParameter("expected an id, or --sink, --type, --event, --since or --all")
    if dead_letter is not None:
        await call.relay.post("dead-letters", dead_letter, "redeliver")
        print_lines(f"{dead_letter} goes out again; see `imds-relay deliveries`")
        return
    count = await _redeliver_in_batches(call.relay, selection)
    print_lines(
        f"{pluralize(count, 'dead letter')} {'goes' if count == 1 else 'go'} out again; "
        "see `imds-relay deliveries`"
    )


async def _redeliver_in_batches(relay: Client, selection: dict[str, Any]) -> int:
    """Redeliver in batches, which keeps each call short and shows progress. Return the number."""
    count, has_more = 0, True
    with show_progress_bar("sent again") as show_progress:
        while has_more:
            batch = await relay.post("dead-letters", "redeliver", body=selection)
            count += int(batch["redelivered"])
            show_progress(count, count + batch["left"])
            has_more = batch["next"] is not None
            selection = {**selection, "until": batch["until"], "after": batch["next"]}
    return count


def _parse_event_type(event_type: str) -> str:
    """Return the type without prefix and version. Raises BadParameter if there is no such type."""
    name = event_name(event_type)
    known = [definition.name for definition in CATALOG]
    if name not in known:
        raise typer.BadParameter(
            f"no such type: {event_type!r}; {describe_choices(name, known)}", param_hint="--type"
        )
    return name


def _parse_since(since: str | None) -> str | None:
    """Return the timestamp for --since, which is a duration before now or a timestamp."""
    if since is None:
        return None
    try:
        duration = parse_duration(since.removesuffix(" ago").strip())
    except ValueError:
        moment = parse_timestamp(since)
    else:
        moment = datetime.now(UTC) - timedelta(seconds=duration)
    if moment is None:
        raise typer.BadParameter(
            "expected a duration such as 2h, or a time such as 2026-04-11T22:26:58Z",
            param_hint="--since",
        )
    return format_rfc3339(moment)
