"""What is said to one person alone after a click: sent to the response URL that came with it, if it is Slack's own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
from yarl import URL

from relay.errors import Deferred
from relay.net.egress import parse_receiver_url
from relay.net.http import Request, post

_MOST = 20
"""Answers that are under way at once; more are not said: what counts is on record, and shown by the messages."""
_PATIENCE = 5.0
_log = logging.getLogger(__name__)


class PrivateReplies:
    """Sends at the side. Whether it arrives changes nothing, so it is tried once."""

    def __init__(self, session: aiohttp.ClientSession, api: URL, *, allow_http: bool) -> None:
        self._session = session
        self._api = api
        self._allow_http = allow_http
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, url: str, body: Mapping[str, Any]) -> None:
        """Begin to send; returns at once. What is not Slack's own address is never called."""
        target = own(url, self._api, allow_http=self._allow_http)
        if target is None:
            _log.warning("a response URL was not of %s, and was not called", self._api.host)
        elif len(self._tasks) < _MOST:
            request = Request(target, {"Content-Type": "application/json"}, orjson.dumps(body))
            task = asyncio.create_task(self._send(request), name="slack: answer to one person")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    @asynccontextmanager
    async def ended(self) -> AsyncIterator[None]:
        """When this context is left, nothing is under way any more."""
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send(self, request: Request) -> None:
        try:
            answer = await post(self._session, request, seconds=_PATIENCE)
        except Deferred as error:
            _log.info("what was to be said to one person was not taken: %s", error)
            return
        if answer.status != 200:  # HTTP
            _log.info("what was to be said to one person was not taken: status %d", answer.status)


def own(text: str, api: URL, *, allow_http: bool) -> URL | None:
    """The URL, if it is of Slack itself: the host of the Web API, or ``hooks.`` before it. Pure."""
    try:
        url = parse_receiver_url(text, allow_http=allow_http)
    except ValueError:
        return None
    same = (
        url.host in (api.host, f"hooks.{api.host}")
        and url.port == api.port
        and url.scheme == api.scheme
    )
    return url if same else None
