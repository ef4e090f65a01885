"""``events``, ``show`` and ``explain``: tell what happened to events and which rule decides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from relay.cli._client import Client
from relay.cli._connection import with_client
from relay.cli._event_text import approval_summary, cloudevent_row, event_summary, vote_count
from relay.cli._options import AllPages, AsJson, EventId
from relay.cli._output import (
    format_local_time,
    join_names,
    pluralize,
    print_fields,
    print_json,
    print_output,
    print_page,
    print_table,
)
from relay.events.cloudevent import event_name


@with_client
async def events(relay: Client, *, all_pages: AllPages = False, as_json: AsJson = False) -> None:
    """List current and recent events."""
    page = await relay.get_pages("events", all_pages=all_pages)
    columns = ("event", "type", "state", "machines", "not before", "approval")
    print_page(page, columns, _event_row, empty="no events", as_json=as_json)


def _event_row(event: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        event["eventId"],
        event["eventType"],
        event["outcome"] or event["eventStatus"],
        join_names(event["resources"], limit=3),
        format_local_time(event["notBefore"]) if event["outcome"] is None else None,
        approval_summary(event),
    )


@with_client
async def show(relay: Client, event: EventId, *, as_json: AsJson = False) -> None:
    """Show one event: its history, votes and deliveries."""
    details = await relay.get("events", event)
    if as_json:
        print_json(details)
        return
    votes = [
        (
            format_local_time(vote["at"], relative=False),
            vote["decision"],
            vote["principal"],
            vote["channel"],
            "counts" if vote["counts"] else "counts no more",
        )
        for vote in details["votes"]
    ]
    history = [cloudevent_row(cloudevent) for cloudevent in details["history"]]
    deliveries = [
        (
            event_name(delivery["type"]),
            delivery["sink"],
            delivery["state"],
            delivery["attempts"],
            delivery["reason"],
        )
        for delivery in details["deliveries"]
    ]
    print_fields(event_summary(details))
    print_output("")
    print_table(
        ("decided", "what", "by", "through", "still"), votes, empty="nobody has decided anything"
    )
    print_output("")
    print_table(("told", "what", "by", "detail"), history, empty="nothing was told")
    print_output("")
    print_table(
        ("delivery of", "to", "state", "tries", "reason"),
        deliveries,
        empty="nothing was sent: no sink wants it",
    )


@with_client
async def explain(relay: Client, event: EventId, *, as_json: AsJson = False) -> None:
    """Say which rule decides about an event, what is missing, and until when."""
    explanation = await relay.get("events", event, "rule")
    if as_json:
        print_json(explanation)
        return
    print_fields(_decision_fields(explanation))
    print_output("")
    rows = [
        (rule["name"], _rule_effect(rule), format_local_time(rule["turns"]))
        for rule in explanation["rules"]
    ]
    print_table(("rule", "why", "hours turn"), rows, empty="no rules: nothing is approved")


def _decision_fields(explanation: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
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
    if explanation["uncoveredResources"]:
        yield "nobody yet", f"speaks for {join_names(explanation['uncoveredResources'])}"
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


def _rule_effect(rule: Mapping[str, Any]) -> str:
    if rule["decides"]:
        return "decides"
    if rule["unmet"]:
        return f"does not match: {join_names(rule['unmet'])}"
    return "comes after"
