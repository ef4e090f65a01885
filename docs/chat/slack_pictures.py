"""Draws the pictures of docs/chat/slack.md: the relay's messages in a page that resembles Slack.

``python -m docs.chat.slack_pictures`` runs the page's example against the stand-in server of the
tests. The messages' blocks are real; the styles are this script's.
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
from tests.chat.running_relay import rule, stage
from tests.chat.slack_server import ALICE, BOB, TEAM, PostedMessage, SlackServer, running_slack
from tests.chromium import running_chromium
from tests.eventually import eventually
from tests.relay_in_process import RelayInProcess

RUNBOOK = "https://wiki.example.com/reboots"
HERE = Path(__file__).parent
MARKS = {"🟡": "#f4c430", "🟠": "#f28c28", "🟢": "#4caf50", "🔵": "#3b82f6", "⚪": "#e8e8e8"}
"""Colors in place of these characters, because most test machines have no font with them."""
NAMES = {ALICE: "Ann", BOB: "Ben"}
STYLE = """
body { margin: 0; padding: 12px 14px; width: 500px; color: #1d1c1d;
  font: 12px/1.4 Lato, "DejaVu Sans", "Noto Color Emoji", sans-serif }
.post { display: flex; gap: 10px; margin-bottom: 10px }
.face { flex: none; width: 32px; height: 32px; border-radius: 6px; background: #1f3a5f;
  color: #fff; text-align: center; line-height: 32px }
.who > b { margin-right: 5px }
.who > i { font: 9px/1 sans-serif; background: #e8e8e8; padding: 1px 3px; border-radius: 2px;
  color: #616061 }
.who > div { margin: 3px 0 }
h4 { margin: 4px 0; font-size: 15px }
.link { color: #1264a3 }
h4 span { display: inline-block; width: 13px; height: 13px; border-radius: 50%;
  border: 1px solid #0003; margin-right: 7px }
p { margin: 0 0 6px; white-space: pre-wrap; overflow-wrap: anywhere }
u { text-decoration: none; background: #e8f1fa; color: #1264a3; border-radius: 3px;
  padding: 0 2px }
code { background: #f6f6f6; border: 1px solid #ddd; border-radius: 3px; padding: 0 3px;
  color: #c01343 }
small { color: #616061; font-size: 11px }
button { font: 600 12px Lato, "DejaVu Sans", sans-serif; margin: 2px 6px 6px 0;
  padding: 5px 11px; border-radius: 4px; border: 1px solid #bbb; background: #fff }
.primary { background: #007a5a; color: #fff; border-color: #007a5a }
.thread { margin-left: 42px }
.dialog { border: 1px solid #ddd; border-radius: 8px; padding: 16px; width: 400px;
  margin: 0 0 6px 42px; box-shadow: 0 4px 14px #0002 }
.dialog div { text-align: right; margin-top: 10px }
"""


def rich_text_html(element: Mapping[str, Any]) -> str:
    """Return an element of a rich text as HTML."""
    match element["type"]:
        case "user":
            return f"<u>@{NAMES[element['user_id']]}</u>"
        case "date":
            time = datetime.fromtimestamp(element["timestamp"], UTC)
            text = f"{time:%H:%M:%S} on {time:%b} {time.day}, {time.year}"
        case _:
            text = html.escape(element["text"])
    style = element.get("style", {})
    if element["type"] == "link" and not style:
        return f'<span class="link">{text}</span>'
    if style.get("bold"):
        return f"<b>{text}</b>"
    return f"<code>{text}</code>" if style.get("code") else text


def block_html(block: Mapping[str, Any]) -> str:
    """Return a block of a message as HTML."""
    match block["type"]:
        case "header":
            mark, _, title = block["text"]["text"].partition(" ")
            color = f'<span style="background: {MARKS[mark]}"></span>'
            return f"<h4>{color}{html.escape(title)}</h4>"
        case "context":
            texts = (html.escape(element["text"]) for element in block["elements"])
            return "".join(f"<div><small>{text}</small></div>" for text in texts)
        case "actions":
            return f"<div>{''.join(map(button_html, block['elements']))}</div>"
    return "".join(
        f"<p>{''.join(map(rich_text_html, section['elements']))}</p>"
        for section in block["elements"]
    )


def button_html(button: Mapping[str, Any]) -> str:
    """Return a button as HTML."""
    label = html.escape(button["text"]["text"])
    return f'<button class="{button.get("style", "")}">{label}</button>'


def message_html(blocks: Sequence[Mapping[str, Any]]) -> str:
    """Return a message as HTML."""
    content = "".join(map(block_html, blocks))
    author = "<b>azure-maintenance</b><i>APP</i>"
    return (
        '<div class="post"><div class="face">Az</div>'
        f'<div class="who">{author}<div>{content}</div></div></div>'
    )


def confirm_dialog_html(message: PostedMessage, label: str) -> str:
    """Return the dialog that a click on a button opens."""
    confirm = message.buttons()[label]["confirm"]
    title, text, confirm_label, deny_label = (
        html.escape(confirm[key]["text"]) for key in ("title", "text", "confirm", "deny")
    )
    buttons = f'<button>{deny_label}</button><button class="primary">{confirm_label}</button>'
    return f'<div class="dialog"><b>{title}</b><p>{text}</p><div>{buttons}</div></div>'


@asynccontextmanager
async def announced_reboot(
    *, in_chat: bool
) -> AsyncIterator[tuple[RelayInProcess, SlackServer, Event]]:
    """Run a relay that has posted about a reboot."""
    voters = (f"slack:{TEAM}/{ALICE}", f"slack:{TEAM}/{BOB}")
    rules = {"rules": [rule(2, *voters) | {"runbook": RUNBOOK}]}
    with TemporaryDirectory() as directory:
        async with running_slack() as slack, Simulator(Setup(vms=(VM("vm-0"),))) as azure:
            sink = slack.settings(approve_in_chat=in_chat)
            async with stage(Path(directory), [sink], approvals=rules, azure=azure) as relay:
                description = "Host server is undergoing maintenance."
                event = relay.reboot("db-1", "db-2", description=description)
                dispatcher = relay.running.relay.dispatcher
                await eventually(
                    lambda: bool(slack.channel_messages()) and dispatcher.workers[0].waiting == 0
                )
                yield relay, slack, event


async def pages() -> dict[str, str]:
    """Return the pictures' pages by name."""
    bodies = {}
    async with announced_reboot(in_chat=False) as (_, slack, _):
        bodies["links"] = message_html(slack.channel_messages()[0].blocks)
    async with announced_reboot(in_chat=True) as (relay, slack, event):
        message = slack.channel_messages()[0]
        bodies["buttons"] = message_html(message.blocks) + confirm_dialog_html(message, "Approve")
        for user_id in (ALICE, BOB):
            await slack.click(message, "Approve", user_id)
        await eventually(lambda: "Azure has begun" in message.text_of_blocks())
        relay.azure.end(event.event_id)
        await eventually(lambda: any("It is over" in line for line in slack.thread_lines(message)))
        replies = "".join(
            message_html(reply.blocks) for reply in slack.messages.values() if reply.thread_ts
        )
        bodies["end"] = f'{message_html(message.blocks)}<div class="thread">{replies}</div>'
    return bodies


async def main() -> None:
    """Draw all pictures. Raises FileNotFoundError without Chromium."""
    async with running_chromium() as browser:
        page = await browser.new_page(viewport={"width": 530, "height": 200})
        for name, body in (await pages()).items():
            await page.set_content(
                f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>{body}"
            )
            await page.locator("body").screenshot(path=HERE / f"slack-{name}.png")


if __name__ == "__main__":
    asyncio.run(main())
