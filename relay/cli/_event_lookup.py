"""Finds the event that a person means: by its EventId, or by a unique beginning of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from relay.cli._client import Client
from relay.cli._exit_codes import CommandFailed
from relay.cli._options import scope_query

_EVENT_ID_LENGTH = 36
"""Characters of an EventId. A text of this length or longer is taken as it is."""
_MIN_BEGINNING = 8
_MAX_NAMED = 5


class EventName(NamedTuple):
    """An EventId, and the query that names its scope."""

    event_id: str
    query: Mapping[str, str]


async def find_event(relay: Client, text: str, scope: str | None = None) -> EventName:
    """Return the event whose EventId begins with a text.

    A text that begins no EventId is returned as it is, so that the relay says what is wrong with
    it. Events in the document come before those that ended. Raises CommandFailed if the text begins
    several EventIds.
    """
    given = EventName(text, scope_query(scope))
    if len(text) >= _EVENT_ID_LENGTH or not text:
        return given
    page = await relay.get_list("events", all_pages=True, **scope_query(scope))
    wanted = text.lower()
    matching = _newest_of_each(
        [event for event in page["items"] if event["eventId"].lower().startswith(wanted)]
    )
    exact = [event for event in matching if event["eventId"].lower() == wanted]
    live = [event for event in matching if event["outcome"] is None]
    for candidates in (exact, live, matching):
        if len(candidates) == 1:
            (event,) = candidates
            # An older relay does not say the scope.
            return EventName(event["eventId"], scope_query(event.get("scope", scope)))
    if not matching:
        return given
    names = [f"{event['eventId']} ({event['eventType']})" for event in (live or matching)]
    listed = ", ".join(names[:_MAX_NAMED])
    others = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    raise CommandFailed(
        f"{text!r} begins {len(names)} EventIds: {listed}{others}. Give more of the one you mean"
    )


async def get_event(relay: Client, text: str) -> Any:
    """Return the event whose EventId begins with a text, as the API gives it."""
    name = await find_event(relay, text)
    return await relay.get("events", name.event_id, **name.query)


def unique_beginnings(event_ids: Iterable[str]) -> dict[str, str]:
    """Return a beginning of each EventId that no other one has, at least eight characters."""
    known = set(event_ids)
    length = _MIN_BEGINNING
    while len({event_id[:length].lower() for event_id in known}) < len(
        {event_id.lower() for event_id in known}
    ):
        length += 1
    return {event_id: event_id[:length] for event_id in known}


def _newest_of_each(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the newest occurrence of each event. The relay lists the newest first."""
    newest: dict[tuple[str, str | None], Mapping[str, Any]] = {}
    for event in events:
        newest.setdefault((event["eventId"].lower(), event.get("scope")), event)
    return list(newest.values())
