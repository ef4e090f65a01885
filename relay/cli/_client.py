"""The HTTP client of the command line: calls the API of a running relay.

It turns every failed call into an error with a sentence and an exit code. `_connection` decides
which relay is called.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import orjson
from yarl import URL

from relay.cli._exit_codes import CommandFailed, NotFound, RefusedByPolicy, Unprocessable
from relay.net.tls import explain_refusal

_CALL_TIMEOUT: Final = aiohttp.ClientTimeout(total=30, sock_connect=10)
_STREAM_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=90)
"""The relay sends a comment on an idle stream every few seconds."""
_POST_ATTEMPTS: Final = 3
_RETRY_DELAY: Final = 0.5
_CONNECTION_ERRORS: Final = (
    aiohttp.ClientConnectionError,
    aiohttp.ClientPayloadError,
    TimeoutError,
)


class Client:
    """Calls one relay. Raises CommandFailed, or RefusedByPolicy if rules or rights forbid the call.

    ``address`` is the relay's address for error messages: a URL, or the path of a socket.
    """

    def __init__(self, session: aiohttp.ClientSession, base_url: str, address: str) -> None:
        self._session = session
        self._base_url = base_url.rstrip("/")
        self._address = address

    async def get(self, *path: str, **query: str) -> Any:
        """Return the JSON that answers a GET."""
        return await self._call("GET", path, query=query)

    async def get_first_or_all_pages(
        self, *path: str, all_pages: bool, **query: str
    ) -> dict[str, Any]:
        """Return the first page of a list, or all pages joined into one."""
        page: dict[str, Any] = await self.get(*path, **query)
        items = page["items"]
        while all_pages and page["next"] is not None:
            page = await self.get(*path, cursor=page["next"], **query)
            items = items + page["items"]
        return {"items": items, "next": page["next"]}

    async def get_details_with_log(
        self, *path: str, log: str, all_pages: bool, **query: str
    ) -> dict[str, Any]:
        """Return an event or a delivery with the newest rows of its list ``log``, or with all.

        An older relay has all in one answer, without ``next``.
        """
        details: dict[str, Any] = await self.get(*path, **query)
        while all_pages and details.get("next") is not None:
            before = await self.get(*path, cursor=details["next"], **query)
            details[log], details["next"] = before[log] + details[log], before["next"]
        return details

    async def post(self, *path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON that answers a POST.

        Repeats a call without an answer, with the same Idempotency-Key.
        """
        headers = {"Idempotency-Key": str(uuid.uuid4())}
        return await self._call("POST", path, body=body, headers=headers, attempts=_POST_ATTEMPTS)

    async def put(self, *path: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON that answers a PUT."""
        return await self._call("PUT", path, body=body)

    @asynccontextmanager
    async def stream_chunks(
        self, *path: str, headers: Mapping[str, str]
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yield the chunks of an endless response. Raises ConnectionError when it breaks."""
        url = self._url(path, query=None)
        try:
            async with self._session.get(
                url, headers=headers, timeout=_STREAM_TIMEOUT, allow_redirects=False
            ) as response:
                if response.status != HTTPStatus.OK:
                    raise error_from_response(response.status, await response.read())
                yield response.content.iter_any()
        except _CONNECTION_ERRORS as error:
            raise ConnectionError(self._describe_connection_error(error)) from error

    async def _call(
        self,
        method: str,
        path: tuple[str, ...],
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        attempts: int = 1,
    ) -> Any:
        for attempts_left in reversed(range(attempts)):
            try:
                async with self._session.request(
                    method,
                    self._url(path, query),
                    json=body,
                    headers=headers,
                    timeout=_CALL_TIMEOUT,
                    allow_redirects=False,
                ) as response:
                    return self._decode_answer_or_raise_http_error(
                        response.status, await response.read()
                    )
            except _CONNECTION_ERRORS as error:
                if not attempts_left or isinstance(error, aiohttp.ClientConnectorError):
                    raise CommandFailed(self._describe_connection_error(error)) from error
                await asyncio.sleep(_RETRY_DELAY)
        raise AssertionError

    def _decode_answer_or_raise_http_error(self, status: int, body: bytes) -> Any:
        if not 200 <= status < 300:
            raise error_from_response(status, body)
        try:
            answer = orjson.loads(body)
        except orjson.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict):
            raise CommandFailed(f"expected an answer in JSON from {self._address}: is it a relay?")
        return answer

    def _url(self, path: tuple[str, ...], query: Mapping[str, str] | None) -> URL:
        # An EventId may hold any character, so each part is quoted before yarl sees it.
        quoted = (quote(part, safe="") for part in path)
        return URL("/".join((self._base_url, "v1", *quoted)), encoded=True).with_query(
            query or None
        )

    def _describe_connection_error(self, error: BaseException) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer came from {self._address} in time"
        if not isinstance(error, aiohttp.ClientConnectorError):
            return f"the connection to {self._address} broke: {error}"
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            problem, remedy = explain_refusal(error.certificate_error, "--ca-file or ca_file")
            return f"the certificate of {self._address} was refused: {problem}. Remedy: {remedy}"
        if isinstance(error.os_error, PermissionError):
            return (
                f"you may not open {self._address}: the rights of its file decide who may. "
                "Join its group, or use --url and a key"
            )
        reason = error.os_error.strerror or error.os_error
        return f"no relay answers at {self._address}: {reason}. Is the relay running?"


def error_from_response(status: int, body: bytes) -> CommandFailed | RefusedByPolicy:
    """Return the error for a response that is not 2xx, with the ``detail`` of its problem body."""
    problem: Any = {}
    try:
        problem = orjson.loads(body)
        detail = str(problem["detail"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        detail = f"expected a relay's answer, got HTTP {status}"
    if status == HTTPStatus.UNAUTHORIZED:
        return CommandFailed(
            f"{detail} (401): give a key of api.clients in IMDS_RELAY_KEY or with --key-file"
        )
    if status == HTTPStatus.NOT_FOUND:
        return NotFound(detail)
    if status == HTTPStatus.UNPROCESSABLE_ENTITY and isinstance(problem, dict):
        return Unprocessable(detail, problem)
    if status in (HTTPStatus.FORBIDDEN, HTTPStatus.CONFLICT):
        return RefusedByPolicy(f"refused: {detail}")
    return CommandFailed(detail)
