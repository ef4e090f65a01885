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
from relay.cli._server_sent_events import Message, Stream
from relay.cli._signals import until_stopped
from relay.events.cloudevent import event_name
from relay.net.backoff import exponential_backoff

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Every = Annotated[bool, typer.Option("--all", help="Every page, not only the first.")]
EventId = Annotated[
    str, typer.Argument(metavar="EVENT", help="An EventId; upper and lower case are the same.")
]

_AGAIN, _AGAIN_LATEST = 0.5, 15.0
"""Seconds before a broken stream is taken up again; doubled from one to the other."""


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


@with_client
async def show_event(relay: Client, event: EventId, *, as_json: AsJson = False) -> None:
    """Show one event: its history, votes and deliveries."""
    found = await relay.get("events", event)
    if as_json:
        print_json(found)
        return
    print_output(print_fields(about(found)))
    votes = [
        (
            format_local_time(one["at"], relative=False),
            one["decision"],
            one["principal"],
            one["channel"],
            "counts" if one["counts"] else "counts no more",
        )
        for one in found["votes"]
    ]
    sent = [
        (event_name(one["type"]), one["sink"], one["state"], one["attempts"], one["reason"])
        for one in found["deliveries"]
    ]
    print_output("")
    print_table(
        ("decided", "what", "by", "through", "still"), votes, empty="nobody has decided anything"
    )
    print_output("")
    print_table(
        ("told", "what", "by", "detail"),
        [told(one) for one in found["history"]],
        empty="nothing was told",
    )
    print_output("")
    print_table(
        ("delivery of", "to", "state", "tries", "reason"),
        sent,
        empty="nothing was sent: no sink wants it",
    )


@with_client
async def tail(relay: Client, *, as_json: AsJson = False) -> None:
    """Follow what the relay says, as it says it, until Ctrl-C."""
    await until_stopped(_follow(relay, Stream(), as_json=as_json))


async def _follow(relay: Client, stream: Stream, *, as_json: bool) -> None:
    tries = 0
    while True:
        try:
            async with relay.stream("stream", headers=stream.headers()) as chunks:
                if stream.broken:
                    print_status("connected again; nothing is left out")
                async for chunk in chunks:
                    tries = 0
                    for message in stream.feed(chunk):
                        _print(message, as_json=as_json)
            reason = "the relay ended the stream"
        except ConnectionError as error:
            if not stream.begun:
                raise
            reason = str(error)
        if not stream.broken:
            print_status(f"{reason}; trying again until it is there")
        stream.break_off()
        tries += 1
        await asyncio.sleep(exponential_backoff(tries, first=_AGAIN, maximum=_AGAIN_LATEST))


def about(event: Mapping[str, Any]) -> list[tuple[str, object]]:
    """An event as a person decides about it."""
    return [
        ("event", event["eventId"]),
        ("what", " ".join(part for part in (event["eventType"], event["eventStatus"]) if part)),
        ("outcome", event["outcome"]),
        ("machines", join_names(event["resources"], most=50) or "none named"),
        ("not before", format_local_time(event["notBefore"])),
        (
            "takes",
            "unknown" if event["durationSeconds"] is None else f"{event['durationSeconds']} s",
        ),
        ("started by", event["eventSource"]),
        ("because", event["description"]),
        ("approval", _standing(event)),
        (
            "closes",
            format_local_time(event["approval"]["closes"]) if event["outcome"] is None else None,
        ),
        ("revision", event["revision"]),
    ]


def _standing(event: Mapping[str, Any]) -> str | None:
    approval = event["approval"]
    if event["outcome"] is not None and approval["state"] == "none":
        return None
    # Afterwards they are counted against another revision than the one that was voted on.
    matters = approval["required"] and approval["state"] in ("pending", "held")
    votes = f"{approval['votes']} of {pluralize(approval['required'], 'vote')}" if matters else None
    rule = f"rule {approval['rule']}" if approval["rule"] else "no rule"
    return ", ".join(part for part in (approval["state"], votes, rule) if part)


def told(event: Mapping[str, Any]) -> tuple[object, object, object, str]:
    """A CloudEvent on a line: when, what, by whom, and the rest."""
    data = event["data"]
    name = event_name(event["type"])
    return (
        format_local_time(event["time"], relative=False),
        name,
        data.get("principal"),
        _detail(name, data),
    )


def _detail(name: str, data: Mapping[str, Any]) -> str:
    """What a line says beyond the name of the event."""
    parts: list[object]
    match name.partition(".")[0]:
        case "relay":
            parts = [data["sink"], data["reason"]]
        case "approval":
            votes = (
                f"{data['votes']} of {pluralize(data['required'], 'vote')}"
                if data.get("required")
                else None
            )
            dry = "dry run" if data.get("dryRun") else None
            parts = [
                data.get("decision"),
                data.get("refusal"),
                data.get("why"),
                data.get("reason"),
                votes,
                dry,
            ]
        case "startrequest":
            parts = [
                data["reason"],
                f"sent {data['attempts']} times" if data["attempts"] > 1 else None,
            ]
        case _:
            due = (
                f"not before {format_local_time(data['notBefore'])}"
                if data["notBefore"] and not data.get("outcome")
                else None
            )
            parts = [
                data.get("outcome"),
                due,
                *(f"{key} was {value}" for key, value in (data.get("changed") or {}).items()),
            ]
    return ", ".join(str(part) for part in parts if part)


def _print(message: Message, *, as_json: bool) -> None:
    event = orjson.loads(message.data)
    if as_json:
        print_json_line(event)
        return
    at, name, by, detail = told(event)
    data = event["data"]
    subject = (
        f"{data.get('eventType') or 'event'} {data['eventId']} of {join_names(data.get('resources')) or 'unknown machines'}"
        if "eventId" in data
        else ""
    )
    print_output("  ".join(str(part) for part in (at, f"{name:<21}", subject, by, detail) if part))
