"""Apprise: which URLs are accepted, how texts are sent, and what services that fail can delay."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relay.chat.cards import event_card
from relay.chat.cards.card import Buttons, Card
from relay.chat.platforms import apprise
from relay.chat.platforms.apprise import Services, Settings, card_text, load_service
from relay.errors import Deferred
from tests.approvals.builders import build_event, build_status
from tests.chat.apprise_server import PATH, AppriseService, running_service
from tests.clocks import NOON
from tests.eventually import eventually

PAGE = Path(__file__).parents[2] / "docs" / "chat" / "apprise.md"
NOT_BEFORE = NOON + timedelta(seconds=900)


def services(*urls: str, **changes: Any) -> Services:
    section = {"kind": "apprise", "name": "pager", "urls": urls, "allow_http": True, **changes}
    return Services(Settings.model_validate(section))


def make_card(**event_changes: Any) -> Card:
    """Return the card of an event that waits for votes."""
    status = build_status(build_event(**event_changes))
    return event_card(status, Buttons(in_chat=True))


@pytest.fixture
async def service() -> AsyncIterator[AppriseService]:
    async with running_service() as service:
        yield service


async def post_error(platform: Services) -> Deferred:
    with pytest.raises(Deferred) as caught:
        await platform.post(make_card())
    return caught.value


# --- texts


def test_a_card_is_the_plain_text_of_the_page_and_names_the_command_that_decides() -> None:
    reboot = build_event(
        "6F83E8DA-3EB4-4B0A-BFCA-0932494392AD",
        resources=("db-1", "db-2"),
        description="Host server is undergoing maintenance.",
    )
    card = event_card(build_status(reboot), Buttons(in_chat=True))
    page = PAGE.read_text(encoding="utf-8")
    assert f"```text\n{card.title}\n\n{card_text(card)}\n```" in page


@given(st.text(max_size=300))
def test_a_description_cannot_add_lines(description: str) -> None:
    lines = card_text(make_card(description=f"x{description}")).splitlines()
    assert len(lines) == len(card_text(make_card(description="x")).splitlines())


# --- URLs


@pytest.mark.parametrize(
    "url",
    [
        "tgram://123456789:AAE-xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx/12315544/",
        "pover://uuuuuuuuuuuuuuuuuuuuuuuuuuuuuu@aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "ntfys://ntfy.example.com/topic",
        "https://discord.com/api/webhooks/4174216298/JHMHI8qBe7bk2ZwO5U711o3dV_js",
        "rsyslog://logs.example.com",
    ],
)
def test_services_on_the_network_are_accepted(url: str) -> None:
    assert load_service(url, allow_http=False)


SCHEMES = (
    "json jsons slack mailto tgram https discord sns fcm workflows matrix x".split()  # noqa: SIM905  # readable
)


@example("fcm", "\x00")
@given(st.sampled_from([*SCHEMES, ""]), st.text("abcT0129:/@?&=%[]#.-_ \\\x00é", max_size=60))
def test_any_text_is_a_service_or_an_error_of_the_usual_form(scheme: str, rest: str) -> None:
    try:
        load_service(f"{scheme}://{rest}", allow_http=True)
    except ValueError as error:
        assert str(error).startswith("expected ")  # noqa: PT017  # not every text raises


# --- sending


async def test_a_message_has_title_text_type_and_sender(service: AppriseService) -> None:
    platform = services(service.url)
    await platform.post(make_card(description="x" * 40_000))
    await platform.reply_in_thread(None, [("Reboot of db-1 (E-1)",), (NOON, ": it began")])
    await platform.reply_in_thread(None, [("ping",)])
    card, *replies = service.messages
    assert card.startswith(f"Reboot of db-1\nAzure begins at {NOT_BEFORE:%Y-%m-%d %H:%M} UTC")
    assert len(card) <= 33_100  # cut to what the service takes
    began = f"Reboot of db-1 (E-1)\n{NOON:%Y-%m-%d %H:%M} UTC: it began"
    assert replies == [began, "imds-relay\nping"]
    assert service.message_types == ["warning", "info", "info"]
    assert set(service.user_agents) == {"imds-relay"}


@pytest.mark.parametrize(
    ("status", "failure", "reason"),
    [
        (302, "slow", "redirects are not followed"),
        (401, "slow", "check its URL"),
        (404, "slow", "check its URL"),
        (429, "transient", "it answered 429"),
        (503, "transient", "it answered 503"),
    ],
)
async def test_the_status_of_a_refusal_decides_how_it_is_retried(
    status: int, failure: str, reason: str, service: AppriseService
) -> None:
    service.status = status
    error = await post_error(services(service.url))
    assert (error.failure, error.status) == (failure, status)
    assert reason in error.reason
    assert service.calls == [PATH]  # no redirect was followed


async def test_a_failing_service_does_not_stop_others_and_nobody_gets_a_message_twice() -> None:
    async with running_service() as healthy, running_service() as failing:
        platform = services(healthy.url, failing.url)
        failing.status = 503
        for _ in range(3):
            assert (await post_error(platform)).failure == "transient"
        failing.status = 200
        await platform.post(make_card())
        assert (len(healthy.messages), len(failing.messages)) == (1, 1)
        await platform.post(make_card())  # every service has the first message: this is a new one
        assert len(healthy.messages) == 2


async def test_a_permanent_failure_does_not_slow_the_retry_of_a_transient_failure() -> None:
    async with running_service() as forbidding, running_service() as failing:
        forbidding.status, failing.status = 403, 503
        error = await post_error(services(forbidding.url, failing.url))
        assert error.failure == "transient"
        assert "403" in error.reason
        assert "503" in error.reason


async def test_old_partial_messages_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apprise, "MAX_PARTIAL_MESSAGES", 2)
    async with running_service() as healthy, running_service() as failing:
        platform = services(healthy.url, failing.url)
        failing.status = 503
        for text in ("one", "two", "three", "three", "one"):
            with pytest.raises(Deferred):
                await platform.reply_in_thread(None, [(text,)])
        received = [message.removeprefix("imds-relay\n") for message in healthy.messages]
        assert received == ["one", "two", "three", "one"]


async def test_a_hanging_service_is_left_and_no_threads_pile_up(service: AppriseService) -> None:
    release = service.release = asyncio.Event()
    platform = services(service.url, timeout="1s")
    for _ in range(3):
        error = await post_error(platform)
        assert (error.failure, "within 1 s" in error.reason) == ("transient", True)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "apprise"]
    assert thread.daemon  # the process does not wait for it
    release.set()
    service.release = None
    await eventually(lambda: not thread.is_alive())
    await services(service.url).post(make_card())
