"""Where the broker is: one URL, which may name several hosts, and what a client certificate needs. Pure."""

from __future__ import annotations

import re

from yarl import URL

from relay.net.egress import is_refused, parse_address_literal

_URL = re.compile(r"(?P<begin>amqps?://(?:[^/?#]*@)?)(?P<hosts>[^/?#@]+)(?P<end>[/?][^#]*)?")
FILES = {"cafile", "certfile", "keyfile"}
"""What may stand behind the ? and names a file."""
_OPTIONS = {"auth", *FILES}


def parse_urls(text: str) -> tuple[URL, ...]:
    """Read the URL of a broker: one for each of its hosts, which stand with commas between.

    Raises ValueError, which holds nothing of the URL.
    """
    match = _URL.fullmatch(text)
    try:
        urls = (
            tuple(
                URL(f"{match['begin']}{host}{match['end'] or ''}")
                for host in match["hosts"].split(",")
            )
            if match
            else ()
        )
    except ValueError:
        urls = ()
    if not urls or not all(url.host for url in urls):
        raise ValueError(
            "expected a URL such as amqps://user:password@broker.example.com/vhost, got something else"
        )
    # What a name resolves to is seen when it is dialled.
    if any(
        is_refused(address)
        for url in urls
        if (address := parse_address_literal(url.host or "")) is not None
    ):
        raise ValueError(
            "expected a broker's address, got a metadata or host address, which no sink may reach"
        )
    _check_options(urls[0])
    return urls


def _check_options(url: URL) -> None:
    auth = url.query.get("auth", "plain")
    if not _OPTIONS.issuperset(url.query) or len(url.query) != len(set(url.query)):
        raise ValueError(
            f"expected nothing behind the ? but {', '.join(sorted(_OPTIONS))}, each once"
        )
    if url.query and url.scheme != "amqps":
        raise ValueError(f"expected amqps, got amqp: {', '.join(sorted(_OPTIONS))} are for TLS")
    if auth not in ("plain", "external"):
        raise ValueError("expected auth=plain or auth=external")
    if auth == "external" and "certfile" not in url.query:
        raise ValueError("expected certfile with auth=external: the broker knows the user by it")
    if "keyfile" in url.query and "certfile" not in url.query:
        raise ValueError("expected certfile with keyfile")


def host_port(url: URL) -> str:
    """The broker as logs and errors name it: host and port, no user, no password."""
    host = f"[{url.host}]" if ":" in (url.host or "") else url.host
    return f"{host}:{url.port or (5671 if url.scheme == 'amqps' else 5672)}"
