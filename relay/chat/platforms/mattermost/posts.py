"""Posts, edits and replies in one channel of Mattermost.

Texts of others cannot mention anybody, link anywhere or format anything. Everything is in
attachments, and ``message`` stays empty: the server's time limit for edits applies to ``message``
only, and so does the mark "(edited)".

Sources: https://developers.mattermost.com/integrate/reference/message-attachments/ and
https://developers.mattermost.com/integrate/plugins/interactive-messages/
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from relay.chat.cards.card import Button, Card, cut, longest_fitting, on_one_line, one_line
from relay.chat.cards.wording import Tone
from relay.chat.platforms.mattermost.api import MattermostApi
from relay.errors import Deferred
from relay.sentences import PrincipalRef, Text, render

MAX_MESSAGE_LENGTH = 16383
"""Characters of a post's ``message`` (Mattermost, ``PostMessageMaxRunesV2``)."""
MAX_TITLE_LENGTH = 300
"""Characters of a title or footer, before they are escaped."""
MAX_TEXT_LENGTH = 3000
"""Characters of any other text in an attachment, before they are escaped."""
_MAX_NAME_LENGTH = 64
_MAX_PRINCIPAL_LENGTH = 128
_LINE_LENGTHS = (1500, 500, 150)
"""Characters of each line of a reply. The first length is used at which the reply is accepted."""
_COLORS: dict[Tone, str] = {
    "waiting": "#F0A30A",
    "held": "#8C5BD6",
    "approved": "#2E9E6B",
    "running": "#1C58D9",
    "over": "#8B8FA7",
}
_ZERO_WIDTH_SPACE = "\N{ZERO WIDTH SPACE}"
_ESCAPED = re.compile(r"[\\`*\[\]|$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
# The server finds mentions, hashtags, emojis and bare URLs after it has removed backslashes. A
# space without width stops it.
_SEPARATED = re.compile(r"[@#&~<]|:(?=\S)|www(?=\d{0,3}\.)|\.(?=[A-Za-z]{2,}/)", re.IGNORECASE)
_BLOCK_MARKER = re.compile(r"(?=[-+>=]|\d{1,9}[.)])")

Json = dict[str, Any]
Names = Mapping[str, str]
"""User names by principal."""
Integration = Callable[[Button], Json]


def attachments(card: Card, names: Names, integration: Integration | None) -> list[Json]:
    numbers = itertools.count(1)
    paragraphs = [render_markdown(text, names) for text in (card.summary, *card.notes)]
    paragraphs.append(_links(card.buttons))
    paragraphs += [f"Runbook of rule [{escape(rule)}]({url})" for rule, url in card.runbooks]
    title = cut(on_one_line(card.title), MAX_TITLE_LENGTH)
    common = {"fallback": title, "color": _COLORS[card.tone]}
    main = {
        **common,
        "title": render_markdown((title,), {}),
        "text": _paragraphs(paragraphs),
        "fields": [
            {"title": label, "value": render_markdown(text, names), "short": False}
            for label, text in card.facts
        ],
        "footer": render_markdown((card.footer,), {}, limit=MAX_TITLE_LENGTH),
        "actions": _actions(card.buttons, integration, numbers),
    }
    lines = [
        {
            **common,
            "text": _paragraphs([render_markdown(line.text, names), _links(line.buttons)]),
            "actions": _actions(line.buttons, integration, numbers),
        }
        for line in card.lines
    ]
    return [main, *lines]


def thread_message(lines: Sequence[Text], names: Names) -> str:
    """Return the message of a reply. Long lines are cut if the reply would be too long."""
    message = longest_fitting(
        lambda limit: "\n".join(render_markdown(line, names, limit=limit) for line in lines),
        _LINE_LENGTHS,
        lambda message: len(message) <= MAX_MESSAGE_LENGTH,
    )
    return message[:MAX_MESSAGE_LENGTH]


def render_markdown(text: Text, names: Names, *, limit: int = MAX_TEXT_LENGTH) -> str:
    """Return a text as Markdown, with times in UTC. People are not mentioned."""

    def person(principal: str) -> str:
        if principal in names:
            return f"**{escape(cut(names[principal], _MAX_NAME_LENGTH))}**"
        return f"`{cut(on_one_line(principal).replace('`', chr(39)), _MAX_PRINCIPAL_LENGTH)}`"

    rendered = render(one_line(text, limit), words=escape, person=person).strip()
    return _ZERO_WIDTH_SPACE + rendered if _BLOCK_MARKER.match(rendered) else rendered


def escape(text: str) -> str:
    """Return Markdown that shows a text literally, within a line."""
    text = _ESCAPED.sub(r"\\\g<0>", on_one_line(text))
    return _SEPARATED.sub(rf"\g<0>{_ZERO_WIDTH_SPACE}", text)


def _actions(
    buttons: Sequence[Button], integration: Integration | None, numbers: Iterator[int]
) -> list[Json]:
    # The server requires that ids are unique in a post, and of letters and digits.
    return [
        {
            "id": f"{button.decision}{next(numbers)}",
            "type": "button",
            "name": button.label,
            "style": "primary" if button.decision == "approve" else "default",
            "integration": integration(button),
        }
        for button in buttons
        if button.url is None and integration is not None
    ]


def _links(buttons: Sequence[Button]) -> str:
    """Return links for the decisions that a page takes: Mattermost's buttons open no pages."""
    urls = ((button.label, button.url) for button in buttons if button.url is not None)
    return " · ".join(f"**[{escape(label)}]({url})**" for label, url in urls)


def _paragraphs(paragraphs: Sequence[str]) -> str:
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


_PRINCIPAL = re.compile(r"mattermost:[a-z0-9]{26}/([a-z0-9]{26})")


class Channel:
    """``integration`` is None if nobody decides in the chat."""

    def __init__(self, api: MattermostApi, integration: Integration | None) -> None:
        self._api = api
        self._integration = integration

    async def post(self, card: Card) -> str:
        return await self._api.create_post(card, message="", props=await self._props(card))

    async def edit(self, ref: str, card: Card) -> None:
        await self._api.patch_post(ref, {"props": await self._props(card)})

    async def reply_in_thread(self, ref: str | None, lines: Sequence[Text]) -> None:
        message = thread_message(lines, await self._names_in(lines))
        await self._api.create_post((ref, *lines), message=message, root_id=ref or "")

    async def _props(self, card: Card) -> Mapping[str, Any]:
        texts = [card.summary, *card.notes]
        texts += [text for _, text in card.facts]
        texts += [line.text for line in card.lines]
        return {"attachments": attachments(card, await self._names_in(texts), self._integration)}

    async def _names_in(self, texts: Iterable[Text]) -> Names:
        """Return the names that messages show instead of ids. Without them they show the ids."""
        pieces = (piece for text in texts for piece in text)
        principals = {piece.principal for piece in pieces if isinstance(piece, PrincipalRef)}
        matches = map(_PRINCIPAL.fullmatch, sorted(principals))
        ids = {match[1]: match[0] for match in matches if match is not None}
        if not ids:
            return {}
        try:
            users = await self._api.call("POST", "users/ids", list(ids), expected=list)
        except Deferred:
            return {}
        return {
            ids[user["id"]]: str(user["username"])
            for user in users
            if isinstance(user, dict) and user.get("id") in ids and user.get("username")
        }
