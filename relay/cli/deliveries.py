"""``deliveries``, ``dead-letters``, ``redeliver``, ``ping``, ``pause`` and ``resume``: how it goes out."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from relay.cli._client import Client, with_client
from relay.cli._output import (
    format_duration,
    format_local_time,
    pluralize,
    print_fields,
    print_json,
    print_output,
    print_status,
    print_table,
    progress,
)
from relay.cli.events import AsJson, Every
from relay.events.cloudevent import event_name
from relay.events.timestamps import format_rfc3339, parse_timestamp
from relay.settings import parse_duration

SinkName = Annotated[
    str, typer.Argument(metavar="SINK", help="The sink's name in the configuration.")
]


@with_client
async def deliveries(
    relay: Client,
    delivery: Annotated[
        str | None,
        typer.Argument(metavar="ID", show_default=False, help="One of the list, with every try."),
    ] = None,
    *,
    every: Every = False,
    as_json: AsJson = False,
) -> None:
    """List what was sent, and what waits; or show one delivery with every try."""
    if delivery is None:
        _list(await relay.pages("deliveries", every=every), "nothing was sent", as_json=as_json)
        return
    found = await relay.get("deliveries", delivery)
    if as_json:
        print_json(found)
        return
    named = {
        "id": "id",
        "sink": "sink",
        "type": "what",
        "eventId": "event",
        "state": "state",
        "reason": "reason",
    }
    print_output(
        print_fields(
            (label, event_name(found[name]) if name == "type" else found[name])
            for name, label in named.items()
        ),
        "",
    )
    tries = [
        (
            format_local_time(one["at"], relative=False),
            format_duration(one["tookSeconds"]),
            one["outcome"],
            one["status"],
            one["reason"] or one["answer"],
        )
        for one in found["log"]
    ]
    print_table(
        ("tried", "took", "outcome", "status", "what was said"), tries, empty="it was not tried yet"
    )


@with_client
async def dead_letters(relay: Client, *, every: Every = False, as_json: AsJson = False) -> None:
    """List what was given up, and why. `imds-relay redeliver` sends one again."""
    _list(await relay.pages("dead-letters", every=every), "no dead letters", as_json=as_json)


@with_client
async def redeliver(
    relay: Client,
    dead_letter: Annotated[
        str | None,
        typer.Argument(
            metavar="ID",
            show_default=False,
            help="Its id in `imds-relay dead-letters`; without it, by the options.",
        ),
    ] = None,
    *,
    sink: Annotated[
        str | None,
        typer.Option("--sink", metavar="SINK", show_default=False, help="Those of this sink."),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option("--type", metavar="TYPE", show_default=False, help="Such as event.scheduled."),
    ] = None,
    event: Annotated[
        str | None,
        typer.Option(
            "--event", metavar="EVENT", show_default=False, help="Those about this EventId."
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="WHEN",
            show_default=False,
            help="Given up since then: 2h ago, or 2026-04-11T22:26:58Z.",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every dead letter.")] = False,
) -> None:
    """Send a dead letter again, at once; or all that meet every option given, the oldest first."""
    given = {"sink": sink, "type": kind, "eventId": event, "since": _moment(since)}
    meant = {name: value for name, value in given.items() if value is not None}
    if (dead_letter is not None) + bool(meant or every) != 1:
        raise typer.BadParameter("expected an id, or --sink, --type, --event, --since or --all")
    if dead_letter is not None:
        await relay.post("dead-letters", dead_letter, "redeliver")
        print_output(f"{dead_letter} goes out again; see `imds-relay deliveries`")
        return
    count = await _redeliver_some(relay, meant)
    print_output(
        f"{pluralize(count, 'dead letter')} {'goes' if count == 1 else 'go'} out again; see `imds-relay deliveries`"
    )


async def _redeliver_some(relay: Client, meant: dict[str, Any]) -> int:
    """In batches, so that each call is short and one can see how far it is; returns how many there were."""
    done, more = 0, True
    with progress("sent again") as tell_progress:
        while more:
            found = await relay.post("dead-letters", "redeliver", body=meant)
            done += int(found["redelivered"])
            tell_progress(done, done + found["left"])
            more = found["next"] is not None
            meant = {**meant, "until": found["until"], "after": found["next"]}
    return done


def _moment(text: str | None) -> str | None:
    """The moment that --since names."""
    if text is None:
        return None
    try:
        return format_rfc3339(
            datetime.now(UTC) - timedelta(seconds=parse_duration(text.removesuffix(" ago").strip()))
        )
    except ValueError:
        moment = parse_timestamp(text)
    if moment is None:
        raise typer.BadParameter(
            "expected a span such as 2h, or a moment such as 2026-04-11T22:26:58Z",
            param_hint="--since",
        )
    return format_rfc3339(moment)


@with_client
async def ping(relay: Client, sink: SinkName) -> None:
    """Send a sink a test message. Only that sink gets it."""
    await relay.post("sinks", sink, "ping")
    print_output(f"a relay.ping goes to {sink}; see `imds-relay deliveries`")


@with_client
async def pause(relay: Client, sink: SinkName) -> None:
    """Send a sink nothing until it is resumed. What it wants is kept."""
    await relay.post("sinks", sink, "pause")
    print_output(f"{sink} is paused; what it wants is kept until `imds-relay resume {sink}`")


@with_client
async def resume(relay: Client, sink: SinkName) -> None:
    """Send to a paused or disabled sink again, what was kept first."""
    await relay.post("sinks", sink, "resume")
    print_output(f"{sink} gets what was kept for it, and what comes")


def _list(found: dict[str, Any], empty: str, *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    rows = [
        (
            one["id"],
            one["sink"],
            event_name(one["type"]),
            one["eventId"],
            f"{one['state']}, {pluralize(one['attempts'], 'try')}",
            format_local_time(
                one["settled"] or one["nextAttempt"] or one["recorded"], relative=False
            ),
            one["reason"],
        )
        for one in found["items"]
    ]
    print_table(("id", "sink", "what", "event", "state", "when", "reason"), rows, empty=empty)
    if found["next"] is not None:
        print_status("there are more: --all")
