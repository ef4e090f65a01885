"""Webhooks: every event as one signed POST, CloudEvents in structured mode and Standard Webhooks headers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Literal

from aiohttp import ClientSession
from pydantic import Field, SecretStr, model_validator
from yarl import URL

from relay import signature
from relay.clock import Clock
from relay.egress import parse_url
from relay.errors import Deferred
from relay.events.cloudevent import CONTENT_TYPE, CloudEvent
from relay.settings import Duration
from relay.sinks import Receipt, SinkSettings
from relay.sinks._http import Request, open_session, post, verdict


class Settings(SinkSettings):
    """A receiver of signed POSTs."""

    kind: Literal["webhook"]
    url: SecretStr | None = None
    """Where to POST. It may hold a token, and is treated as a secret."""
    url_file: Path | None = None
    """A file that holds the whole URL, instead of url."""
    secrets: tuple[SecretStr, ...] = ()
    """Keys to sign with, whsec_ and 24 to 64 bytes in base64. All are used at once: rotation without a gap."""
    secrets_file: Path | None = None
    """A file that holds one secret a line, instead of secrets."""
    allow_http: bool = False
    """Allow a URL with http: bodies are then readable on the way, and still signed."""
    timeout: Duration = Field(default=15.0, gt=0)
    """For the whole request: name look-up, connection, TLS, answer."""
    give_up_after: Duration = 86400.0
    """How long an event is tried before it becomes a dead letter."""
    proxy: str | None = None
    """URL of an HTTP proxy to go through. Proxies of the environment are not used."""

    @model_validator(mode="after")
    def _can_be_sent(self) -> Settings:
        if self.url is None and self.url_file is None:
            raise ValueError("expected url or url_file, got neither")
        for name, check in {"url": self.target, "secrets": self.signing_secrets, "proxy": self.way}.items():
            try:
                check()
            except ValueError as error:
                raise ValueError(f"{name}{'_file' if name in self._files else ''}: {error}") from None
        return self

    def target(self) -> URL:
        """The receiver's URL as it is now. Raises ValueError if it cannot be used."""
        return parse_url(self.reveal("url") or "", allow_http=self.allow_http)

    def signing_secrets(self) -> tuple[str, ...]:
        """The secrets as they are now. Raises ValueError if there is none, or one that cannot be used."""
        secrets = self.reveal_all("secrets")
        if not secrets:
            raise ValueError("expected at least one secret, whsec_ and 24 to 64 random bytes in base64, got none")
        for number, secret in enumerate(secrets, start=1):
            try:
                signature.key_of(secret)
            except ValueError as error:
                raise ValueError(f"number {number}: {error}") from None
        return secrets

    def way(self) -> URL | None:
        """The proxy, None for the direct way. Raises ValueError if its URL cannot be used."""
        return None if self.proxy is None else parse_url(self.proxy, allow_http=True)


def build(url: URL, secrets: Iterable[str], event: CloudEvent, now: datetime) -> Request:
    """Make the request of one attempt; ``now`` is the attempt's time. Pure. Raises ValueError if it cannot be signed."""
    timestamp = int(now.timestamp())
    return Request(
        url,
        {
            "Content-Type": CONTENT_TYPE,
            "webhook-id": event.id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signature.sign(secrets, event.id, timestamp, event.body),
        },
        event.body,
    )


class Webhook:
    """One receiver."""

    concurrency = 16
    longest_pause = 300.0

    def __init__(self, settings: Settings, clock: Clock, session: ClientSession) -> None:
        self._settings = settings
        self._clock = clock
        self._session = session
        self._proxy = settings.way()
        self.give_up_after = settings.give_up_after

    async def deliver(self, event: CloudEvent) -> Receipt:
        """Return once the receiver has answered 2xx. Raises Deferred for everything else: none of it is for ever."""
        try:
            # Anew at each attempt, since the files may have changed.
            request = build(self._settings.target(), self._settings.signing_secrets(), event, self._clock.now())
        except ValueError as error:
            raise Deferred(f"the url or secrets of this sink cannot be used any more: {error}", failure="slow") from None
        answer = await post(self._session, request, seconds=self._settings.timeout, proxy=self._proxy)
        outcome = verdict(answer, self._clock.now())
        if isinstance(outcome, Deferred):
            raise outcome
        return outcome


@asynccontextmanager
async def connect(settings: Settings, clock: Clock) -> AsyncIterator[Webhook]:
    """Open the sink's own session; nothing is connected until the first event."""
    async with open_session() as session:
        yield Webhook(settings, clock, session)
