"""Lets people write and read the beginning of an EventId instead of its 36 characters.

`call_about_event` and what builds on it find the event that a person means, by its EventId or by a
unique beginning. `shorten_page_event_ids_on_terminal` puts such beginnings into lists. On a hub,
several scopes can have an EventId: EVENTID@SCOPE names one of them.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from relay.cli._exit_codes import CommandFailed, NotFound
from relay.cli._options import scope_query
from relay.cli.client import Client

T = TypeVar("T")
_EVENT_ID_LENGTH = 36
"""Characters of an EventId. A text of this length or longer begins no other."""
_MIN_BEGINNING = 8
"""Characters of the shortest beginning that is printed."""
_MAX_NAMED = 5
"""How many of several possible EventIds an error lists."""


async def call_about_event(
    relay: Client,
    text: str,
    scope: str | None,
    call: Callable[[str, Mapping[str, str]], Awaitable[T]],
) -> T:
    """Return the result of a call about the event whose EventId is a text, or begins with it.

    ``call`` gets the EventId, and the query that names its scope. Raises CommandFailed if the text
    begins several EventIds, and what the call raises.
    """
    try:
        return await call(text, scope_query(scope))
    except NotFound:
        event = await _find_single_event_by_prefix(relay, text, scope)
        if event is None:
            raise
    return await call(event["eventId"], scope_query(event["scope"]))


async def get_event(relay: Client, text: str) -> Any:
    """Return the event whose EventId is a text, or begins with it, as the API gives it."""
    return await call_about_event(
        relay, text, None, lambda event_id, query: relay.get("events", event_id, **query)
    )


async def expand_event_id_prefix_if_known(relay: Client, text: str) -> str:
    """Return the EventId that a text is or begins; the text itself if the relay knows none.

    The relay may have deliveries about an event whose history it has no longer. On a hub the
    EventId has its scope, because several scopes can have it.
    """
    try:
        event = await get_event(relay, text)
    except NotFound:
        return text
    event_id: str = event["eventId"]
    _, at, scope = text.partition("@")
    return f"{event_id}@{scope}" if at else event_id


async def _find_single_event_by_prefix(
    relay: Client, text: str, scope: str | None
) -> Mapping[str, Any] | None:
    """Return the event whose EventId begins with a text; None if there is none.

    Events in the document come before those that ended. Raises CommandFailed if the text begins
    several EventIds.
    """
    if len(text.rpartition("@")[0] or text) >= _EVENT_ID_LENGTH or not text:
        return None
    if scope is None and "@" in text:
        text, _, scope = text.rpartition("@")
    page = await relay.get_first_or_all_pages("events", all_pages=True, **scope_query(scope))
    wanted = text.lower()
    matching = _newest_of_each(
        [event for event in page["items"] if event["eventId"].lower().startswith(wanted)]
    )
    live = [event for event in matching if event["outcome"] is None]
    candidates = live or matching
    if len(candidates) > 1:
        names = [f"{event['eventId']} ({event['eventType']})" for event in candidates]
        listed = ", ".join(names[:_MAX_NAMED])
        others = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        raise CommandFailed(
            f"{text!r} begins {len(names)} EventIds: {listed}{others}. "
            "Give more of the one you mean"
        )
    return candidates[0] if candidates else None


def unique_beginnings(event_ids: Iterable[str]) -> dict[str, str]:
    """Return a beginning of each EventId that no other one has, at least eight characters."""
    known = set(event_ids)
    length = _MIN_BEGINNING
    while len({event_id[:length].lower() for event_id in known}) < len(
        {event_id.lower() for event_id in known}
    ):
        length += 1
    return {event_id: event_id[:length] for event_id in known}


def shorten_page_event_ids_on_terminal(page: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a page with beginnings of its EventIds, so that a row fits into a line.

    Without a terminal return it as it is: programs get what they can use anywhere.
    """
    if not sys.stdout.isatty():
        return page
    event_ids = [item["eventId"] for item in page["items"] if item["eventId"] is not None]
    beginnings = unique_beginnings(event_ids)
    items = [
        {**item, "eventId": beginnings.get(item["eventId"], item["eventId"])}
        for item in page["items"]
    ]
    return {**page, "items": items}


def _newest_of_each(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the newest occurrence of each event. The relay lists the newest first."""
    newest: dict[tuple[str, str | None], Mapping[str, Any]] = {}
    for event in events:
        newest.setdefault((event["eventId"].lower(), event["scope"]), event)
    return list(newest.values())
