"""``explain``: shows which rule decides about an event, what is missing, and until when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer

from relay.cli._client import Client
from relay.cli._connection import with_client
from relay.cli._event_text import vote_count
from relay.cli._options import AsJson, EventId
from relay.cli._output import (
    format_local_time,
    join_names,
    pluralize,
    print_fields,
    print_json,
    print_output,
    print_table,
)
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
async def explain(relay: Client, event: EventId, *, as_json: AsJson = False) -> None:
    """Say which rule decides about an event, what is missing, and until when."""
    found = await relay.get("events", event, "rule")
    if as_json:
        print_json(found)
    elif sink is None:
        _show_decision(found)
    else:
        _show_weighed(found)


def _show_decision(explanation: dict[str, Any]) -> None:
    print_fields(_decision_fields(explanation))
    print_output("")
    rows = [
        (rule["name"], _rule_effect(rule), format_local_time(rule["turns"]))
        for rule in explanation["rules"]
    ]
    print_table(("rule", "why", "hours turn"), rows, empty="no rules: nothing is approved")


def _decision_fields(explanation: dict[str, Any]) -> Iterator[tuple[str, object]]:
    yield "event", explanation["eventId"]
    yield "not before", format_local_time(explanation["notBefore"])
    mode = explanation["mode"]
    yield "approval", explanation["state"] + ("" if mode == "on" else f"; approvals are {mode}")
    rule = explanation["rule"]
    yield "decided by", f"rule {rule}" if rule else "no rule: it is not approved"
    if explanation["required"]:
        yield "votes", vote_count(explanation)
    if explanation["missing"]:
        voters = f", from {join_names(explanation['mayVote'])}" if explanation["mayVote"] else ""
        yield "missing", f"{pluralize(explanation['missing'], 'vote')}{voters}"
    if explanation["unspoken"]:
        yield "nobody yet", f"speaks for {join_names(explanation['unspoken'])}"
    if explanation["required"] and explanation["closes"]:
        yield "voting", f"closes {format_local_time(explanation['closes'])}"
    if explanation["lapses"]:
        lapses = format_local_time(explanation["lapses"])
        yield "granted", f"and void unless it is sent until {lapses}"
    for vote in explanation["voted"]:
        until = format_local_time(vote["until"]) or "NotBefore"
        yield "vote", f"{vote['principal']}, good until {until}"
    for hold in explanation["holds"]:
        hold_until = format_local_time(hold["until"])
        yield "held by", f"{hold['principal']} until {hold_until}; {explanation['holdMeans']}"


def _rule_effect(rule: dict[str, Any]) -> str:
    if rule["decides"]:
        return "decides"
    if rule["unmet"]:
        return f"does not match: {join_names(rule['unmet'])}"
    return "comes after"


def _show_plan(found: dict[str, Any]) -> None:
    waits = f"{pluralize(found['attempts'], 'try')} so far" if found["waiting"] else "nothing waits"
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
