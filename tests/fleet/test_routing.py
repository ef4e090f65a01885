"""Routing keys of a fleet, and who may be their sender."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from relay.amqp.connection import UnusableMessage
from relay.events.build import Origin
from relay.events.match import matches_any_pattern
from relay.events.model import relay_word
from relay.fleet.rabbitmq_definitions import fleet_definitions
from relay.fleet.routing import (
    AuthorizedSender,
    agent_binding_keys,
    agent_key,
    agent_publish_exchange_name,
    command_exchange_name,
    command_key,
    parse_agent_routing_key,
    report_key,
    scope_key,
    verify_command_from_hub,
    verify_message_from_agent,
)
from relay.fleet.settings import HubSettings, TrustDomain
from tests.amqp.delivered import delivered
from tests.builders import cloudevent

FLEET, COMMANDS = agent_publish_exchange_name("x"), command_exchange_name("x")
ORIGIN = Origin("vmss-a-1f", "VMSS-A_0")
TO_US = "to.vmss-a-1f.vmss-a_0"
DOMAINS = (
    TrustDomain(user="vmss-a", scopes=("vmss-a-*",)),
    TrustDomain(user="single", scopes=("vmss-b-*",), relays=("one",)),
)
_scopes = st.from_regex(r"[a-z0-9-]{1,80}", fullmatch=True)
_relays = st.text(min_size=1, max_size=100)


def test_the_keys_are_those_of_the_documentation() -> None:
    for event, key in (
        (cloudevent("event.updated", eventtype="Reboot"), "event.updated.reboot"),
        (cloudevent("relay.source-lost", subject=None), "relay.source-lost.none"),
        (cloudevent("relay.ping", subject="Hub"), "relay.ping.hub"),
    ):
        assert report_key(event, ORIGIN) == f"{key}.vmss-a-1f.vmss-a_0"
    assert agent_key("pulse", ORIGIN) == "pulse.vmss-a-1f.vmss-a_0"
    assert agent_key("vote", ORIGIN) == "vote.vmss-a-1f.vmss-a_0"
    assert agent_key("start", ORIGIN) == "start.vmss-a-1f.vmss-a_0"
    assert command_key("vmss-a-1f", "vmss-a_0") == "to.vmss-a-1f.vmss-a_0"
    assert scope_key("vmss-a-1f") == "scope.vmss-a-1f"
    assert agent_binding_keys(ORIGIN) == ("to.vmss-a-1f.vmss-a_0", "scope.vmss-a-1f")


@given(_scopes, _relays, st.text(min_size=1, max_size=100))
def test_every_key_fits_and_is_read_as_it_was_built(scope: str, relay: str, detail: str) -> None:
    origin = Origin(scope, relay)
    for name in ("event.scheduled", "relay.source-recovered", "relay.dead-lettered"):
        key = report_key(cloudevent(name, subject=detail, eventtype=detail), origin)
        assert len(key.encode()) <= 255
        kind = name.partition(".")[0]
        assert parse_agent_routing_key(key) == (kind, scope, relay_word(relay))
    for kind in ("pulse", "vote", "start"):
        key = agent_key(cast("Any", kind), origin)
        assert parse_agent_routing_key(key) == (kind, scope, relay_word(relay))


def test_a_key_that_no_agent_publishes_with_is_unusable() -> None:
    keys = [
        *("pulse", "pulse.a", "pulse.a.", "pulse..b", "pulse.a.b.c", "pulse.A.b", "pulse.a.B"),
        *("pulse.a_a.b", "pulse.a.*", "pulse.#.b", "pulse.a.b\n", "vote.a.b.c.d", ""),
        *("event.scheduled.a.b", "event.scheduled.reboot.a.b.c", "event..reboot.a.b"),
        *("to.a.b", "scope.a", "approve.a.b", "startrequest.accepted.reboot.a.b"),
        *(f"pulse.{'a' * 81}.b", f"pulse.a.{'b' * 81}"),
    ]
    for key in keys:
        with pytest.raises(UnusableMessage, match="no agent publishes"):
            parse_agent_routing_key(key)


@pytest.mark.parametrize(
    ("user", "key", "reason"),
    [
        ("vmss-a", "pulse.vmss-b-1f.one", "may not speak for relay one of scope vmss-b-1f"),
        ("single", "vote.vmss-a-1f.one", "may not speak for"),
        ("single", "vote.vmss-b-1f.two", "may not speak for"),
        ("VMSS-A", "start.vmss-a-1f.one", "user of no trust domain"),
        ("imds-hub", "event.ended.reboot.vmss-a-1f.one", "user of no trust domain"),
    ],
)
def test_a_user_speaks_for_no_relay_outside_its_domain(user: str, key: str, reason: str) -> None:
    with pytest.raises(UnusableMessage, match=reason):
        verify_message_from_agent(delivered(FLEET, key, user_id=user), FLEET, DOMAINS)


_patterns = st.lists(st.text("ab-*?", min_size=1, max_size=5), min_size=1, max_size=3)


@given(
    _patterns,
    st.lists(st.text("ab_*?", min_size=1, max_size=5), min_size=1, max_size=3),
    st.text("ab-", min_size=1, max_size=6),
    st.text("ab_", min_size=1, max_size=6),
)
def test_the_broker_and_the_hub_let_the_same_pass(
    scopes: list[str], relays: list[str], scope: str, relay: str
) -> None:
    domain = TrustDomain(user="a", scopes=tuple(scopes), relays=tuple(relays))
    hub = HubSettings(role="hub", url=SecretStr("amqp://h/"), exchange="x", domains=(domain,))
    answer = fleet_definitions(hub, "h", "/", {})
    rights = {(entry["user"], entry["exchange"]): entry for entry in answer["topic_permissions"]}
    may_report = rights["a", FLEET]["write"]
    may_bind = rights["a", COMMANDS]["read"]
    may_order = rights["h", COMMANDS]["write"]
    speaks = domain.may_speak_for_relay(scope, relay)
    for key in (
        agent_key("vote", Origin(scope, relay)),
        report_key(cloudevent(), Origin(scope, relay)),
    ):
        assert bool(re.search(may_report, key)) is speaks
    assert bool(re.search(may_bind, command_key(scope, relay))) is speaks
    in_domain = matches_any_pattern(scopes, scope)
    assert bool(re.search(may_bind, scope_key(scope))) is in_domain
    assert bool(re.search(may_order, scope_key(scope))) is in_domain
    assert bool(re.search(may_order, command_key(scope, relay))) is in_domain


def test_a_report_is_of_the_relay_in_its_key_if_the_user_may_speak_for_it() -> None:
    message = delivered(FLEET, "vote.vmss-b-1f.one", user_id="single")
    sender = AuthorizedSender("vmss-b-1f", "one", "single")
    assert verify_message_from_agent(message, FLEET, DOMAINS) == ("vote", sender)


@pytest.mark.parametrize(
    ("exchange", "properties", "reason"),
    [
        ("", {"user_id": "single"}, "was not published to x.fleet"),
        (COMMANDS, {"user_id": "single"}, "was not published to x.fleet"),
        (FLEET, {}, "no user_id"),
        (FLEET, {"user_id": "vmss-a"}, "may not speak for"),
        (FLEET, {"user_id": "single", "headers": {"x-death": [{}]}}, "dead letter"),
        (FLEET, {"user_id": "single", "headers": {"CC": ["vote.vmss-b-1f.two"]}}, "CC header"),
    ],
)
def test_a_report_that_the_broker_does_not_vouch_for_is_unusable(
    exchange: str, properties: dict[str, Any], reason: str
) -> None:
    message = delivered(exchange, "vote.vmss-b-1f.one", **properties)
    with pytest.raises(UnusableMessage, match=reason):
        verify_message_from_agent(message, FLEET, DOMAINS)


def test_a_command_is_obeyed_if_it_is_the_hubs_and_for_this_agent() -> None:
    keys = agent_binding_keys(ORIGIN)
    for key in keys:
        message = delivered(COMMANDS, key, user_id="imds-hub")
        assert verify_command_from_hub(message, COMMANDS, keys, "imds-hub") == key


@pytest.mark.parametrize(
    ("exchange", "key", "properties", "reason"),
    [
        (FLEET, TO_US, {}, "routing key of this agent"),
        ("", TO_US, {}, "routing key of this agent"),
        (COMMANDS, "to.vmss-a-1f.vmss-a_1", {}, "routing key of this agent"),
        (COMMANDS, TO_US, {"user_id": "vmss-a"}, "is not the hub's"),
        (COMMANDS, TO_US, {"user_id": None}, "no user_id"),
        (COMMANDS, TO_US, {"headers": {"x-death": [{}]}}, "dead letter"),
        (COMMANDS, TO_US, {"headers": {"CC": ["to.vmss-a-1f.vmss-a_1"]}}, "CC header"),
    ],
)
def test_no_other_command_is_obeyed(
    exchange: str, key: str, properties: dict[str, Any], reason: str
) -> None:
    message = delivered(exchange, key, **{"user_id": "imds-hub"} | properties)
    with pytest.raises(UnusableMessage, match=reason):
        verify_command_from_hub(message, COMMANDS, agent_binding_keys(ORIGIN), "imds-hub")
