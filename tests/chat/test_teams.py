"""A workflow of Teams: what its answers mean, what may be configured, and a story from the first notice to the end."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from relay.chat import CallbackRefused
from relay.chat.platforms import teams
from relay.chat.platforms.teams.settings import Settings
from relay.chat.platforms.teams.workflow import Workflow as Posting
from relay.chat.platforms.teams.workflow import build
from relay.clock import SystemClock
from relay.config import Config
from relay.errors import Deferred
from relay.events.build import relay_event
from relay.net.http import open_session
from relay.simulator import Event
from tests.approvals.builders import ORIGIN
from tests.approvals.manual_clock import NOON
from tests.chat.running_relay import ALICE, BOB, Stage, rule, stage
from tests.chat.teams_server import PATH, QUERY, SIGNATURE, State, Workflow, workflow
from tests.journey.relay_process import eventually

PING = relay_event(
    "relay.ping", ORIGIN, NOON, sink="ops", reason="asked for by local:root", count=1, head="0:0"
)


def settings(url: str, **more: Any) -> Settings:
    return Settings.model_validate(
        {"kind": "teams", "name": "ops", "url": url, "allow_http": True, **more}
    )


@asynccontextmanager
async def platform(url: str, **more: Any) -> AsyncIterator[Posting]:
    """What posts, without a board."""
    async with open_session() as session:
        yield Posting(settings(url, **more), SystemClock(), session)


async def refusal(there: Workflow, url: str | None = None, **more: Any) -> Deferred:
    """How a post fails."""
    async with platform(url or there.url, **more) as posts:
        with pytest.raises(Deferred) as caught:
            await posts.reply_in_thread(None, [("hello",)])
    return caught.value


# --- answers


@pytest.mark.parametrize(
    ("state", "failure", "status", "remedy"),
    [
        ("off", "slow", 400, "turn it on in the Workflows app"),
        ("deleted", "slow", 400, "Send webhook alerts to a channel"),
        ("forbidding", "slow", 401, "copy all of it again"),
        ("gone", "disabled", 410, "imds-relay resume"),
        ("busy", "transient", 429, ""),
        ("broken", "transient", 502, ""),
        ("moved", "slow", 302, "redirects are not followed"),
    ],
)
async def test_a_refusal_says_what_to_do(
    state: State, failure: str, status: int, remedy: str
) -> None:
    async with workflow() as there:
        there.state = state
        error = await refusal(there)
        assert (error.failure, error.status) == (failure, status)
        assert remedy in error.reason
        assert there.refused == 1  # a redirect is not followed
        for said in (error.reason, error.response or ""):
            assert SIGNATURE not in said
            assert PATH not in said


async def test_a_url_of_no_workflow_and_one_without_its_signature_are_told_apart() -> None:
    async with workflow() as there:
        base = f"http://127.0.0.1:{there.port}"
        assert (
            "there is no such workflow"
            in (await refusal(there, f"{base}/workflows/other{QUERY}")).reason
        )
        assert "to the end of sig=" in (await refusal(there, f"{base}{PATH}?api-version=1")).reason
        assert "to the end of sig=" in (await refusal(there, there.url[:-3])).reason


@pytest.mark.parametrize("state", ["busy", "forbidding"])
async def test_the_rest_that_is_asked_for_is_passed_on(state: State) -> None:
    async with workflow() as there:
        there.state, there.retry_after = state, "17"
        assert (await refusal(there)).after == 17.0


async def test_a_url_reaches_the_workflow_letter_for_letter() -> None:
    """Its parts are signed: %2F must not become a slash on the way."""
    async with workflow() as there, platform(there.url) as posts:
        await posts.reply_in_thread(None, [("hello",)])
        assert there.texts == ["hello"]
        assert str(settings(there.url).target()) == there.url
        assert build(settings(there.url).target(), {}).url.raw_query_string == QUERY[1:]


async def test_a_url_from_a_file_is_read_again_and_one_that_is_broken_waits_for_somebody(
    tmp_path: Path,
) -> None:
    file = tmp_path / "url"
    async with workflow() as there:
        file.write_text(f"{there.url}\n")
        given_ = Settings.model_validate(
            {"kind": "teams", "name": "ops", "url_file": file, "allow_http": True}
        )
        async with open_session() as session:
            posts = Posting(given_, SystemClock(), session)
            await posts.reply_in_thread(None, [("one",)])
            file.write_text("nonsense")
            with pytest.raises(Deferred) as caught:
                await posts.reply_in_thread(None, [("two",)])
            assert caught.value.failure == "slow"
            file.write_text(there.url)
            await posts.reply_in_thread(None, [("three",)])
        assert there.texts == ["one", "three"]


# --- configuration


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, "expected url or url_file, got neither"),
        ({"url": "http://127.0.0.1/x?sig=t0ken"}, "url: expected https, got http"),
        (
            {"url": "https://contoso.webhook.office.com/webhookb2/t0ken"},
            "which Microsoft has retired",
        ),
        (
            {
                "url": "https://prod-01.westeurope.logic.azure.com:443/workflows/t0ken/triggers/manual/paths/invoke"
            },
            "ends in sig=",
        ),
        (
            {
                "url": "https://x.environment.api.powerplatform.com/powerautomate/t0ken?api-version=1&sig="
            },
            "ends in sig=",
        ),
        ({"url": "https://169.254.169.254/t0ken"}, "metadata or host address"),
        ({"url": "https://user:t0ken@example.com/"}, "without user and password"),
    ],
)
def test_a_wrong_section_says_what_was_expected(section: Mapping[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({"kind": "teams", "name": "ops", **section})
    assert expected in str(caught.value)
    assert "t0ken" not in str(caught.value)


def test_the_urls_that_microsoft_gives_out_are_accepted() -> None:
    for host in (
        "prod-01.westeurope.logic.azure.com:443",
        "default0f3c.1a.environment.api.powerplatform.com:443",
        "teams.proxy.example",
    ):
        found = Settings.model_validate(
            {"kind": "teams", "name": "ops", "url": f"https://{host}{PATH}{QUERY}"}
        )
        assert found.target().host == host.partition(":")[0]
        assert SIGNATURE not in repr(found)


def test_a_chat_sink_stands_among_the_others() -> None:
    section = {"kind": "teams", "name": "ops", "url": f"https://teams.example{PATH}{QUERY}"}
    (sink,) = Config.model_validate({"sinks": [section]}).sinks
    assert isinstance(sink, Settings)
    assert sink.stale == "drop"


# --- calls


@given(
    st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=3), st.binary(max_size=200)
)
async def test_whoever_calls_is_refused(headers: dict[str, str], body: bytes) -> None:
    """A workflow never does."""
    chat = teams.Teams.__new__(teams.Teams)
    with pytest.raises(CallbackRefused) as caught:
        await chat.handle_callback(headers, body)
    assert caught.value.status == 401


async def test_nothing_of_a_call_reaches_the_gate(tmp_path: Path) -> None:
    async with workflow() as there, stage(tmp_path, [section(there)], approvals=TWO) as on:
        on.reboot("vm-0")
        async with on.web.post(
            f"{on.url}/v1/chat/ops", json={"type": "message", "text": "approve"}
        ) as answer:
            assert answer.status == 401


async def test_doctor_reaches_for_it_and_posts_nothing() -> None:
    async with workflow() as there:
        (found,) = await teams.diagnose(settings(there.url), SystemClock(), "prod")
        assert found.state == "ok"
        assert there.calls == []


# --- stories


TWO: dict[str, Any] = {"rules": [rule(2, "client:alice", "client:bob")]}


def section(there: Workflow, **more: Any) -> dict[str, Any]:
    """The sink's section of the YAML document."""
    return {"kind": "teams", "name": "ops", "url": there.url, "allow_http": True, **more}


