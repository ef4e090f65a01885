"""HTTP requests to receivers: of webhooks and of chat platforms.

`open_session` makes a session whose sockets pass the egress guard. `post` and `send` make one
request with a deadline, and read a bounded start of the body. `interpret_response` says
what a response means for a delivery. Each failure is a Deferred, whose kind of failure decides
about the next try (`relay.delivery.retry`). The texts of aiohttp can contain the URL, which is
secret. The texts of this module never do.
"""

from __future__ import annotations

import os
import re
import ssl
from asyncio import get_running_loop, timeout_at
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import field
from datetime import datetime
from functools import lru_cache
from http import HTTPStatus
from io import BytesIO
from typing import Any, Literal

import aiohttp
import orjson
from aiohttp.abc import AbstractResolver
from yarl import URL

from relay import __version__
from relay.errors import Deferred, Failure
from relay.events import fast_dataclass
from relay.events.timestamps import parse_timestamp
from relay.net.egress import AddressRefused, guarded_socket
from relay.net.tls import HTTPS_CA_OPTION, default_context, explain_refusal

Method = Literal["GET", "POST", "PUT"]
USER_AGENT = f"imds-relay/{__version__}"
MAX_RESPONSE_BYTES = 64 * 1024
"""Bytes of a response body that are read. The connection of a longer one is closed."""
MAX_ANSWER_BYTES = 1024 * 1024
"""The same for a chat, which repeats the message in its answer, with escapes."""
MAX_TEXT_BYTES = 1024
"""Bytes of a response body that the log of attempts keeps."""
BODY_TIMEOUT = 1.0
"""Seconds for the body of a response whose status decides. The next event of its EventId waits."""
MAX_RETRY_AFTER = 3600.0
"""Seconds: the longest pause that the server of a sink can ask for."""
_RETRY_AFTER_SECONDS = re.compile(r"[0-9]+(\.[0-9]+)?")
TRANSIENT_STATUSES = {408, 409, 425, 429}
_MAX_HARMLESS_SKEW = 60.0
"""Seconds. Receivers of Standard Webhooks accept at least this much."""
_KEEPALIVE_TIMEOUT = 4.0
"""Seconds. Many servers close an idle connection after five. A request at that moment fails."""
_MAX_SINGLE_WRITE_BYTES = 64 * 1024
"""Bytes of a request body that are written at once, without a task that writes it in pieces."""


