"""Webhooks: every event as one signed POST, CloudEvents in structured mode and Standard Webhooks headers."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from aiohttp import ClientSession
from pydantic import Field, SecretStr, model_validator
from yarl import URL

from relay import signature
from relay.clock import Clock
from relay.diagnostics import Finding
from relay.errors import Deferred
from relay.events.cloudevent import CONTENT_TYPE, CloudEvent
from relay.net.connectivity import check_connectivity
from relay.net.egress import parse_receiver_url
from relay.net.http import (
    Request,
    Transport,
    basic_authorization,
    open_session,
    post,
)
from relay.net.http_outcome import clock_skew, interpret_response
from relay.net.tls_settings import ClientTlsSettings
from relay.settings import Duration, Section
from relay.sinks import Receipt, SinkSettings

_TOKEN = re.compile(r"[A-Za-z0-9-]+")
_OURS = frozenset(
    {
        *(
            "host",
            "user-agent",
            "content-type",
            "content-length",
            "content-encoding",
            "transfer-encoding",
            "accept-encoding",
            "expect",
        ),
        *(
            "connection",
            "keep-alive",
            "te",
            "trailer",
            "upgrade",
            "proxy-authorization",
            "proxy-connection",
            "cookie",
        ),
    }
)
"""Headers that the relay or the connection sends itself."""


class BasicSettings(Section):
    """User and password for a receiver."""

    user: str = Field(min_length=1, pattern=r"^[^:\x00-\x1f\x7f]+$")
    password: SecretStr | None = None
    """Goes with the user."""
    password_file: Path | None = None
    """A file that holds it, instead of password."""

    def secret(self) -> str:
        """The password as it is now. Raises ValueError where there is none."""
        password = self.reveal("password")
        if not password:
            raise ValueError("expected password or password_file, got neither")
        return password

    def encoded(self) -> str:
        """The Authorization header."""
        return basic_authorization(self.user, self.secret())


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
    give_up_after: Duration = Field(default=86400.0, gt=0)
    """How long an event is tried before it becomes a dead letter; a day or more yields to a NotBefore that is farther."""
    bearer: SecretStr | None = None
    """Sent as Authorization: Bearer."""
    bearer_file: Path | None = None
    """A file that holds it, instead of bearer."""
    basic: BasicSettings | None = None
    """Sent as Authorization: Basic."""
    headers: Mapping[str, SecretStr] = Field(default_factory=dict)
    """Sent with every request as they are; their values are treated as secrets."""
    headers_file: Path | None = None
    """A file that holds them, one `Name: value` a line, instead of headers."""
    tls: ClientTlsSettings | None = None
    """Certificates for this receiver."""
    proxy: SecretStr | None = None
    """URL of an HTTP proxy to go through, user and password in it if it wants them. Proxies of the environment are not used."""
    proxy_file: Path | None = None
    """A file that holds the URL of the proxy, instead of proxy."""

    @model_validator(mode="after")
    def _can_be_sent(self) -> Settings:
        if self.url is None and self.url_file is None:
            raise ValueError("expected url or url_file, got neither")
        checks: dict[str, Callable[[], object]] = {
            "url": self.target,
            "secrets": self.signing_secrets,
            "bearer": self.authorization,
            "headers": self.extra_headers,
            "proxy": self.way,
        }
        for name, check in checks.items():
            try:
                check()
            except ValueError as error:
                raise ValueError(
                    f"{name}{'_file' if name in self._files else ''}: {error}"
                ) from None
        return self

    def target(self) -> URL:
        """The receiver's URL as it is now. Raises ValueError if it cannot be used."""
        return parse_receiver_url(self.reveal("url") or "", allow_http=self.allow_http)

    def signing_secrets(self) -> tuple[str, ...]:
        """The secrets as they are now. Raises ValueError if there is none, or one that cannot be used."""
        secrets = self.reveal_all("secrets")
        if not secrets:
            raise ValueError(
                "expected at least one secret, whsec_ and 24 to 64 random bytes in base64, got none"
            )
        for number, secret in enumerate(secrets, start=1):
            try:
                signature.key_of(secret)
            except ValueError as error:
                raise ValueError(f"number {number}: {error}") from None
        return secrets

    def authorization(self) -> str | None:
        """The Authorization header as it is now. Raises ValueError if it cannot be sent."""
        bearer = self.reveal("bearer")
        if bearer is not None and self.basic is not None:
            raise ValueError("expected one of bearer and basic, got both")
        if bearer is None:
            return self.basic.encoded() if self.basic is not None else None
        if not (bearer and bearer.isascii() and bearer.isprintable() and " " not in bearer):
            raise ValueError(
                "expected a token on one line, of ASCII characters without spaces, got something else"
            )
        return f"Bearer {bearer}"

    def extra_headers(self) -> dict[str, str]:
        """The fixed headers as they are now. Raises ValueError for one that cannot be sent, or that the relay sends itself."""
        if "headers" in self._files:
            lines = [line.partition(":") for line in self.reveal_lines("headers")]
            found = {name.strip(): value.strip() for name, _, value in lines}
        else:
            found = {name: value.get_secret_value() for name, value in self.headers.items()}
        authorized = self.authorization() is not None
        for name, value in found.items():
            if _TOKEN.fullmatch(name) is None:
                raise ValueError(
                    "expected names of letters, digits and hyphens, got something else"
                )
            if (
                name.lower() in _OURS
                or name.lower().startswith("webhook-")
                or (authorized and name.lower() == "authorization")
            ):
                raise ValueError(
                    f"expected headers that the relay does not send itself, got {name}"
                )
            if not (value.isascii() and value.isprintable()):
                raise ValueError(
                    f"expected printable ASCII characters as the value of {name}, got something else"
                )
        return found

    def way(self) -> tuple[URL, tuple[str, str] | None] | None:
        """The proxy, and the user and password that it wants; None for the direct way. Raises ValueError if it cannot be used."""
        text = self.reveal("proxy")
        if text is None:
            return None
        scheme, separator, rest = text.partition("://")
        # Up to the last one, as a password that was not encoded may hold another.
        credentials, at, place = rest.rpartition("@")
        url = parse_receiver_url(f"{scheme}{separator}{place}", allow_http=True)
        user, _, password = credentials.partition(":")
        return url, (unquote(user), unquote(password)) if at else None


