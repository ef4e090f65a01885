"""Reaches for a sink's far side as far as a handshake, for `doctor`: nothing is sent to whoever listens there."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from datetime import UTC, datetime
from ipaddress import ip_address

import aiohappyeyeballs
from yarl import URL

from relay.diagnostics import Finding, failure, ok, warning
from relay.net.egress import AddressRefused, guarded_socket, is_refused
from relay.net.tls_context import CA_OPTION, default_context, explain_refusal

CONNECT_TIMEOUT = 10.0
"""Seconds for look-up, connection and TLS together."""
_SOON = 14 * 86400.0
"""Seconds before its end at which a certificate is spoken of."""


async def check_connectivity(
    about: str,
    url: URL,
    *,
    tls: ssl.SSLContext | None,
    now: datetime,
    seconds: float = CONNECT_TIMEOUT,
) -> Finding:
    """Look the name up, connect through the egress guard and, with https, agree on TLS; then hang up."""
    where, loop = str(url.origin()), asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds):
            found = await loop.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
            sock = await aiohappyeyeballs.start_connection(
                found, happy_eyeballs_delay=0.25, socket_factory=guarded_socket
            )
            address = str(sock.getpeername()[0])
            context = (tls or default_context()) if url.scheme == "https" else None
            transport, _ = await loop.create_connection(
                asyncio.Protocol,
                sock=sock,
                ssl=context,
                server_hostname=url.host if context is not None else None,
            )
    except TimeoutError:
        return failure(
            about,
            f"{where}: nobody answered within {seconds:g} s",
            "see that it runs, and that firewalls let this VM through",
        )
    except OSError as error:
        return failure(about, f"{where}: {_why(error)}", _remedy(error))
    certificate = transport.get_extra_info("peercert")
    transport.abort()
    return _seen(
        about,
        f"{where} is reached at {address}",
        {str(one[4][0]) for one in found},
        certificate,
        now,
    )


def _seen(
    about: str, said: str, addresses: set[str], certificate: dict[str, str] | None, now: datetime
) -> Finding:
    if any(is_refused(ip_address(one)) for one in addresses):
        return warning(
            about,
            f"{said}; its name also stands for an address that no sink may reach",
            "mend the name: that one is passed over",
        )
    if not certificate:
        return ok(about, said)
    ends = datetime.fromtimestamp(ssl.cert_time_to_seconds(certificate["notAfter"]), UTC)
    said = f"{said}, with a certificate good until {ends:%Y-%m-%d}"
    left = (ends - now).total_seconds()
    return warning(about, said, "see that it is renewed") if left < _SOON else ok(about, said)


def _why(error: OSError) -> str:
    match error:
        case AddressRefused():
            return "its name stands for a metadata or host address, which no sink may reach"
        case socket.gaierror():
            return f"its name cannot be looked up ({error.strerror})"
        case ssl.SSLCertVerificationError():
            return f"its certificate is not one that this machine trusts: {explain_refusal(error, CA_OPTION)[0]}"
        case ssl.SSLError():
            return f"the TLS handshake failed: {error.reason or 'it was broken off'}"
    return os.strerror(error.errno) if error.errno else "none of its addresses could be reached"


def _remedy(error: OSError) -> str:
    match error:
        case AddressRefused() | socket.gaierror():
            return "correct the name in the url, or what it stands for"
        case ssl.SSLCertVerificationError():
            return explain_refusal(error, CA_OPTION)[1]
        case ssl.SSLError():
            return "see that TLS 1.2 or newer is spoken there, and whether it wants a certificate in tls.cert_file"
    return "see that it runs, and that firewalls let this VM through"
