"""The table that ``deliveries`` and ``dead-letters`` print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relay.cli._output import format_local_time, pluralize, print_page
from relay.events.cloudevent import event_name

_COLUMNS = ("id", "sink", "what", "event", "state", "when", "reason")


def print_deliveries(page: Mapping[str, Any], *, empty: str, as_json: bool) -> None:
    """Print a page of deliveries or dead letters."""
    print_page(page, _COLUMNS, _row, empty=empty, as_json=as_json)


def _row(delivery: Mapping[str, Any]) -> tuple[object, ...]:
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