@fast_dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A complete request for `post` or `send`.

    ``secrets`` are texts in the request that no log may contain, though a server repeats them. The
    path and the query of the URL always count as secrets. ``proxy_headers`` are for a proxy that
    makes a tunnel to the receiver, and ``tls`` takes the place of the session's.
    """

    url: URL
    headers: Mapping[str, str]
    body: bytes
    secrets: tuple[str, ...] = ()
    proxy: URL | None = None
    proxy_headers: Mapping[str, str] | None = None
    tls: ssl.SSLContext | None = None


@fast_dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A response, after ``elapsed`` seconds.

    ``text`` is the start of the body without secrets, at most `MAX_TEXT_BYTES`; None if there is
    nothing to show. ``body`` is the start of the body as it came, at most `MAX_RESPONSE_BYTES`, or
    `MAX_ANSWER_BYTES`. It can contain secrets, so it must not be logged.
    """

    status: int
    headers: Mapping[str, str]
    text: str | None
    elapsed: float = 0.0
    body: bytes = field(default=b"", repr=False)

    def json(self) -> Any:
        """Return the value of the body; None if it is no JSON."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None


def interpret_response(response: Response, now: datetime) -> Deferred | None:
    """Return None if the delivery succeeded (2xx), else the error to raise.

    408, 409, 425, 429 and 5xx are transient. 410 disables the sink. Anything else, such as a
    redirect, needs a person.
    """
    status = response.status
    if 200 <= status <= 299:
        return None
    skew = measure_clock_skew(response.headers.get("Date"), now, elapsed=response.elapsed)
    failure: Failure = "slow"
    if status == 410:
        failure = "disabled"
        advice = ": the receiver asks never to be called again"
    elif status in TRANSIENT_STATUSES or 500 <= status <= 599:
        failure = "transient"
        advice = ""
    elif 300 <= status <= 399:
        advice = ": redirects are not followed, set the final URL"
    else:
        advice = ": correct the receiver or its URL"
        if status in {400, 401, 403} and skew is not None and abs(skew) > _MAX_HARMLESS_SKEW:
            # It may have refused a good signature for its timestamp.
            why = "and signatures contain the time: check both clocks"
            advice += f"; {describe_skew(skew)}, {why}"
    return Deferred(
        f"expected 2xx, got {status_text(status)}{advice}",
        after=parse_retry_after(response.headers.get("Retry-After"), now, maximum=MAX_RETRY_AFTER),
        failure=failure,
        status=status,
        answer=response.text,
        skew=skew,
    )


def status_text(status: int) -> str:
    """Return the status with its phrase, such as ``404 Not Found``."""
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def parse_retry_after(text: str | None, now: datetime, *, maximum: float) -> float | None:
    """Return the seconds that a ``Retry-After`` header asks for, between 0 and ``maximum``.

    The header holds seconds or a date (RFC 9110, section 10.2.3). A fraction of a second is
    accepted too. Returns None if there is no header, or one that cannot be read.
    """
    text = (text or "").strip()
    if _RETRY_AFTER_SECONDS.fullmatch(text) is not None:
        return min(float(text), maximum)
    date = parse_timestamp(text)
    if date is None:
        return None
    return min(max((date - now).total_seconds(), 0.0), maximum)


def measure_clock_skew(date_header: str | None, now: datetime, *, elapsed: float) -> float | None:
    """Return how many seconds the server's clock is ahead of ours for certain; negative: behind.

    Returns None without a readable ``Date``. The server wrote it at some moment of our wait, which
    took ``elapsed`` seconds, and without the fraction of its second (RFC 9110, section 6.6.1).
    """
    date = parse_timestamp(date_header)
    if date is None:
        return None
    ahead = (date - now).total_seconds()
    behind = ahead + elapsed + 1
    return ahead if ahead > 0 else min(behind, 0.0)


def describe_skew(seconds: float) -> str:
    return f"its clock is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} ours"


def open_session(
    *, resolver: AbstractResolver | None = None, tls: ssl.SSLContext | None = None
) -> aiohttp.ClientSession:
    """Return a session for one sink.

    Its sockets refuse metadata addresses. It has no cookies, no decompression, no timeouts (`send`
    has one) and ignores proxies and .netrc of the environment. The defaults are the resolver and
    the CAs of this machine.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0,  # the sink's `concurrency` is the limit
            keepalive_timeout=_KEEPALIVE_TIMEOUT,
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
    """Return credentials for an ``Authorization`` header (RFC 7617), in UTF-8."""
    return f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"


async def post(session: aiohttp.ClientSession, request: Request, *, seconds: float) -> Response:
    """POST the request and return the response. Raises Deferred if there is none in time.

    Use it if the status decides: it waits for the body no longer than `BODY_TIMEOUT`.
    """
    return await send(session, "POST", request, seconds=seconds, body_timeout=BODY_TIMEOUT)


async def send(
    session: aiohttp.ClientSession,
    method: Method,
    request: Request,
    *,
    seconds: float,
    body_timeout: float | None = None,
    most: int = MAX_RESPONSE_BYTES,
) -> Response:
    """Send the request and return the response. Raises Deferred if there is none in ``seconds``.

    A slow, broken or long body does not matter: the response then has the start of it.
    ``body_timeout`` is how many of the seconds the body may take; None allows all of them. ``most``
    is how many bytes of it are read.
    """
    if session.closed:  # a click can still be answered while a reload disconnects its chat
        raise Deferred("the relay is stopping, or reloads its configuration")
    loop = get_running_loop()
    start = loop.time()
    deadline = start + seconds
    is_small = len(request.body) <= _MAX_SINGLE_WRITE_BYTES
    try:
        async with timeout_at(deadline):
            response = await session.request(
                method,
                request.url,
                data=request.body if is_small else BytesIO(request.body),
                headers=request.headers,
                proxy=request.proxy,
                proxy_headers=request.proxy_headers,
                ssl=request.tls or True,  # True: the context of the session
                allow_redirects=False,
            )
    except TimeoutError:
        raise Deferred(f"expected an answer within {seconds:g} s, none came") from None
    except (aiohttp.ClientError, OSError) as error:
        raise explain_error(error) from None
    elapsed = loop.time() - start
    if body_timeout is not None:
        deadline = min(deadline, loop.time() + body_timeout)
    async with response:  # closes the connection if the body has not ended
        body = await read_body_start(response, deadline, most)
    is_compressed = "Content-Encoding" in response.headers
    return Response(
        status=response.status,
        headers=response.headers,
        text=None if is_compressed else _loggable_text(body, request),
        elapsed=elapsed,
        body=body,
    )


