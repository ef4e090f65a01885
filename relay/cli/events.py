"""``events``: lists current and recent events."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from relay.cli._event_lookup import shorten_page_event_ids_on_terminal
from relay.cli._event_text import approval_summary
from relay.cli._options import AllPages, AsJson, Scope, scope_query
from relay.cli._output import format_local_time, join_names
from relay.cli._tables import print_page
from relay.cli.client import Client, with_client


@with_client
async def events(
    relay: Client,
    *,
    scope: Scope = None,
    all_pages: AllPages = False,
    as_json: AsJson = False,
) -> None:
    """List current and recent events."""
    page = await relay.get_first_or_all_pages("events", all_pages=all_pages, **scope_query(scope))
    columns: tuple[str, ...] = ("event", "type", "state", "machines", "not before", "approval")
    has_scopes = len({event.get("scope") for event in page["items"]}) > 1
    if has_scopes:
        columns = ("scope", *columns)
    shown = page if as_json else shorten_page_event_ids_on_terminal(page)
    row = functools.partial(_event_row, with_scope=has_scopes)
    print_page(shown, columns, row, empty="no events", as_json=as_json)


def _event_row(event: Mapping[str, Any], *, with_scope: bool) -> tuple[object, ...]:
    return (
        *((event["scope"],) if with_scope else ()),
        event["eventId"],
        event["eventType"],
        event["outcome"] or event["eventStatus"],
        join_names(event["resources"], limit=3),
        format_local_time(event["notBefore"]) if event["outcome"] is None else None,
        approval_summary(event),
    )
