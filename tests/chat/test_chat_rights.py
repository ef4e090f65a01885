"""In a chat a person has no more rights than with their clients, and than the sink allows."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from relay.approvals import ApprovalsSettings
from relay.approvals.request import Caller, Right, Rights
from relay.chat import AnswerableChatSettings
from relay.chat.cards.card import rights_of_buttons
from relay.chat.cards.event_card import event_card, grouped_card
from relay.chat.context import ChatDecisionSubmitter
from relay.clock import SystemClock
from tests.approvals.builders import build_status, decide_nothing
from tests.chat.running_relay import rule

ANN = "slack:T024BE7LD/U0ANN"
ALL: tuple[Right, ...] = ("read", "approve", "hold", "operate")
CHAT: frozenset[Right] = frozenset({"read", "approve", "hold"})
DB, VM = ("db-*",), ("vm-*",)


class Sink(AnswerableChatSettings):
    kind: Literal["slack"] = "slack"


def rights(*can: Right, resources: tuple[str, ...] | None = None) -> Rights:
    return Rights(frozenset(can), resources)


@pytest.mark.parametrize(
    ("clients", "sink", "expected"),
    [
        ([], {}, Rights(CHAT)),
        ([rights(*ALL)], {}, Rights(CHAT)),
        ([rights("read", "hold")], {}, rights("read", "hold")),
        ([rights(*ALL), rights("hold")], {}, rights("hold")),
        ([rights(*ALL)], {"can": ["approve"]}, rights("approve")),
        ([rights(*ALL, resources=DB)], {}, Rights(CHAT, DB)),
        ([rights(*ALL, resources=DB), rights(*ALL)], {}, Rights(CHAT, DB)),
        ([rights(*ALL)], {"resources": DB}, Rights(CHAT, limits=(DB,))),
        ([rights(*ALL, resources=VM)], {"resources": DB}, Rights(CHAT, VM, (DB,))),
    ],
)
def test_a_person_may_do_in_a_chat_what_every_client_and_the_sink_allow(
    clients: list[Rights], sink: dict[str, Any], expected: Rights
) -> None:
    names = [f"client:{number}" for number in range(len(clients))]
    settings = ApprovalsSettings.model_validate(
        {"people": {"ann": [ANN, *names]}, "rules": [rule(1, "person:ann")]}
    )
    decisions = ChatDecisionSubmitter(
        settings, SystemClock(), dict(zip(names, clients, strict=True)), decide_nothing
    )
    section = Sink.model_validate({"name": "ops", **sink})
    assert decisions.caller(ANN, section) == Caller(ANN, "slack", expected)
    assert decisions.caller("slack:T024BE7LD/U0EVE", section) is None


def test_two_clients_with_other_patterns_limit_the_person_to_what_both_cover() -> None:
    clients = {"client:a": rights(*ALL, resources=DB), "client:b": rights(*ALL, resources=VM)}
    settings = ApprovalsSettings.model_validate(
        {"people": {"ann": [ANN, *clients]}, "rules": [rule(1, "person:ann")]}
    )
    caller = ChatDecisionSubmitter(settings, SystemClock(), clients, decide_nothing).caller(
        ANN, Sink.model_validate({"name": "ops"})
    )
    assert caller is not None
    assert caller.rights.resources is None
    assert sorted(caller.rights.limits) == [DB, VM]


@pytest.mark.parametrize(("in_chat", "labels"), [(True, ["Hold"]), (False, ["Approve", "Hold"])])
def test_a_chat_shows_only_the_buttons_that_its_can_allows(
    *, in_chat: bool, labels: list[str]
) -> None:
    """A link stays: the page knows the rights of its callers."""
    section = Sink.model_validate({"name": "ops", "can": ["hold"]})
    can = rights_of_buttons(section, in_chat=in_chat)
    card = event_card(build_status(), link=lambda *_: None, can=can)
    lines = grouped_card([build_status()] * 2, link=lambda *_: None, can=can).lines
    for buttons in (card.buttons, *(line.buttons for line in lines)):
        assert [button.label for button in buttons] == labels
