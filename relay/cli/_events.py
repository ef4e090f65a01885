"""Finds the event that a person means, and describes events in words.

An event is named by its EventId or by a unique beginning of it. On a hub, several scopes can have
an EventId: EVENTID@SCOPE names one of them. Everything here takes the JSON objects of the API.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from relay.approvals.request import HOLD_NOTICE
from relay.cli._options import scope_query
from relay.cli._output import CommandFailed, format_local_time, pluralize
from relay.cli.client import Client
from relay.errors import ConfigError
from relay.events.cloudevent import event_name
from relay.events.timestamps import duration_text
from relay.sentences import LIMIT_NOTICE, said
from relay.settings import join_names

_EVENT_ID_LENGTH = 36
"""Characters of an EventId. A text of this length or longer begins no other."""
_BEGINNING = 8
"""Characters of an EventId that a table shows, if no other in it begins so."""
_MAX_NAMED = 5
"""How many of several possible EventIds an error lists."""


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
            f"{beginning!r} begins {len(names)} EventIds: {join_names(names, most=_MAX_NAMED)}. "
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
    waits = "; ".join(map(_describe_limit_wait, approval.get("waitingFor", ())))
    return f"{waits}; {LIMIT_NOTICE}" if waits else None


def _describe_limit_wait(wait: Mapping[str, Any]) -> str:
    text = f"limit {wait['limit']}, {pluralize(wait['max'], 'machine')} at once"
    if wait["behind"]:
        return f"{text}: event {wait['behind']} comes first"
    until = f" until {format_local_time(wait['until'])}" if wait["until"] else ""
    return f"{text}: {join_names(wait['machines'], most=10)}{until}"


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
