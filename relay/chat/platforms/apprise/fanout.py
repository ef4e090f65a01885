"""Sends each text to every service of a sink: the platform of the sink's live messages.

If some services fail, the store delivers again. The repeat makes the same text, and skips the
services that have it: `ServiceFanout` remembers them by the digest of the text until all have it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from relay.chat import MessageGone
from relay.chat.cards.card import Card, Text, Tone
from relay.chat.platforms.apprise.guarded_thread import SerialCaller
from relay.chat.platforms.apprise.service import SendResult
from relay.chat.platforms.apprise.settings import Settings
from relay.chat.platforms.apprise.text import (
    card_text,
    neutralize_markup,
    plain_text_with_utc_times,
)
from relay.errors import Deferred
from relay.net.egress import AddressRefused

MAX_PARTIAL_MESSAGES = 100
"""Messages that some services have and others do not, whose recipients are remembered."""
_MESSAGE_TYPES: dict[Tone, str] = {
    "waiting": "warning",
    "held": "warning",
    "approved": "info",
    "running": "info",
    "over": "info",
}
_TRANSIENT_STATUSES = frozenset({408, 409, 425, 429})


class ServiceFanout:
    """The `ChatPlatform` of a sink. Each service has a thread of its own."""

    def __init__(
        self, settings: Settings, *, max_partial_messages: int = MAX_PARTIAL_MESSAGES
    ) -> None:
        self._settings = settings
        self._max_partial_messages = max_partial_messages
        self._services = settings.load_services()
        self._callers: dict[str, SerialCaller[SendResult]] = {}
        self._recipients: dict[str, set[str]] = {}
        """The URLs of the services that have a message, by its digest. Oldest message first."""

    async def post(self, card: Card) -> None:
        """Send a card. Raises Deferred."""
        await self._send_to_all(
            neutralize_markup(card.title), card_text(card), _MESSAGE_TYPES[card.tone]
        )

    async def edit(self, ref: str, card: Card) -> None:  # noqa: ARG002  # nothing can be edited
        """Raise MessageGone: a sink of another kind, which had this sink's name, posted it."""
        raise MessageGone("the message was posted on another platform")

    async def reply_in_thread(self, ref: str | None, lines: Sequence[Text]) -> None:  # noqa: ARG002  # there are no threads
        """Send lines as a message; the first of several lines is its title. Raises Deferred."""
        texts = [plain_text_with_utc_times(line) for line in lines]
        if len(texts) == 1:
            texts.insert(0, "imds-relay")
        await self._send_to_all(texts[0], "\n".join(texts[1:]), "info")

    async def _send_to_all(self, title: str, body: str, message_type: str) -> None:
        """Return when every service has the message. Raises Deferred.

        A repeat skips the services that have it already.
        """
        self._reload_services()
        digest = hashlib.sha256(f"{title}\n{body}".encode()).hexdigest()
        recipients = self._recipients.setdefault(digest, set())

        async def send_and_remember_recipient(url: str) -> Deferred | None:
            error = await self._send(url, title, body, message_type)
            if error is None:
                recipients.add(url)
            return error

        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(send_and_remember_recipient(url))
                for url in self._services
                if url not in recipients
            ]
        errors = [error for error in (task.result() for task in tasks) if error is not None]
        if not errors:
            del self._recipients[digest]
            return
        while len(self._recipients) > self._max_partial_messages:
            del self._recipients[next(iter(self._recipients))]
        is_transient = any(error.failure == "transient" for error in errors)
        raise Deferred(
            "; ".join(error.reason for error in errors),
            failure="transient" if is_transient else "slow",
            status=errors[0].status,
        )

    async def _send(self, url: str, title: str, body: str, message_type: str) -> Deferred | None:
        """Send a message to one service. Returns the error, so that other services go on."""
        service = self._services[url]
        timeout = self._settings.timeout
        thread_name = f"{self._settings.name}: {service.name}"
        caller = self._callers.setdefault(url, SerialCaller(thread_name))
        try:
            result, is_address_refused = await caller.call(
                lambda: service.send(title, body, message_type), timeout
            )
        except TimeoutError:
            return Deferred(
                f"expected {service.name} to accept the message within {timeout:g} s, it did not"
            )
        except Exception as error:  # noqa: BLE001  # the library has hundreds of services; one error must not stop the others
            return Deferred(
                f"expected {service.name} to accept the message, its own code failed: "
                f"{type(error).__name__}"
            )
        if result.accepted:
            return None
        if is_address_refused:
            return Deferred(
                f"expected the address of {service.name}, its name resolves to "
                f"{AddressRefused().strerror}",
                failure="slow",
            )
        return _refusal_error(service.name, result.status)

    def _reload_services(self) -> None:
        """Follow changes of the file with the URLs. Raises Deferred if it is not usable."""
        settings = self._settings
        if not settings.has_secret_files or set(settings.reveal_list("urls")) == set(
            self._services
        ):
            return
        try:
            self._services = settings.load_services()
        except ValueError as error:
            raise Deferred(
                f"the urls of this sink are no longer usable: {error}", failure="slow"
            ) from None


def _refusal_error(service: str, status: int | None) -> Deferred:
    """Return the error for a message that a service did not accept.

    ``status`` is its HTTP status. The library rarely says more.
    """
    expected = f"expected {service} to accept the message"
    if status is None:
        return Deferred(f"{expected}: there was no connection, no answer, or a refusal")
    if status in _TRANSIENT_STATUSES or status >= 500:
        return Deferred(f"{expected}, it answered {status}", status=status)
    advice = (
        "redirects are not followed, use the final URL"
        if status < 400
        else "check its URL, token and target"
    )
    return Deferred(f"{expected}, it answered {status}: {advice}", failure="slow", status=status)
