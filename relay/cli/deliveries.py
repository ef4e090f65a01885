"""``deliveries``: lists deliveries, or shows one delivery with every try."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from relay.cli._client import Client
from relay.cli._connection import with_client
from relay.cli._options import AllPages, AsJson
from relay.cli._output import (
    format_duration,
    format_local_time,
    pluralize,
    print_fields,
    print_json,
    print_output,
    print_status,
    print_table,
)
from relay.events.cloudevent import event_name


@with_client
async def deliveries(
    relay: Client,
    delivery: Annotated[
        str | None,
        typer.Argument(
            metavar="ID", show_default=False, help="An id of the list: shows every try."
        ),
    ] = None,
    *,
    all_pages: AllPages = False,
    as_json: AsJson = False,
) -> None:
    """List what was sent and what waits, or show one delivery with every try."""
    if delivery is None:
        page = await relay.get_pages("deliveries", all_pages=all_pages)
        print_deliveries(page, empty="nothing was sent", as_json=as_json)
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


def print_deliveries(page: dict[str, Any], *, empty: str, as_json: bool) -> None:
    """Print a list of deliveries or dead letters."""
    if as_json:
        print_json(page)
        return
    rows = [_row(delivery) for delivery in page["items"]]
    columns = ("id", "sink", "what", "event", "state", "when", "reason")
    print_table(columns, rows, empty=empty)
    if page["next"] is not None:
        print_status("there are more: --all")


def _row(delivery: dict[str, Any]) -> tuple[object, ...]:
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
