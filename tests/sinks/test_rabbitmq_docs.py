"""docs/rabbitmq.md, run: its rights suffice, its consumer gets what the sink sends, and its tables name what is there."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from pathlib import Path

from ruamel.yaml import YAML

from relay.sinks.rabbitmq import Settings, build, routing_key
from tests.make import EVENT_ID, cloudevent
from tests.rabbitmq import Broker
from tests.sinks.bus import delivered, sink

PAGE = (Path(__file__).parents[2] / "docs" / "rabbitmq.md").read_text(encoding="utf-8")
EXCHANGE = "azure.scheduledevents"


def blocks(language: str) -> list[str]:
    """The page's blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_section_of_the_page_is_one() -> None:
    (section,) = YAML(typ="safe").load(blocks("yaml")[0])["sinks"]
    assert Settings.model_validate(section).exchange == EXCHANGE


def test_the_page_names_the_routing_keys_and_properties_that_are_sent() -> None:
    assert f"`{routing_key(cloudevent(eventtype='Reboot'))}`" in PAGE
    assert f"`{routing_key(cloudevent('relay.sink-failing', subject='drain'))}`" in PAGE
    message = build(cloudevent())
    sent = {name for name in ("content_type", "message_id", "correlation_id", "type", "app_id", "timestamp") if getattr(message, name)}
    assert all(f"`{name}`" in PAGE for name in sent)
    assert f"`{message.content_type}`" in PAGE
    assert "ce-datacontenttype" in message.headers


async def test_the_rights_and_the_consumer_of_the_page_are_all_it_takes(own_broker: Broker) -> None:
    declaring, publishing, consuming = (rights(block) for block in blocks("sh"))
    url = f"amqp://{{}}:hunter2@127.0.0.1:{own_broker.port}/"
    for command in (*declaring, *consuming):
        await asyncio.to_thread(own_broker.ctl, *command)
    async with sink(url.format("imds-relay"), EXCHANGE) as maker:
        await delivered(maker, cloudevent("relay.ping"))
    for command in publishing:
        await asyncio.to_thread(own_broker.ctl, *command)
    consumer = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", blocks("python")[0]),
        env={**os.environ, "AMQP_URL": url.format("drainer")},
        stdout=asyncio.subprocess.PIPE,
    )
    assert consumer.stdout is not None
    try:
        async with asyncio.timeout(20), sink(url.format("imds-relay"), EXCHANGE, declare="passive") as bus:
            assert await consumer.stdout.readline() == b"ready\n"
            for event in (cloudevent(), cloudevent(), cloudevent("relay.ping"), cloudevent("event.ended")):
                await delivered(bus, event)
            lines = [await consumer.stdout.readline() for _ in range(2)]
    finally:
        consumer.kill()
        await consumer.communicate()
    names = ("event.scheduled", "event.ended")
    assert [line.decode().split() for line in lines] == [[f"io.imdsrelay.{name}.v1", EVENT_ID] for name in names]


def rights(block: str) -> list[list[str]]:
    """The arguments of each `rabbitmqctl` of a block, with passwords filled in."""
    commands = (shlex.split(re.sub(r"\$\w+_PASSWORD", "hunter2", line)) for line in block.splitlines())
    return [arguments for program, *arguments in commands if program == "rabbitmqctl"]
