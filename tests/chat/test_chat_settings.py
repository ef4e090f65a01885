"""The sections of chats, which show no secrets, and the rights that people have in a chat."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import ValidationError

from relay.approvals import ApprovalsSettings
from relay.approvals.request import Caller, Right, Rights
from relay.chat import AnswerableChatSettings, ChatSettings
from relay.chat.cards import event_card, grouped_card
from relay.chat.cards.card import Buttons
from relay.chat.context import ChatDecisionSubmitter
from relay.clock import SystemClock
from relay.config import Config, load_kinds
from tests.approvals.builders import build_status, decide_nothing
from tests.chat.mattermost_server import SECRET
from tests.chat.running_relay import rule
from tests.chat.slack_server import CHANNEL

XOXB, XAPP = "xoxb-1234567890-t0ken", "xapp-1-1234567890-t0ken"
MATTERMOST = {
    "api_url": "https://chat.example.com",
    "channel": "4xp9fdt77pncbef59f4k1qe83o",
    "token": "bot-t0ken",
}
SLACK = {"token": XOXB, "channel": CHANNEL}
LOGIC_APPS = "https://prod-01.westeurope.logic.azure.com:443/workflows"
POWER_PLATFORM = "https://x.environment.api.powerplatform.com/powerautomate"
BOT_TOKEN = "token: expected the bot account's access token"
WRONG_BOT_TOKEN = "token: expected a bot token, which starts with xoxb-"
NOT_IN_APPRISE = "expected a URL that Apprise knows"


def settings(kind: str, section: dict[str, Any]) -> ChatSettings:
    """Return a section as it is read; a key that is None is left out."""
    given = {name: value for name, value in section.items() if value is not None}
    model: type[ChatSettings] = load_kinds().modules[kind].Settings
    return model.model_validate({"kind": kind, "name": "ops", **given})


@pytest.mark.parametrize(
    ("kind", "section", "problem"),
    [
        ("mattermost", {"api_url": "http://chat.example.com"}, "api_url: expected https, got http"),
        ("mattermost", {"api_url": "chat.example.com"}, "api_url: expected a URL that starts with"),
        ("mattermost", {"api_url": "https://u:t0ken@example.com"}, "without user and password"),
        ("mattermost", {"api_url": "https://169.254.169.254"}, "got a metadata or host address"),
        ("mattermost", {"channel": "../users/me"}, "channel"),
        ("mattermost", {"token": None}, "without spaces, in token or token_file, got neither"),
        ("mattermost", {"token": "two t0ken"}, BOT_TOKEN),
        ("mattermost", {"approve_in_chat": True}, "secret: expected a secret or secret_file for"),
        ("mattermost", {"approve_in_chat": True, "secret": "t0ken"}, "secret: expected whsec_"),
        ("slack", {"token": None}, "starts with xoxb-, in token or token_file, got neither"),
        ("slack", {"token": "xoxp-1234567890-t0ken"}, f"{WRONG_BOT_TOKEN}, got something else"),
        ("slack", {"token": f"{XOXB} "}, WRONG_BOT_TOKEN),
        ("slack", {"channel": "#ops"}, "channel"),
        ("slack", {"channel": "D024BE91L"}, "channel"),
        ("slack", {"approve_in_chat": True}, "approve_in_chat: expected app_token or app_token_fi"),
        ("slack", {"app_token": XOXB}, "app_token: expected an app-level token, which starts with"),
        ("slack", {"signing_secret": "8f742231b10e8888abcd99yyyt0ken"}, "signing_secret"),
        ("slack", {"api_url": "http://slack.com/api/"}, "api_url: expected https, got http"),
        ("slack", {"api_url": "http://169.254.169.254/", "allow_http": True}, "metadata or host"),
        ("teams", {}, "expected url or url_file, got neither"),
        ("teams", {"url": "http://127.0.0.1/x?sig=t0ken"}, "url: expected https, got http"),
        ("teams", {"url": "https://c.webhook.office.com/t0ken"}, "which Microsoft has retired"),
        ("teams", {"url": f"{LOGIC_APPS}/t0ken/triggers/manual/paths/invoke"}, "ends in sig="),
        ("teams", {"url": f"{POWER_PLATFORM}/t0ken?api-version=1&sig="}, "ends in sig="),
        ("teams", {"url": "https://169.254.169.254/t0ken"}, "metadata or host address"),
        ("teams", {"url": "https://user:t0ken@example.com/"}, "without user and password"),
        ("apprise", {}, "urls: expected at least one URL"),
        ("apprise", {"urls": ["gopher://t0ken"]}, f"number 1: {NOT_IN_APPRISE}"),
        ("apprise", {"urls": ["jsons://a/x", "file:///t0ken"]}, f"number 2: {NOT_IN_APPRISE}"),
        ("apprise", {"urls": ["discord://t0ken"]}, f"{NOT_IN_APPRISE}, with all that its service"),
        ("apprise", {"urls": ["json://a/t0ken"]}, "expected jsons://, got json://: set allow_http"),
        ("apprise", {"urls": ["gotify://a.de/t0ken"]}, "expected gotifys://, got gotify://: set"),
        ("apprise", {"urls": ["jsons://169.254.169.254/t0ken"]}, "metadata or host address"),
        ("apprise", {"urls": ["jsons://[::ffff:168.63.129.16]/t0ken"]}, "metadata or host address"),
    ],
)
def test_an_unusable_section_is_refused_without_repeating_secrets(
    kind: str, section: dict[str, Any], problem: str
) -> None:
    usable: dict[str, dict[str, Any]] = {"mattermost": MATTERMOST, "slack": SLACK}
    with pytest.raises(ValidationError) as caught:
        settings(kind, usable.get(kind, {}) | section)
    assert problem in str(caught.value)
    assert "t0ken" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "section", "secrets"),
    [
        ("mattermost", MATTERMOST, {"token": "bot-t0ken", "secret": SECRET}),
        ("slack", SLACK, {"token": XOXB, "app_token": XAPP}),
    ],
)
def test_every_secret_can_be_in_a_file(
    tmp_path: Path, kind: str, section: dict[str, Any], secrets: dict[str, str]
) -> None:
    section = {**section, "token": None, "approve_in_chat": True}
    for name, text in secrets.items():
        (tmp_path / name).write_text(f"{text}\n", encoding="utf-8")
        section[f"{name}_file"] = str(tmp_path / name)
    made = settings(kind, section)
    assert {name: made.reveal(name) for name in secrets} == secrets
    (tmp_path / "token").write_text("t0ken with blanks", encoding="utf-8")
    with pytest.raises(ValidationError, match="token_file: expected") as caught:
        settings(kind, section)
    assert "t0ken" not in str(caught.value)


def test_approve_in_chat_needs_the_url_that_mattermost_calls() -> None:
    section: dict[str, Any] = {"kind": "mattermost", "name": "ops", **MATTERMOST}
    section |= {"approve_in_chat": True, "secret": SECRET}
    problem = "api.public_url: expected the URL at which the platform of sink ops reaches this rela"
    with pytest.raises(ValidationError, match=re.escape(problem)):
        Config.model_validate({"sinks": [section]})
    Config.model_validate({"sinks": [section], "api": {"public_url": "https://relay.example.com"}})


ANN = "slack:T024BE7LD/U0ANN"
ALL: tuple[Right, ...] = ("read", "approve", "hold", "operate")
CHAT: frozenset[Right] = frozenset({"read", "approve", "hold"})
DB, VM = ("db-*",), ("vm-*",)


class Sink(AnswerableChatSettings):
    kind: Literal["slack"] = "slack"


def rights(*can: Right, resources: tuple[str, ...] | None = None) -> Rights:
    return Rights(frozenset(can), resources)


def submitter(*clients: Rights) -> ChatDecisionSubmitter:
    """What submits the decisions of Ann, who is these clients, too."""
    rights_by_name = {f"client:{number}": each for number, each in enumerate(clients)}
    section = {"people": {"ann": [ANN, *rights_by_name]}, "rules": [rule(1, "person:ann")]}
    settings = ApprovalsSettings.model_validate(section)
    return ChatDecisionSubmitter(settings, SystemClock(), rights_by_name, decide_nothing)


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
    decisions = submitter(*clients)
    section = Sink.model_validate({"name": "ops", **sink})
    assert decisions.caller(ANN, section) == Caller(ANN, "slack", expected)
    assert decisions.caller("slack:T024BE7LD/U0EVE", section) is None


def test_two_clients_with_other_patterns_limit_the_person_to_what_both_cover() -> None:
    decisions = submitter(rights(*ALL, resources=DB), rights(*ALL, resources=VM))
    caller = decisions.caller(ANN, Sink.model_validate({"name": "ops"}))
    assert caller is not None
    assert caller.rights.resources is None
    assert sorted(caller.rights.limits) == [DB, VM]


@pytest.mark.parametrize(("in_chat", "labels"), [(True, ["Hold"]), (False, ["Approve", "Hold"])])
def test_a_chat_shows_only_buttons_that_its_can_allows(*, in_chat: bool, labels: list[str]) -> None:
    """A link stays: the page knows the rights of its callers."""
    section = Sink.model_validate({"name": "ops", "can": ["hold"]})
    buttons_of = Buttons.of_sink(section, "https://relay.example.com", in_chat=in_chat)
    card = event_card(build_status(), buttons_of)
    lines = grouped_card([build_status()] * 2, buttons_of).lines
    for buttons in (card.buttons, *(line.buttons for line in lines)):
        assert [button.label for button in buttons] == labels
