"""Checks that the keys of a configuration belong to its role in a fleet.

A key in the wrong place is an error. Ignored, it would look as if it had an effect: a rule on an
agent, or ``dry_run`` there.
"""

from __future__ import annotations

from relay.api import ApiSettings
from relay.approvals import ApprovalsSettings
from relay.settings import KeyPath, Section, WrongValue
from relay.sinks import SinkSettings

_HUB_API_KEYS = ("clients", "oidc", "public_url")
"""Keys of ``api`` about people and programs elsewhere, who call the hub."""


def check_agent(
    sinks: tuple[SinkSettings, ...], approvals: ApprovalsSettings, api: ApiSettings
) -> None:
    """Raise WrongValue for a key that only the hub of the fleet can have."""
    paths: list[KeyPath] = [("sinks",)] if sinks else []
    paths += _non_default_keys("approvals", approvals, tuple(ApprovalsSettings.model_fields))
    paths += _non_default_keys("api", api, _HUB_API_KEYS)
    for path in paths:
        raise WrongValue(
            path,
            "expected no value on an agent (fleet.role: agent); "
            "this belongs in the hub's configuration",
        )


def check_hub_has_no_source(keys: set[str]) -> None:
    """Raise WrongValue if ``source`` is among the top-level keys that a hub's configuration has."""
    if "source" in keys:
        raise WrongValue(
            ("source",),
            "expected no such key on a hub (fleet.role: hub); "
            "a hub has no IMDS: this belongs in the configuration of the agents",
        )


def _non_default_keys(name: str, section: Section, keys: tuple[str, ...]) -> list[KeyPath]:
    """Return the keys of a section that have another value than the default."""
    fields = type(section).model_fields
    return [
        (name, key)
        for key in keys
        if getattr(section, key)
        != fields[key].get_default(call_default_factory=True, validated_data={})
    ]
