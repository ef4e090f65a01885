"""``events``: lists current and recent events."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from relay.cli._client import Client
from relay.cli._connection import with_client
from relay.cli._event_lookup import unique_beginnings
from relay.cli._event_text import approval_summary
from relay.cli._options import AllPages, AsJson, Scope, scope_query
from relay.cli._output import format_local_time, join_names
from relay.cli._tables import print_page


@with_client
async def events(
    relay: Client,
    *,
    scope: Scope = None,
    all_pages: AllPages = False,
    as_json: AsJson = False,
) -> None:
    """List current and recent events."""
    page = await relay.get_list("events", all_pages=all_pages, **scope_query(scope))
    columns: tuple[str, ...] = ("event", "type", "state", "machines", "not before", "approval")
    row = _event_row
    if sys.stdout.isatty() and not as_json:  # a pipe gets what a program can use anywhere
        page = _with_short_ids(page)
    if len({event.get("scope") for event in page["items"]}) > 1:
        columns, row = ("scope", *columns), _event_row_with_scope
    print_page(page, columns, row, empty="no events", as_json=as_json)


def _with_short_ids(page: Mapping[str, Any]) -> dict[str, Any]:
    """Return the page with beginnings of its EventIds, so that a row fits into a line."""
    beginnings = unique_beginnings(event["eventId"] for event in page["items"])
    items = [{**event, "eventId": beginnings[event["eventId"]]} for event in page["items"]]
    return {**page, "items": items}


def _event_row_with_scope(event: Mapping[str, Any]) -> tuple[object, ...]:
    return (event["scope"], *_event_row(event))


def _event_row(event: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        event["eventId"],
        event["eventType"],
        event["outcome"] or event["eventStatus"],
        join_names(event["resources"], limit=3),
        format_local_time(event["notBefore"]) if event["outcome"] is None else None,
        approval_summary(event),
    )
