"""Reads the Scheduled Events document of IMDS, and knows what each version of the API has.

Unknown content is ignored, broken content refused. Source of every field and of the table of
versions: https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
(docs/protocol.md#api-versions).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Final, Required

import orjson
from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic needs it up to Python 3.11

from relay.errors import DocumentError
from relay.events.match import Match
from relay.events.model import Document, EventId, ScheduledEvent
from relay.events.timestamps import format_rfc3339, parse_timestamp
from relay.settings import first_error_path_and_message

API_VERSIONS: Final = (
    "2017-03-01",
    "2017-08-01",
    "2017-11-01",
    "2019-01-01",
    "2019-04-01",
    "2019-08-01",
    "2020-07-01",
)
"""Oldest first."""
NEWEST_API_VERSION: Final = API_VERSIONS[-1]
SOURCE_SINCE: Final = "2019-08-01"
"""Since this version a document says who started an event."""
DURATION_SINCE: Final = "2020-07-01"
"""Since this version a document says how long an interruption lasts."""
PREFIX_UNTIL: Final = "2017-03-01"
"""In documents of this version, names in ``Resources`` begin with an additional ``_``."""
TYPE_SINCE: Final[Mapping[str, str]] = {"preempt": "2017-11-01", "terminate": "2019-01-01"}
_SEVERITY = ("terminate", "preempt", "redeploy", "reboot", "freeze", "")


def _whole_seconds(value: object) -> int | None:
    # Text is read too, as Microsoft's own sample does. Round up, so that no rule takes 8.9 s for 8.
    # Negative (-1), not a number, or larger than JSON can hold exactly: the duration is unknown.
    if isinstance(value, str) and re.fullmatch(r"\s*\d{1,15}\s*", value, re.ASCII):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        return None
    return math.ceil(value)


_Text = Annotated[
    str | None,
    BeforeValidator(lambda value: None if isinstance(value, str) and not value.strip() else value),
]


_WIRE = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True)


@with_config(_WIRE)
class _WireEvent(TypedDict, total=False):
    """An entry of the document. A dict takes a fifth of the memory of a model."""

    EventId: Required[EventId]
    EventType: _Text
    EventStatus: _Text
    ResourceType: _Text
    Resources: list[str] | None
    NotBefore: _Text
    Description: _Text
    EventSource: _Text
    DurationInSeconds: Annotated[int | None, BeforeValidator(_whole_seconds)]


@with_config(_WIRE)
class _WireDocument(TypedDict):
    Events: list[_WireEvent]


_DOCUMENT = TypeAdapter(_WireDocument)


def _to_event(entry: _WireEvent, *, prefixed: bool) -> ScheduledEvent:
    names: Sequence[str] = entry.get("Resources") or ()
    if prefixed:
        names = [name.removeprefix("_") for name in names]
    not_before = entry.get("NotBefore")
    moment = parse_timestamp(not_before)
    return ScheduledEvent(
        event_id=entry["EventId"],
        event_type=entry.get("EventType"),
        event_status=entry.get("EventStatus"),
        resource_type=entry.get("ResourceType"),
        resources=tuple(dict.fromkeys(names)),
        not_before=format_rfc3339(moment) if moment else not_before,
        description=entry.get("Description"),
        event_source=entry.get("EventSource"),
        duration=entry.get("DurationInSeconds"),
    )


def parse_document(body: bytes, api_version: str = NEWEST_API_VERSION) -> Document:
    """Read the document from the body of a 200 response.

    Machines have the same names in every version of the API: the prefix ``_`` of the oldest is
    removed (docs/protocol.md#names-of-resources).

    If an EventId occurs more than once, its entries become one event with the furthest status, the
    most severe type, the longest duration and all resources. So nothing is approved that no rule
    has checked.

    Raises DocumentError for an empty body, a body that is not JSON, a document without ``Events``
    or a malformed event. None of these means "no events" (docs/protocol.md#an-empty-answer).
    """
    if not body.strip():
        raise DocumentError("expected a Scheduled Events document, got an empty body", status=200)
    try:
        content = orjson.loads(body)
        entries = _DOCUMENT.validate_python(content)["Events"]
    except orjson.JSONDecodeError as error:
        raise DocumentError(
            f"expected a Scheduled Events document, got a body that is not JSON: {error}",
            status=200,
        ) from error
    except ValidationError as error:
        path, problem = first_error_path_and_message(error)
        raise DocumentError(
            f"expected a Scheduled Events document, {path or 'document'}: {problem}", status=200
        ) from error
    events_by_key: dict[str, list[ScheduledEvent]] = {}
    for entry in entries:
        event = _to_event(entry, prefixed=api_version <= PREFIX_UNTIL)
        events_by_key.setdefault(event.lowercase_event_id, []).append(event)
    # A hint is never worth an error. The store holds signed integers of 64 bits.
    incarnation = content.get("DocumentIncarnation")
    if type(incarnation) is not int or not -(2**63) <= incarnation < 2**63:
        incarnation = None
    return Document(incarnation, tuple(map(_merge_same_event, events_by_key.values())))


def _merge_same_event(events: Sequence[ScheduledEvent]) -> ScheduledEvent:
    if len(events) == 1:
        return events[0]
    # The order in the document must not matter: Started comes first, then the text decides.
    events = sorted(
        events, key=lambda event: (not event.is_started, str(event.to_cloudevent_data()))
    )
    durations = [event.duration for event in events if event.duration is not None]
    return replace(
        events[0],
        resources=tuple(sorted({name for event in events for name in event.resources})),
        event_type=min((event.event_type for event in events), key=_severity_rank),
        # Rules approve events of users more readily, so another source wins.
        event_source=min(
            (event.event_source for event in events),
            key=lambda source: (source or "").lower() == "user",
        ),
        duration=max(durations) if len(durations) == len(events) else None,
    )


def _severity_rank(event_type: str | None) -> int:
    name = (event_type or "").lower()
    # A type that we do not know may be worse than all others.
    return _SEVERITY.index(name) if name in _SEVERITY else -1


def shows_all_types(api_version: str) -> bool:
    """Whether documents of this version show events of every type."""
    return api_version >= max(TYPE_SINCE.values())


def find_impossible_conditions(match: Match, api_version: str) -> Iterator[str]:
    """Yield why no event of this version can ever meet a condition: one text for each key."""
    if match.event_source is not None and api_version < SOURCE_SINCE:
        yield f"event_source: the source is not known before {SOURCE_SINCE}"
    if match.duration is not None and api_version < DURATION_SINCE:
        yield f"duration: it is not known before {DURATION_SINCE}"
    if match.event_type is not None:
        since = [TYPE_SINCE.get(name.lower(), "") for name in match.event_type]
        if all(api_version < first for first in since):
            names = ", ".join(match.event_type)
            yield f"event_type: there is no {names} before {min(since)}"
