"""``deliveries``: lists deliveries, or shows one delivery with its tries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from relay.cli._client import Client
from relay.cli._connection import with_client
from relay.cli._event_lookup import shorten_page_event_ids_on_terminal
from relay.cli._options import AllPages, AsJson
from relay.cli._output import (
    format_duration,
    format_local_time,
    pluralize,
    print_json,
    print_lines,
    print_to_stderr,
)
from relay.cli._tables import print_fields, print_page, print_table
from relay.events.cloudevent import event_name

_COLUMNS = ("id", "sink", "what", "event", "state", "when", "reason")


@with_client
async def deliveries(
    relay: Client,
    delivery: Annotated[
        str | None, typer.Argument(metavar="ID", help="An id of the list: shows its tries.")
    ] = None,
    *,
    all_pages: AllPages = False,
    as_json: AsJson = False,
) -> None:
    """List what was sent and what waits, or show one delivery with its tries."""
    if delivery is None:
        page = await relay.get_first_or_all_pages("deliveries", all_pages=all_pages)
        print_deliveries(page, empty="nothing was sent", as_json=as_json)
        return
    details = await relay.get_details_with_log(
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
    if details.get("next") is not None:
        print_to_stderr("there were more tries before: --all")


def print_deliveries(page: Mapping[str, Any], *, empty: str, as_json: bool) -> None:
    """Print a page of deliveries or dead letters."""
    shown = page if as_json else shorten_page_event_ids_on_terminal(page)
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
