"""What differs between two configurations, and what of it needs a restart. Pure.

A reload lists these changes in the log and in the answer of the API. If one of them needs a
restart, it refuses the new configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from relay.config.model import Config
from relay.settings import Section

RESTART_KEYS = (
    "scope",
    "relay",
    "fleet",
    "source.url",
    "source.api_version",
    "store.path",
    "api.listen",
    "api.socket",
)
"""The keys that a reload cannot change, with the keys inside them.

They say who this relay is, and where it is found. All others can change while the relay runs.
"""
_LIVE_KEYS = ("fleet.domains",)
"""The exceptions inside `RESTART_KEYS`."""

ChangeKind = Literal["added", "changed", "removed", "moved"]


@dataclass(frozen=True, slots=True)
class KeyChange:
    """A key whose value differs. Entries of a list that have names are keys too: ``sinks.bus``.

    moved: the entries of a list are the same, in another order.
    """

    key: str
    kind: ChangeKind


def find_key_changes(before: Config, after: Config) -> list[KeyChange]:
    return list(_changes_of("", before, after))


def key_needs_restart(key: str) -> bool:
    return _is_key_at_or_under_any(key, RESTART_KEYS) and not _is_key_at_or_under_any(
        key, _LIVE_KEYS
    )


def _is_key_at_or_under_any(key: str, keys: tuple[str, ...]) -> bool:
    return any(key == outer or key.startswith(f"{outer}.") for outer in keys)


def _changes_of(key: str, before: Any, after: Any) -> Iterator[KeyChange]:
    if before == after:
        return
    if isinstance(before, Section) and type(before) is type(after):
        for field in type(before).model_fields:
            path = f"{key}.{field}" if key else field
            yield from _changes_of(path, getattr(before, field), getattr(after, field))
    elif isinstance(before, Mapping) and isinstance(after, Mapping):
        yield from _changes_of_entries(key, before, after)
    elif (old := _by_name(before)) is not None and (new := _by_name(after)) is not None:
        changes = list(_changes_of_entries(key, old, new))
        yield from changes or [KeyChange(key, "moved")]
    else:
        yield KeyChange(key, "changed")


def _changes_of_entries(
    key: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[KeyChange]:
    for name in (*before, *(name for name in after if name not in before)):
        if name not in after:
            yield KeyChange(f"{key}.{name}", "removed")
        elif name not in before:
            yield KeyChange(f"{key}.{name}", "added")
        elif before[name] != after[name]:
            yield KeyChange(f"{key}.{name}", "changed")


def _by_name(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, tuple):
        return None
    entries = {
        name: entry
        for entry in value
        if isinstance(name := getattr(entry, "name", getattr(entry, "user", None)), str)
    }
    return entries if len(entries) == len(value) else None
