"""The Teams sink: errors of a workflow, its configuration, and a reboot from start to end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from relay.chat.platforms import teams
from relay.chat.platforms.teams import Settings, WorkflowWebhook
from relay.clock import SystemClock
from relay.errors import Deferred
from relay.net.http import open_session
from tests.chat.teams_server import (
    PATH,
    QUERY,
    SIGNATURE,
    State,
    TeamsWorkflow,
    running_workflow,
)


def section(url: str) -> dict[str, Any]:
    """Return the sink's section of the YAML document."""
    return {"kind": "teams", "name": "ops", "url": url, "allow_http": True}


@asynccontextmanager
async def webhook(settings: Settings) -> AsyncIterator[WorkflowWebhook]:
    """Yield what posts to a workflow."""
    async with open_session() as session:
        yield WorkflowWebhook(settings, SystemClock(), session)


async def post_error(workflow: TeamsWorkflow, url: str | None = None) -> Deferred:
    """Return the error of a post to the workflow's URL, or to another."""
    async with webhook(Settings.model_validate(section(url or workflow.url))) as platform:
        with pytest.raises(Deferred) as caught:
            await platform.reply_in_thread(None, [("hello",)])
    return caught.value


# --- errors


@pytest.mark.parametrize(
    ("state", "failure", "status", "remedy"),
    [
        ("off", "slow", 400, "turn it on in the Workflows app"),
        ("deleted", "slow", 400, "Send webhook alerts to a channel"),
        ("forbidding", "slow", 401, "copy all of it again"),
        ("gone", "disabled", 410, "imds-relay sink resume"),
        ("busy", "transient", 429, ""),
        ("broken", "transient", 502, ""),
        ("redirecting", "slow", 302, "redirects are not followed"),
    ],
)
async def test_an_error_names_its_remedy_and_no_secret(
    state: State, failure: str, status: int, remedy: str
) -> None:
    async with running_workflow() as workflow:
        workflow.state = state
        error = await post_error(workflow)
        assert (error.failure, error.status) == (failure, status)
        assert remedy in error.reason
        assert workflow.refused_calls == 1  # a redirect is not followed
        for text in (error.reason, error.response or ""):
            assert SIGNATURE not in text
            assert PATH not in text


async def test_a_wrong_url_is_explained() -> None:
    async with running_workflow() as workflow:
        for path_and_query, reason in (
            (f"/workflows/other{QUERY}", "there is no such workflow"),
            (f"{PATH}?api-version=1", "to the end of sig="),
            (f"{PATH}{QUERY[:-3]}", "to the end of sig="),
        ):
            error = await post_error(workflow, f"http://127.0.0.1:{workflow.port}{path_and_query}")
            assert reason in error.reason


async def test_retry_after_is_passed_on() -> None:
    async with running_workflow() as workflow:
        workflow.retry_after = "17"
        states: tuple[State, ...] = ("busy", "forbidding")
        for workflow.state in states:
            assert (await post_error(workflow)).after == 17.0


async def test_the_url_reaches_the_workflow_unchanged() -> None:
    """Its parts are signed, so %2F must not become a slash."""
    async with running_workflow() as workflow:
        settings = Settings.model_validate(section(workflow.url))
        async with webhook(settings) as platform:
            await platform.reply_in_thread(None, [("hello",)])
        assert workflow.card_texts == ["hello"]
        assert str(settings.webhook_url()) == workflow.url


# --- configuration


def test_the_urls_of_microsoft_and_of_proxies_are_accepted() -> None:
    for host in (
        "prod-01.westeurope.logic.azure.com",
        "default0f3c.1a.environment.api.powerplatform.com",
        "teams.proxy.example",
    ):
        settings = Settings.model_validate(section(f"https://{host}:443{PATH}{QUERY}"))
        assert settings.webhook_url().host == host
        assert SIGNATURE not in repr(settings)


async def test_doctor_connects_to_the_workflow_and_posts_nothing() -> None:
    async with running_workflow() as workflow:
        settings = Settings.model_validate(section(workflow.url))
        (finding,) = await teams.diagnose(settings, SystemClock(), "prod")
        assert finding.state == "ok"
        assert workflow.calls == []
