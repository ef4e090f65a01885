"""Warnings about a configuration that is valid: for ``check``, ``doctor`` and the start."""

from __future__ import annotations

from collections.abc import Iterator

from relay.config.kinds import load_kinds
from relay.config.model import NO_RULE_FOR_USER_EVENTS, Config
from relay.config.source_warnings import all_match_conditions, imds_source_warnings
from relay.events.match import EVENT_SOURCES, EVENT_TYPES, Match
from relay.fleet.settings import HubSettings
from relay.suggestions import closest


def start_warnings(config: Config) -> Iterator[str]:
    """Yield what the log says when a relay starts."""
    if config.has_no_rule_for_user_events:
        yield NO_RULE_FOR_USER_EVENTS
    for place, match in all_match_conditions(config):
        yield from _unknown_values(place, match)
    yield from imds_source_warnings(config)
    for plugin in load_kinds().broken:
        yield f"{plugin.problem}; nothing uses it"


def config_warnings(config: Config) -> Iterator[str]:
    """Yield every warning."""
    yield from start_warnings(config)
    if isinstance(config.fleet, HubSettings):
        yield from config.fleet.overlap_warnings()
    conditions = [rule.match for rule in config.approvals.rules]
    conditions += [limit.match for limit in config.approvals.limits]
    has_scope_condition = any(match.scope is not None for match in conditions)
    if config.scope == "auto" and has_scope_condition:
        yield (
            "scope: auto is resolved on the VM only; "
            "here conditions on the scope are compared with the word auto"
        )


def _unknown_values(place: str, match: Match) -> Iterator[str]:
    """Yield each type and source that Azure does not document. It may add some in future."""
    for key, values, known in (
        ("event_type", match.event_type, EVENT_TYPES),
        ("event_source", match.event_source, EVENT_SOURCES),
    ):
        lower_case = {name.lower() for name in known}
        for value in values or ():
            if value.lower() not in lower_case:
                close = closest(value, known)
                meant = f"Did you mean {close}? " if close else ""
                yield (
                    f"{place}: {key}: Azure sends {', '.join(known)}, and documents no "
                    f"{value}. {meant}Until it sends one, this condition matches nothing"
                )
