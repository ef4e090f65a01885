"""``events``: lists current and recent events."""

from __future__ import annotations

from relay.cli._client import Client
from relay.cli._connection import with_client
from relay.cli._event_text import approval_summary
from relay.cli._options import AllPages, AsJson
from relay.cli._output import (
    format_local_time,
    join_names,
    print_json,
    print_status,
    print_table,
)


@with_client
async def events(relay: Client, *, all_pages: AllPages = False, as_json: AsJson = False) -> None:
    """List current and recent events."""
    page = await relay.get_pages("events", all_pages=all_pages)
    if as_json:
        print_json(page)
        return
    rows = [
        (
            event["eventId"],
            event["eventType"],
            event["outcome"] or event["eventStatus"],
            join_names(event["resources"], limit=3),
            format_local_time(event["notBefore"]) if event["outcome"] is None else None,
            approval_summary(event),
        )
        for event in page["items"]
    ]
    columns = ("event", "type", "state", "machines", "not before", "approval")
    print_table(columns, rows, empty="no events")
    if page["next"] is not None:
        print_status("there are more: --all")
