"""``events``, ``show`` and ``explain`` say what is known of events; ``tail`` follows the stream.

An event is named by its EventId or by a unique beginning of it. On a hub, several scopes can have
an EventId: EVENTID@SCOPE names one of them. The other verbs find and describe events with what is
here, too. It takes the JSON objects of the API.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson

from relay.approvals.request import HOLD_NOTICE
from relay.cli._options import AllPages, EventId, Scope, scope_query
from relay.cli._output import (
    CommandFailed,
    format_local_time,
    pluralize,
    print_json_line,
    print_lines,
    print_to_stderr,
)
from relay.cli._tables import print_fields, print_page, print_table
from relay.cli.client import Client, RelayCall
from relay.errors import ConfigError
from relay.events.cloudevent import event_name
from relay.events.timestamps import duration_text
from relay.process import run_until_stopped
from relay.sentences import LIMIT_NOTICE, said
from relay.settings import join_names

_EVENT_ID_LENGTH = 36
"""Characters of an EventId. A text of this length or longer begins no other."""
_BEGINNING = 8
"""Characters of an EventId that a table shows, if no other in it begins so."""


async def find_event(relay: Client, text: str, scope: str | None) -> tuple[str, dict[str, str]]:
    """Return the EventId that a text is or begins, and the query of a call that names its scope.

    Events in the document come before those that ended. Raises CommandFailed if the text begins
    several EventIds, ConfigError if it is empty. If the relay knows none, the text is returned: the
    call about it says so.
    """
    if not text:
        raise ConfigError("expected an EventId or a beginning of it, got an empty text")
    beginning, _, named = text.rpartition("@") if scope is None and "@" in text else (text, "", "")
    if not beginning or len(beginning) >= _EVENT_ID_LENGTH:
        return text, scope_query(scope)
    page = await relay.pages("events", all_pages=True, **scope_query(named or scope))
    newest: dict[tuple[str, str], Mapping[str, Any]] = {}  # the occurrence of each event
    for event in page["items"]:  # the newest first
        if event["eventId"].lower().startswith(beginning.lower()):
            newest.setdefault((event["eventId"].lower(), event["scope"]), event)
    matching = [*newest.values()]
    if not matching or any(event_id == beginning.lower() for event_id, _ in newest):
        return text, scope_query(scope)
    candidates = [event for event in matching if event["outcome"] is None] or matching
    if len(candidates) > 1:
        names = [f"{event['eventId']} ({event['eventType']})" for event in candidates]
        raise CommandFailed(
            f"{beginning!r} begins {len(names)} EventIds: {join_names(names, most=5)}. "
            "Give more of the one you mean"
        )
    return candidates[0]["eventId"], scope_query(candidates[0]["scope"])


async def get_event(relay: Client, text: str) -> Any:
    """Return the event whose EventId is a text, or begins with it, as the API gives it."""
    event_id, query = await find_event(relay, text, None)
    return await relay.get("events", event_id, **query)


def with_short_event_ids(page: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a page with beginnings of its EventIds, so that a row fits into a line.

    Without a terminal return it as it is: programs get what they can use anywhere.
    """
    if not sys.stdout.isatty():
        return page
    ids = {item["eventId"] for item in page["items"] if item["eventId"]}
    beginnings = Counter(each[:_BEGINNING].lower() for each in ids)
    short = {each: each[:_BEGINNING] for each in ids if beginnings[each[:_BEGINNING].lower()] == 1}
    items = [
        {**item, "eventId": short.get(item["eventId"], item["eventId"])} for item in page["items"]
    ]
    return {**page, "items": items}


def event_fields(event: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield what a person needs to know to decide about an event, as names and values."""
    approval, duration = event["approval"], event["durationSeconds"]
    yield "event", event["eventId"]
    yield "scope", event["scope"]
    yield "what", " ".join(filter(None, (event["eventType"], event["eventStatus"])))
    yield "outcome", event["outcome"]
    yield "machines", join_names(event["resources"], most=50) or "none named"
    yield "not before", format_local_time(event["notBefore"])
    yield "takes", "unknown" if duration is None else duration_text(duration)
    yield "started by", event["eventSource"]
    yield "because", event["description"]
    yield "approval", approval_summary(event)
    if event["outcome"] is None:  # an event that is over waits for nothing
        yield from approval_fields(approval, HOLD_NOTICE)
        yield "closes", format_local_time(approval["closes"])
    yield "revision", event["revision"]


def approval_fields(approval: Mapping[str, Any], hold_means: str) -> Iterator[tuple[str, object]]:
    """Yield what an event that is not over waits for, as names and values."""
    if approval["missing"]:
        voters = f", from {join_names(approval['mayVote'])}" if approval["mayVote"] else ""
        yield "missing", f"{pluralize(approval['missing'], 'vote')}{voters}"
    yield "waits for", describe_limit_waits(approval)
    holds = describe_holds_in_force(approval["standingHolds"])
    yield "held by", f"{holds}; {hold_means}" if holds else None
    yield "runbook", approval["runbook"]


def approval_summary(event: Mapping[str, Any]) -> str | None:
    """Return the approval state of an event with votes and rule; None for an ended one without."""
    approval = event["approval"]
    state = approval["state"]
    if event["outcome"] is not None and state == "none":
        return None
    parts = [state]
    # In later states the event has another revision, for which the votes do not count.
    if approval["required"] and state in ("pending", "held", "waiting"):
        parts.append(vote_count(approval))
    if state == "waiting":
        names = join_names([wait["limit"] for wait in approval["waitingFor"]])
        parts.append(f"for limit {names}")
    parts.append(f"rule {approval['rule']}" if approval["rule"] else "no rule")
    return ", ".join(parts)


def describe_limit_waits(approval: Mapping[str, Any]) -> str | None:
    texts = []
    for wait in approval.get("waitingFor", ()):
        until = f" until {format_local_time(wait['until'])}" if wait["until"] else ""
        why = f"{join_names(wait['machines'])}{until}"
        if wait["behind"]:
            why = f"event {wait['behind']} comes first"
        texts.append(f"limit {wait['limit']}, {pluralize(wait['max'], 'machine')} at once: {why}")
    return "; ".join([*texts, LIMIT_NOTICE]) if texts else None


def describe_holds_in_force(holds: Iterable[Mapping[str, Any]]) -> str | None:
    texts = [
        f"standing hold {hold['holdId'][:8]} of {hold['principal']} until "
        f"{format_local_time(hold['until'])} ({hold['reason']})"
        for hold in holds
    ]
    return "; ".join(texts) or None


def vote_count(approval: Mapping[str, Any]) -> str:
    return f"{approval['votes']} of {pluralize(approval['required'], 'vote')}"


def cloudevent_row(event: Mapping[str, Any]) -> tuple[object, object, object, str]:
    name, data = event_name(event["type"]), event["data"]
    at = format_local_time(event["time"], relative=False)
    return at, name, data.get("principal"), said(name, data)


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
