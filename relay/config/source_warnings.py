"""What a valid configuration cannot do with its source: each text is a warning."""

from __future__ import annotations

from collections.abc import Iterator

from relay.config.model import Config
from relay.events.match import Match
from relay.fleet.settings import AgentSettings, HubSettings
from relay.imds import DISCOVER
from relay.imds.api_versions import API_VERSIONS, NEWEST_API_VERSION, find_impossible_conditions


def imds_source_warnings(config: Config) -> Iterator[str]:
    """Yield warnings about the source and about conditions that no event from it can meet.

    A hub has no source. An agent has neither rules nor sinks of its own.
    """
    if isinstance(config.fleet, HubSettings):
        return
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
        return
    for place, match in all_match_conditions(config):
        for reason in find_impossible_conditions(match, source.api_version):
            yield (
                f"{place} never matches with source.api_version {source.api_version}: {reason}. "
                f"Remedy: api_version: {NEWEST_API_VERSION}"
            )


def all_match_conditions(config: Config) -> Iterator[tuple[str, Match]]:
    """Yield the conditions of the configuration, each with what has them."""
    for rule in config.approvals.rules:
        yield f"rule {rule.name}", rule.match
    for limit in config.approvals.limits:
        yield f"limit {limit.name}", limit.match
    for sink in config.sinks:
        yield f"match of sink {sink.name}", sink.match
