"""What every sink that speaks HTTP shares: the session, one bounded request, and what its answer means."""

from __future__ import annotations

import os
import re
import ssl
from asyncio import get_running_loop, timeout_at
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from http import HTTPStatus
from io import BytesIO
from typing import Literal

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from relay import __version__
from relay.errors import Deferred, Failure
from relay.events.timestamps import parse_timestamp
from relay.net.egress import AddressRefused, guarded_socket
from relay.net.tls_context import default_context, explain_refusal
from relay.sinks import Receipt

Method = Literal["GET", "POST", "PUT"]
USER_AGENT = f"imds-relay/{__version__}"
MAX_RESPONSE_BYTES = 64 * 1024
"""Bytes of an answer that are read; what is longer is cut off with its connection."""
MAX_KEPT_BYTES = 1024
"""Bytes of an answer that are kept for the log of attempts."""
BODY_TIMEOUT = 1.0
"""Seconds that an answer's body may take where its status decides: the next event of this EventId waits."""
MAX_RETRY_AFTER = 3600.0
"""Seconds to which ``Retry-After`` is cut."""
CA_OPTION = "tls.ca_file of the webhook, or install it on this machine"
"""Where the operator names a CA; chats have no option for it."""
_IDLE = 4.0  # seconds; many servers close an idle connection after five, and one that both use at that instant is a failure
_IN_ONE_GO = (
    64 * 1024
)  # bytes of a body that are written at once, without a task that does it piece by piece
_DRIFT = 60.0  # seconds; what Standard Webhooks receivers forgive at the least


@dataclass(frozen=True, slots=True)
class Request:
    """A request, complete: building it is pure, sending it is `post`, or `send` where it is not a POST.

    ``hidden``: texts in it that no log may hold, though the far side repeats them.
    """

    url: URL
    headers: Mapping[str, str]
    body: bytes
    hidden: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Transport:
    """How a request gets there. ``tls`` None: with the session's certificates. ``pass_proxy``: Proxy-Authorization."""

    proxy: URL | None = None
    pass_proxy: str | None = None
    tls: ssl.SSLContext | None = None


DIRECT = Transport()


@dataclass(frozen=True, slots=True)
class Response:
    """What came back. ``text`` is at most 1 KiB of the body, None where there is none to show. ``took`` is in seconds.

    ``body`` is what was read, 64 KiB at the most, for whoever asked for it: it can hold secrets, and is for no log.
    """

    status: int
    headers: Mapping[str, str]
    text: str | None
    elapsed: float = 0.0
    body: bytes = field(default=b"", repr=False)


