"""A stand-in for a Teams workflow with a webhook. It keeps the cards that Teams would show.

It follows the public documentation:
https://learn.microsoft.com/microsoftteams/platform/webhooks-and-connectors/how-to/connectors-using,
https://learn.microsoft.com/azure/connectors/connectors-native-reqres (status 202, signature) and
https://adaptivecards.io/explorer. A card that is too large fails after the 202, as in
https://github.com/MicrosoftDocs/msteams-docs/issues/11274. Users report the error codes
WorkflowTriggerIsNotEnabled, WorkflowNotFound and DirectApiAuthorizationRequired.
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
from yarl import URL

from tests.cli.command import serve_handler

SIGNATURE = "t0ken-9xYwVutsRqPoNmLkJiHgFeDcBa-1234567890_ab"
PATH = (
    "/powerautomate/automations/direct/workflows/0f3c1d2e4b5a69788796a5b4c3d2e1f0"
    "/triggers/manual/paths/invoke"
)
QUERY = f"?api-version=1&sp=%2Ftriggers%2Fmanual%2Frun&sv=1.0&sig={SIGNATURE}"
MAX_MESSAGE_BYTES = 28_672

State = Literal["on", "off", "deleted", "gone", "forbidding", "busy", "broken", "redirecting"]
_TIMESTAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
_TIME_FUNCTION = re.compile(
    rf"\{{\{{(?:DATE\({_TIMESTAMP}(?:, (?:COMPACT|SHORT|LONG))?\)|TIME\({_TIMESTAMP}\))\}}\}}"
)
_STYLES = {"default", "emphasis", "good", "attention", "warning", "accent", "heading"}
_BUTTON_STYLES = {"default", "positive", "destructive"}
_LOOKS = {"wrap", "size", "weight", "style", "isSubtle", "spacing", "fontType"}
_PROPERTIES: dict[str, set[str]] = {
    "AdaptiveCard": {"$schema", "type", "version", "msteams", "fallbackText", "body", "actions"},
    "Container": {"type", "style", "bleed", "separator", "spacing", "items"},
    "TextBlock": {"type", "text", *_LOOKS},
    "FactSet": {"type", "facts"},
    "ActionSet": {"type", "spacing", "actions"},
    "Action.OpenUrl": {"type", "title", "style", "url"},
}


@dataclass(slots=True)
class TeamsWorkflow:
    """One workflow. No caller learns about the runs in ``failed_runs``."""

    port: int = 0
    state: State = "on"
    retry_after: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    cards: list[dict[str, Any]] = field(default_factory=list)
    """The posted cards, in order."""
    failed_runs: list[str] = field(default_factory=list)
    refused_calls: int = 0

    @property
    def url(self) -> str:
        """The webhook URL as the Workflows app shows it."""
        return f"http://127.0.0.1:{self.port}{PATH}{QUERY}"

    @property
    def card_texts(self) -> list[str]:
        """What each card says to a reader in UTC, line by line."""
        return ["\n".join(card_lines(card)) for card in self.cards]

    async def handle_request(self, request: web.Request) -> web.Response:
        """Handle a call of the webhook. It answers before the workflow runs."""
        refusal = self._refusal_by_state(request) or self._refusal_of_request(request)
        if refusal is not None:
            self.refused_calls += 1
            return refusal
        message = await request.json()
        self.calls.append(message)
        self.run(message)
        return web.Response(status=202, headers={"x-ms-workflow-run-id": f"{len(self.calls):032d}"})

    def _refusal_by_state(self, request: web.Request) -> web.Response | None:
        headers = {"Retry-After": self.retry_after} if self.retry_after is not None else {}
        match self.state:
            case "off" | "deleted":
                state = "Disabled" if self.state == "off" else "Deleted"
                message = f"Could not execute workflow trigger 'manual' with state '{state}'."
                return _error(400, "WorkflowTriggerIsNotEnabled", message)
            case "busy":
                message = "The rate limit of the workflow is exceeded."
                return _error(429, "TooManyRequests", message, headers)
            case "broken":
                # Some servers repeat the whole URL in the response.
                return _error(502, "BadGateway", f"No server took {request.path_qs}")
            case "forbidding":
                signature = request.query.get("sig")
                message = f"The signature of {request.path_qs} is not valid: {signature}"
                return _error(401, "Unauthorized", message, headers)
            case "gone":
                return web.Response(status=410)
            case "redirecting":
                location = f"http://127.0.0.1:{self.port}/elsewhere"
                return web.Response(status=302, headers={"Location": location})
        return None

    def _refusal_of_request(self, request: web.Request) -> web.Response | None:
        if request.path != PATH:
            return _error(404, "WorkflowNotFound", "The workflow could not be found.")
        if "sig" not in request.query:
            message = "The request must be authenticated only by Shared Access scheme."
            return _error(401, "DirectApiAuthorizationRequired", message)
        if request.query["sig"] != SIGNATURE:
            message = f"The signature {request.query['sig']} is not valid."
            return _error(401, "Unauthorized", message)
        if request.content_type != "application/json":
            return _error(400, "TriggerInputSchemaMismatch", "Expected JSON.")
        return None

    def run(self, message: dict[str, Any]) -> None:
        """Post the cards of a message, as the workflow does after its webhook has answered."""
        for attachment in message.get("attachments", ()):
            card = attachment["content"]
            size = len(json.dumps(json.dumps(card)))
            if attachment["contentType"] != "application/vnd.microsoft.card.adaptive":
                self.failed_runs.append("expected an Adaptive Card")
            elif size > MAX_MESSAGE_BYTES:
                self.failed_runs.append(f"MessageSizeExceeded: {size}")
            elif errors := list(schema_errors(card)):
                self.failed_runs.append("; ".join(errors))
            else:
                self.cards.append(card)
        if message.get("type") != "message" or not message.get("attachments"):
            self.failed_runs.append("expected a message with attachments")


def _error(
    status: int, code: str, message: str, headers: dict[str, str] | None = None
) -> web.Response:
    document = {"error": {"code": code, "message": message}}
    return web.json_response(document, status=status, headers=headers)


@asynccontextmanager
async def running_workflow() -> AsyncIterator[TeamsWorkflow]:
    workflow = TeamsWorkflow()
    async with serve_handler(workflow.handle_request) as url:
        workflow.port = URL(url).port or 0
        yield workflow


# --- how a client of Teams shows a card


def schema_errors(card: dict[str, Any]) -> Iterator[str]:
    """Yield what Adaptive Cards 1.5, the newest version that Teams takes, does not allow."""
    if card.get("version") != "1.5":
        yield f"version {card.get('version')}"
    for element in _elements(card):
        properties = _PROPERTIES.get(element.get("type", ""))
        if properties is None:
            yield f"unknown element {element.get('type')}"
            continue
        yield from (f"{element['type']}.{key}" for key in element.keys() - properties)
        styles = _BUTTON_STYLES if element["type"] == "Action.OpenUrl" else _STYLES
        if element.get("style", "default") not in styles:
            yield f"style {element['style']}"
        if element["type"] == "TextBlock" and not element["text"]:
            yield "an empty TextBlock"
        if element["type"] == "Action.OpenUrl" and not element["url"].startswith("https://"):
            yield "a button without an https URL"
        if element["type"] in {"AdaptiveCard", "ActionSet"} and len(element.get("actions", ())) > 6:
            yield "more than six actions"
    for text in _texts(card):
        if "{{" in _TIME_FUNCTION.sub("", text):
            yield f"a function that clients show unchanged: {text}"


def _elements(element: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield element
    for key in ("body", "items", "actions"):
        for child in element.get(key, ()):
            yield from _elements(child)


def _texts(card: dict[str, Any]) -> Iterator[str]:
    for element in _elements(card):
        if element["type"] == "TextBlock":
            yield element["text"]
        for fact in element.get("facts", ()):
            yield from (fact["title"], fact["value"])


def card_actions(card: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every button, in order."""
    return [element for element in _elements(card) if element["type"] == "Action.OpenUrl"]


