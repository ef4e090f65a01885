"""Draws the pictures of docs/chat/mattermost.md: posts of a relay, on a page like Mattermost's.

``python -m docs.chat.mattermost_pictures`` runs the story of the page against the stand-in server
of the tests. The content of the pictures is the JSON of the posts. The look is ours.
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
from tests.chat.mattermost_server import SECRET, MattermostServer, post_text, running_mattermost
from tests.chat.running_relay import rule, stage
from tests.chromium import running_chromium
from tests.eventually import eventually
from tests.relay_in_process import RelayInProcess

RUNBOOK = "https://wiki.example.com/reboots"
DIRECTORY = Path(__file__).parent
STYLE = """
body {
  margin: 0; padding: 12px 14px; width: 500px; color: #3f4350;
  font: 12px/1.4 "Open Sans", "DejaVu Sans", sans-serif;
}
.post { display: flex; gap: 10px; margin-bottom: 8px }
.avatar {
  flex: none; width: 30px; height: 30px; border-radius: 50%;
  background: #1e325c; color: #fff; text-align: center; line-height: 30px;
}
.author > b { margin-right: 6px }
.author > i { font: 10px/1 sans-serif; background: #e8e9ed; padding: 1px 4px; border-radius: 3px }
.attachment {
  border: 1px solid #dcdde1; border-left: 4px solid; border-radius: 4px;
  padding: 8px 12px; margin-top: 4px; width: 420px;
}
h4 { margin: 0 0 6px; font-size: 12px }
p { margin: 0 0 6px }
dl { margin: 6px 0 }
dt { font-weight: 600 }
dd { margin: 0 0 5px }
button {
  font: 600 12px sans-serif; margin-right: 6px; padding: 6px 12px; border-radius: 4px;
  border: 1px solid #c3c6d0; background: #fff;
}
.primary { background: #1c58d9; color: #fff; border-color: #1c58d9 }
code { background: #f2f3f5; padding: 0 3px; overflow-wrap: anywhere }
small { color: #7a7f8f; font-size: 11px }
a { color: #1c58d9 }
.thread { margin-left: 40px }
.dialog { border: 1px solid #dcdde1; border-radius: 8px; padding: 14px; width: 400px }
.dialog div { text-align: right; margin-top: 12px }
"""


def markdown_html(text: str) -> str:
    """Return the relay's Markdown as HTML."""
    markup = html.escape(text, quote=False)
    markup = re.sub(r"`([^`]*)`", r"<code>\1</code>", markup)
    markup = re.sub(r"(?<!\\)\[([^\]]*)\]\(([^)]*)\)", r'<a href="\2">\1</a>', markup)
    markup = re.sub(r"(?<!\\)\*\*(.+?)\*\*", r"<b>\1</b>", markup)
    return re.sub(r"\\([\\`*\[\]|$_])", r"\1", markup).replace("\n", "<br>")


def attachment_html(attachment: Mapping[str, Any]) -> str:
    """Return an attachment as HTML."""
    fields = "".join(
        f"<dt>{html.escape(field['title'])}</dt><dd>{markdown_html(field['value'])}</dd>"
        for field in attachment.get("fields", [])
    )
    buttons = "".join(
        f'<button class="{button["style"]}">{html.escape(button["name"])}</button>'
        for button in attachment["actions"]
    )
    paragraphs = "".join(
        f"<p>{markdown_html(paragraph)}</p>" for paragraph in attachment["text"].split("\n\n")
    )
    return (
        f'<div class="attachment" style="border-left-color: {attachment["color"]}">'
        f"<h4>{markdown_html(attachment.get('title', ''))}</h4>{paragraphs}"
        f"<dl>{fields}</dl><p>{buttons}</p>"
        f"<small>{markdown_html(attachment.get('footer', ''))}</small></div>"
    )


def post_html(post: Mapping[str, Any]) -> str:
    """Return a post as HTML: its attachments, or its message if it has none."""
    attachments = post["props"].get("attachments", [])
    content = "".join(attachment_html(attachment) for attachment in attachments)
    if not content:
        content = f"<div>{markdown_html(post['message'])}</div>"
    return (
        '<div class="post"><div class="avatar">IR</div>'
        f'<div class="author"><b>imds-relay</b><i>BOT</i>{content}</div></div>'
    )


def dialog_html(dialog: Mapping[str, Any]) -> str:
    """Return the dialog that asks before a decision counts."""
    label = html.escape(dialog["submit_label"])
    return (
        f'<div class="dialog"><h4>{html.escape(dialog["title"])}</h4>'
        f"<p>{markdown_html(dialog['introduction_text'])}</p>"
        f'<div><button>Cancel</button><button class="primary">{label}</button></div></div>'
    )


@asynccontextmanager
async def announced_reboot(
    *, in_chat: bool
) -> AsyncIterator[tuple[RelayInProcess, MattermostServer, Event, list[str]]]:
    """Yield a relay that has posted about a reboot, the server, the event, and two voters."""
    async with running_mattermost() as server, Simulator(Setup(vms=(VM("vm-0"),))) as azure:
        voters = [server.add_user("ann"), server.add_user("ben")]
        principals = [server.principal(user_id) for user_id in voters]
        approvals = {"rules": [rule(2, *principals) | {"runbook": RUNBOOK}]}
        section = server.sink_section(approve_in_chat=in_chat, secret=SECRET)
        with TemporaryDirectory() as directory:
            async with stage(Path(directory), [section], approvals=approvals, azure=azure) as relay:
                server.relay_url = relay.url
                event = relay.reboot(
                    "db-1", "db-2", description="Host server is undergoing maintenance."
                )
                await eventually(lambda: bool(server.channel_posts))
                await eventually(lambda: relay.running.relay.dispatcher.workers[0].waiting == 0)
                yield relay, server, event, voters


async def picture_pages() -> dict[str, str]:
    """Return the HTML of each picture by name."""
    async with announced_reboot(in_chat=False) as (_, server, _, _):
        pages = {"links": post_html(server.channel_posts[0])}
    async with announced_reboot(in_chat=True) as (relay, server, event, (ann, ben)):
        post = server.channel_posts[0]
        pages["buttons"] = post_html(post)
        await server.decide(post, "Approve", ann)
        pages["dialog"] = dialog_html(server.dialogs[0].request["dialog"])
        await server.decide(post, "Approve", ben)
        await eventually(lambda: "Azure has begun" in post_text(post))
        relay.azure.end(event.event_id)
        await eventually(lambda: any("It is over" in line for line in server.thread_lines(post)))
        thread = "".join(post_html(reply) for reply in server.replies)
        pages["end"] = f'{post_html(post)}<div class="thread">{thread}</div>'
    return pages


async def main() -> None:
    """Draw all pictures. Raises FileNotFoundError without Chromium."""
    pages = await picture_pages()
    async with running_chromium() as browser:
        page = await browser.new_page(viewport={"width": 528, "height": 200})
        for name, body in pages.items():
            await page.set_content(f"<!doctype html><style>{STYLE}</style>{body}")
            await page.locator("body").screenshot(path=DIRECTORY / f"mattermost-{name}.png")


if __name__ == "__main__":
    asyncio.run(main())
