"""Sends each text to every service of a sink."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from relay.chat import MessageGone
from relay.chat.cards.card import Card, Text, Tone
from relay.chat.platforms.apprise.plugin import SendResult
from relay.chat.platforms.apprise.serial_thread import SerialThread
from relay.chat.platforms.apprise.settings import Settings
from relay.chat.platforms.apprise.text import card_text, plain, render_text
from relay.errors import Deferred
from relay.net.egress import AddressRefused

_KINDS: dict[Tone, str] = {
    "waiting": "warning",
    "held": "warning",
    "approved": "info",
    "running": "info",
    "over": "info",
}
_PASSES = frozenset({408, 409, 425, 429})
_MOST_HALF_TOLD = 100
"""Messages of which it is remembered who has got them already, while somebody else has not."""


class ServiceFanout:
    """The platform: sends each text to every service, each in a thread of its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._services = settings.services()
        self._threads: dict[str, SerialThread[SendResult]] = {}
        self._half_told: dict[str, set[str]] = {}

    async def post(self, card: Card) -> str | None:
        """Send what a card says. Raises Deferred."""
        await self._send(plain(card.title), card_text(card), _KINDS[card.tone])
        return None

    async def edit(self, ref: str, card: Card) -> None:  # noqa: ARG002  # nothing can be edited here
        """Raises MessageGone: a message that has a name was posted by a sink of another kind, which had this one's."""
        raise MessageGone("the message was posted elsewhere")

    async def reply_in_thread(self, ref: str | None, lines: Sequence[Text]) -> None:  # noqa: ARG002  # no message has a name
        """Send a few lines, of several the first as the title. Raises Deferred."""
        title, *body = (
            map(render_text, lines) if len(lines) > 1 else ("imds-relay", render_text(lines[0]))
        )
        await self._send(title, "\n".join(body), "info")

    async def _send(self, title: str, body: str, kind: str) -> None:
        """Return when all have it. Who got it is not sent it again while others are tried. Raises Deferred."""
        self._look()
        text = hashlib.sha256(f"{title}\n{body}".encode()).hexdigest()
        told = self._half_told.setdefault(text, set())
        async with asyncio.TaskGroup() as group:
            tries = [
                group.create_task(self._to(url, title, body, kind, told))
                for url in self._services
                if url not in told
            ]
        failed = [one for one in (each.result() for each in tries) if one is not None]
        if not failed:
            del self._half_told[text]
            return
        while len(self._half_told) > _MOST_HALF_TOLD:
            del self._half_told[next(iter(self._half_told))]
        passing = any(one.failure == "transient" for one in failed)
        reason = "; ".join(one.reason for one in failed)
        raise Deferred(reason, failure="transient" if passing else "slow", status=failed[0].status)

    async def _to(
        self, url: str, title: str, body: str, kind: str, told: set[str]
    ) -> Deferred | None:
        """Send it to one; returns how that failed, so that one that fails takes no other along."""
        service, seconds = self._services[url], self._settings.timeout
        thread = self._threads.setdefault(
            url, SerialThread(f"{self._settings.name}: {service.name}")
        )
        try:
            said, was_refused = await thread.run(lambda: service.send(title, body, kind), seconds)
        except TimeoutError:
            return Deferred(
                f"expected {service.name} to take the message within {seconds:g} s, it did not"
            )
        except Exception as error:  # noqa: BLE001  # of a library's hundreds of services; it takes no other along
            return Deferred(
                f"expected {service.name} to take the message, its own code failed: {type(error).__name__}"
            )
        if said.accepted:
            told.add(url)
            return None
        if was_refused:
            return Deferred(
                f"expected the address of {service.name}, its name stands for {AddressRefused().strerror}",
                failure="slow",
            )
        return _refusal(service.name, said.status)

    def _look(self) -> None:
        """Read the file of the URLs again, if there is one. Raises Deferred for what cannot be used any more."""
        if not self._settings.has_secret_files or set(self._settings.reveal_all("urls")) == set(
            self._services
        ):
            return
        try:
            self._services = self._settings.services()
        except ValueError as error:
            raise Deferred(
                f"the urls of this sink cannot be used any more: {error}", failure="slow"
            ) from None


def _refusal(name: str, status: int | None) -> Deferred:
    """What a message that was not taken means: the library tells little more than that."""
    if status is None:
        return Deferred(
            f"expected {name} to take the message: there was no connection, no answer, or one that says no"
        )
    if status in _PASSES or status >= 500:
        return Deferred(f"expected {name} to take the message, it answered {status}", status=status)
    advice = (
        "redirects are not followed, give the address that answers itself"
        if status < 400
        else "see to its URL, token and target"
    )
    return Deferred(
        f"expected {name} to take the message, it answered {status}: {advice}",
        failure="slow",
        status=status,
    )
