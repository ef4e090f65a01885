"""Apprise: a short text to any of the services that this library speaks to. To tell, never to approve.

Nothing of it is edited and nothing comes back. Its messages hold no links: who they reach is not known, and a link is half of
an approval. They name the command that answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, model_validator

from relay.chatops import ChatRefused, ChatSettings, Reply
from relay.chatops._apprise_service import Said, Service, service_of
from relay.chatops._apprise_thread import OneAtATime
from relay.chatops._current import Current
from relay.clock import Clock
from relay.egress import AddressRefused
from relay.errors import Deferred
from relay.notices.board import Board
from relay.notices.card import Card, Text, Tone, Who
from relay.settings import Duration

_KINDS: dict[Tone, str] = {"waiting": "warning", "held": "warning", "approved": "info", "running": "info", "over": "info"}
_PASSES = frozenset({408, 409, 425, 429})
_MOST_HALF_TOLD = 100
"""Messages of which it is remembered who has got them already, while somebody else has not."""
_GAP = "\N{ZERO WIDTH SPACE}"
_log = logging.getLogger(__name__)


class Settings(ChatSettings):
    """Services that Apprise speaks to; they are told, and nobody answers there."""

    kind: Literal["apprise"]
    urls: tuple[SecretStr, ...] = ()
    """Apprise's URLs of the services, one or more. They hold what is needed to post: they are treated as secrets."""
    urls_file: Path | None = None
    """A file that holds one a line, instead of urls."""
    allow_http: bool = False
    """Allow URLs whose messages can be read on the way, such as json:// where there is jsons://."""
    timeout: Duration = Field(default=30.0, gt=0)
    """For one message to one service, with all that it is sent to there."""

    @model_validator(mode="after")
    def _can_be_told(self) -> Settings:
        self.services()
        return self

    def services(self) -> dict[str, Service]:
        """The services as they are now, by their URLs. Raises ValueError where there is none, or one that cannot be used."""
        name = "urls_file" if self._files else "urls"
        urls = self.reveal_all("urls")
        if not urls:
            raise ValueError(f"{name}: expected at least one URL of Apprise, got none")
        found = {}
        for number, url in enumerate(urls, start=1):
            try:
                found[url] = service_of(url, allow_http=self.allow_http)
            except ValueError as error:
                raise ValueError(f"{name}: number {number}: {error}") from None
        return found


