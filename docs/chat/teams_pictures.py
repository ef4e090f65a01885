"""Draws the pictures of docs/chat/teams.md: cards as a relay made them, in a page that looks a little like Teams.

``python -m docs.chat.teams_pictures`` runs the story of the page against the stand-in workflow of the tests. What is drawn is the
cards' own JSON; how it is drawn is ours.
"""

from __future__ import annotations

import asyncio
import html
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.chat.running_relay import ALICE, BOB, Stage, rule, stage
from tests.chat.teams_server import Workflow, workflow
from tests.chromium import executable, running
from tests.journey.relay_process import eventually

HERE = Path(__file__).parent
READER = timedelta(hours=1)
"""How far the clock of the pictures' reader is ahead of UTC."""
STYLE = """
body { margin: 0; padding: 14px 18px; width: 640px; font: 14px/1.4 "Segoe UI", "DejaVu Sans", sans-serif; color: #242424;
  background: #f5f5f5 } .post { display: flex; gap: 10px; margin-bottom: 12px } .face { flex: none; width: 32px; height: 32px;
  border-radius: 6px; background: #5b5fc7; color: #fff; text-align: center; line-height: 32px; font-size: 12px }
.who { font-size: 12px; color: #616161; margin-bottom: 3px } .card { width: 580px; background: #fff; border-radius: 6px;
  box-shadow: 0 1px 3px #0003; padding: 12px 16px; overflow: hidden } .block { margin-top: 8px } .small { margin-top: 4px }
.card > .block:first-child, .tone > .block:first-child, .line > .block:first-child { margin-top: 0 }
.tone { margin: -12px -16px 8px; padding: 10px 16px } .warning { background: #fbf0d2 } .attention { background: #f9dcdc }
.good { background: #dff2df } .accent { background: #dfe4fb } .emphasis { background: #ebebeb }
.line { margin-top: 8px; padding-top: 8px; border-top: 1px solid #e0e0e0 } .facts b { font-weight: 600 }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: 4px 12px; margin-top: 8px }
.large { font-size: 18px; font-weight: 600 } .subtle { font-size: 12px; color: #707070 } .actions { margin-top: 10px }
a { display: inline-block; margin-right: 8px; padding: 5px 14px; border-radius: 4px; border: 1px solid #d1d1d1; font-weight: 600;
  font-size: 13px } .positive { background: #5b5fc7; border-color: #5b5fc7; color: #fff } .destructive { color: #c4314b }
"""


def words(text: str) -> str:
    """The Markdown and the functions that the relay writes, as HTML."""

    def told(found: re.Match[str]) -> str:
        at = datetime.strptime(found[2], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC) + READER
        return f"{at:%a, %b %-d, %Y}" if found[1] == "DATE" else f"{at:%-I:%M %p}"

    text = re.sub(
        r"\{\{(DATE|TIME)\(([^,)]+)(?:, SHORT)?\)\}\}", told, html.escape(text, quote=False)
    )
    text = re.sub(r"(?<!\\)\*\*(.+?)(?<!\\)\*\*", r"<b>\1</b>", text)
    return re.sub(r"\\([\\*_\[\]`~])", r"\1", text)


def drawn(element: dict[str, Any]) -> str:
    """An element of a card."""
    match element["type"]:
        case "TextBlock":
            large = (
                "large"
                if element.get("size") == "Large"
                else "subtle"
                if element.get("isSubtle")
                else ""
            )
            bold = ' style="font-weight: 600"' if element.get("weight") == "Bolder" else ""
            return f'<div class="block {large} {"small" if element.get("spacing") == "Small" else ""}"{bold}>{words(element["text"])}</div>'
        case "FactSet":
            facts = "".join(
                f"<b>{words(fact['title'])}</b><span>{words(fact['value'])}</span>"
                for fact in element["facts"]
            )
            return f'<div class="facts">{facts}</div>'
        case "Container":
            kind = f"tone {element['style']}" if "style" in element else "line"
            return f'<div class="{kind}">{"".join(map(drawn, element["items"]))}</div>'
        case "ActionSet":
            return actions(element["actions"])
    raise ValueError(element["type"])


def actions(found: list[dict[str, Any]]) -> str:
    """Buttons."""
    return f'<div class="actions">{"".join(f"""<a class="{one["style"]}">{html.escape(one["title"])}</a>""" for one in found)}</div>'


def post(card: dict[str, Any]) -> str:
    """A message in the channel."""
    inner = "".join(map(drawn, card["body"])) + (
        actions(card["actions"]) if "actions" in card else ""
    )
    head = '<div class="face">W</div><div><div class="who"><b>Workflows</b></div>'
    return f'<div class="post">{head}<div class="card">{inner}</div></div></div>'


async def announced(on: Stage, there: Workflow, cards: int) -> None:
    """Return when so many cards were posted, and nothing waits."""
    await eventually(
        lambda: len(there.cards) >= cards and on.running.relay.dispatcher.status()[0].waiting == 0
    )


async def pages() -> dict[str, str]:
    """The pictures' pages by name."""
    made = {}
    rules = {"rules": [rule(2, "client:alice", "client:bob")]}
    async with workflow() as there:
        sink = {"kind": "teams", "name": "ops", "url": there.url, "allow_http": True}
        with TemporaryDirectory() as folder:
            async with stage(Path(folder), [sink], approvals=rules) as on:
                event = on.reboot(
                    "db-1", "db-2", description="Host server is undergoing maintenance."
                )
                await announced(on, there, 1)
                made["announced"] = post(there.cards[0])
                for client in (ALICE, BOB):
                    before = len(there.cards)
                    await on.approve(event, client=client)
                    await announced(on, there, before + 1)
                await eventually(lambda: "Azure began" in there.texts[-1])
                on.azure.end(event.event_id)
                await eventually(lambda: "It is over" in there.texts[-1])
                made["end"] = "".join(map(post, there.cards[1:]))
        with TemporaryDirectory() as folder:
            before = len(there.cards)
            async with stage(Path(folder), [sink], approvals=rules) as on:
                for number in range(50):
                    on.reboot(f"web-{number}")
                await announced(on, there, before + 1)
                made["burst"] = post(
                    {**there.cards[-1], "body": shortened(there.cards[-1]["body"])}
                )
    return made


def shortened(body: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A burst with three of its ten lines, so that the picture is small."""
    lines = [element for element in body if element.get("separator")]
    return [element for element in body if element not in lines[3:]]


async def main() -> None:
    """Draw them all. Raises RuntimeError where there is no Chromium."""
    chromium = executable()
    if chromium is None:
        raise RuntimeError("expected a Chromium on this machine, found none")
    async with running(chromium) as browser:
        page = await browser.new_page(viewport={"width": 676, "height": 200})
        for name, body in (await pages()).items():
            await page.set_content(f"<!doctype html><style>{STYLE}</style>{body}")
            await page.locator("body").screenshot(path=HERE / f"teams-{name}.png")


if __name__ == "__main__":
    asyncio.run(main())
