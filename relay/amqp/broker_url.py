"""The URL of a broker, and the settings of all sections that have one.

Such sections are the RabbitMQ sink, approvals over AMQP, and both ends of a fleet. The URL may name
several hosts, and files for TLS. It holds a password, so no error repeats it.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import SecretStr, model_validator
from yarl import URL

from relay.net.egress import is_refused, parse_address_literal
from relay.settings import Section, text_pattern_validator

_URL = re.compile(r"(amqps?://(?:[^/?#]*@)?)([^/?#@]+)([/?][^#]*)?")
FILE_OPTIONS = {"cafile", "certfile", "keyfile"}
"""Query parameters that name a file."""
_OPTIONS = {"auth", *FILE_OPTIONS}


ExchangeName = Annotated[
    str,
    text_pattern_validator(
        r"[A-Za-z0-9_.:-]{1,127}",
        "a name such as azure.scheduledevents: letters, digits, _, ., : and -, "
        "at most 127 characters",
    ),
]
Declare = Literal[True, False, "passive"]
"""True makes the exchanges and queues, ``passive`` checks that they exist, False does neither."""


class BrokerSettings(Section):
    """A section with the URL of a RabbitMQ."""

    url: SecretStr | None = None
    """amqp or amqps, user, password, host (several: with commas between) and virtual host.

    For amqps, ?cafile= names a private CA; certfile, keyfile and auth=external are for a client
    certificate.
    """
    url_file: Path | None = None
    """A file that holds the whole URL, instead of url. It is read again for every connection."""

    @model_validator(mode="after")
    def _check_url_or_url_file(self) -> Self:
        if self.url is None and self.url_file is None:
            raise ValueError("expected url or url_file, got neither")
        try:
            self.broker_urls()
        except ValueError as error:
            field = "url" if self.url_file is None else "url_file"
            raise ValueError(f"{field}: {error}") from None
        return self

    def broker_urls(self) -> tuple[URL, ...]:
        """Return the current URL, once for each host. Raises ValueError if it is unusable."""
        return parse_urls(self.reveal("url") or "")


def parse_urls(text: str) -> tuple[URL, ...]:
    """Return the URL once for each host, between commas. Raises ValueError, which shows nothing."""
    urls: tuple[URL, ...] = ()
    if match := _URL.fullmatch(text):
        begin, hosts, end = match.groups(default="")
        with suppress(ValueError):
            urls = tuple(URL(f"{begin}{host}{end}") for host in hosts.split(","))
    if not urls or not all(url.host for url in urls):
        raise ValueError(
            "expected a URL such as amqps://user:password@broker.example.com/vhost, "
            "got something else"
        )
    for url in urls:
        # The addresses of a name are checked on every connection.
        address = parse_address_literal(url.host or "")
        if address is not None and is_refused(address):
            raise ValueError(
                "expected a broker's address, got a metadata or host address, "
                "which no sink may reach"
            )
    _check_tls_query_options(urls[0])
    return urls


def _check_tls_query_options(url: URL) -> None:
    names = ", ".join(sorted(_OPTIONS))
    auth = url.query.get("auth", "plain")
    if not _OPTIONS.issuperset(url.query) or len(url.query) != len(set(url.query)):
        raise ValueError(f"expected nothing behind the ? but {names}, each once")
    if url.query and url.scheme != "amqps":
        raise ValueError(f"expected amqps, got amqp: {names} are for TLS")
    if auth not in ("plain", "external"):
        raise ValueError("expected auth=plain or auth=external")
    if auth == "external" and "certfile" not in url.query:
        raise ValueError("expected certfile with auth=external: it identifies the user")
    if "keyfile" in url.query and "certfile" not in url.query:
        raise ValueError("expected certfile with keyfile")


def host_port(url: URL) -> str:
    """Return host and port for logs and errors, without user and password."""
    host = f"[{url.host}]" if ":" in (url.host or "") else url.host
    return f"{host}:{url.port or (5671 if url.scheme == 'amqps' else 5672)}"