async def test_a_story_from_the_first_notice_to_the_end(tmp_path: Path) -> None:
    """Scheduled, a card with links, two votes, the StartRequest, started, ended: each told once, in a card that says which."""
    async with workflow() as there, stage(tmp_path, [section(there)], approvals=TWO) as on:
        reboot = on.reboot("vm-0", lasts=None)
        await eventually(lambda: len(there.cards) == 1)
        assert "Reboot of vm-0" in there.texts[0]
        assert "0 of 2; 2 missing, from client:alice, client:bob" in there.texts[0]
        links = there.links()
        assert [*links] == ["Approve", "Hold"]
        assert all(link.startswith("https://relay.example.com/approve#") for link in links.values())
        assert await on.approve(reboot, client=ALICE) == 202
        await eventually(lambda: len(there.cards) == 2)
        assert await on.approve(reboot, client=BOB) == 202
        await eventually(lambda: "Azure began" in there.texts[-1])
        on.azure.end(reboot)
        await eventually(lambda: "It is over" in there.texts[-1])
        about = f"Reboot of vm-0 ({reboot.event_id[:8]})"
        assert all(text.startswith(about) for text in there.texts[1:])
        told = "\n".join(there.texts[1:])
        for words in (
            "client:alice voted to approve, 1 of 2.",
            "Approved by rule reboots: 2 of 2 votes.",
            "Azure accepted the StartRequest.",
            "Azure began, as this relay had approved.",
            "It is over: Azure has completed it.",
        ):
            assert told.count(words) == 1
        assert there.failed == []
        assert on.starts(reboot) == 1


async def test_a_burst_is_one_card(tmp_path: Path) -> None:
    async with workflow() as there, stage(tmp_path, [section(there)], approvals=TWO) as on:
        for number in range(50):
            on.reboot(f"vm-{number}")
        await eventually(lambda: len(there.cards) == 1)
        assert "50 maintenance events at once" in there.texts[0]
        assert len(there.links()) == 2  # the same two words on each of ten lines
        assert there.failed == []


async def test_what_happened_while_teams_was_away_is_told_in_two_cards(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with workflow() as there, stage(tmp_path, [section(there)], approvals=TWO) as on:
        there.state = "broken"
        reboot = on.reboot("vm-0")
        await eventually(lambda: there.refused > 0)
        for client in (ALICE, BOB):
            assert await on.approve(reboot, client=client) == 202
        await eventually(
            lambda: _is(on, reboot, "eventStatus", "Started"), every=0.2
        )  # the API allows ten calls a second
        on.azure.end(reboot)
        await eventually(lambda: _is(on, reboot, "outcome", "completed"), every=0.2)
        there.state = "on"
        await eventually(lambda: len(there.cards) == 2)
        assert "It is over: Azure has completed it." in there.texts[0]
        assert there.links(0) == {}
        assert "client:alice voted to approve" in there.texts[1]
        assert SIGNATURE not in caplog.text


async def _is(on: Stage, reboot: Event, field: str, value: str) -> bool:
    return bool((await on.event(reboot))[field] == value)
