"""The page in Firefox: it shows, follows, and takes a decision.

Firefox is driven over WebDriver BiDi, without a driver: https://www.w3.org/TR/webdriver-bidi/
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.api.running_relay import RunningRelay, make_event
from tests.chromium import IN_SESSION_LOOP
from tests.page.scenes import page_url

pytestmark = IN_SESSION_LOOP
FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")
Send = Callable[..., Awaitable[dict[str, Any]]]


@asynccontextmanager
async def firefox(folder: Path, errors: list[str]) -> AsyncIterator[Send]:
    """Run Firefox with a new profile; yield what sends a command, and collect what it complains."""
    options = ("--headless", "--no-remote", "--remote-debugging-port", "0", "--profile", folder)
    process = await asyncio.create_subprocess_exec(
        str(FIREFOX),
        *options,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "HOME": str(folder)},
    )
    try:
        assert process.stderr is not None
        said = await asyncio.wait_for(process.stderr.readuntil(b"BiDi listening on ws://"), 60)
        address = (await process.stderr.readline()).decode().strip()
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"ws://{address}/session", max_msg_size=0) as socket,
        ):

            async def send(method: str, **parameters: Any) -> dict[str, Any]:
                await socket.send_json({"id": 1, "method": method, "params": parameters})
                while (message := await socket.receive_json(timeout=60)).get("id") != 1:
                    entry = message["params"]
                    if entry.get("level") in ("error", "warn"):
                        errors.append(entry["text"])
                assert message["type"] == "success", (message, said)
                result: dict[str, Any] = message["result"]
                return result

            await send("session.new", capabilities={})
            await send("session.subscribe", events=["log.entryAdded"])
            yield send
    finally:
        process.kill()
        await process.wait()


@pytest.mark.skipif(FIREFOX is None, reason="there is no Firefox")
async def test_the_page_works_in_firefox(relay: RunningRelay, tmp_path: Path) -> None:
    errors: list[str] = []
    async with firefox(tmp_path, errors) as send:
        (tab,) = (await send("browsingContext.getTree"))["contexts"]
        context = tab["context"]

        async def run(expression: str) -> Any:
            answer = await send(
                "script.evaluate",
                expression=expression,
                target={"context": context},
                awaitPromise=True,
            )
            assert answer["type"] == "success", answer
            return answer["result"].get("value")

        async def wait_for(condition: str) -> None:
            async with asyncio.timeout(60):
                while not await run(f"Boolean({condition})"):  # noqa: ASYNC110  # no signal
                    await asyncio.sleep(0.05)

        async def click(selector: str) -> None:
            await wait_for(f"document.querySelector(`{selector}`)")
            await run(f"document.querySelector(`{selector}`).click()")

        url = page_url(relay)
        await send("browsingContext.navigate", context=context, url=url, wait="complete")
        await wait_for("document.activeElement.id === 'key'")
        await run("document.getElementById('key').value = 'bearer-test-key-of-alice'")
        await click("#enter [type=submit]")
        await wait_for("document.getElementById('live').textContent === 'Live'")
        await relay.observe(make_event(), make_event(event_id="E-2", resources=("db-1",)))
        await wait_for("document.querySelectorAll('.event').length === 2")
        await click("[aria-label^='Hold: Reboot of West']")
        await wait_for("document.querySelector('#decide-notices p')")
        await click("#decide-do")
        await wait_for("/It is on hold/.test(document.querySelector('dialog').textContent)")
        await click("dialog button")
        await click(".event.held h2 a")
        await wait_for("document.querySelectorAll('#history li').length === 2")
        (hold,) = await relay.recorded_events("approval.recorded")
        assert (hold["data"]["decision"], hold["data"]["principal"]) == ("hold", "client:alice")
        assert await run("document.documentElement.scrollWidth <= innerWidth")
    assert errors == []
