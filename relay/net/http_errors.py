"""Says in words why an HTTP request got no response. Pure.

The texts of aiohttp can contain the URL, which is secret. The texts of this module never do.
"""

from __future__ import annotations

import os
import ssl
from http import HTTPStatus

import aiohttp

from relay.errors import Failure
from relay.net.egress import AddressRefused
from relay.net.tls_context import HTTPS_CA_OPTION, explain_refusal


def describe_and_classify_error(error: Exception) -> tuple[str, Failure]:
    """Return why there was no response, and the kind of failure for the retry plan."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    system_text = cause.strerror if isinstance(cause, OSError) else None
    if isinstance(cause, AddressRefused):
        # Not permanent: the name can get another address.
        reason = f"expected a receiver's address, the name in the URL stands for {system_text}"
        return reason, "slow"
    return _reason(error, cause, system_text), "transient"


def _reason(error: Exception, cause: Exception, system_text: str | None) -> str:
    match error:
        case aiohttp.ClientConnectorCertificateError():
            explanation = "; ".join(explain_refusal(error.certificate_error, HTTPS_CA_OPTION))
            return f"expected a certificate that this machine trusts: {explanation}"
        case aiohttp.ClientConnectorDNSError():
            problem = system_text or "the look-up failed"
            return f"expected an address for the name in the URL: {problem}"
        case aiohttp.ClientHttpProxyError():
            status = status_text(error.status)
            return f"expected the proxy to connect to the receiver, it answered {status}"
        case aiohttp.ClientSSLError() | ssl.SSLError():
            problem = getattr(cause, "reason", None) or "the connection was closed"
            return f"expected TLS, the handshake failed: {problem}"
        case aiohttp.ClientProxyConnectionError():
            return f"expected a connection to the proxy: {_connection_problem(cause)}"
        case aiohttp.ServerDisconnectedError():
            return "expected an answer, the connection was closed without one"
        case OSError():
            return f"expected a connection to the receiver: {_connection_problem(cause)}"
    return "expected an HTTP answer, got something else"


def _connection_problem(cause: Exception) -> str:
    number = cause.errno if isinstance(cause, OSError) else None
    return os.strerror(number) if number else "none of its addresses could be reached"


def status_text(status: int) -> str:
    """Return the status with its phrase, such as ``404 Not Found``."""
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)
