"""Draws the pictures of docs/chat/slack.md: messages as a relay made them, in a page that looks a little like Slack.

``python -m docs.chat.slack_pictures`` runs the story of the page against the stand-in server of the tests. What is drawn is
the messages' own blocks; how they are drawn is ours.
"""

from __future__ import annotations

import asyncio
import html
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from relay.simulator import VM, Event, Setup, Simulator
from tests.chat.running_relay import Stage, rule, stage
from tests.chat.slack_server import ALICE, BOB, TEAM, Posted, SlackServer, slack
from tests.chromium import executable, running
from tests.journey.relay_process import eventually

HERE = Path(__file__).parent
MARKS = {"🟡": "#f4c430", "🟠": "#f28c28", "🟢": "#4caf50", "🔵": "#3b82f6", "⚪": "#e8e8e8"}
"""Most machines that run tests have no font with these."""
NAMES = {ALICE: "Ann", BOB: "Ben"}
STYLE = """
body { margin: 0; padding: 12px 14px; width: 500px; font: 12px/1.4 Lato, "DejaVu Sans", "Noto Color Emoji", sans-serif; color: #1d1c1d }
.post { display: flex; gap: 10px; margin-bottom: 10px }
.face { flex: none; width: 32px; height: 32px; border-radius: 6px; background: #1f3a5f; color: #fff; text-align: center; line-height: 32px }
.who > b { margin-right: 5px }
.who > i { font: 9px/1 sans-serif; background: #e8e8e8; padding: 1px 3px; border-radius: 2px; color: #616061 }
.who > div { margin: 3px 0 }
h4 { margin: 4px 0; font-size: 15px }
h4 span { display: inline-block; width: 13px; height: 13px; border-radius: 50%; border: 1px solid #0003; margin-right: 7px }
p { margin: 0 0 6px; white-space: pre-wrap; overflow-wrap: anywhere }
u { text-decoration: none; background: #e8f1fa; color: #1264a3; border-radius: 3px; padding: 0 2px }
code { background: #f6f6f6; border: 1px solid #ddd; border-radius: 3px; padding: 0 3px; color: #c01343 }
small { color: #616061; font-size: 11px }
button { font: 600 12px Lato, "DejaVu Sans", sans-serif; margin: 2px 6px 6px 0; padding: 5px 11px; border-radius: 4px }
button { border: 1px solid #bbb; background: #fff }
.primary { background: #007a5a; color: #fff; border-color: #007a5a }
.thread { margin-left: 42px }
.alone { color: #616061; font-size: 11px; margin-left: 42px }
.dialog { border: 1px solid #ddd; border-radius: 8px; padding: 16px; width: 400px; margin: 0 0 6px 42px; box-shadow: 0 4px 14px #0002 }
.dialog div { text-align: right; margin-top: 10px }
"""


def element(one: Mapping[str, Any]) -> str:
    """A piece of a rich text."""
    if one["type"] == "user":
        return f"<u>@{NAMES[one['user_id']]}</u>"
    if one["type"] == "date":
        moment = datetime.fromtimestamp(one["timestamp"], UTC)
        text = f"{moment:%H:%M:%S} on {moment:%b} {moment.day}, {moment.year}"
    else:
        text = html.escape(one["text"])
    style = one.get("style", {})
    return (
        f"<b>{text}</b>"
        if style.get("bold")
        else f"<code>{text}</code>"
        if style.get("code")
        else text
    )


def block(one: Mapping[str, Any]) -> str:
    """A block of a message."""
    match one["type"]:
        case "header":
            mark, _, title = one["text"]["text"].partition(" ")
            return f'<h4><span style="background: {MARKS[mark]}"></span>{html.escape(title)}</h4>'
        case "context":
            return "".join(
                f"<div><small>{html.escape(each['text'])}</small></div>" for each in one["elements"]
            )
        case "actions":
            return f"<div>{''.join(map(button, one['elements']))}</div>"
    return "".join(
        f"<p>{''.join(map(element, section['elements']))}</p>" for section in one["elements"]
    )


def button(one: Mapping[str, Any]) -> str:
    """A button of a message."""
    return f'<button class="{one.get("style", "")}">{html.escape(one["text"]["text"])}</button>'


def post(blocks: Sequence[Mapping[str, Any]]) -> str:
    """A message."""
    inner = "".join(map(block, blocks))
    return f'<div class="post"><div class="face">Az</div><div class="who"><b>azure-maintenance</b><i>APP</i><div>{inner}</div></div></div>'


def dialog(message: Posted, label: str) -> str:
    """What is asked before a click counts."""
    asked = message.buttons()[label]["confirm"]
    text = {name: html.escape(asked[name]["text"]) for name in ("title", "text", "confirm", "deny")}
    buttons = f'<button>{text["deny"]}</button><button class="primary">{text["confirm"]}</button>'
    return (
        f'<div class="dialog"><b>{text["title"]}</b><p>{text["text"]}</p><div>{buttons}</div></div>'
    )


def alone(said: Mapping[str, Any]) -> str:
    """What one person alone is shown."""
    return f'<div class="alone">Only visible to you</div>{post(said["blocks"])}'


@asynccontextmanager
async def announced(
    *machines: str, in_chat: bool
) -> AsyncIterator[tuple[Stage, SlackServer, Event]]:
    """A relay that has posted about a reboot, and the workspace."""
    async with slack() as server, Simulator(Setup(vms=(VM("vm-0"),))) as azure:
        rules = {"rules": [rule(2, f"slack:{TEAM}/{ALICE}", f"slack:{TEAM}/{BOB}")]}
        with TemporaryDirectory() as folder:
            async with stage(
                Path(folder),
                [server.settings(approve_in_chat=in_chat)],
                approvals=rules,
                azure=azure,
            ) as here:
                server.relay = f"{here.url}/v1/chat/ops"
                event = here.reboot(*machines, description="Host server is undergoing maintenance.")
                await eventually(
                    lambda: (
                        bool(server.tops())
                        and here.running.relay.dispatcher.status()[0].waiting == 0
                    )
                )
                yield here, server, event


async def pages() -> dict[str, str]:
    """The pictures' pages by name."""
    async with announced("db-1", "db-2", in_chat=False) as (_, server, _):
        made = {"links": post(server.tops()[0].blocks)}
    async with announced("db-1", "db-2", in_chat=True) as (here, server, event):
        shown = server.tops()[0]
        made["buttons"] = post(shown.blocks) + dialog(shown, "Approve")
        command = (await server.calls_relay(server.typed(f"approve {event.event_id[:8]}"))).body
        assert command is not None  # noqa: S101  # the stand-in says what came
        made["command"] = alone(command)
        for who in (ALICE, BOB):
            await server.calls_relay(server.click(shown, "Approve", who))
        await eventually(lambda: "Azure has begun" in shown.words())
        here.azure.end(event.event_id)
        await eventually(lambda: any("It is over" in line for line in server.thread(shown)))
        replies = "".join(post(one.blocks) for one in server.messages.values() if one.thread)
        made["end"] = f'{post(shown.blocks)}<div class="thread">{replies}</div>'
    return made


async def main() -> None:
    """Draw them all. Raises RuntimeError where there is no Chromium."""
    chromium = executable()
    if chromium is None:
        raise RuntimeError("expected a Chromium on this machine, found none")
    async with running(chromium) as browser:
        page = await browser.new_page(viewport={"width": 530, "height": 200})
        for name, body in (await pages()).items():
            await page.set_content(
                f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>{body}"
            )
            await page.locator("body").screenshot(path=HERE / f"slack-{name}.png")


if __name__ == "__main__":
    asyncio.run(main())
