"""Warnings about a valid configuration, and what is said about names that nobody knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay.config import load
from relay.config.model import config_warnings
from relay.errors import ConfigError


def warnings_of(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "relay.yaml"
    file.write_text(text)
    return list(config_warnings(load(file, {}).config))


def test_a_type_or_source_that_azure_does_not_document_is_a_warning(tmp_path: Path) -> None:
    text = """
sinks:
  - {kind: rabbitmq, name: bus, url: amqp://h, match: {event_type: [FREEZE, Restart]}}
approvals:
  rules:
    - {name: users, match: {event_source: [user, Users]}, approve: automatic}
  limits:
    - {name: one, match: {event_type: [Rebot]}, max: 1}
"""
    assert warnings_of(tmp_path, text) == [
        (
            "rule users: event_source: Azure sends Platform, User, and documents no Users. "
            "Did you mean User? Until it sends one, this condition matches nothing"
        ),
        (
            "limit one: event_type: Azure sends Freeze, Reboot, Redeploy, Preempt, "
            "Terminate, and documents no Rebot. Did you mean Reboot? Until it sends one, this "
            "condition matches nothing"
        ),
        (
            "match of sink bus: event_type: Azure sends Freeze, Reboot, Redeploy, Preempt, "
            "Terminate, and documents no Restart. Until it sends one, this condition matches "
            "nothing"
        ),
    ]


# --- names that nobody knows, and names that come twice


def test_the_first_of_two_names_may_be_in_a_variable() -> None:
    clients = '[{"name": "a"}, {"name": "a"}]'
    with pytest.raises(ConfigError) as error:
        load(environment={"IMDS_RELAY_API__CLIENTS": clients}, default_paths=())
    assert str(error.value) == (
        "environment variable IMDS_RELAY_API__CLIENTS: api.clients[1].name: duplicate name: a; "
        "the first is api.clients[0].name"
    )
