"""``explain``: which rule decides about an event; or what a sink does with it, and when it would be tried again."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from relay.cli._client import Client, with_client
from relay.cli._output import (
    format_duration,
    format_local_time,
    join_names,
    pluralize,
    print_fields,
    print_json,
    print_output,
    print_table,
)
from relay.cli.events import AsJson, EventId
from relay.events.cloudevent import event_name

_MEANT: Final = {
    "transient": "if it cannot be reached, does not answer, or answers 408, 409, 425, 429 or 5xx",
    "slow": "if it answers that somebody must mend something, as with other 4xx",
}


SinkName = Annotated[
    str | None,
    typer.Argument(
        metavar="SINK",
        show_default=False,
        help="The name of a sink: its delivery is explained instead.",
    ),
]


@with_client
async def explain(
    relay: Client, event: EventId, sink: SinkName = None, *, as_json: AsJson = False
) -> None:
    """Say which rule decides about an event, what is missing, and until when.

    With a sink: whether it wants the event, and when it would be tried again if each try failed at once, from now on.
    Jitter, which only adds up to a tenth, is left out.
    """
    found = (
        await relay.get("events", event, "rule")
        if sink is None
        else await relay.get("sinks", sink, "plan", event=event)
    )
    if as_json:
        print_json(found)
    elif sink is None:
        _show_weighed(found)
    else:
        _show_plan(found)


def _show_weighed(found: dict[str, Any]) -> None:
    votes = f"{found['votes']} of {pluralize(found['required'], 'vote')}"
    from_ = f", from {join_names(found['mayVote'])}" if found["mayVote"] else ""
    print_output(
        print_fields(
            [
                ("event", found["eventId"]),
                ("not before", format_local_time(found["notBefore"])),
                (
                    "approval",
                    found["state"]
                    + ("" if found["mode"] == "on" else f"; approvals are {found['mode']}"),
                ),
                (
                    "decided by",
                    f"rule {found['rule']}" if found["rule"] else "no rule: it is not approved",
                ),
                ("votes", votes if found["required"] else None),
                (
                    "missing",
                    f"{pluralize(found['missing'], 'vote')}{from_}" if found["missing"] else None,
                ),
                (
                    "nobody yet",
                    f"speaks for {join_names(found['unspoken'])}" if found["unspoken"] else None,
                ),
                (
                    "voting",
                    f"closes {format_local_time(found['closes'])}"
                    if found["required"] and found["closes"]
                    else None,
                ),
                (
                    "granted",
                    f"and void unless it is sent until {format_local_time(found['lapses'])}"
                    if found["lapses"]
                    else None,
                ),
                *(
                    (
                        "vote",
                        f"{one['principal']}, good until {format_local_time(one['until']) or 'NotBefore'}",
                    )
                    for one in found["voted"]
                ),
                *(
                    (
                        "held by",
                        f"{one['principal']} until {format_local_time(one['until'])}; {found['holdMeans']}",
                    )
                    for one in found["holds"]
                ),
            ]
        )
    )
    print_output("")
    rows = [
        (
            one["name"],
            "decides"
            if one["decides"]
            else f"does not match: {join_names(one['unmet'])}"
            if one["unmet"]
            else "comes after",
            format_local_time(one["turns"]),
        )
        for one in found["rules"]
    ]
    print_table(("rule", "why", "hours turn"), rows, empty="no rules: nothing is approved")


def _show_plan(found: dict[str, Any]) -> None:
    waits = f"{pluralize(found['attempts'], 'try')} so far" if found["waiting"] else "nothing waits"
    print_output(
        print_fields(
            [
                ("event", found["eventId"]),
                ("last said", event_name(found["type"])),
                ("not before", format_local_time(found["notBefore"])),
                ("sink", found["sink"]),
                ("wanted", "yes" if found["whyNot"] is None else f"no: {found['whyNot']}"),
                ("delivery", waits),
            ]
        )
    )
    for course in found["plan"]:
        print_output("", f"{_MEANT[course['failure']]}:")
        print_table(
            ("tries", "every", "from", "to"),
            [_line(one) for one in course["tries"]],
            empty="no other try",
        )
        print_output(f"then a dead letter: {course['ends']}" if course["ends"] else "and so on")


def _line(one: dict[str, Any]) -> tuple[object, ...]:
    return (
        one["tries"],
        format_duration(one["pauseSeconds"]),
        format_local_time(one["first"]),
        format_local_time(one["last"], relative=False),
    )
