"""What each version of the Scheduled Events API has.

Source: the table of versions on the events page (docs/protocol.md#api-versions).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from relay.events.match import Match

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
_PREFIX_UNTIL: Final = "2017-03-01"
_TYPE_SINCE: Final[Mapping[str, str]] = {"preempt": "2017-11-01", "terminate": "2019-01-01"}


def prefixes_resource_names(api_version: str) -> bool:
    """Whether names in ``Resources`` begin with an additional ``_``."""
    return api_version <= _PREFIX_UNTIL


def shows_all_types(api_version: str) -> bool:
    """Whether documents of this version show events of every type."""
    return api_version >= max(_TYPE_SINCE.values())


def find_impossible_conditions(match: Match, api_version: str) -> Iterator[str]:
    """Yield why no event of this version can ever meet a condition: one text for each key."""
    if match.event_source is not None and api_version < SOURCE_SINCE:
        yield f"event_source: the source is not known before {SOURCE_SINCE}"
    if match.duration is not None and api_version < DURATION_SINCE:
        yield f"duration: it is not known before {DURATION_SINCE}"
    if match.event_type is not None:
        since = [_TYPE_SINCE.get(name.lower(), "") for name in match.event_type]
        if all(api_version < first for first in since):
            names = ", ".join(match.event_type)
            yield f"event_type: there is no {names} before {min(since)}"
