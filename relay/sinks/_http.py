"""What every sink that speaks HTTP shares: the session, one bounded request, and what its answer means."""

from __future__ import annotations

import os
import re
import ssl
from asyncio import get_running_loop, timeout_at
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from io import BytesIO

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from relay import __version__
from relay.egress import AddressRefused, guarded_socket
from relay.errors import Deferred, Failure
from relay.events.moment import parse_moment
from relay.sinks import Receipt

USER_AGENT = f"imds-relay/{__version__}"
MOST_READ = 64 * 1024
"""Bytes of an answer that are read; what is longer is cut off with its connection."""
MOST_KEPT = 1024
"""Bytes of an answer that are kept for the log of attempts."""
BODY_PATIENCE = 1.0
"""Seconds that an answer's body may take: its status decides, and the next event of this EventId waits."""
LONGEST_REST = 3600.0
"""Seconds to which ``Retry-After`` is cut."""
_IDLE = 4.0  # seconds; many servers close an idle connection after five, and one that both use at that instant is a failure
_DRIFT = 60.0  # seconds; what Standard Webhooks receivers forgive at the least


@dataclass(frozen=True, slots=True)
class Request:
    """A POST, complete: building it is pure, sending it is `post`."""

    url: URL
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. ``text`` is at most 1 KiB of the body, None where there is none to show."""

    status: int
    headers: Mapping[str, str]
    text: str | None


def open_session(*, resolver: AbstractResolver | None = None, tls: ssl.SSLContext | None = None) -> aiohttp.ClientSession:
    """A sink's own session: guarded sockets, no proxy or netrc of the environment, no cookies, nothing unpacked, no timeouts.

    ``post`` has the one timeout. None stands for the machine's own resolver and for the certificates that it trusts.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0,  # the sink's `concurrency` is the limit
            keepalive_timeout=_IDLE,
            socket_factory=guarded_socket,
            resolver=resolver,
            ssl=tls or True,
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"User-Agent": USER_AGENT, "Accept-Encoding": "identity"},
        auto_decompress=False,
        trust_env=False,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
    )


async def post(session: aiohttp.ClientSession, request: Request, *, seconds: float, proxy: URL | None = None) -> Answer:
    """Send the request and read the answer, all within ``seconds``. Raises Deferred where no answer came.

    An answer whose body is slow, broken or too long is an answer: its status was said.
    """
    deadline = get_running_loop().time() + seconds
    try:
        async with timeout_at(deadline):
            # BytesIO: bytes over 1 MiB would be written in one go, and warned of.
            response = await session.post(
                request.url, data=BytesIO(request.body), headers=request.headers, proxy=proxy, allow_redirects=False
            )
    except TimeoutError:
        raise Deferred(f"expected an answer within {seconds:g} s, none came") from None
    except (aiohttp.ClientError, OSError) as error:
        reason, failure = _no_answer(error)
        raise Deferred(reason, failure=failure) from None  # the library's own texts can hold the URL
    async with response:  # closes the connection if more is to come: the next request would take it for its answer
        start = b""
        if not response.content.at_eof():
            start = await _start_of_body(response, min(deadline, get_running_loop().time() + BODY_PATIENCE))
    readable = "Content-Encoding" not in response.headers  # nothing is unpacked
    return Answer(response.status, response.headers, _text(start, request.url) if readable else None)


async def _start_of_body(response: aiohttp.ClientResponse, deadline: float) -> bytes:
    start = b""
    left = MOST_READ
    try:
        async with timeout_at(deadline):
            while left and (chunk := await response.content.read(left)):
                left -= len(chunk)
                start = (start + chunk)[:MOST_KEPT]
    except (TimeoutError, aiohttp.ClientError, OSError):
        return start
    return start


