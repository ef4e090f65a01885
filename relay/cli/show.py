"""``events``, ``show`` and ``explain`` say what is known of events; ``tail`` follows the stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from relay.cli._events import (
    approval_fields,
    approval_summary,
    cloudevent_row,
    event_fields,
    find_event,
    vote_count,
    with_short_event_ids,
)
from relay.cli._options import AllPages, EventId, Scope, scope_query
from relay.cli._output import format_local_time, print_json_line, print_lines, print_to_stderr
from relay.cli._tables import print_fields, print_page, print_table
from relay.cli.client import Client, RelayCall
from relay.events.cloudevent import event_name
from relay.process import run_until_stopped
from relay.settings import join_names


async def events(call: RelayCall, *, scope: Scope = None, all_pages: AllPages = False) -> None:
    """List current and recent events."""
    query = scope_query(scope)
    page = call.for_people(await call.relay.pages("events", all_pages=all_pages, **query))
    columns = ("scope", "event", "type", "state", "machines", "not before", "approval")
    first = 0 if len({event["scope"] for event in page["items"]}) > 1 else 1
    print_page(
        with_short_event_ids(page),
        columns[first:],
        lambda event: _event_row(event)[first:],
        empty="no events",
    )


def _event_row(event: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        event["scope"],
        event["eventId"],
        event["eventType"],
        event["outcome"] or event["eventStatus"],
        join_names(event["resources"], most=3),
        format_local_time(event["notBefore"]) if event["outcome"] is None else None,
        approval_summary(event),
    )


async def show(
    call: RelayCall, event: EventId, *, scope: Scope = None, all_pages: AllPages = False
) -> None:
    """Show one event: its rule and what is missing, history, votes and deliveries, the newest.

    --all shows the whole history.
    """
    event_id, query = await find_event(call.relay, event, scope)
    details = call.for_people(
        await call.relay.details("events", event_id, log="history", all_pages=all_pages, **query)
    )
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
    print_fields(event_fields(details))
    print_lines("")
    print_table(
        ("decided", "what", "by", "through", "still"), votes, empty="nobody has decided anything"
    )
    print_lines("")
    told = map(cloudevent_row, details["history"])
    print_table(("told", "what", "by", "detail"), told, empty="nothing was told")
    print_lines("")
    columns = ("delivery of", "to", "state", "tries", "reason")
    print_table(columns, deliveries, empty="nothing was sent: no sink wants it")
    if details["next"] is not None:
        print_to_stderr("more happened before: --all")


async def explain(call: RelayCall, event: EventId, *, scope: Scope = None) -> None:
    """Say which rule decides about an event, what is missing, and until when."""
    event_id, query = await find_event(call.relay, event, scope)
    explanation = call.for_people(await call.relay.get("events", event_id, "rule", **query))
    print_fields(_explanation_fields(explanation))
    print_lines("")
    rows = [
        (
            rule["name"],
            "decides"
            if rule["decides"]
            else f"does not match: {join_names(rule['unmet'])}"
            if rule["unmet"]
            else "comes after",
            format_local_time(rule["turns"]),
        )
        for rule in explanation["rules"]
    ]
    print_table(("rule", "why", "hours turn"), rows, empty="no rules: nothing is approved")


def _explanation_fields(explanation: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    yield "event", explanation["eventId"]
    yield "not before", format_local_time(explanation["notBefore"])
    mode = explanation["mode"]
    yield "approval", explanation["state"] + ("" if mode == "on" else f"; approvals are {mode}")
    rule = explanation["rule"]
    yield "decided by", f"rule {rule}" if rule else "no rule: it is not approved"
    if explanation["required"]:
        yield "votes", vote_count(explanation)
    yield from approval_fields(explanation, explanation["holdMeans"])
    if explanation["uncoveredResources"]:
        yield "nobody yet", f"speaks for {join_names(explanation['uncoveredResources'])}"
    if explanation["required"] and explanation["closes"]:
        yield "voting", f"closes {format_local_time(explanation['closes'])}"
    yield "reminder", format_local_time(explanation["reminder"])
    for vote in explanation["voted"]:
        until = format_local_time(vote["until"]) or "NotBefore"
        yield "vote", f"{vote['principal']}, good until {until}"
    for hold in explanation["holds"]:
        hold_until = format_local_time(hold["until"])
        yield "held by", f"{hold['principal']} until {hold_until}; {explanation['holdMeans']}"


_MIN_RECONNECT_DELAY, _MAX_RECONNECT_DELAY = 0.5, 15.0
"""Seconds. The delay doubles with each attempt that fails."""
_MAY_BE_MISSING = "events may be missing: the journal of the relay does not go on where this ended"


async def tail(call: RelayCall) -> None:
    """Print each CloudEvent of the relay as it happens, until Ctrl-C."""
    await run_until_stopped(_follow(call.relay, as_json=call.as_json))


async def _follow(relay: Client, *, as_json: bool) -> None:
    last: str | None = None  # the journalhead of the last frame
    is_broken = False
    delay = _MIN_RECONNECT_DELAY
    while True:
        try:
            async for frame in relay.stream(last):
                delay = _MIN_RECONNECT_DELAY
                head = frame.get(b"journalhead", b"").decode("ascii", "replace")
                if is_broken:
                    is_broken = False
                    # docs/api.md#the-stream
                    what = "no event is missing" if last and last == head else _MAY_BE_MISSING
                    print_to_stderr(f"connected again; {what}")
                last = head
                if b"data" in frame:
                    _print_event(orjson.loads(frame[b"data"]), as_json=as_json)
            reason = "the relay ended the stream"
        except ConnectionError as error:
            if last is None:
                raise
            reason = str(error)
        if not is_broken:
            print_to_stderr(f"{reason}; trying again until the relay answers")
        is_broken = True
        await asyncio.sleep(delay)
        delay = min(2 * delay, _MAX_RECONNECT_DELAY)


def _print_event(event: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json_line(event)
        return
    time, name, principal, details = cloudevent_row(event)
    data = event["data"]
    subject = ""
    if "eventId" in data:
        machines = join_names(data.get("resources") or ()) or "unknown machines"
        subject = f"{data.get('eventType') or 'event'} {data['eventId']} of {machines}"
    parts = (time, f"{name:<21}", subject, principal, details)
    print_lines("  ".join(str(part) for part in parts if part))
