"""What operators do: see deliveries, send them again, test and pause sinks, reload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from relay.cli._options import AllPages, argument, option
from relay.cli._output import (
    CommandFailed,
    Unprocessable,
    format_duration,
    format_local_time,
    pluralize,
    print_lines,
    print_to_stderr,
)
from relay.cli._tables import print_fields, print_page, print_table
from relay.cli.client import RelayCall, RelayCommand
from relay.cli.events import with_short_event_ids
from relay.errors import ConfigError
from relay.events.cloudevent import event_name

SinkName = Annotated[str, argument("NAME", "The sink's name in the configuration.")]


async def deliveries(
    call: RelayCall,
    delivery: Annotated[str | None, argument("ID", "An id of the list: shows its tries.")] = None,
    *,
    dead: Annotated[
        bool, option("--dead", None, "Only dead letters: those that were given up, and why.")
    ] = False,
    all_pages: AllPages = False,
) -> None:
    """List what was sent and what waits, or show one delivery with its tries.

    `imds-relay redeliver` sends a dead letter again.
    """
    if delivery is None:
        page = call.for_people(
            await call.relay.pages("dead-letters" if dead else "deliveries", all_pages=all_pages)
        )
        columns = ("id", "sink", "what", "event", "state", "when", "reason")
        empty = "no dead letters" if dead else "nothing was sent"
        print_page(with_short_event_ids(page), columns, _delivery_row, empty=empty)
        return
    details = call.for_people(
        await call.relay.details("deliveries", delivery, log="log", all_pages=all_pages)
    )
    fields = {**details, "what": event_name(details["type"]), "event": details["eventId"]}
    names = ("id", "sink", "what", "event", "state", "reason")
    print_fields([(name, fields[name]) for name in names])
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
    print_table(
        ("tried", "took", "outcome", "status", "answer"), rows, empty="it was not tried yet"
    )
    if details["next"] is not None:
        print_to_stderr("there were more tries before: --all")


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


async def redeliver(
    call: RelayCall,
    dead_letter: Annotated[
        str | None,
        argument("ID", "An id of `imds-relay deliveries --dead`. Without it, an option selects."),
    ] = None,
    *,
    sink: Annotated[str | None, option("--sink", "SINK", "Those of this sink.")] = None,
    every: Annotated[bool, option("--all", None, "Every dead letter.")] = False,
) -> None:
    """Send a dead letter again at once, or those of a sink, or all, oldest first."""
    if (dead_letter is not None) == (sink is not None or every):
        raise typer.BadParameter("expected an id, --sink or --all")
    if dead_letter is not None:
        call.for_people(await call.relay.post("dead-letters", dead_letter, "redeliver"))
        print_lines(f"{dead_letter} goes out again; see `imds-relay deliveries`")
        return
    answer = call.for_people(
        await call.relay.post("dead-letters", "redeliver", body={"sink": sink})
    )
    count = answer["redelivered"]
    print_lines(
        f"{pluralize(count, 'dead letter')} {'goes' if count == 1 else 'go'} out again; "
        "see `imds-relay deliveries`"
    )


sink = typer.Typer(help="Test a sink, pause it, and let it go on.")


@sink.command(cls=RelayCommand)
async def ping(call: RelayCall, name: SinkName) -> None:
    """Send a sink a test message. No other sink gets it."""
    call.for_people(await call.relay.post("sinks", name, "ping"))
    print_lines(f"a relay.ping goes to {name}; see `imds-relay deliveries`")


@sink.command(cls=RelayCommand)
async def pause(call: RelayCall, name: SinkName) -> None:
    """Send a sink nothing until it is resumed. Its events are kept."""
    call.for_people(await call.relay.post("sinks", name, "pause"))
    print_lines(f"{name} is paused; its events are kept until `imds-relay sink resume {name}`")


@sink.command(cls=RelayCommand)
async def resume(call: RelayCall, name: SinkName) -> None:
    """Send to a paused or disabled sink again, the kept events first."""
    call.for_people(await call.relay.post("sinks", name, "resume"))
    print_lines(f"{name} gets the kept events, and new ones")


async def reload(call: RelayCall) -> None:
    """Let the relay read its configuration again and take it over, as SIGHUP does.

    All of it or nothing: if it is wrong, or a change in it needs a restart, the earlier
    configuration stays in force. The connections of sinks are made again, and deliveries pause for
    five seconds at most. Exit code 2: the configuration is wrong. Exit code 1: it needs a restart,
    or the relay does not answer.
    """
    try:
        answer = call.for_people(await call.relay.post("reload"))
    except Unprocessable as error:
        if "restartRequired" in error.problem:
            raise CommandFailed(str(error)) from error
        raise ConfigError(str(error)) from error
    for change in answer["changes"]:
        print_lines(f"{change['key']} {change['change']}")
    if not answer["changes"]:
        print_lines("nothing has changed")
