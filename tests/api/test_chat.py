"""POST /v1/chat/{sink}: a platform's call reaches its sink; without proof it is rejected."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from relay.chat import CallbackRefused, Reply
from relay.errors import StoreUnavailable
from relay.events.cloudevent import CloudEvent
from relay.sinks import Receipt
from tests.api.running_relay import RunningRelay, run_relay


@dataclass(slots=True)
class Wall:
    heard: list[bytes] = field(default_factory=list)
    concurrency: int = 1
    longest_pause: float = 60.0
    give_up_after: float = 86400.0

    async def deliver(self, _event: CloudEvent) -> Receipt:
        return Receipt()

    async def handle_callback(self, headers: Mapping[str, str], body: bytes) -> Reply:
        if headers.get("x-proof") != "good":
            raise CallbackRefused("the header X-Proof is not good")
        if body == b"unreadable":
            raise CallbackRefused("the body cannot be read", status=400)
        if body == b"disk":
            raise StoreUnavailable("the disk is full")
        if body == b"mistake":
            raise ZeroDivisionError
        self.heard.append(body)
        return {"text": "done"} if body else None


GOOD = {"X-Proof": "good", "Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture
async def wall() -> Wall:
    return Wall()


@pytest.fixture
async def relay(tmp_path: Path, wall: Wall) -> AsyncIterator[RunningRelay]:
    async with run_relay(tmp_path) as running_relay:
        running_relay.server.state.attach_relay(replace(running_relay.relay, chats={"ops": wall}))
        yield running_relay


async def test_a_platform_call_is_answered_by_its_sink(relay: RunningRelay, wall: Wall) -> None:
    answer = await relay.call("POST", "/v1/chat/ops", b"payload=%7B%7D", by=None, headers=GOOD)
    assert (answer.status, answer.json, wall.heard) == (200, {"text": "done"}, [b"payload=%7B%7D"])
    assert relay.server.state.rates.rejections.count == 0


async def test_an_empty_answer_is_empty(relay: RunningRelay) -> None:
    url = f"http://127.0.0.1:{relay.server.port}/v1/chat/ops"
    async with relay.session.post(url, data=b"", headers=GOOD) as answer:
        assert (answer.status, await answer.read()) == (200, b"")


@pytest.mark.parametrize("name", ["nobody", "box", "..", "%00"])
async def test_a_sink_that_is_no_chat_is_404(relay: RunningRelay, name: str) -> None:
    assert (await relay.call("POST", f"/v1/chat/{name}", b"x", by=None, headers=GOOD)).status == 404


@pytest.mark.parametrize(
    ("body", "headers", "status"), [(b"x", {}, 401), (b"unreadable", GOOD, 400)]
)
async def test_a_refused_platform_call_learns_no_reason_and_is_counted(
    relay: RunningRelay,
    caplog: pytest.LogCaptureFixture,
    body: bytes,
    headers: Mapping[str, str],
    status: int,
) -> None:
    answer = await relay.call("POST", "/v1/chat/ops", body, by=None, headers=headers)
    assert answer.status == status
    said = "the call proves nothing, or cannot be read; the relay's log says more"
    assert answer.json["detail"] == said
    assert relay.server.state.rates.rejections.count == 1
    assert "chat ops: the " in caplog.text


async def test_while_the_relay_stops_or_cannot_write_it_says_so(relay: RunningRelay) -> None:
    """So the platform, or whoever clicked, tries again."""
    assert (await relay.call("POST", "/v1/chat/ops", b"disk", by=None, headers=GOOD)).status == 503
    relay.server.state.detach_relay()
    assert (await relay.call("POST", "/v1/chat/ops", b"x", by=None, headers=GOOD)).status == 503


async def test_a_good_proof_passes_a_used_up_address(relay: RunningRelay, wall: Wall) -> None:
    relay.use_up_rate()
    for headers, status in ((GOOD, 200), (GOOD | {"X-Proof": "bad"}, 429), (GOOD, 200)):
        answer = await relay.call("POST", "/v1/chat/ops", b"click", by=None, headers=headers)
        assert answer.status == status
    assert wall.heard == [b"click"] * 2