def build(
    url: URL,
    secrets: Iterable[str],
    event: CloudEvent,
    now: datetime,
    *,
    more: Mapping[str, str] | None = None,
    hidden: tuple[str, ...] = (),
) -> Request:
    """Make the request of one attempt; ``now`` is the attempt's time. Pure. Raises ValueError if it cannot be signed.

    ``more``: headers beside those of Standard Webhooks. ``hidden``: see `Request`.
    """
    timestamp = int(now.timestamp())
    return Request(
        url=url,
        headers={
            **(more or {}),
            "Content-Type": CONTENT_TYPE,
            "webhook-id": event.id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signature.sign(secrets, event.id, timestamp, event.body),
        },
        body=event.body,
        secrets=hidden,
    )


@dataclass(frozen=True, slots=True)
class _Known:
    """What every request of a sink has, as the settings and their files are now."""

    url: URL
    secrets: tuple[str, ...]
    more: Mapping[str, str]
    hidden: tuple[str, ...]
    proxy: URL | None
    pass_proxy: str | None


def _look(given: Settings) -> _Known:
    """Read the settings and their files. Raises ValueError for what cannot be used."""
    more, authorization, secrets = (
        given.extra_headers(),
        given.authorization(),
        given.signing_secrets(),
    )
    hidden = [*secrets, *more.values()]
    if authorization is not None:
        more["Authorization"] = authorization
        hidden += [
            authorization.partition(" ")[2],
            *([given.basic.secret()] if given.basic is not None else ()),
        ]
    proxy, credentials = given.way() or (None, None)
    pass_proxy = basic_authorization(*credentials) if credentials is not None else None
    if credentials is not None and pass_proxy is not None:
        hidden += [credentials[1], pass_proxy.partition(" ")[2]]
    return _Known(given.target(), secrets, more, tuple(hidden), proxy, pass_proxy)


class Webhook:
    """One receiver."""

    concurrency = 16
    longest_pause = 300.0

    def __init__(self, settings: Settings, clock: Clock, session: ClientSession) -> None:
        self._settings = settings
        self._clock = clock
        self._session = session
        self._certificates = settings.tls.reloading_context() if settings.tls is not None else None
        can_change = settings.has_secret_files or (
            settings.basic is not None and settings.basic.has_secret_files
        )
        self._known = None if can_change else _look(settings)
        self._timeout = settings.timeout
        self.give_up_after = settings.give_up_after

    async def deliver(self, event: CloudEvent) -> Receipt:
        """Return once the receiver has answered 2xx. Raises Deferred for everything else: none of it is for ever."""
        try:
            known = self._known or _look(
                self._settings
            )  # anew at each attempt, where files may have changed
            request = build(
                known.url,
                known.secrets,
                event,
                self._clock.now(),
                more=known.more,
                hidden=known.hidden,
            )
        except ValueError as error:
            raise Deferred(
                f"the url, secrets or credentials of this sink cannot be used any more: {error}",
                failure="slow",
            ) from None
        transport = Transport(
            proxy=known.proxy,
            proxy_authorization=known.pass_proxy,
            tls=self._certificates.get() if self._certificates is not None else None,
        )
        response = await post(self._session, request, seconds=self._timeout, transport=transport)
        now = self._clock.now()
        failure = interpret_response(response, now)
        if failure is not None:
            raise failure
        return Receipt(response.status, response.text, clock_skew(response, now))


@asynccontextmanager
async def connect(settings: Settings, clock: Clock) -> AsyncIterator[Webhook]:
    """Open the sink's own session; nothing is connected until the first event."""
    async with open_session() as session:
        yield Webhook(settings, clock, session)


async def diagnose(settings: Settings, clock: Clock, scope: str) -> list[Finding]:  # noqa: ARG001  # the contract of the family
    """Whether the receiver, or the proxy before it, is reached. Nothing is posted."""
    about, way = f"sink {settings.name}", settings.way()
    tls = settings.tls.make_context() if settings.tls is not None else None
    if way is not None:
        return [await check_connectivity(f"{about}, its proxy", way[0], tls=tls, now=clock.now())]
    return [await check_connectivity(about, settings.target(), tls=tls, now=clock.now())]
