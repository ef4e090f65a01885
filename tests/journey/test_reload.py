"""A relay as a process reads its configuration again: with SIGHUP, and over the API."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from relay.simulator import Plan
from tests.background_tasks import BackgroundTasks
from tests.eventually import eventually
from tests.journey.relay_process import (
    KEY,
    RelayProcess,
    after_polls,
    client,
    inbox,
    name_of,
    relay,
    told_relay,
    webhook,
)
from tests.relay_in_process import simulated

OTHER_KEY = "another-bearer-key-for-tests"


@dataclass(slots=True)
class Stream:
    """A reader of /v1/stream."""

    names: list[str] = field(default_factory=list)
    is_open: bool = False

    async def read(self, url: str, key: str) -> None:
        """Read until the stream ends."""
        headers = {"Authorization": f"Bearer {key}"}
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url}/v1/stream", headers=headers) as response,
        ):
            async for line in response.content:
                self.is_open = True
                if line.startswith(b"data: "):
                    self.names.append(name_of(orjson.loads(line[6:])))
        self.is_open = False


async def reload(process: RelayProcess, **sections: Any) -> tuple[int, Any]:
    """Change sections of the configuration, and let the relay read it."""
    process.document |= sections
    process.write_document()
    return await process.call("POST", "/v1/reload")


async def test_a_reload_takes_a_file_over_or_says_why_not(tmp_path: Path) -> None:
    stream, watched = Stream(), Stream()
    watcher = client("watcher", key=OTHER_KEY, can=["read"])
    started = told_relay(tmp_path / "relay", api={"clients": [client(), watcher]})
    async with inbox() as second, started as (drain, sim, process):
        tasks = (stream.read(process.url, KEY), watched.read(process.url, OTHER_KEY))
        async with BackgroundTasks(*tasks):
            await eventually(lambda: stream.is_open and watched.is_open)
            event = sim.schedule(Plan(type="Reboot", resources=("vm-0",), lasts=None))
            await eventually(lambda: drain.types_of(event.event_id) == ["event.scheduled"])

            # A new sink gets the event that is live. A removed client loses its stream.
            sinks = [webhook(drain.url), webhook(second.url, "second")]
            clients = {"clients": [client()], "public_url": "https://relay.example.com"}
            status, body = await reload(process, sinks=sinks, api=clients)
            changes = [
                {"key": "sinks.second", "change": "added"},
                {"key": "api.public_url", "change": "changed"},
                {"key": "api.clients.watcher", "change": "removed"},
            ]
            assert (status, body) == (200, {"changes": changes})
            await eventually(lambda: second.types_of(event.event_id) == ["event.scheduled"])
            await eventually(lambda: not watched.is_open)

            # A wrong file leaves everything as it is, and the relay says where it is wrong.
            wrong = webhook(second.url, "second", timeout="soon")
            process.document["sinks"] = [webhook(drain.url), wrong]
            process.write_document()
            process.hang_up()
            await eventually(lambda: "was not reloaded" in process.log)
            status, ready = await process.call("GET", "/readyz")
            assert (status, ready["status"], ready["configuration"]) == (200, "ok", "refused")
            assert ready["configurationProblem"].startswith(
                f"{tmp_path}/relay/relay.yaml:1: sinks[1].timeout: expected a duration"
            )

            # What needs a restart is named, with its place.
            status, problem = await reload(process, sinks=sinks, scope="another")
            assert (status, problem["restartRequired"]) == (422, ["scope"])
            assert problem["detail"] == (
                f"restart required for: scope ({tmp_path}/relay/relay.yaml:1). Nothing was changed"
            )

            # SIGHUP takes a good file over.
            del process.document["scope"]
            process.document["sinks"] = sinks
            process.document["source"] |= {"interval": "600ms"}
            process.write_document()
            process.hang_up()
            await eventually(lambda: "SIGHUP): source.interval changed" in process.log)
            assert "configuration" not in (await process.call("GET", "/readyz"))[1]
            sim.start(event)
            sim.end(event)
            for box in (drain, second):
                await eventually(lambda box=box: "event.ended" in box.types_of(event.event_id))
            await eventually(lambda: "event.ended" in stream.names)
        assert stream.names.count("event.scheduled") == 1
        assert [name_of(each) for each in drain.events] == ["event.scheduled", "event.ended"]
        assert [name_of(each) for each in second.events] == ["event.scheduled", "event.ended"]
        assert await process.stop() == 0
        assert "Traceback" not in process.log


async def test_a_hangup_during_the_start_is_a_reload_after_it(tmp_path: Path) -> None:
    async with (
        simulated() as sim,
        relay(tmp_path, {"source": {"url": sim.url}, "relay": "vm-0"}) as process,
    ):
        await process.start(ready=False)
        await eventually(lambda: "the configuration is" in process.log, every=0.005)
        process.hang_up()
        await eventually(process.ready)
        await eventually(lambda: "was reloaded (asked for by SIGHUP): nothing" in process.log)

        # While an editor writes the file, it can be empty or missing.
        file = tmp_path / "relay.yaml"
        file.write_text("")
        process.hang_up()
        await eventually(lambda: "expected keys, the file is empty" in process.log)
        file.unlink()
        process.hang_up()
        await eventually(lambda: "expected a file that can be read: No such file" in process.log)

        # The log changes its form and its level.
        process.document["telemetry"] = {"log": "json", "level": "debug"}
        process.write_document()
        process.hang_up()
        await eventually(lambda: "telemetry.log changed, telemetry.level changed" in process.log)
        assert await process.stop() == 0
        lines = process.log.splitlines()
        first = next(at for at, line in enumerate(lines) if line.startswith("{"))
        assert "SIGHUP" in orjson.loads(lines[first])["message"]
        assert {"level", "message"} <= set.intersection(
            *(set(orjson.loads(line)) for line in lines[first:])
        )


async def test_a_relay_stops_in_the_middle_of_a_reload(tmp_path: Path) -> None:
    """The old receiver still holds a delivery, so the reload waits for its answer."""
    async with inbox() as other, told_relay(tmp_path) as (slow, sim, process):
        slow.may_answer.clear()
        event = sim.schedule(Plan(type="Reboot", resources=("vm-0",), lasts=None))
        await eventually(lambda: slow.types_of(event.event_id) == ["event.scheduled"])
        process.document["sinks"] = [webhook(other.url)]
        process.write_document()
        process.hang_up()
        await after_polls(sim)
        assert await process.stop() == 0
        assert "Traceback" not in process.log
        await process.start()
        await eventually(lambda: other.types_of(event.event_id) == ["event.scheduled"])
        assert await process.stop() == 0
