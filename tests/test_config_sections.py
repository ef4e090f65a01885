"""What the sections of the configuration need of each other, and what a valid one is warned of."""

from __future__ import annotations

import hashlib
from itertools import product
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from relay.config import Config, load
from relay.config.model import config_warnings
from relay.fleet.settings import TrustDomain, overlapping_scopes
from tests.chat.slack_server import APP_TOKEN, CHANNEL, TOKEN
from tests.test_config import error_of, load_text

CLIENTS = """\
api:
  tls: {cert_file: /server.pem, key_file: /server.pem, client_ca_file: /ca.pem}
  clients: [{name: bob, key: bearer-test-key-of-bob, can: [approve], san: bob.internal}]
"""


@pytest.mark.parametrize("principal", ["slack:E024BE7LH/W012A3CDE", "mtls:bob.internal"])
def test_a_principal_that_is_one_is_accepted_in_each_place(file: Path, principal: str) -> None:
    named = {"people": {"bob": [principal]}, "groups": {"oncall": [principal]}}
    rule = {"name": "all", "approve": {"votes": 1, "from": [principal]}}
    approvals = orjson.dumps({**named, "rules": [rule]}).decode()
    load_text(file, f"{CLIENTS}approvals: {approvals}")


# --- fleet: which keys belong to which role


