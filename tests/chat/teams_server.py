"""A workflow of Teams as far as its webhook goes, written from public documentation; it posts what Teams would show.

Sources: https://learn.microsoft.com/microsoftteams/platform/webhooks-and-connectors/how-to/connectors-using (the envelope),
https://learn.microsoft.com/azure/connectors/connectors-native-reqres (202, and the signature in the URL), the schema of Adaptive Cards
(https://adaptivecards.io/explorer), https://github.com/MicrosoftDocs/msteams-docs/issues/11274 (a card that is too large fails after
the 202), and what users report of error codes: WorkflowTriggerIsNotEnabled, WorkflowNotFound, DirectApiAuthorizationRequired.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web
from markdown_it import MarkdownIt

SIGNATURE = "t0ken-9xYwVutsRqPoNmLkJiHgFeDcBa-1234567890_ab"
PATH = "/powerautomate/automations/direct/workflows/0f3c1d2e4b5a69788796a5b4c3d2e1f0/triggers/manual/paths/invoke"
QUERY = f"?api-version=1&sp=%2Ftriggers%2Fmanual%2Frun&sv=1.0&sig={SIGNATURE}"
LARGEST = 28_672
"""Bytes of a message's properties."""

State = Literal["on", "off", "deleted", "gone", "forbidding", "busy", "broken", "moved"]
_MOMENT = re.compile(
    r"\{\{(?:DATE\(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ(?:, (?:COMPACT|SHORT|LONG))?\)|TIME\(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ\))\}\}"
)
_STYLES = {"default", "emphasis", "good", "attention", "warning", "accent"}
_KNOWN: dict[str, set[str]] = {
    "AdaptiveCard": {"$schema", "type", "version", "msteams", "fallbackText", "body", "actions"},
    "Container": {"type", "style", "bleed", "separator", "spacing", "items"},
    "TextBlock": {
        "type",
        "text",
        "wrap",
        "size",
        "weight",
        "style",
        "isSubtle",
        "spacing",
        "fontType",
    },
    "FactSet": {"type", "facts"},
    "ActionSet": {"type", "spacing", "actions"},
    "Action.OpenUrl": {"type", "title", "style", "url"},
}


