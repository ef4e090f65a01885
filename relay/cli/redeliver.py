"""``redeliver``: sends dead letters again, one by its id or all that match the options."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from relay.cli._client import Client
from relay.cli._connection import with_client
from relay.cli._event_lookup import expand_event_id_prefix_if_known
from relay.cli._options import lazy_completion_function
from relay.cli._output import pluralize, print_lines
from relay.cli._tables import show_progress_bar
from relay.events.catalog import CATALOG
from relay.events.cloudevent import event_name
from relay.events.timestamps import format_rfc3339, parse_timestamp
from relay.settings import parse_duration
from relay.suggestions import describe_choices


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
        str | None,
        typer.Option(
            "--sink",
            metavar="SINK",
            help="Those of this sink.",
            autocompletion=lazy_completion_function("sinks"),
        ),
    ] = None,
    event_type: Annotated[
        str | None,
        typer.Option(
            "--type",
            metavar="TYPE",
            help="Such as event.scheduled.",
            autocompletion=lazy_completion_function("event_types"),
        ),
    ] = None,
    event: Annotated[
        str | None,
        typer.Option(
            "--event",
            metavar="EVENT",
            help="Those about this EventId, or a unique beginning of it.",
            autocompletion=lazy_completion_function("event_ids"),
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
        event = await expand_event_id_prefix_if_known(relay, event)
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
        await relay.post("dead-letters", dead_letter, "redeliver")
        print_lines(f"{dead_letter} goes out again; see `imds-relay deliveries`")
        return
    count = await _redeliver_in_batches(relay, selection)
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
