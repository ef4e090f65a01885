"""Draws the pictures of docs/chat/teams.md: the relay's cards in a page that resembles Teams.

``python -m docs.chat.teams_pictures`` runs the page's example against the stand-in workflow of the
tests. The cards' JSON is real; the styles are this script's.
"""

from __future__ import annotations

import asyncio
import html
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.chat.running_relay import ALICE, BOB, rule, stage
from tests.chat.teams_server import TeamsWorkflow, running_workflow
from tests.chromium import running_chromium
from tests.eventually import eventually
from tests.relay_in_process import RelayInProcess

RUNBOOK = "https://wiki.example.com/reboots"
HERE = Path(__file__).parent
READER_UTC_OFFSET = timedelta(hours=1)
STYLE = """
body { margin: 0; padding: 14px 18px; width: 640px; color: #242424; background: #f5f5f5;
  font: 14px/1.4 "Segoe UI", "DejaVu Sans", sans-serif }
.post { display: flex; gap: 10px; margin-bottom: 12px }
.face { flex: none; width: 32px; height: 32px; border-radius: 6px; background: #5b5fc7;
  color: #fff; text-align: center; line-height: 32px; font-size: 12px }
.who { font-size: 12px; color: #616161; margin-bottom: 3px }
.card { width: 580px; background: #fff; border-radius: 6px; box-shadow: 0 1px 3px #0003;
  padding: 12px 16px; overflow: hidden }
.block { margin-top: 8px }
.small { margin-top: 4px }
.card > .block:first-child, .tone > .block:first-child, .line > .block:first-child { margin-top: 0 }
.tone { margin: -12px -16px 8px; padding: 10px 16px }
.warning { background: #fbf0d2 }
.attention { background: #f9dcdc }
.good { background: #dff2df }
.accent { background: #dfe4fb }
.emphasis { background: #ebebeb }
.line { margin-top: 8px; padding-top: 8px; border-top: 1px solid #e0e0e0 }
.facts b { font-weight: 600 }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: 4px 12px; margin-top: 8px }
.large { font-size: 18px; font-weight: 600 }
.subtle { font-size: 12px; color: #707070 }
.actions { margin-top: 10px }
a { display: inline-block; margin-right: 8px; padding: 5px 14px; border-radius: 4px;
  border: 1px solid #d1d1d1; font-weight: 600; font-size: 13px }
a.text { display: inline; margin: 0; padding: 0; border: 0; font: inherit; color: #4f52b2 }
.positive { background: #5b5fc7; border-color: #5b5fc7; color: #fff }
.destructive { color: #c4314b }
"""


