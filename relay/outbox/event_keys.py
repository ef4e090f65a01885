"""The keys by which a state file knows the events of Azure.

Whoever writes or looks up an event makes its key with the `EventKeyFormat` of the state file.
A relay has the events of one scope, so their EventIds identify them. A hub has those of many
scopes. Two scopes can have the same EventId, so there the key names the scope, too.
"""

from __future__ import annotations

from dataclasses import dataclass

_SEPARATOR = "@"
"""It is in no name of a scope, so the last one in a key ends the EventId, whatever that holds."""


@dataclass(frozen=True, slots=True)
class EventKeyFormat:
    """Makes keys. ``with_scope``: the state file is that of a hub."""

    with_scope: bool = False

    def make_key(self, scope: str, event_id: str) -> str:
        """Return the key of an event: ``<eventid>``, on a hub ``<eventid>@<scope>``."""
        key = event_id.lower()
        return f"{key}{_SEPARATOR}{scope}" if self.with_scope else key

    def event_id_of_key(self, key: str) -> str:
        """Return the EventId in a key, in lower case."""
        return key.rpartition(_SEPARATOR)[0] if self.with_scope else key

    def scope_of_key(self, key: str) -> str | None:
        """Return the scope in a key; None if the keys of this state file have none."""
        return key.rpartition(_SEPARATOR)[2] if self.with_scope else None

    def prefix_of_event_id(self, event_id: str) -> str:
        """Return how the keys of an EventId begin in every scope."""
        key = event_id.lower()
        return f"{key}{_SEPARATOR}" if self.with_scope else key


SINGLE_SCOPE = EventKeyFormat()
"""The keys of a relay that is no hub."""