def _text(start: bytes, url: URL) -> str | None:
    """The start of a body as text to log: of a page that repeats what was asked for, without the path that may hold a token."""
    text = start.decode("utf-8", "replace").strip()
    for part in (url.raw_path_qs, url.path_qs, url.raw_path, url.path, url.raw_query_string, url.query_string):
        if len(part) > 1:
            text = text.replace(part, "…")
    shown = "".join(char if char.isprintable() or char in "\t\n" else "\N{REPLACEMENT CHARACTER}" for char in text)
    return shown.encode()[:MOST_KEPT].decode("utf-8", "ignore") or None


def verdict(answer: Answer, now: datetime) -> Receipt | Deferred:
    """What an answer means for the delivery, to be returned or raised.

    2xx is delivered. 408, 409, 425, 429 and 5xx pass by themselves; 410 asks us to stop; for anything else, redirects
    included, somebody must mend something.
    """
    status = answer.status
    if 200 <= status <= 299:
        return Receipt(status, answer.text)
    failure: Failure = "slow"
    if status == 410:
        failure = "disabled"
        advice = ": the receiver asks never to be called again"
    elif status in {408, 409, 425, 429} or 500 <= status <= 599:
        failure = "transient"
        advice = ""
    elif 300 <= status <= 399:
        advice = ": redirects are not followed, give the URL that answers itself"
    else:
        advice = f": the receiver or its URL must be mended{_drift(answer, now)}"
    reason = f"expected 2xx, got {_named(status)}{advice}"
    return Deferred(reason, after=_rest(answer.headers, now), failure=failure, status=status, answer=answer.text)


def _named(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def _rest(headers: Mapping[str, str], now: datetime) -> float | None:
    """Seconds of rest that ``Retry-After`` asks for (RFC 9110, 10.2.3: seconds or a date), cut to an hour."""
    text = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]+", text) is not None:
        return min(float(text), LONGEST_REST)
    date = parse_moment(text)
    return None if date is None else min(max((date - now).total_seconds(), 0.0), LONGEST_REST)


def _drift(answer: Answer, now: datetime) -> str:
    """A hint where a good signature may have been refused for its timestamp."""
    date = parse_moment(answer.headers.get("Date")) if answer.status in {400, 401, 403} else None
    seconds = 0.0 if date is None else (date - now).total_seconds()
    if abs(seconds) <= _DRIFT:
        return ""
    return f"; its clock is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} ours, and signatures bear the time: check both"


def _no_answer(error: Exception) -> tuple[str, Failure]:
    """Why there was no answer, in words that hold nothing of the URL, and what the retry plan should make of it."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    said = cause.strerror if isinstance(cause, OSError) else None
    match error:
        case _ if isinstance(cause, AddressRefused):
            return f"expected a receiver's address, the name in the URL stands for {said}", "slow"  # names can change
        case aiohttp.ClientConnectorCertificateError():
            reason = f"expected a certificate that this machine trusts: {_untrusted(error.certificate_error)}"
        case aiohttp.ClientConnectorDNSError():
            reason = f"expected an address for the name in the URL: {said or 'it could not be looked up'}"
        case aiohttp.ClientHttpProxyError():
            reason = f"expected the proxy to open a way to the receiver, it answered {_named(error.status)}"
        case aiohttp.ClientSSLError() | ssl.SSLError():
            reason = f"expected TLS, the handshake failed: {getattr(cause, 'reason', None) or 'it was broken off'}"
        case aiohttp.ClientProxyConnectionError():
            reason = f"expected a connection to the proxy: {_in_words(cause)}"
        case aiohttp.ServerDisconnectedError():
            reason = "expected an answer, the connection was closed without one"
        case OSError():
            reason = f"expected a connection to the receiver: {_in_words(cause)}"
        case _:
            reason = "expected an HTTP answer, got something else"
    return reason, "transient"


def _untrusted(error: Exception) -> str:
    message: str = getattr(error, "verify_message", "")
    # OpenSSL's text for these two repeats the name in the URL, which may be a secret of its own.
    return "it is for another name" if "mismatch" in message else message or "it was not accepted"


def _in_words(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number) if number else "none of its addresses could be reached"
