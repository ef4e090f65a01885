"""Warnings about a valid configuration, and what is said about names that nobody knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay.config import load
from relay.config.warnings import config_warnings, start_warnings
from relay.errors import ConfigError
from tests.cli.command import run_command
from tests.cli.running_relay import running_relay


def warnings_of(tmp_path: Path, text: str) -> list[str]:
    """Return the warnings about a document."""
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


async def test_the_warning_is_in_check_and_in_the_log_of_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rule = {"name": "typo", "match": {"event_type": ["Rebot"]}, "approve": "automatic"}
    async with running_relay(tmp_path, rules=[rule]) as relay:
        config = load(Path(relay.config), {}).config
        expected = [warning for warning in start_warnings(config) if "Rebot" in warning]
        assert len(expected) == 1
        assert expected == [
            record.getMessage() for record in caplog.records if "Rebot" in record.getMessage()
        ]
    result = run_command("check", "-c", relay.config)
    assert f"warning: {expected[0]}\n" in result.err


# --- names that nobody knows, and names that come twice


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "sinks:\n  - {kind: webhok, name: a}",
            (
                "2: sinks[0].kind: expected one of 'rabbitmq', 'webhook', 'apprise', 'mattermost', "
                "'slack', 'teams'; got 'webhok'; did you mean webhook?"
            ),
        ),
        (
            "interval: 1s",
            "1: interval: unknown key; did you mean source.interval?",
        ),
        (
            "sinks:\n  - kind: webhook\n    name: a\n    interval: 1s",
            "4: sinks[0].interval: unknown key; did you mean source.interval?",
        ),
        (
            "approvals:\n  rules:\n    - {name: a, approve: {vote: 1, from: ['client:a']}}",
            (
                "3: approvals.rules[0].approve.vote: unknown key; did you mean votes? The keys "
                "here "
                "are votes, from, each_resource, expires, close_before, execution_expires"
            ),
        ),
        (
            "fleet: {role: agent, url: 'amqp://h', hub_usr: x}",
            (
                "1: fleet.hub_usr: unknown key; did you mean hub_user? The keys here are url, "
                "url_file, "
            ),
        ),
        (
            (
                "approvals:\n  groups: {oncall: []}\n  rules:\n    - name: a\n"
                "      approve: {votes: 1, from: ['group:oncal']}"
            ),
            (
                "5: approvals.rules[0].approve.from[0]: expected a group of approvals.groups, "
                "group:oncal is none; did you mean group:oncall? There is group:oncall"
            ),
        ),
        (
            "approvals:\n  groups: {oncall: ['person:bob']}",
            (
                "2: approvals.groups.oncall[0]: expected a person of approvals.people, "
                "person:bob is "
                "none; there are none"
            ),
        ),
        (
            "sinks:\n  - {kind: rabbitmq, name: a, url: 'amqp://h', events: [event.schedulled]}",
            (
                "2: sinks[0].events[0]: expected a pattern that matches an event type; did you "
                "mean "
                "event.scheduled? `imds-relay schema --list` lists them; got 'event.schedulled'"
            ),
        ),
        (
            (
                "approvals:\n  rules:\n    - name: a\n      match:\n        time: {from: 8:00}\n"
                "      approve: automatic"
            ),
            (
                "5: approvals.rules[0].match.time.from: expected a minute in quotes such as "
                '"08:00", '
                "at most \"23:59\"; got '8:00'"
            ),
        ),
        (
            (
                "approvals:\n  rules:\n    - {name: a, approve: automatic, match: {scope: [x]}}\n"
                "    - {name: a, approve: automatic}"
            ),
            "4: approvals.rules[1].name: duplicate name: a; the first is in line 3",
        ),
        (
            "api:\n  clients:\n    - {name: a}\n    - {name: b}\n    - name: a",
            "5: api.clients[2].name: duplicate name: a; the first is in line 3",
        ),
        (
            "api:\n  clients:\n    - {name: a, amqp_user: x}\n    - {name: b, amqp_user: x}",
            "4: api.clients[1].amqp_user: duplicate amqp_user: x; the first is in line 3",
        ),
        (
            "approvals:\n  people:\n    a: ['local:x']\n    b: ['local:y', 'local:x']",
            (
                "4: approvals.people.b[1]: expected every principal for one person, local:x "
                "belongs "
                "to a and to b; the first is in line 3"
            ),
        ),
        (
            "api:\n  clients:\n    - name: a\n      can: [read]\n      can: [hold]",
            '5: expected YAML: found duplicate key "can"; the first is in line 4',
        ),
        (
            "store: {path: a}\nsource: {interval: 1s}\nstore: {path: b}",
            '3: expected YAML: found duplicate key "store"; the first is in line 1',
        ),
    ],
)
def test_what_is_unknown_or_twice_is_said_with_its_lines_and_with_what_may_be_meant(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "relay.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(file, {})
    assert str(error.value).startswith(f"{file}:{message}")


def test_the_first_of_two_names_may_be_in_a_variable() -> None:
    clients = '[{"name": "a"}, {"name": "a"}]'
    with pytest.raises(ConfigError) as error:
        load(environment={"IMDS_RELAY_API__CLIENTS": clients}, default_paths=())
    assert str(error.value) == (
        "environment variable IMDS_RELAY_API__CLIENTS: api.clients[1].name: duplicate name: a; "
        "the first is api.clients[0].name"
    )
