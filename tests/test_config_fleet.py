"""The section ``fleet``, and which keys belong to which role."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.errors import ConfigError
from relay.fleet.settings import TrustDomain, overlapping_scopes
from tests.test_config import error_of, file, load_text

__all__ = ["file"]

AGENT = 'fleet: {role: agent, url: "amqp://vmss-a:x@127.0.0.1/"}\n'
HUB = """\
fleet: {role: hub, url: "amqp://imds-hub:x@127.0.0.1/", domains: [{user: a, scopes: ["a-*"]}]}
"""


def test_a_share_of_the_machines_is_for_a_hub(file: Path) -> None:
    text = "approvals: {limits: [{name: tenth, max: 10%}]}"
    assert load_text(file, f"{HUB}{text}").approvals.limits[0].is_share
    with pytest.raises(ConfigError, match="a share such as 10% needs a hub"):
        load_text(file, text)


def test_a_source_of_a_variable_is_an_error_on_a_hub_that_names_the_variable(file: Path) -> None:
    assert error_of(file, HUB, {"IMDS_RELAY_SOURCE__INTERVAL": "2s"}).startswith(
        "environment variable IMDS_RELAY_SOURCE__INTERVAL: source: expected no such key on a hub"
    )


def test_only_an_agent_leaves_the_rule_for_user_events_to_its_hub(file: Path) -> None:
    assert not load_text(file, AGENT).has_no_rule_for_user_events
    assert load_text(file, HUB).has_no_rule_for_user_events


def test_domains_of_different_relays_do_not_overlap() -> None:
    domains = [
        TrustDomain(user=user, scopes=("single",), relays=(user,)) for user in ("one", "two")
    ]
    assert overlapping_scopes(*domains) is None


_patterns = st.text("ab*?", min_size=1, max_size=5)


@given(_patterns, _patterns, st.text("ab", max_size=6))
def test_whatever_matches_both_patterns_makes_them_overlap(one: str, other: str, name: str) -> None:
    domains = [
        TrustDomain(user=user, scopes=(pattern,)) for user, pattern in (("a", one), ("b", other))
    ]
    if all(domain.may_speak_for_relay(name, "vm") for domain in domains):
        assert overlapping_scopes(*domains) == (one, other)


@given(_patterns, _patterns)
def test_patterns_overlap_only_if_a_short_text_matches_both(one: str, other: str) -> None:
    domains = [
        TrustDomain(user=user, scopes=(pattern,)) for user, pattern in (("a", one), ("b", other))
    ]
    names = ("".join(letters) for size in range(11) for letters in product("ab", repeat=size))
    if overlapping_scopes(*domains) is not None:
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
    rule = {
        "name": "drained",
        "approve": {"votes": votes, "from": list(voters), "each_resource": each_resource},
    }
    return f"approvals: {{rules: [{orjson.dumps(rule).decode()}]}}"


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


def test_a_pattern_stands_for_as_many_voters_as_a_rule_needs(file: Path) -> None:
    config = load_text(file, HUB + machine_rule("vm:a-*/*", "vm:a-1/x", votes=50))
    ((_, _, voters),) = config.voting_rules
    assert [voter.name for voter in voters] == ["vm:a-*/*", "vm:a-1/x"]
    two = "approvals: {people: {p: ['vm:a-1/*', 'local:p'], q: ['vm:a-2/*']}}"
    assert load_text(file, HUB + two).approvals.people["q"] == ("vm:a-2/*",)
