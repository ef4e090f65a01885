"""Draws the pictures of docs/chat/mattermost.md: posts as a relay made them, in a page that looks a little like Mattermost.

``python -m docs.chat.mattermost_pictures`` runs the story of the page against the stand-in server of the tests. What is drawn
is the posts' own JSON; how it is drawn is ours.
"""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from relay.simulator import VM, Event, Setup, Simulator
from tests.chat.mattermost_server import SECRET, Mattermost, mattermost
from tests.chat.running_relay import Stage, rule, stage
from tests.chromium import executable, running
from tests.journey.relay_process import eventually

HERE = Path(__file__).parent
STYLE = """
body { margin: 0; padding: 12px 14px; width: 500px; font: 12px/1.4 "Open Sans", "DejaVu Sans", sans-serif; color: #3f4350 }
.post { display: flex; gap: 10px; margin-bottom: 8px }
.face { flex: none; width: 30px; height: 30px; border-radius: 50%; background: #1e325c; color: #fff; text-align: center; line-height: 30px }
.who > b { margin-right: 6px }
.who > i { font: 10px/1 sans-serif; background: #e8e9ed; padding: 1px 4px; border-radius: 3px }
.card { border: 1px solid #dcdde1; border-left: 4px solid; border-radius: 4px; padding: 8px 12px; margin-top: 4px; width: 420px }
h4 { margin: 0 0 6px; font-size: 12px }
p { margin: 0 0 6px }
dl { margin: 6px 0 }
dt { font-weight: 600 }
dd { margin: 0 0 5px }
button { font: 600 12px sans-serif; margin-right: 6px; padding: 6px 12px; border-radius: 4px; border: 1px solid #c3c6d0; background: #fff }
.primary { background: #1c58d9; color: #fff; border-color: #1c58d9 }
code { background: #f2f3f5; padding: 0 3px; overflow-wrap: anywhere }
small { color: #7a7f8f; font-size: 11px }
a { color: #1c58d9 }
.thread { margin-left: 40px }
.dialog { border: 1px solid #dcdde1; border-radius: 8px; padding: 14px; width: 400px }
.dialog div { text-align: right; margin-top: 12px }
"""


def words(text: str) -> str:
    """The Markdown that the relay writes, as HTML."""
    found = html.escape(text, quote=False)
    found = re.sub(r"`([^`]*)`", r"<code>\1</code>", found)
    found = re.sub(r"(?<!\\)\[([^\]]*)\]\(([^)]*)\)", r'<a href="\2">\1</a>', found)
    found = re.sub(r"(?<!\\)\*\*(.+?)\*\*", r"<b>\1</b>", found)
    return re.sub(r"\\([\\`*\[\]|$_])", r"\1", found).replace("\n", "<br>")


def card(one: Mapping[str, Any]) -> str:
    """An attachment."""
    fields = "".join(
        f"<dt>{html.escape(field['title'])}</dt><dd>{words(field['value'])}</dd>"
        for field in one.get("fields", [])
    )
    buttons = "".join(
        f'<button class="{button["style"]}">{html.escape(button["name"])}</button>'
        for button in one["actions"]
    )
    paragraphs = "".join(f"<p>{words(part)}</p>" for part in one["text"].split("\n\n"))
    return (
        f'<div class="card" style="border-left-color: {one["color"]}"><h4>{words(one.get("title", ""))}</h4>{paragraphs}'
        f"<dl>{fields}</dl><p>{buttons}</p><small>{words(one.get('footer', ''))}</small></div>"
    )


def post(one: Mapping[str, Any]) -> str:
    """A post: a message, or attachments."""
    inner = (
        "".join(card(each) for each in one["props"].get("attachments", []))
        or f"<div>{words(one['message'])}</div>"
    )
    return f'<div class="post"><div class="face">IR</div><div class="who"><b>imds-relay</b><i>BOT</i>{inner}</div></div>'


def dialog(one: Mapping[str, Any]) -> str:
    """What is asked before a decision counts."""
    label = html.escape(one["submit_label"])
    text = words(one["introduction_text"])
    return (
        f'<div class="dialog"><h4>{html.escape(one["title"])}</h4><p>{text}</p>'
        f'<div><button>Cancel</button><button class="primary">{label}</button></div></div>'
    )


@asynccontextmanager
async def announced(*, in_chat: bool) -> AsyncIterator[tuple[Stage, Mattermost, Event, list[str]]]:
    """A relay that has posted about a reboot, the server, the event, and the two people who may vote."""
    async with mattermost() as server, Simulator(Setup(vms=(VM("vm-0"),))) as azure:
        people = [server.person("ann"), server.person("ben")]
        rules = {"rules": [rule(2, *(f"mattermost:{server.team}/{one}" for one in people))]}
        with TemporaryDirectory() as folder:
            sink = server.sink(approve_in_chat=in_chat, secret=SECRET)
            async with stage(Path(folder), [sink], approvals=rules, azure=azure) as here:
                server.relay = here.url
                event = here.reboot(
                    "db-1", "db-2", description="Host server is undergoing maintenance."
                )
                await eventually(
                    lambda: (
                        bool(server.roots)
                        and here.running.relay.dispatcher.status()[0].waiting == 0
                    )
                )
                yield here, server, event, people


async def pages() -> dict[str, str]:
    """The pictures' pages by name."""
    async with announced(in_chat=False) as (_, server, _, _):
        made = {"links": post(server.roots[0])}
    async with announced(in_chat=True) as (here, server, event, (ann, ben)):
        shown = server.roots[0]
        made["buttons"] = post(shown)
        await server.decide(shown, "Approve", ann)
        made["dialog"] = dialog(server.dialogs[0][1]["dialog"])
        await server.decide(shown, "Approve", ben)
        await eventually(lambda: "Azure has begun" in server.texts_of(shown))
        here.azure.end(event.event_id)
        await eventually(lambda: any("It is over" in line for line in server.thread(shown)))
        replies = "".join(post(one) for one in server.posts.values() if one["root_id"])
        made["end"] = f'{post(shown)}<div class="thread">{replies}</div>'
    return made


async def main() -> None:
    """Draw them all. Raises RuntimeError where there is no Chromium."""
    chromium = executable()
    if chromium is None:
        raise RuntimeError("expected a Chromium on this machine, found none")
    async with running(chromium) as browser:
        page = await browser.new_page(viewport={"width": 528, "height": 200})
        for name, body in (await pages()).items():
            await page.set_content(f"<!doctype html><style>{STYLE}</style>{body}")
            await page.locator("body").screenshot(path=HERE / f"mattermost-{name}.png")


if __name__ == "__main__":
    asyncio.run(main())