class Services:
    """The platform: sends each text to every service, each in a thread of its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._services = settings.services()
        self._threads: dict[str, OneAtATime[Said]] = {}
        self._half_told: dict[str, set[str]] = {}

    async def post(self, card: Card) -> str | None:
        """Send what a card says. Raises Deferred."""
        await self._send(_plain(card.title), body_of(card), _KINDS[card.tone])
        return None

    async def edit(self, ref: str, card: Card) -> None:
        """Never called: no message has a name."""
        raise NotImplementedError

    async def tell(self, ref: str | None, lines: Sequence[Text]) -> None:  # noqa: ARG002  # no message has a name
        """Send a few lines, of several the first as the title. Raises Deferred."""
        title, *body = map(_read, lines) if len(lines) > 1 else ("imds-relay", _read(lines[0]))
        await self._send(title, "\n".join(body), "info")

    async def _send(self, title: str, body: str, kind: str) -> None:
        """Return when all have it. Who got it is not sent it again while others are tried. Raises Deferred."""
        self._look()
        text = hashlib.sha256(f"{title}\n{body}".encode()).hexdigest()
        told = self._half_told.setdefault(text, set())
        async with asyncio.TaskGroup() as group:
            tries = [group.create_task(self._to(url, title, body, kind, told)) for url in self._services if url not in told]
        failed = [one for one in (each.result() for each in tries) if one is not None]
        if not failed:
            del self._half_told[text]
            return
        while len(self._half_told) > _MOST_HALF_TOLD:
            del self._half_told[next(iter(self._half_told))]
        passing = any(one.failure == "transient" for one in failed)
        reason = "; ".join(one.reason for one in failed)
        raise Deferred(reason, failure="transient" if passing else "slow", status=failed[0].status)

    async def _to(self, url: str, title: str, body: str, kind: str, told: set[str]) -> Deferred | None:
        """Send it to one; returns how that failed, so that one that fails takes no other along."""
        service, seconds = self._services[url], self._settings.timeout
        thread = self._threads.setdefault(url, OneAtATime(f"{self._settings.name}: {service.name}"))
        try:
            said, was_refused = await thread.run(lambda: service.send(title, body, kind), seconds)
        except TimeoutError:
            return Deferred(f"expected {service.name} to take the message within {seconds:g} s, it did not")
        if said.taken:
            told.add(url)
            return None
        if was_refused:
            return Deferred(f"expected the address of {service.name}, its name stands for {AddressRefused().strerror}", failure="slow")
        return _refusal(service.name, said.status)

    def _look(self) -> None:
        """Read the file of the URLs again, if there is one. Raises Deferred for what cannot be used any more."""
        if not self._settings.can_change or set(self._settings.reveal_all("urls")) == set(self._services):
            return
        try:
            self._services = self._settings.services()
        except ValueError as error:
            raise Deferred(f"the urls of this sink cannot be used any more: {error}", failure="slow") from None


def _refusal(name: str, status: int | None) -> Deferred:
    """What a message that was not taken means: the library tells little more than that."""
    if status is None:
        return Deferred(f"expected {name} to take the message: there was no connection, no answer, or one that says no")
    if status in _PASSES or status >= 500:
        return Deferred(f"expected {name} to take the message, it answered {status}", status=status)
    advice = "redirects are not followed, give the address that answers itself" if status < 400 else "see to its URL, token and target"
    return Deferred(f"expected {name} to take the message, it answered {status}: {advice}", failure="slow", status=status)


def body_of(card: Card) -> str:
    """What a card says, as plain text; what matters most comes first, as some services cut it. Pure."""
    parts = [_read(card.summary), "\n".join(f"{label}: {_read(text)}" for label, text in card.facts)]
    parts += ["\n".join(f"- {_read(line.text)}" for line in card.lines), *map(_read, card.notes)]
    buttons = [*card.buttons, *(button for line in card.lines for button in line.buttons)]
    if buttons:
        choices = " | ".join(dict.fromkeys(button.decision for button in buttons))
        event = card.buttons[0].event_id if card.buttons else "EVENT"
        parts.append(f"To answer, on a machine of this scope: imds-relay {choices} {event}")
    return "\n\n".join(part for part in (*parts, _plain(card.footer)) if part)


def _read(text: Text) -> str:
    """A text with its moments in UTC: which zone its readers live in is not known."""
    return "".join(f"{part.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if isinstance(part, datetime) else _plain(part) for part in text)


def _plain(part: str | Who) -> str:
    """Words that call nobody and lead nowhere, whatever the service makes of them: a gap that nobody sees breaks both.

    The library keeps a service's own markup off; mentions and links are what many find in plain text.
    """
    words = re.sub(r"\s+", " ", part.principal if isinstance(part, Who) else part)
    return re.sub(r"(?<=[@<])(?=\S)|(?<=:)(?=//)|(?<=\])(?=\()|(?<=\bwww)(?=\.)", _GAP, words, flags=re.IGNORECASE)


class Apprise(Current):
    """Services that are told."""

    async def hear(self, headers: Mapping[str, str], body: bytes) -> Reply:  # noqa: ARG002  # whatever they are
        """Refuse: nobody answers there. Raises ChatRefused."""
        raise ChatRefused("nobody answers through Apprise")


@asynccontextmanager
async def connect(settings: Settings, clock: Clock, board: Board) -> AsyncIterator[Apprise]:
    """Nothing is connected until the first event. Threads that hang at the end are left behind; nobody waits for them."""
    if proxies := sorted({"http", "https", "all"} & urllib.request.getproxies().keys()):
        _log.warning(
            "sink %s: Apprise goes through the proxies of the environment (%s), past the guard of addresses",
            settings.name,
            ", ".join(proxies),
        )
    # Answered "in the chat": no links are made, and buttons only say what can be decided.
    apprise = Apprise(settings, board, Services(settings), clock, in_chat=True)
    async with apprise.kept():
        yield apprise
