"""The verbs about sinks and what is sent to them, from ``deliveries`` to ``resume``."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from relay.cli._client import Client
from relay.cli._connection import with_client
from relay.cli._options import AllPages, AsJson, SinkName
from relay.cli._output import (
    format_duration,
    format_local_time,
    pluralize,
    print_fields,
    print_json,
    print_output,
    print_page,
    print_table,
    progress_bar,
)
from relay.events.cloudevent import event_name
from relay.events.timestamps import format_rfc3339, parse_timestamp
from relay.settings import parse_duration

_COLUMNS = ("id", "sink", "what", "event", "state", "when", "reason")


@with_client
async def deliveries(
    relay: Client,
    delivery: Annotated[
        str | None, typer.Argument(metavar="ID", help="An id of the list: shows every try.")
    ] = None,
    *,
    all_pages: AllPages = False,
    as_json: AsJson = False,
) -> None:
    """List what was sent and what waits, or show one delivery with every try."""
    if delivery is None:
        page = await relay.get_pages("deliveries", all_pages=all_pages)
        print_page(page, _COLUMNS, _delivery_row, empty="nothing was sent", as_json=as_json)
        return
    details = await relay.get("deliveries", delivery)
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
    print_output("")
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


@with_client
async def dead_letters(
    relay: Client, *, all_pages: AllPages = False, as_json: AsJson = False
) -> None:
    """List the deliveries that were given up, and why. `imds-relay redeliver` sends one again."""
    page = await relay.get_pages("dead-letters", all_pages=all_pages)
    print_page(page, _COLUMNS, _delivery_row, empty="no dead letters", as_json=as_json)


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


@with_client
async def redeliver(
    relay: Client,
    dead_letter: Annotated[
        str | None,
        typer.Argument(
            metavar="ID", help="An id of `imds-relay dead-letters`. Without it, the options select."
        ),
    ] = None,
    *,
    sink: Annotated[
        str | None, typer.Option("--sink", metavar="SINK", help="Those of this sink.")
    ] = None,
    event_type: Annotated[
        str | None, typer.Option("--type", metavar="TYPE", help="Such as event.scheduled.")
    ] = None,
    event: Annotated[
        str | None, typer.Option("--event", metavar="EVENT", help="Those about this EventId.")
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
    conditions = {"sink": sink, "type": event_type, "eventId": event, "since": _timestamp(since)}
    selection = {name: value for name, value in conditions.items() if value is not None}
    is_by_id = dead_letter is not None
    is_by_options = bool(selection) or every
    if is_by_id == is_by_options:
        raise typer.BadParameter("expected an id, or --sink, --type, --event, --since or --all")
    if dead_letter is not None:
        await relay.post("dead-letters", dead_letter, "redeliver")
        print_output(f"{dead_letter} goes out again; see `imds-relay deliveries`")
        return
    count = await _redeliver_in_batches(relay, selection)
    print_output(
        f"{pluralize(count, 'dead letter')} {'goes' if count == 1 else 'go'} out again; "
        "see `imds-relay deliveries`"
    )


async def _redeliver_in_batches(relay: Client, selection: dict[str, Any]) -> int:
    """Redeliver in batches, which keeps each call short and shows progress. Return the number."""
    count, has_more = 0, True
    with progress_bar("sent again") as show_progress:
        while has_more:
            batch = await relay.post("dead-letters", "redeliver", body=selection)
            count += int(batch["redelivered"])
            show_progress(count, count + batch["left"])
            has_more = batch["next"] is not None
            selection = {**selection, "until": batch["until"], "after": batch["next"]}
    return count


def _timestamp(since: str | None) -> str | None:
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


@with_client
async def ping(relay: Client, sink: SinkName) -> None:
    """Send a sink a test message. No other sink gets it."""
    await relay.post("sinks", sink, "ping")
    print_output(f"a relay.ping goes to {sink}; see `imds-relay deliveries`")


@with_client
async def pause(relay: Client, sink: SinkName) -> None:
    """Send a sink nothing until it is resumed. Its events are kept."""
    await relay.post("sinks", sink, "pause")
    print_output(f"{sink} is paused; its events are kept until `imds-relay resume {sink}`")


@with_client
async def resume(relay: Client, sink: SinkName) -> None:
    """Send to a paused or disabled sink again, the kept events first."""
    await relay.post("sinks", sink, "resume")
    print_output(f"{sink} gets the kept events, and new ones")