@dataclass(slots=True)
class Workflow:
    """One workflow. ``cards`` are those that it has posted, in order; ``failed`` the runs that failed, which no caller hears of."""

    port: int = 0
    state: State = "on"
    retry_after: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    cards: list[dict[str, Any]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    refused: int = 0

    @property
    def url(self) -> str:
        """As the Workflows app shows it."""
        return f"http://127.0.0.1:{self.port}{PATH}{QUERY}"

    @property
    def texts(self) -> list[str]:
        """What each card says, as a reader sees it whose zone is UTC, line by line."""
        return ["\n".join(lines_of(card)) for card in self.cards]

    def links(self, number: int = -1) -> dict[str, str]:
        """Where the buttons of a card lead."""
        return {action["title"]: action["url"] for action in actions_of(self.cards[number])}

    async def take(self, request: web.Request) -> web.Response:
        """The trigger: answers before the workflow runs."""
        answer = await self._answer(request)
        self.refused += answer.status != 202
        return answer

    async def _answer(self, request: web.Request) -> web.Response:
        refused = self._in_its_state(request) or self._not_for_it(request)
        if refused is not None:
            return refused
        body = await request.json()
        self.calls.append(body)
        self._run(body)
        return web.Response(status=202, headers={"x-ms-workflow-run-id": f"{len(self.calls):032d}"})

    def _in_its_state(self, request: web.Request) -> web.Response | None:
        rest = {"Retry-After": self.retry_after} if self.retry_after is not None else {}
        match self.state:
            case "off" | "deleted":
                state = "Disabled" if self.state == "off" else "Deleted"
                return _error(
                    400,
                    "WorkflowTriggerIsNotEnabled",
                    f"Could not execute workflow trigger 'manual' with state '{state}'.",
                )
            case "busy":
                return _error(
                    429, "TooManyRequests", "The rate limit of the workflow is exceeded.", rest
                )
            case "broken":
                return _error(
                    502, "BadGateway", f"No server took {request.path_qs}"
                )  # as some do: the whole URL in the answer
            case "forbidding":
                return _error(
                    401,
                    "Unauthorized",
                    f"The signature of {request.path_qs} is not valid: {request.query.get('sig')}",
                    rest,
                )
            case "gone":
                return web.Response(status=410)
            case "moved":
                return web.Response(
                    status=302, headers={"Location": f"http://127.0.0.1:{self.port}/elsewhere"}
                )
        return None

    def _not_for_it(self, request: web.Request) -> web.Response | None:
        if request.path != PATH:
            return _error(404, "WorkflowNotFound", "The workflow could not be found.")
        if "sig" not in request.query:
            return _error(
                401,
                "DirectApiAuthorizationRequired",
                "The request must be authenticated only by Shared Access scheme.",
            )
        if request.query["sig"] != SIGNATURE:
            return _error(
                401, "Unauthorized", f"The signature {request.query['sig']} is not valid."
            )
        if request.content_type != "application/json":
            return _error(400, "TriggerInputSchemaMismatch", "Expected JSON.")
        return None

    def _run(self, body: dict[str, Any]) -> None:
        for attachment in body.get("attachments", ()):
            card = attachment["content"]
            size = len(json.dumps(json.dumps(card)))
            if attachment["contentType"] != "application/vnd.microsoft.card.adaptive":
                self.failed.append("expected an Adaptive Card")
            elif size > LARGEST:
                self.failed.append(f"MessageSizeExceeded: {size}")
            elif wrong := list(mistakes(card)):
                self.failed.append("; ".join(wrong))
            else:
                self.cards.append(card)
        if body.get("type") != "message" or not body.get("attachments"):
            self.failed.append("expected a message with attachments")


def _error(
    status: int, code: str, message: str, headers: dict[str, str] | None = None
) -> web.Response:
    return web.json_response(
        {"error": {"code": code, "message": message}}, status=status, headers=headers
    )


@asynccontextmanager
async def workflow() -> AsyncIterator[Workflow]:
    """A workflow that is on."""
    made = Workflow()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.port = runner.addresses[0][1]
    try:
        yield made
    finally:
        await runner.cleanup()


# --- what a client of Teams makes of a card


def mistakes(card: dict[str, Any]) -> Iterator[str]:
    """What is not in the schema of Adaptive Cards 1.5, which is as far as Teams goes, or would be shown raw."""
    if card.get("version") != "1.5":
        yield f"version {card.get('version')}"
    for element in _elements(card):
        known = _KNOWN.get(element.get("type", ""))
        if known is None:
            yield f"unknown element {element.get('type')}"
            continue
        yield from (f"{element['type']}.{key}" for key in element.keys() - known)
        if element.get("style", "default") not in _STYLES | {"positive", "destructive", "heading"}:
            yield f"style {element['style']}"
        if element["type"] == "TextBlock" and not element["text"]:
            yield "an empty TextBlock"
        if element["type"] == "Action.OpenUrl" and not element["url"].startswith("https://"):
            yield "a button that leads nowhere"
        if element["type"] in {"AdaptiveCard", "ActionSet"} and len(element.get("actions", ())) > 6:
            yield "more than six actions"
    for text in _texts(card):
        if "{{" in _MOMENT.sub("", text):
            yield f"a function that is shown as it stands: {text}"


def _elements(element: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield element
    for key in ("body", "items", "actions"):
        for inner in element.get(key, ()):
            yield from _elements(inner)


def _texts(card: dict[str, Any]) -> Iterator[str]:
    for element in _elements(card):
        if element["type"] == "TextBlock":
            yield element["text"]
        for fact in element.get("facts", ()):
            yield from (fact["title"], fact["value"])


def actions_of(card: dict[str, Any]) -> list[dict[str, Any]]:
    """Every button, in order."""
    return [element for element in _elements(card) if element["type"] == "Action.OpenUrl"]


def lines_of(card: dict[str, Any]) -> Iterator[str]:
    """What a card says, line by line, to a reader in UTC."""
    for element in _elements(card):
        match element["type"]:
            case "TextBlock":
                yield read(element["text"])
            case "FactSet":
                yield from (
                    f"{read(fact['title'])}: {read(fact['value'])}" for fact in element["facts"]
                )
            case "Action.OpenUrl":
                yield f"[{element['title']}]"


def read(text: str) -> str:
    """A text with its moments told and its Markdown done: what is bold shows plain, what is escaped as it is."""
    text = re.sub(r"\{\{DATE\((\d{4}-\d\d-\d\d)T[^}]*\)\}\}", r"\1", text)
    text = re.sub(r"\{\{TIME\([^T]*T(\d\d:\d\d):\d\dZ\)\}\}", r"\1", text)
    text = re.sub(r"(?<!\\)\*\*(.+?)(?<!\\)\*\*", r"\1", text)
    return re.sub(r"\\([\\*_\[\]`~])", r"\1", text).replace("\N{ZERO WIDTH SPACE}", "")


def alive(card: dict[str, Any]) -> Iterator[str]:
    """What in a card's texts a client would make a mention, a tag or a link of."""
    for text in _texts(card):
        found = MarkdownIt("commonmark", {"html": True}).parse(text)
        kinds = {token.type for block in found for token in (block, *(block.children or ()))}
        yield from (
            kind
            for kind in kinds
            if kind in {"link_open", "html_inline", "html_block", "em_open", "image"}
        )
        yield from re.findall(r"\w+://\S+|\bwww\.\S+|@\w+|<[\w!/]\S*", text)
