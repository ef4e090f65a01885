"""Checks for ``imds-relay doctor`` whether the URL of a sink or a service can be reached.

It connects as the sink would, with the same guard and the same checks of certificates, and hangs
up. No request is sent.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from datetime import UTC, datetime
from ipaddress import ip_address

import aiohappyeyeballs
from yarl import URL

from relay.logs import Finding, failure, ok, warning
from relay.net.egress import AddressRefused, guarded_socket, is_refused
from relay.net.tls import HTTPS_CA_OPTION, default_context, explain_refusal

_CONNECT_TIMEOUT = 10.0
"""Seconds for look-up, connection and TLS together."""
_EXPIRY_WARNING = 14 * 86400.0
"""Seconds before the end of a certificate from which on the finding is a warning."""
_CHECK_RECEIVER = "check that it runs, and that firewalls let this VM through"


async def check_connectivity(
    subject: str, url: URL, *, tls: ssl.SSLContext | None, now: datetime
) -> Finding:
    """Look up the name, connect through the egress guard, do the TLS handshake, and hang up.

    ``subject`` is what the finding is about. ``tls`` replaces the default context for https.
    """
    origin = str(url.origin())
    loop = asyncio.get_running_loop()
    context = (tls or default_context()) if url.scheme == "https" else None
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT):
            infos = await loop.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
            sock = await aiohappyeyeballs.start_connection(
                infos, happy_eyeballs_delay=0.25, socket_factory=guarded_socket
            )
            address = str(sock.getpeername()[0])
            transport, _ = await loop.create_connection(
                asyncio.Protocol,
                sock=sock,
                ssl=context,
                server_hostname=url.host if context is not None else None,
            )
    except TimeoutError:
        problem = f"{origin}: nobody answered within {_CONNECT_TIMEOUT:g} s"
        return failure(subject, problem, _CHECK_RECEIVER)
    except OSError as error:
        problem, remedy = _explain_connection_error(error)
        return failure(subject, f"{origin}: {problem}", remedy)
    certificate = transport.get_extra_info("peercert")
    transport.abort()
    message = f"{origin} is reached at {address}"
    if any(is_refused(ip_address(str(info[4][0]))) for info in infos):
        return warning(
            subject,
            f"{message}; its name also stands for an address that no sink may reach",
            "correct the name: that address is never used",
        )
    if not certificate:
        return ok(subject, message)
    expiry = datetime.fromtimestamp(ssl.cert_time_to_seconds(certificate["notAfter"]), UTC)
    message = f"{message}, with a certificate good until {expiry:%Y-%m-%d}"
    if (expiry - now).total_seconds() < _EXPIRY_WARNING:
        return warning(subject, message, "make sure that it is renewed")
    return ok(subject, message)


def _explain_connection_error(error: OSError) -> tuple[str, str]:
    correct_name = "correct the name in the url, or its addresses"
    match error:
        case AddressRefused():
            return "its name stands for a metadata or host address, which no sink may reach", (
                correct_name
            )
        case socket.gaierror():
            return f"its name cannot be looked up ({error.strerror})", correct_name
        case ssl.SSLCertVerificationError():
            problem, remedy = explain_refusal(error, HTTPS_CA_OPTION)
            return f"its certificate is not one that this machine trusts: {problem}", remedy
        case ssl.SSLError():
            problem = error.reason or "the connection was closed"
            return f"the TLS handshake failed: {problem}", (
                "check that it supports TLS 1.2 or newer, "
                "and whether it needs a certificate in tls.cert_file"
            )
    if error.errno:
        return os.strerror(error.errno), _CHECK_RECEIVER
    return "none of its addresses could be reached", _CHECK_RECEIVER