AGENT = 'fleet: {role: agent, url: "amqp://vmss-a:x@127.0.0.1/"}\n'
HUB = """\
fleet: {role: hub, url: "amqp://imds-hub:x@127.0.0.1/", domains: [{user: a, scopes: ["a-*"]}]}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "relay.yaml"


def test_a_share_of_the_machines_is_for_a_hub(file: Path) -> None:
    text = "approvals: {limits: [{name: tenth, max: 10%}]}"
    assert load_text(file, f"{HUB}{text}").approvals.limits[0].is_share


def test_a_machine_rests_no_longer_than_its_event_is_remembered(file: Path) -> None:
    text = "store: {audit_retain: 1h}\napprovals: {limits: [{name: one, max: 1, rest: %s}]}"
    assert load_text(file, text % "1h").approvals.limits[0].rest == 3600


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


@given(_patterns, _patterns)
def test_patterns_overlap_exactly_if_a_short_text_matches_both(one: str, other: str) -> None:
    domains = [TrustDomain(user=f"of-{each}", scopes=(each,)) for each in (one, other)]
    names = ("".join(letters) for size in range(11) for letters in product("ab", repeat=size))
    is_shared = any(
        all(domain.may_speak_for_relay(name, "vm") for domain in domains) for name in names
    )
    assert overlapping_scopes(*domains) == ((one, other) if is_shared else None)


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
def test_a_domain_speaks_for_what_its_patterns_match(scope: str, relay: str, may: bool) -> None:
    domain = TrustDomain(user="a", scopes=("vmss-a-*", "single"), relays=("vmss-a_?*",))
    assert domain.may_speak_for_relay(scope, relay) is may


# --- machines as voters


def machine_rule(*voters: str, votes: int = 1) -> str:
    quorum = {"votes": votes, "from": list(voters), "each_resource": True}
    rule = {"name": "drained", "approve": quorum}
    return f"approvals: {{rules: [{orjson.dumps(rule).decode()}]}}"


def test_a_pattern_stands_for_as_many_voters_as_a_rule_needs(file: Path) -> None:
    config = load_text(file, HUB + machine_rule("vm:a-*/*", "vm:a-1/x", votes=50))
    ((_, _, voters),) = config.voting_rules
    assert [*voters] == ["vm:a-*/*", "vm:a-1/x"]
    relays = HUB.replace('["a-*"]', '["a-*"], relays: ["x*", "y"]')
    load_text(file, relays + machine_rule("vm:*b/*"))
    two = "approvals: {people: {p: ['vm:a-1/*', 'local:p'], q: ['vm:a-2/*']}}"
    assert load_text(file, HUB + two).approvals.people["q"] == ("vm:a-2/*",)


@pytest.mark.parametrize(
    ("cans", "who"),
    [
        ([], ["local:root", "slack:T1/U1"]),
        ([["read", "approve"]], ["local:root", "slack:T1/U1"]),
        ([["read", "hold"]], ["local:root"]),
        ([["read", "hold"], ["approve"]], ["local:root", "slack:T1/U1"]),
        ([["approve"], ["read", "hold"]], ["local:root", "slack:T1/U1"]),
    ],
)
def test_people_in_a_chat_can_vote_where_a_sink_for_their_platform_takes_approvals(
    cans: list[list[str]], who: list[str]
) -> None:
    chat = {"kind": "slack", "channel": CHANNEL, "token": TOKEN, "app_token": APP_TOKEN}
    rule = {"name": "all", "approve": {"votes": 1, "from": ["local:root", "slack:T1/U1"]}}
    sinks = [{**chat, "name": f"ops-{at}", "can": can} for at, can in enumerate(cans)]
    config = Config.model_validate({"sinks": sinks, "approvals": {"rules": [rule]}})
    ((_, _, voters),) = config.voting_rules
    assert [*voters] == who


# --- a secret of a sink is never that of a client: the sink's receiver could decide as the client


SIGNING = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="
OTHER = "whsec_AfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="
KEY = "bearer-test-key-of-drain"
SHA256 = hashlib.sha256(KEY.encode()).hexdigest()
WEBHOOK = {"kind": "webhook", "name": "hook", "url": "https://x", "secrets": [OTHER]}


@pytest.mark.parametrize(
    ("sink", "client"),
    [
        ({"secrets": [OTHER, SIGNING]}, {"secrets": [SIGNING]}),
        ({"secrets_file": "signing"}, {"secrets_file": "signing"}),
        ({"secrets": [SIGNING]}, {"key": SIGNING}),
        ({"bearer": KEY}, {"key": KEY}),
        ({"bearer": KEY}, {"key_sha256": SHA256}),
        ({"bearer_file": "key"}, {"key_file": "key"}),
        ({"bearer": SIGNING}, {"secrets": [SIGNING]}),
        ({"basic": {"user": "u", "password": KEY}}, {"key_sha256": SHA256}),
        ({"headers": {"X-Key": f"Token {KEY}"}}, {"key_sha256": SHA256}),
        ({"headers_file": "headers"}, {"key_sha256": SHA256}),
        ({"url": f"https://x/hook?token={KEY}"}, {"key_sha256": SHA256}),
        ({"kind": "rabbitmq", "url": f"amqp://user:{KEY}@host/"}, {"key_sha256": SHA256}),
    ],
)
def test_a_secret_of_a_sink_and_a_client_is_an_error_that_does_not_show_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sink: dict[str, object],
    client: dict[str, object],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"signing": SIGNING, "key": KEY, "headers": f"X-Key: {KEY}"}.items():
        Path(name).write_text(f"{text}\n")
    base = {"kind": "rabbitmq", "name": "hook"} if "kind" in sink else WEBHOOK
    usual = {key: value for key, value in base.items() if f"{key}_file" not in sink}
    clients = [{"name": "drain", **client}]
    with pytest.raises(ValidationError, match="client drain and sink hook have the same") as error:
        Config.model_validate({"sinks": [{**usual, **sink}], "api": {"clients": clients}})
    assert KEY not in str(error.value)
    assert SIGNING not in str(error.value)


def test_two_sinks_may_share_what_no_client_has() -> None:
    """Two channels of a chat have one bot, and two webhooks can have one receiver."""
    second = {**WEBHOOK, "name": "second"}
    clients = [{"name": "drain", "key": KEY, "secrets": [SIGNING]}]
    Config.model_validate({"sinks": [WEBHOOK, second], "api": {"clients": clients}})


# --- warnings about a valid configuration


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