def card_lines(card: dict[str, Any]) -> Iterator[str]:
    """Yield what a card says to a reader in UTC, line by line. Buttons are in brackets."""
    for element in _elements(card):
        match element["type"]:
            case "TextBlock":
                yield displayed_text(element["text"])
            case "FactSet":
                for fact in element["facts"]:
                    yield f"{displayed_text(fact['title'])}: {displayed_text(fact['value'])}"
            case "Action.OpenUrl":
                yield f"[{element['title']}]"


def displayed_text(text: str) -> str:
    """Return what a reader in UTC sees of a text, without its bold style."""
    text = re.sub(r"\{\{DATE\((\d{4}-\d\d-\d\d)T[^}]*\)\}\}", r"\1", text)
    text = re.sub(r"\{\{TIME\([^T]*T(\d\d:\d\d):\d\dZ\)\}\}", r"\1", text)
    text = re.sub(r"(?<!\\)\*\*(.+?)(?<!\\)\*\*", r"\1", text)
    return re.sub(r"\\([\\*_\[\]`~])", r"\1", text).replace("\N{ZERO WIDTH SPACE}", "")


def active_markup(card: dict[str, Any]) -> Iterator[str]:
    """Yield what a client would show as a mention, a tag, a link or emphasis."""
    active_types = {"link_open", "html_inline", "html_block", "em_open", "image"}
    for text in _texts(card):
        blocks = MarkdownIt("commonmark", {"html": True}).parse(text)
        types = {token.type for block in blocks for token in (block, *(block.children or ()))}
        yield from types & active_types
        yield from re.findall(r"\w+://\S+|\bwww\.\S+|@\w+|<[\w!/]\S*", text)