def open_session(
    *, resolver: AbstractResolver | None = None, tls: ssl.SSLContext | None = None
) -> aiohttp.ClientSession:
    """A sink's own session: guarded sockets, no proxy or netrc of the environment, no cookies, nothing unpacked, no timeouts.

    ``post`` has the one timeout. None stands for the machine's own resolver and for the certificates that it trusts.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0,  # the sink's `concurrency` is the limit
            keepalive_timeout=_IDLE,
            socket_factory=guarded_socket,
            resolver=resolver,
            ssl=tls or default_context(),
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"User-Agent": USER_AGENT, "Accept-Encoding": "identity"},
        auto_decompress=False,
        trust_env=False,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
    )


def basic_authorization(user: str, password: str) -> str:
    """Credentials for an Authorization header (RFC 7617), in UTF-8."""
    return f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"


async def post(
    session: aiohttp.ClientSession, request: Request, *, seconds: float, way: Transport = DIRECT
) -> Response:
    """POST the request and read the answer, all within ``seconds``. Raises Deferred where no answer came.

    Its status decides, so little time is lost on its body.
    """
    return await send(session, "POST", request, seconds=seconds, way=way, patience=BODY_TIMEOUT)


async def send(
    session: aiohttp.ClientSession,
    method: Method,
    request: Request,
    *,
    seconds: float,
    way: Transport = DIRECT,
    patience: float | None = None,
) -> Response:
    """Send the request and read the answer, all within ``seconds``. Raises Deferred where no answer came.

    An answer whose body is slow, broken or too long is an answer: its status was said. ``patience``: seconds that the body
    may take; None: all that are left, since what the body says decides.
    """
    began = get_running_loop().time()
    deadline = began + seconds
    at_proxy = {"Proxy-Authorization": way.pass_proxy} if way.pass_proxy is not None else {}
    tunnelled = request.url.scheme == "https"  # else the proxy reads the request itself
    try:
        async with timeout_at(deadline):
            response = await session.request(
                method,
                request.url,
                data=request.body if len(request.body) <= _IN_ONE_GO else BytesIO(request.body),
                headers=request.headers if tunnelled else {**request.headers, **at_proxy},
                proxy=way.proxy,
                proxy_headers=at_proxy if tunnelled else None,
                ssl=way.tls or True,  # True: as the session has it
                allow_redirects=False,
            )
    except TimeoutError:
        raise Deferred(f"expected an answer within {seconds:g} s, none came") from None
    except (aiohttp.ClientError, OSError) as error:
        reason, failure = _no_answer(error)
        raise Deferred(
            reason, failure=failure
        ) from None  # the library's own texts can hold the URL
    took = get_running_loop().time() - began
    async with (
        response
    ):  # closes the connection if more is to come: the next request would take it for its answer
        start = b""
        if not response.content.at_eof():
            until = (
                deadline
                if patience is None
                else min(deadline, get_running_loop().time() + patience)
            )
            start = await _start_of_body(response, until)
    readable = "Content-Encoding" not in response.headers  # nothing is unpacked
    return Response(
        response.status,
        response.headers,
        _text(start, request) if readable and start else None,
        took,
        start,
    )


async def _start_of_body(response: aiohttp.ClientResponse, deadline: float) -> bytes:
    start = b""
    left = MAX_RESPONSE_BYTES
    try:
        async with timeout_at(deadline):
            while left and (chunk := await response.content.read(left)):
                left -= len(chunk)
                start += chunk
    except (TimeoutError, aiohttp.ClientError, OSError):
        return start
    return start


def _text(start: bytes, request: Request) -> str | None:
    """The start of a body as text to log: of one that repeats what it was sent, without what may be secret.

    All that was read is looked through before it is cut, or a secret at the cut would show its first half.
    """
    text, url = start.decode("utf-8", "replace").strip(), request.url
    secret = (
        url.raw_path_qs,
        url.path_qs,
        url.raw_path,
        url.path,
        url.raw_query_string,
        url.query_string,
        *request.hidden,
    )
    for part in sorted({part for part in secret if len(part) > 1}, key=len, reverse=True):
        text = text.replace(part, "…")
    text = text[:MAX_KEPT_BYTES]
    shown = "".join(
        char if char.isprintable() or char in "\t\n" else "\N{REPLACEMENT CHARACTER}"
        for char in text
    )
    return shown.encode()[:MAX_KEPT_BYTES].decode("utf-8", "ignore") or None


def interpret_response(answer: Response, now: datetime) -> Receipt | Deferred:
    """What an answer means for the delivery, to be returned or raised.

    2xx is delivered. 408, 409, 425, 429 and 5xx pass by themselves; 410 asks us to stop; for anything else, redirects
    included, somebody must mend something.
    """
    status, skew = answer.status, _skew(answer, now)
    if 200 <= status <= 299:
        return Receipt(status, answer.text, skew)
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
        advice = f": the receiver or its URL must be mended{_drift(status, skew)}"
    reason = f"expected 2xx, got {_named(status)}{advice}"
    return Deferred(
        reason,
        after=_rest(answer.headers, now),
        failure=failure,
        status=status,
        answer=answer.text,
        skew=skew,
    )


def _named(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def _rest(headers: Mapping[str, str], now: datetime) -> float | None:
    """Seconds of rest that ``Retry-After`` asks for (RFC 9110, 10.2.3: seconds or a date), cut to an hour."""
    text = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]+", text) is not None:
        return min(float(text), MAX_RETRY_AFTER)
    date = parse_timestamp(text)
    return None if date is None else min(max((date - now).total_seconds(), 0.0), MAX_RETRY_AFTER)


@lru_cache(maxsize=16)
def _date(text: str | None) -> datetime | None:
    """A ``Date``, which all answers of one second have in common."""
    return parse_timestamp(text)


def _skew(answer: Response, now: datetime) -> float | None:
    """Seconds that the far side's clock is certainly ahead of ours, by its ``Date``; None where it shows none.

    It was written at some moment while we waited, and has lost its fraction of a second (RFC 9110, 6.6.1).
    """
    date = _date(answer.headers.get("Date"))
    if date is None:
        return None
    ahead = (date - now).total_seconds()
    behind = ahead + answer.elapsed + 1
    return ahead if ahead > 0 else min(behind, 0.0)


def _drift(status: int, skew: float | None) -> str:
    """A hint where a good signature may have been refused for its timestamp."""
    if status not in {400, 401, 403} or skew is None or abs(skew) <= _DRIFT:
        return ""
    return f"; its clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} ours, and signatures bear the time: check both"


def _no_answer(error: Exception) -> tuple[str, Failure]:
    """Why there was no answer, in words that hold nothing of the URL, and what the retry plan should make of it."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    said = cause.strerror if isinstance(cause, OSError) else None
    match error:
        case _ if isinstance(cause, AddressRefused):
            return (
                f"expected a receiver's address, the name in the URL stands for {said}",
                "slow",
            )  # names can change
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
    return "; ".join(
        explain_refusal(error, CA_OPTION)
    )  # the library's own texts repeat the name in the URL


def _in_words(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number) if number else "none of its addresses could be reached"
