"""The section ``fleet``, and which keys belong to which role."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.config import load
from relay.errors import ConfigError
from relay.fleet.settings import (
    AgentSettings,
    HubSettings,
    TrustDomain,
    find_first_overlapping_scope_patterns,
)
from tests.test_config import error_of, file, fleet_example, load_text

__all__ = ["file"]

AGENT = 'fleet: {role: agent, url: "amqp://vmss-a:x@127.0.0.1/"}\n'
HUB = """\
fleet: {role: hub, url: "amqp://imds-hub:x@127.0.0.1/", domains: [{user: a, scopes: ["a-*"]}]}
"""


def test_a_relay_without_the_section_is_in_no_fleet(file: Path) -> None:
    assert load_text(file, "scope: west").fleet is None


def test_the_examples_of_the_shipped_document_are_an_agent_and_a_hub(file: Path) -> None:
    agent = load_text(file, fleet_example("agent")).fleet
    assert isinstance(agent, AgentSettings)
    assert (agent.exchange, agent.hub_user, agent.url_user) == (
        "azure.scheduledevents",
        "imds-hub",
        "vmss-a",
    )
    hub = load_text(file, fleet_example("hub")).fleet
    assert isinstance(hub, HubSettings)
    assert (hub.exchange, hub.declare, hub.url_user) == ("azure.scheduledevents", True, "imds-hub")
    assert hub.domains == (TrustDomain(user="vmss-a", scopes=("vmss-a-????????",), relays=("*",)),)


def test_the_defaults_are_those_of_the_examples(file: Path) -> None:
    agent, hub = load_text(file, AGENT).fleet, load_text(file, HUB).fleet
    assert isinstance(agent, AgentSettings)
    assert isinstance(hub, HubSettings)
    assert (agent.exchange, agent.hub_user) == ("azure.scheduledevents", "imds-hub")
    assert (hub.exchange, hub.declare) == ("azure.scheduledevents", True)
    assert hub.domains[0].relays == ("*",)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('sinks: [{kind: rabbitmq, name: bus, url: "amqp://127.0.0.1/"}]', "sinks: expected no"),
        ("approvals: {dry_run: true}", "approvals.dry_run: expected no"),
        ("approvals: {rules: [{name: a, approve: automatic}]}", "approvals.rules: expected no"),
        ("approvals: {limits: [{name: all, max: 1}]}", "approvals.limits: expected no"),
        ("approvals: {people: {alice: ['local:alice']}}", "approvals.people: expected no"),
        ("approvals: {groups: {all: ['local:alice']}}", "approvals.groups: expected no"),
        ('approvals: {amqp: {url: "amqp://127.0.0.1/"}}', "approvals.amqp: expected no"),
        (f"api: {{clients: [{{name: a, key_sha256: {'ab' * 32}}}]}}", "api.clients: expected no"),
        ("api: {public_url: 'https://relay.example.com'}", "api.public_url: expected no"),
    ],
)
def test_what_decides_and_tells_is_an_error_on_an_agent(file: Path, text: str, error: str) -> None:
    assert error_of(file, f"{AGENT}{text}") == (
        f"2: {error} value on an agent (fleet.role: agent); this belongs in the hub's configuration"
    )
    assert load_text(file, text if "amqp:" not in text else "").fleet is None


def test_a_share_of_the_machines_is_for_a_hub(file: Path) -> None:
    text = "approvals: {limits: [{name: tenth, max: 10%}]}"
    assert load_text(file, f"{HUB}{text}").approvals.limits[0].is_share
    with pytest.raises(ConfigError, match="a share such as 10% needs a hub"):
        load_text(file, text)


def test_an_agent_may_have_the_empty_lists_of_the_shipped_document(file: Path) -> None:
    text = (
        f"{AGENT}sinks: []\napprovals: {{enabled: true, dry_run: false, amqp: null, rules: [], "
        "limits: [], groups: {}, people: {}}\napi: {clients: [], oidc: null, public_url: null}"
    )
    assert isinstance(load_text(file, text).fleet, AgentSettings)


@pytest.mark.parametrize("text", ["source: {interval: 1s}", "source: {}"])
def test_a_source_is_an_error_on_a_hub_even_with_the_default_values(file: Path, text: str) -> None:
    assert error_of(file, f"{HUB}{text}") == (
        "2: source: expected no such key on a hub (fleet.role: hub); "
        "a hub has no IMDS: this belongs in the configuration of the agents"
    )


def test_a_source_of_a_variable_is_an_error_on_a_hub_that_names_the_variable(file: Path) -> None:
    assert error_of(file, HUB, {"IMDS_RELAY_SOURCE__INTERVAL": "2s"}).startswith(
        "environment variable IMDS_RELAY_SOURCE__INTERVAL: source: expected no such key on a hub"
    )


def test_a_hub_needs_no_document() -> None:
    variables = {
        "IMDS_RELAY_FLEET__ROLE": "hub",
        "IMDS_RELAY_FLEET__URL": "amqp://imds-hub:x@127.0.0.1/",
        "IMDS_RELAY_FLEET__DOMAINS": '[{"user": "a", "scopes": ["a-*"]}]',
    }
    assert isinstance(load(environment=variables, default_paths=()).config.fleet, HubSettings)


def test_only_an_agent_leaves_the_rule_for_user_events_to_its_hub(file: Path) -> None:
    assert not load_text(file, AGENT).has_no_rule_for_user_events
    assert load_text(file, HUB).has_no_rule_for_user_events


WRONG = {
    "role: chief, url: 'amqp://127.0.0.1/'": (
        "fleet.role: expected one of 'agent', 'hub'; got 'chief'"
    ),
    "url: 'amqp://127.0.0.1/'": "fleet.role: expected one of agent, hub; got nothing",
    "role: agent": "fleet: expected url or url_file, got neither",
    "role: agent, url: 'amqp://u:topsecret@127.0.0.1/', domains: []": (
        "fleet.domains: unknown key; the keys here are url, url_file, exchange, role, hub_user"
    ),
    "role: agent, url: 'amqp://imds-hub:topsecret@127.0.0.1/'": (
        "fleet: hub_user: expected the hub's user, which no agent has, got imds-hub, "
        "which is also the user of this agent's URL"
    ),
    "role: hub, url: 'amqp://u:topsecret@127.0.0.1/', domains: []": (
        "fleet.domains: expected at least 1 entry; got an empty list"
    ),
    "role: hub, url: 'amqp://u:topsecret@127.0.0.1/', domains: [{user: u, scopes: [a]}]": (
        "fleet.domains: expected users other than the hub's own, got u: "
        "an agent with that user could give orders to all agents"
    ),
    "role: hub, url: 'amqp://h/', domains: [{user: a, scopes: [a]}, {user: a, scopes: [b]}]": (
        "fleet.domains[1].user: expected each user once, a comes twice: list all its scopes in one "
        "domain; the first is in line 1"
    ),
    "role: hub, url: 'amqp://127.0.0.1/', domains: [{user: a, scopes: ['[ab]']}]": (
        'fleet.domains[0].scopes[0]: expected a pattern such as "vmss-a-????????": a to z, '
        "0 to 9, -, * and ?, at most 80 characters; got '[ab]'"
    ),
    "role: hub, url: 'amqp://127.0.0.1/', domains: [{user: a, scopes: [a], relays: ['VM.1']}]": (
        'fleet.domains[0].relays[0]: expected a pattern such as "vmss-a_*": a to z, 0 to 9, '
        "_, -, * and ?, at most 80 characters; got 'VM.1'"
    ),
}


@pytest.mark.parametrize(("section", "error"), WRONG.items())
def test_an_error_names_the_key_and_no_secret(file: Path, section: str, error: str) -> None:
    assert error_of(file, f"fleet: {{{section}}}") == f"1: {error}"


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        (("vmss-a-*",), ("vmss-a-2-*",), ("vmss-a-*", "vmss-a-2-*")),
        (("vmss-a-????????",), ("vmss-a-2-????????",), None),
        (("x", "vmss-a-????????"), ("y", "vmss-*"), ("vmss-a-????????", "vmss-*")),
        (("*-a",), ("b-*",), ("*-a", "b-*")),
        (("a*b*c",), ("ab*d",), None),
        (("one",), ("two",), None),
        (("one",), ("one",), ("one", "one")),
        (("?",), ("",), None),
    ],
)
def test_two_domains_overlap_if_a_scope_can_match_both(
    one: tuple[str, ...], other: tuple[str, ...], overlap: tuple[str, str] | None
) -> None:
    first = TrustDomain(user="a", scopes=one)
    second = TrustDomain.model_construct(user="b", scopes=other, relays=("*",))
    assert find_first_overlapping_scope_patterns(first, second) == overlap
    assert find_first_overlapping_scope_patterns(second, first) == (overlap and overlap[::-1])


def test_domains_of_different_relays_do_not_overlap() -> None:
    domains = [
        TrustDomain(user=user, scopes=("single",), relays=(user,)) for user in ("one", "two")
    ]
    assert find_first_overlapping_scope_patterns(*domains) is None


_patterns = st.text("ab*?", min_size=1, max_size=5)


@given(_patterns, _patterns, st.text("ab", max_size=6))
def test_whatever_matches_both_patterns_makes_them_overlap(one: str, other: str, name: str) -> None:
    domains = [
        TrustDomain(user=user, scopes=(pattern,)) for user, pattern in (("a", one), ("b", other))
    ]
    if all(domain.may_speak_for_relay(name, "vm") for domain in domains):
        assert find_first_overlapping_scope_patterns(*domains) == (one, other)


@given(_patterns, _patterns)
def test_patterns_overlap_only_if_a_short_text_matches_both(one: str, other: str) -> None:
    domains = [
        TrustDomain(user=user, scopes=(pattern,)) for user, pattern in (("a", one), ("b", other))
    ]
    names = ("".join(letters) for size in range(11) for letters in product("ab", repeat=size))
    if find_first_overlapping_scope_patterns(*domains) is not None:
        assert any(
            all(domain.may_speak_for_relay(name, "vm") for domain in domains) for name in names
        )


@pytest.mark.parametrize(
    ("scope", "relay", "may"),
    [
        ("vmss-a-1f", "vmss-a_0", True),
        ("vmss-a-", "vmss-a_12", True),
        ("vmss-a", "vmss-a_0", False),
        ("vmss-b-1f", "vmss-a_0", False),
        ("other-vmss-a-1f", "vmss-a_0", False),
        ("vmss-a-1f", "vmss-b_0", False),
        ("vmss-a-1f", "vmss-a_", False),
        ("single", "one", False),
        ("single", "vmss-a_0", True),
    ],
)
def test_a_domain_speaks_for_the_scopes_and_relays_that_its_patterns_match(
    scope: str, relay: str, may: bool
) -> None:
    domain = TrustDomain(user="a", scopes=("vmss-a-*", "single"), relays=("vmss-a_?*",))
    assert domain.may_speak_for_relay(scope, relay) is may


# --- machines as voters


def machine_rule(*voters: str, votes: int = 1, each_resource: bool = True) -> str:
    """A rule that takes votes of these."""
    rule = {
        "name": "drained",
        "approve": {"votes": votes, "from": list(voters), "each_resource": each_resource},
    }
    return f"approvals: {{rules: [{orjson.dumps(rule).decode()}]}}"


@pytest.mark.parametrize(
    "text",
    [
        machine_rule("vm:a-1/db_0"),
        machine_rule("vm:a-*/*"),
        'approvals: {groups: {g: ["vm:a-*/*"]}}',
        'approvals: {people: {p: ["vm:a-*/*"]}}',
    ],
)
def test_machines_are_voters_on_a_hub_alone(file: Path, text: str) -> None:
    assert load_text(file, HUB + text).fleet is not None
    error = error_of(file, text)
    assert "expected a principal other than vm:a-" in error
    assert error.endswith(
        "the machines of a fleet need a hub (fleet.role: hub), which hears of their agents"
    )
    assert "this belongs in the hub's configuration" in error_of(file, AGENT + text)


@pytest.mark.parametrize("machine", ["vm:b-*/*", "vm:?/*", "vm:a/x", "vm:*b/*"])
def test_a_machine_for_which_no_user_speaks_is_an_error(file: Path, machine: str) -> None:
    domains = 'domains: [{user: a, scopes: ["a-*"], relays: ["x*", "y"]}]}'
    hub = f'fleet: {{role: hub, url: "amqp://imds-hub:x@127.0.0.1/", {domains}\n'
    if machine == "vm:*b/*":
        load_text(file, hub + machine_rule(machine))
        machine = "vm:*b/z*"
    assert error_of(file, hub + machine_rule(machine)).endswith(
        f"expected machines of fleet.domains, no user there speaks for {machine}"
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (machine_rule("vm:a-*"), "expected vm:<scope>/<relay>, where <scope>/<relay> matches"),
        (machine_rule("vm:A-1/x"), "expected vm:<scope>/<relay>, where <scope>/<relay> matches"),
        (machine_rule("local:*"), "expected local:<user>, where <user> matches"),
        (
            machine_rule("vm:a-*/*", votes=2, each_resource=False),
            "a machine (vm:) speaks for itself alone, so without each_resource all machines have",
        ),
        (
            machine_rule("vm:a-1/x", "vm:a-1/y", votes=3),
            "3 votes can never come from 2 principals",
        ),
        (
            'approvals: {people: {p: ["vm:a-*/x"], q: ["vm:a-1/*"]}}',
            "expected every machine for one person, vm:a-*/x of p and vm:a-1/* of q can mean",
        ),
    ],
)
def test_machines_that_cannot_vote_as_written_are_an_error(
    file: Path, text: str, error: str
) -> None:
    assert error in error_of(file, HUB + text)


def test_a_pattern_stands_for_as_many_voters_as_a_rule_needs(file: Path) -> None:
    config = load_text(file, HUB + machine_rule("vm:a-*/*", "vm:a-1/x", votes=50))
    ((_, _, voters),) = config.rules_with_quorum_and_voters
    assert [voter.name for voter in voters] == ["vm:a-*/*", "vm:a-1/x"]
    two = "approvals: {people: {p: ['vm:a-1/*', 'local:p'], q: ['vm:a-2/*']}}"
    assert load_text(file, HUB + two).approvals.people["q"] == ("vm:a-2/*",)