def text_html(text: str) -> str:
    """Return the relay's Markdown and time functions as HTML."""

    def local_time(match: re.Match[str]) -> str:
        time = datetime.strptime(match[2], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        time += READER_UTC_OFFSET
        return f"{time:%a, %b %-d, %Y}" if match[1] == "DATE" else f"{time:%-I:%M %p}"

    text = html.escape(text, quote=False)
    text = re.sub(r"\{\{(DATE|TIME)\(([^,)]+)(?:, SHORT)?\)\}\}", local_time, text)
    text = re.sub(r"(?<!\\)\*\*(.+?)(?<!\\)\*\*", r"<b>\1</b>", text)
    text = re.sub(r"(?<!\\)\[(.+?)\]\(\S+?\)", r'<a class="text">\1</a>', text)
    return re.sub(r"\\([\\*_\[\]`~])", r"\1", text)


def element_html(element: dict[str, Any]) -> str:
    """Return an element of a card as HTML."""
    match element["type"]:
        case "TextBlock":
            return text_block_html(element)
        case "FactSet":
            facts = "".join(
                f"<b>{text_html(fact['title'])}</b><span>{text_html(fact['value'])}</span>"
                for fact in element["facts"]
            )
            return f'<div class="facts">{facts}</div>'
        case "Container":
            css_class = f"tone {element['style']}" if "style" in element else "line"
            items = "".join(map(element_html, element["items"]))
            return f'<div class="{css_class}">{items}</div>'
        case "ActionSet":
            return actions_html(element["actions"])
    raise ValueError(element["type"])


def text_block_html(element: dict[str, Any]) -> str:
    """Return a TextBlock as HTML."""
    css_classes = ["block"]
    if element.get("size") == "Large":
        css_classes.append("large")
    elif element.get("isSubtle"):
        css_classes.append("subtle")
    if element.get("spacing") == "Small":
        css_classes.append("small")
    style = ' style="font-weight: 600"' if element.get("weight") == "Bolder" else ""
    return f'<div class="{" ".join(css_classes)}"{style}>{text_html(element["text"])}</div>'


def actions_html(actions: list[dict[str, Any]]) -> str:
    """Return buttons as HTML."""
    links = "".join(
        f'<a class="{action["style"]}">{html.escape(action["title"])}</a>' for action in actions
    )
    return f'<div class="actions">{links}</div>'


def message_html(card: dict[str, Any]) -> str:
    """Return a message in the channel as HTML."""
    content = "".join(map(element_html, card["body"]))
    if "actions" in card:
        content += actions_html(card["actions"])
    author = '<div class="face">W</div><div><div class="who"><b>Workflows</b></div>'
    return f'<div class="post">{author}<div class="card">{content}</div></div></div>'


async def wait_for_cards(relay: RelayInProcess, workflow: TeamsWorkflow, count: int) -> None:
    """Return when so many cards are posted and no delivery is waiting."""
    dispatcher = relay.running.relay.dispatcher
    await eventually(lambda: len(workflow.cards) >= count and dispatcher.workers[0].waiting == 0)


async def pages() -> dict[str, str]:
    """Return the pictures' pages by name."""
    bodies = {}
    rules = {"rules": [rule(2, "client:alice", "client:bob") | {"runbook": RUNBOOK}]}
    async with running_workflow() as workflow:
        sink = {"kind": "teams", "name": "ops", "url": workflow.url, "allow_http": True}
        with TemporaryDirectory() as directory:
            async with stage(Path(directory), [sink], approvals=rules) as relay:
                description = "Host server is undergoing maintenance."
                event = relay.reboot("db-1", "db-2", description=description)
                await wait_for_cards(relay, workflow, 1)
                bodies["announced"] = message_html(workflow.cards[0])
                for client in (ALICE, BOB):
                    count = len(workflow.cards)
                    await relay.decide(event, key=str(client["key"]))
                    await wait_for_cards(relay, workflow, count + 1)
                await eventually(lambda: "Azure began" in workflow.card_texts[-1])
                relay.azure.end(event.event_id)
                await eventually(lambda: "It is over" in workflow.card_texts[-1])
                bodies["end"] = "".join(map(message_html, workflow.cards[1:]))
        with TemporaryDirectory() as directory:
            count = len(workflow.cards)
            async with stage(Path(directory), [sink], approvals=rules) as relay:
                for number in range(50):
                    relay.reboot(f"web-{number}")
                await wait_for_cards(relay, workflow, count + 1)
                card = workflow.cards[-1]
                bodies["burst"] = message_html({**card, "body": with_three_events(card["body"])})
    return bodies


def with_three_events(body: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a grouped card's body with three of its ten events, for a small picture."""
    lines = [element for element in body if element.get("separator")]
    return [element for element in body if element not in lines[3:]]


async def main() -> None:
    """Draw all pictures. Raises FileNotFoundError without Chromium."""
    async with running_chromium() as browser:
        page = await browser.new_page(
            viewport={"width": 676, "height": 200}, device_scale_factor=0.9
        )
        for name, body in (await pages()).items():
            await page.set_content(f"<!doctype html><style>{STYLE}</style>{body}")
            await page.locator("body").screenshot(path=HERE / f"teams-{name}.png")


if __name__ == "__main__":
    asyncio.run(main())