async def read_body_start(
    response: aiohttp.ClientResponse, deadline: float, most: int = MAX_RESPONSE_BYTES
) -> bytes:
    """Return the start of the body; less of it if it is slow or broken."""
    body = b""
    try:
        if response.content.is_eof():  # all of it came with the headers: no timeout is needed
            return response.content.read_nowait(most)
        async with timeout_at(deadline):
            while len(body) < most:
                chunk = await response.content.read(most - len(body))
                if not chunk:
                    break
                body += chunk
    except (TimeoutError, aiohttp.ClientError, OSError):
        pass  # the status is known, which is enough
    return body


def _loggable_text(body: bytes, request: Request) -> str | None:
    """Return the start of the body without secrets of the request; None if nothing is left.

    Secrets are replaced before the cut: a cut could leave the first half of one.
    """
    if not body:  # as most answers to a delivery
        return None
    text = body.decode("utf-8", "replace").strip()
    for secret in _texts_to_hide(request.url, request.secrets):
        text = text.replace(secret, "…")
    text = text[:MAX_TEXT_BYTES]
    if not text.isprintable():
        text = "".join(
            char if char.isprintable() or char in "\t\n" else "\N{REPLACEMENT CHARACTER}"
            for char in text
        )
    return text.encode()[:MAX_TEXT_BYTES].decode("utf-8", "ignore") or None


@lru_cache(maxsize=256)  # a sink has one URL and few secrets
def _texts_to_hide(url: URL, secrets: tuple[str, ...]) -> list[str]:
    """Return the secrets of a request, the longest first: one can contain another."""
    texts = {
        url.raw_path_qs,
        url.path_qs,
        url.raw_path,
        url.path,
        url.raw_query_string,
        url.query_string,
        *secrets,
    }
    return sorted((text for text in texts if len(text) > 1), key=len, reverse=True)


def explain_error(error: Exception) -> Deferred:
    """Return what a failed call means. The text of the error itself can contain the URL."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    system_text = cause.strerror if isinstance(cause, OSError) else None
    number = cause.errno if isinstance(cause, OSError) else None
    problem = os.strerror(number) if number else "none of its addresses could be reached"
    failure: Failure = "transient"
    match error:
        case aiohttp.ClientConnectorError() if isinstance(cause, AddressRefused):
            # Not permanent: the name can get another address.
            failure = "slow"
            reason = f"expected a receiver's address, the name in the URL stands for {system_text}"
        case aiohttp.ClientConnectorCertificateError():
            explanation = "; ".join(explain_refusal(error.certificate_error, HTTPS_CA_OPTION))
            reason = f"expected a certificate that this machine trusts: {explanation}"
        case aiohttp.ClientConnectorDNSError():
            problem = system_text or "the look-up failed"
            reason = f"expected an address for the name in the URL: {problem}"
        case aiohttp.ClientHttpProxyError():
            status = status_text(error.status)
            reason = f"expected the proxy to connect to the receiver, it answered {status}"
        case aiohttp.ClientSSLError() | ssl.SSLError():
            problem = getattr(cause, "reason", None) or "the connection was closed"
            reason = f"expected TLS, the handshake failed: {problem}"
        case aiohttp.ClientProxyConnectionError():
            reason = f"expected a connection to the proxy: {problem}"
        case aiohttp.ServerDisconnectedError():
            reason = "expected an answer, the connection was closed without one"
        case OSError():
            reason = f"expected a connection to the receiver: {problem}"
        case _:
            reason = "expected an HTTP answer, got something else"
    return Deferred(reason, failure=failure)
