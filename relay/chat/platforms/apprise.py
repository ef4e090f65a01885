"""Apprise: short texts to the many services that this library supports. Nobody can answer.

Messages cannot be edited. They contain no links, because their readers are not known; they name the
command that decides. The library blocks, so each message is sent in a thread. If some services of a
sink fail, the store delivers again. The repeat makes the same text, and skips the services that
have it.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import re
import threading
import warnings
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, model_validator

from relay.chat import ChatSettings, MessageGone, raise_deferred_if_secret_unusable
from relay.chat.cards.card import Card, on_one_line
from relay.chat.cards.wording import Tone
from relay.chat.context import ChatContext
from relay.chat.live_message import LiveMessageSink
from relay.clock import Clock
from relay.errors import Deferred
from relay.net.egress import is_refused, parse_address_literal
from relay.net.http import TRANSIENT_STATUSES
from relay.sentences import Text, render
from relay.settings import Duration

MAX_PARTIAL_MESSAGES = 100
"""Messages that some services have and others do not, whose recipients are remembered."""
_URGENT_TONES: tuple[Tone, ...] = ("waiting", "held")
_LOGGED_STATUS = re.compile(r"\berror=(\d{3})\b")
"""How the library logs an HTTP status. It does not return the status."""
_ZERO_WIDTH_SPACE = "\N{ZERO WIDTH SPACE}"
_MENTION_OR_LINK = re.compile(
    r"(?<=[@<])(?=\S)|(?<=:)(?=//)|(?<=\])(?=\()|(?<=\bwww)(?=\.)", re.IGNORECASE
)


class Settings(ChatSettings):
    """Services that Apprise supports. They get notices, and nobody answers there."""

    kind: Literal["apprise"]
    urls: tuple[SecretStr, ...] = ()
    """Apprise's URLs of the services, at least one. They are secrets: who has one can post."""
    urls_file: Path | None = None
    """A file with one URL on each line, instead of urls."""
    allow_http: bool = False
    """Allow URLs without TLS, such as json:// in place of jsons://."""
    timeout: Duration = Field(default=30.0, gt=0)
    """For one message to one service, with all its recipients there."""

    @model_validator(mode="after")
    def _check_urls(self) -> Settings:
        self.load_services()
        return self

    def load_services(self) -> dict[str, Any]:
        """Return the service of each current URL. Raises ValueError if one is not usable."""
        key = "urls_file" if self.has_secret_files else "urls"
        urls = self.reveal_list("urls")
        if not urls:
            raise ValueError(f"{key}: expected at least one URL of Apprise, got none")
        services = {}
        for number, url in enumerate(urls, start=1):
            try:
                services[url] = load_service(url, allow_http=self.allow_http)
            except ValueError as error:
                raise ValueError(f"{key}: number {number}: {error}") from None
        return services


@asynccontextmanager
async def connect(
    settings: Settings, clock: Clock, context: ChatContext
) -> AsyncIterator[LiveMessageSink]:
    # in_chat=True: cards get no links, and their buttons only say which decisions are possible.
    sink = LiveMessageSink(settings, context, Services(settings), clock, in_chat=True)
    async with sink.refreshing():
        yield sink


class Services:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._services = settings.load_services()
        self._sending: dict[str, asyncio.Future[Deferred | None]] = {}
        self._recipients: dict[tuple[str, str], set[str]] = {}
        """The URLs of the services that have a message, by title and text. Oldest message first."""

    async def post(self, card: Card) -> None:
        message_type = "warning" if card.tone in _URGENT_TONES else "info"
        await self._send_to_all(_neutral(card.title), card_text(card), message_type)

    async def edit(self, ref: str, card: Card) -> None:  # noqa: ARG002  # nothing can be edited
        """Raise MessageGone: a sink of another kind, which had this sink's name, posted it."""
        raise MessageGone("the message was posted by a sink of another kind")

    async def reply_in_thread(self, ref: str | None, lines: Sequence[Text]) -> None:  # noqa: ARG002  # there are no threads
        first, *rest = map(_plain, lines)
        title, body = (first, "\n".join(rest)) if rest else ("imds-relay", first)
        await self._send_to_all(title, body, "info")

    async def _send_to_all(self, title: str, body: str, message_type: str) -> None:
        settings = self._settings
        if settings.has_secret_files and {*settings.reveal_list("urls")} != {*self._services}:
            with raise_deferred_if_secret_unusable("urls", "are"):
                self._services = settings.load_services()
        message = {"title": title, "body": body, "notify_type": message_type}
        recipients = self._recipients.setdefault((title, body), set())
        missing = [url for url in self._services if url not in recipients]
        errors = await asyncio.gather(*(self._send(url, message) for url in missing))
        recipients.update(url for url, error in zip(missing, errors, strict=True) if error is None)
        problems = [error for error in errors if error is not None]
        if not problems:
            del self._recipients[title, body]
            return
        while len(self._recipients) > MAX_PARTIAL_MESSAGES:
            del self._recipients[next(iter(self._recipients))]
        is_transient = any(error.failure == "transient" for error in problems)
        raise Deferred(
            "; ".join(error.reason for error in problems),
            failure="transient" if is_transient else "slow",
            status=problems[0].status,
        )

    async def _send(self, url: str, message: Mapping[str, str]) -> Deferred | None:
        """Send to one service. A late call goes on, and the next one waits for it."""
        service = self._services[url]
        try:
            async with asyncio.timeout(self._settings.timeout):
                if url in self._sending:
                    await asyncio.wait({self._sending[url]})
                self._sending[url] = _notify_in_thread(service, message)
                return await asyncio.shield(self._sending[url])
        except TimeoutError:
            return Deferred(
                f"expected {service[0].service_name} to accept the message within "
                f"{self._settings.timeout:g} s, it did not"
            )


