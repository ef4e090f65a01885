"""Webhooks: each event is a signed POST, a CloudEvent in structured mode.

The headers follow Standard Webhooks. See docs/webhooks.md. A secret can be in a file: then the
settings are read anew for each delivery, so that it can change while the relay runs.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote

from aiohttp import ClientSession
from pydantic import Field, SecretStr, model_validator
from yarl import URL

from relay import signature
from relay.clock import Clock
from relay.errors import Deferred
from relay.events.cloudevent import CONTENT_TYPE, CloudEvent
from relay.logs import Finding
from relay.net.connectivity import check_connectivity
from relay.net.egress import parse_receiver_url
from relay.net.http import (
    Request,
    basic_authorization,
    interpret_response,
    measure_clock_skew,
    open_session,
    post,
)
from relay.net.tls import ClientTlsSettings
from relay.settings import Duration, Section, text_pattern_validator
from relay.sinks import Receipt, SinkSettings

_HEADER_NAME = re.compile(r"[A-Za-z0-9-]+")
_RESERVED_HEADERS = frozenset(
    """
    accept-encoding connection content-encoding content-length content-type cookie expect host
    keep-alive proxy-authorization proxy-connection te trailer transfer-encoding upgrade user-agent
    """.split()  # noqa: SIM905  # a set would take a line for each
)
"""Headers that the relay or the connection sets, besides those that begin with ``webhook-``."""


class BasicAuthenticationSettings(Section):
    """User and password for a receiver."""

    user: Annotated[
        str,
        text_pattern_validator(
            r"[^:\x00-\x1f\x7f]+", "a user such as relay, without colons and line breaks"
        ),
    ]
    password: SecretStr | None = None
    """Goes with the user."""
    password_file: Path | None = None
    """A file that holds it, instead of password."""

    @model_validator(mode="after")
    def _check_password(self) -> BasicAuthenticationSettings:
        self.current_password()
        return self

    def current_password(self) -> str:
        password = self.reveal("password")
        if not password:
            raise ValueError("expected password or password_file, got neither")
        return password


class Settings(SinkSettings):
    """A receiver of signed POSTs."""

    kind: Literal["webhook"]
    url: SecretStr | None = None
    """Where to POST. It may hold a token, and is treated as a secret."""
    url_file: Path | None = None
    """A file that holds the whole URL, instead of url."""
    secrets: tuple[SecretStr, ...] = ()
    """Keys to sign with, whsec_ and 24 to 64 bytes in base64. All sign at once, for rotation."""
    secrets_file: Path | None = None
    """A file that holds one secret a line, instead of secrets."""
    allow_http: bool = False
    """Allow a URL with http: bodies are then readable on the way, and still signed."""
    timeout: Duration = Field(default=15.0, gt=0)
    """For the whole request: name look-up, connection, TLS, answer."""
    give_up_after: Duration = Field(default=86400.0, gt=0)
    """How long an event is tried; a day or more is extended to a later NotBefore."""
    bearer: SecretStr | None = None
    """Sent as Authorization: Bearer."""
    bearer_file: Path | None = None
    """A file that holds it, instead of bearer."""
    basic: BasicAuthenticationSettings | None = None
    """Sent as Authorization: Basic."""
    headers: Mapping[str, SecretStr] = Field(default_factory=dict)
    """Sent with every request as they are; their values are treated as secrets."""
    headers_file: Path | None = None
    """A file that holds them, one `Name: value` a line, instead of headers."""
    tls: ClientTlsSettings | None = None
    """Certificates for this receiver."""
    proxy: SecretStr | None = None
    """URL of an HTTP proxy, with user and password. Proxies of the environment are not used."""
    proxy_file: Path | None = None
    """A file that holds the URL of the proxy, instead of proxy."""

    @model_validator(mode="after")
    def _check_values(self) -> Settings:
        if self.url is None and self.url_file is None:
            raise ValueError("expected url or url_file, got neither")
        self.run_field_checks(
            {
                "url": self.receiver_url,
                "secrets": self.signing_secrets,
                "bearer": self.authorization_header,
                "headers": self.extra_headers,
                "proxy": self.proxy_target,
            }
        )
        return self

    def receiver_url(self) -> URL:
        """Return the current URL of the receiver. Raises ValueError if it is unusable."""
        return parse_receiver_url(self.reveal("url") or "", allow_http=self.allow_http)

    def signing_secrets(self) -> tuple[str, ...]:
        """Return the current secrets, one at least. Raises ValueError if one is unusable."""
        secrets = self.reveal_list("secrets")
        if not secrets:
            raise ValueError(
                "expected at least one secret, whsec_ and 24 to 64 random bytes in base64, got none"
            )
        for number, secret in enumerate(secrets, start=1):
            try:
                signature.decode_secret(secret)
            except ValueError as error:
                raise ValueError(f"number {number}: {error}") from None
        return secrets

    def authorization_header(self) -> str | None:
        """Return the current Authorization header. Raises ValueError if it is unusable."""
        bearer = self.reveal("bearer")
        if bearer is not None and self.basic is not None:
            raise ValueError("expected one of bearer and basic, got both")
        if self.basic is not None:
            return basic_authorization(self.basic.user, self.basic.current_password())
        if bearer is None:
            return None
        if not (bearer and bearer.isascii() and bearer.isprintable() and " " not in bearer):
            raise ValueError(
                "expected a token on one line, of ASCII characters without spaces, "
                "got something else"
            )
        return f"Bearer {bearer}"

    def extra_headers(self) -> dict[str, str]:
        """Return the current fixed headers. Raises ValueError if one is unusable."""
        if "headers" in self._files:
            lines = [line.partition(":") for line in self.reveal_file_lines("headers")]
            headers = {name.strip(): value.strip() for name, _, value in lines}
        else:
            headers = {name: value.get_secret_value() for name, value in self.headers.items()}
        reserved = _RESERVED_HEADERS
        if self.authorization_header() is not None:
            reserved |= {"authorization"}
        for name, value in headers.items():
            if _HEADER_NAME.fullmatch(name) is None:
                raise ValueError(
                    "expected names of letters, digits and hyphens, got something else"
                )
            if name.lower() in reserved or name.lower().startswith("webhook-"):
                raise ValueError(
                    f"expected headers that the relay does not send itself, got {name}"
                )
            if not (value.isascii() and value.isprintable()):
                raise ValueError(
                    f"expected printable ASCII characters as the value of {name}, "
                    "got something else"
                )
        return headers

    def proxy_target(self) -> tuple[URL, tuple[str, str] | None] | None:
        """Return the proxy and its credentials, or None. Raises ValueError if it is unusable."""
        text = self.reveal("proxy")
        if text is None:
            return None
        scheme, separator, rest = text.partition("://")
        # The last @ counts: a password that is not percent-encoded can contain another.
        credentials, at, host = rest.rpartition("@")
        url = parse_receiver_url(f"{scheme}{separator}{host}", allow_http=True)
        user, _, password = credentials.partition(":")
        return url, (unquote(user), unquote(password)) if at else None


def read_template(settings: Settings) -> Request:
    """Return what the requests of a sink have in common. Raises ValueError if unusable."""
    headers = settings.extra_headers()
    hidden_texts = [*settings.signing_secrets(), *headers.values()]
    authorization = settings.authorization_header()
    if authorization is not None:
        headers["Authorization"] = authorization
        hidden_texts.append(authorization.partition(" ")[2])
        if settings.basic is not None:
            hidden_texts.append(settings.basic.current_password())
    proxy, credentials = settings.proxy_target() or (None, None)
    url = settings.receiver_url()
    proxy_headers: dict[str, str] = {}
    if credentials is not None:
        proxy_authorization = basic_authorization(*credentials)
        hidden_texts += [credentials[1], proxy_authorization.partition(" ")[2]]
        # Without TLS there is no tunnel: the proxy reads the request itself.
        read_by_proxy = proxy_headers if url.scheme == "https" else headers
        read_by_proxy["Proxy-Authorization"] = proxy_authorization
    return Request(
        url=url,
        headers={**headers, "Content-Type": CONTENT_TYPE},
        body=b"",
        secrets=tuple(hidden_texts),
        proxy=proxy,
        proxy_headers=proxy_headers or None,
    )


def signed_headers(secrets: Sequence[str], event: CloudEvent, now: datetime) -> dict[str, str]:
    """Return the headers of Standard Webhooks (`relay.signature`) for a try ``now``. Pure."""
    timestamp = int(now.timestamp())
    return {
        "webhook-id": event.id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature.sign(secrets, event.id, timestamp, event.body),
    }


class Webhook:
    concurrency = 16
    longest_pause = 300.0

    def __init__(self, settings: Settings, clock: Clock, session: ClientSession) -> None:
        self.give_up_after = settings.give_up_after
        self._settings = settings
        self._clock = clock
        self._session = session
        self._tls = settings.tls.reloading_context() if settings.tls is not None else None
        can_change = settings.has_secret_files or (
            settings.basic is not None and settings.basic.has_secret_files
        )
        self._fixed = None if can_change else (settings.signing_secrets(), read_template(settings))

    async def deliver(self, event: CloudEvent) -> Receipt:
        """Return when the receiver has answered 2xx. Raises Deferred, as no failure is final."""
        settings = self._settings
        tls = self._tls.get() if self._tls is not None else None
        try:
            secrets, template = self._fixed or (settings.signing_secrets(), read_template(settings))
        except ValueError as error:
            raise Deferred(
                f"the url, secrets or credentials of this sink cannot be used any more: {error}"
            ) from None
        headers = {**template.headers, **signed_headers(secrets, event, self._clock.now())}
        request = Request(  # `dataclasses.replace` takes five times as long
            url=template.url,
            headers=headers,
            body=event.body,
            secrets=template.secrets,
            proxy=template.proxy,
            proxy_headers=template.proxy_headers,
            tls=tls,
        )
        response = await post(self._session, request, seconds=settings.timeout)
        now = self._clock.now()
        failure = interpret_response(response, now)
        if failure is not None:
            raise failure
        skew = measure_clock_skew(response.headers.get("Date"), now, elapsed=response.elapsed)
        return Receipt(status=response.status, response=response.text, skew=skew)


@asynccontextmanager
async def connect(settings: Settings, clock: Clock) -> AsyncIterator[Webhook]:
    async with open_session() as session:
        yield Webhook(settings, clock, session)


async def diagnose(settings: Settings, clock: Clock, scope: str) -> list[Finding]:  # noqa: ARG001  # the signature is the same for all sinks
    """Check whether the receiver, or its proxy, can be reached. Nothing is posted."""
    subject = f"sink {settings.name}"
    url = settings.receiver_url()
    proxy = settings.proxy_target()
    if proxy is not None:
        subject = f"{subject}, its proxy"
        url = proxy[0]
    tls = settings.tls.make_context() if settings.tls is not None else None
    return [await check_connectivity(subject, url, tls=tls, now=clock.now())]
