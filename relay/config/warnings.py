"""Warnings about a configuration that is valid, each as a text.

`start_warnings` is what the log says when a relay starts or reloads. `config_warnings` adds what
only ``check`` and ``doctor`` show. A warning names something that has no effect, such as a rule
with a condition that no event can meet.
"""

from __future__ import annotations

from collections.abc import Iterator

from relay.config.kinds import load_kinds
from relay.config.model import NO_RULE_FOR_USER_EVENTS, Config
from relay.events.match import EVENT_SOURCES, EVENT_TYPES, Match
from relay.fleet.settings import AgentSettings, HubSettings
from relay.imds import DISCOVER
from relay.imds.document import API_VERSIONS, NEWEST_API_VERSION, find_impossible_conditions
from relay.settings import closest


def start_warnings(config: Config) -> Iterator[str]:
    if config.has_no_rule_for_user_events:
        yield NO_RULE_FOR_USER_EVENTS
    for place, match in _all_match_conditions(config):
        yield from _undocumented_value_warnings(place, match)
    if not isinstance(config.fleet, HubSettings):  # a hub has no source
        yield from _source_warnings(config)
    for _, problem in load_kinds().broken:
        yield f"{problem}; nothing uses it"


def config_warnings(config: Config) -> Iterator[str]:
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


def _all_match_conditions(config: Config) -> Iterator[tuple[str, Match]]:
    for rule in config.approvals.rules:
        yield f"rule {rule.name}", rule.match
    for limit in config.approvals.limits:
        yield f"limit {limit.name}", limit.match
    for sink in config.sinks:
        yield f"match of sink {sink.name}", sink.match


def _undocumented_value_warnings(place: str, match: Match) -> Iterator[str]:
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


def _source_warnings(config: Config) -> Iterator[str]:
    """Yield warnings about the source, and about conditions that no event from it can meet."""
    source = config.source
    if source.url == DISCOVER and "auto" in (config.scope, config.relay):
        yield (
            "source.url: discover is for VMs without a virtual network. They have no instance "
            "metadata, so the relay waits for it in vain. Remedy: give scope and relay a name"
        )
    if source.api_version not in API_VERSIONS:
        yield (
            f"source.api_version: {source.api_version} is none of the versions that Microsoft "
            f"lists: {', '.join(API_VERSIONS)}"
        )
    if isinstance(config.fleet, AgentSettings):
        return  # it has neither rules nor sinks of its own
    for place, match in _all_match_conditions(config):
        for reason in find_impossible_conditions(match, source.api_version):
            yield (
                f"{place} never matches with source.api_version {source.api_version}: {reason}. "
                f"Remedy: api_version: {NEWEST_API_VERSION}"
            )