def _notify_in_thread(service: Any, message: Mapping[str, str]) -> asyncio.Future[Deferred | None]:
    """Send in a thread of its own, for which the process does not wait at its end.

    A few threads that hang in the pool of the event loop would stop all sinks from resolving names.
    """
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[Deferred | None] = loop.create_future()

    def run() -> None:
        error = _notify(service, message)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(finished.set_result, error)

    threading.Thread(target=run, name="apprise", daemon=True).start()
    return finished


def _notify(service: Any, message: Mapping[str, str]) -> Deferred | None:
    expected = f"expected {service[0].service_name} to accept the message"
    try:
        result = service.notify(**message, body_format="text")
        if result:
            return None
        found = [_LOGGED_STATUS.search(entry.message) for entry in result.logs()]
    except Exception as error:  # noqa: BLE001  # the library has hundreds of services
        return Deferred(f"{expected}, its own code failed: {type(error).__name__}")
    statuses = [int(match[1]) for match in found if match is not None]
    if not statuses:
        return Deferred(f"{expected}: there was no connection, no answer, or a refusal")
    status = statuses[-1]
    if status in TRANSIENT_STATUSES or status >= 500:  # HTTP
        return Deferred(f"{expected}, it answered {status}", status=status)
    advice = "check its URL, token and target"
    if status < 400:  # HTTP
        advice = "redirects are not followed, use the final URL"
    return Deferred(f"{expected}, it answered {status}: {advice}", failure="slow", status=status)


def load_service(url: str, *, allow_http: bool) -> Any:
    """Return the library's object for a URL.

    Raises ValueError, which contains nothing of the URL but its scheme.
    """
    library = _library()
    asset = library.AppriseAsset(
        app_id="imds-relay",  # the sender that services show
        app_desc="imds-relay",
        http_redirects=False,
        async_mode=False,  # send in the calling thread
        service_timeout=0,  # its own timeout uses a thread pool, which the process waits for
        allow_templates=False,  # the library must not replace ${…} in URLs
        pgp_autogen=False,
        pem_autogen=False,
    )
    parsed = library.plugins.url_to_dict(url) if url.isprintable() else {}
    plugin = library.Apprise.instantiate(url, asset=asset) if parsed else None
    if plugin is None:
        raise ValueError(
            "expected a URL that Apprise knows, with all that its service needs, such as "
            "gotifys://gotify.example.com/token, got something else"
        )
    schema, secure = parsed["schema"], plugin.secure_protocol or ()
    secure = (secure,) if isinstance(secure, str) else tuple(secure)
    if secure and schema not in secure and not allow_http:
        raise ValueError(
            f"expected {secure[0]}://, got {schema}://: set allow_http: true if the network to "
            "the service is trusted"
        )
    address = parse_address_literal(str(parsed.get("host") or "").strip("[]"))
    if address is not None and is_refused(address):
        raise ValueError(
            "expected a service's address, got a metadata or host address, which no sink may reach"
        )
    if plugin.overflow_mode == library.OverflowMode.UPSTREAM:
        plugin.overflow_mode = library.OverflowMode.TRUNCATE  # some refuse a text that is too long
    service = library.Apprise(asset=asset)
    service.add(plugin)
    return service


@functools.cache
def _library() -> Any:
    """Load the library when it is first needed: it takes half a second and 40 MB.

    Silences its log and the log of its HTTP library, which can contain URLs. Raises ValueError.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its deprecation warnings are for its authors
        try:
            library = importlib.import_module("apprise")
        except ModuleNotFoundError:
            raise ValueError(
                "expected the package apprise, 2.2 or newer (requirements/run.lock has it); "
                "it is not installed"
            ) from None
        _ = "json" in importlib.import_module("apprise.plugins").N_MGR  # loads all plugins
    for name in ("apprise", "urllib3"):
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.addHandler(logging.NullHandler())
    return library


# --- texts


def card_text(card: Card) -> str:
    """Return a card as plain text. The most important part comes first: some services cut it."""
    facts = "\n".join(f"{label}: {_plain(text)}" for label, text in card.facts)
    lines = "\n".join(f"- {_plain(line.text)}" for line in card.lines)
    runbooks = "\n".join(f"Runbook of rule {rule}: {url}" for rule, url in card.runbooks)
    paragraphs = [_plain(card.summary), facts, lines, *map(_plain, card.notes), runbooks]
    if buttons := [*card.buttons, *(button for line in card.lines for button in line.buttons)]:
        decisions = " | ".join(dict.fromkeys(button.decision for button in buttons))
        event_id = card.buttons[0].event_id if card.buttons else "EVENT"
        command = f"imds-relay {decisions} {event_id}"
        paragraphs.append(f"To answer, on a machine of this scope: {command}")
    paragraphs.append(_neutral(card.footer))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def _plain(text: Text) -> str:
    return render(
        text,
        words=_neutral,
        person=_neutral,
        time=lambda time: f"{time.astimezone(UTC):%Y-%m-%d %H:%M} UTC",
    )


def _neutral(text: str) -> str:
    """Return a text in which no service finds a mention or a link.

    The library escapes each service's own markup.
    """
    return _MENTION_OR_LINK.sub(_ZERO_WIDTH_SPACE, on_one_line(text))
