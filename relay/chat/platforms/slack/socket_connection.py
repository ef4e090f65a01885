"""Opens a Socket Mode connection: asks Slack for its URL, connects, and waits for the greeting.

Source: https://docs.slack.dev/apis/events-api/using-socket-mode. `socket_mode` uses the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson

from relay.chat.platforms.slack.settings import Settings
from relay.chat.platforms.slack.web import WebApi
from relay.errors import Deferred, DeliveryError
from relay.net.egress import parse_receiver_url

HEARTBEAT_INTERVAL = 10.0
"""Seconds between pings. aiohttp closes a connection that does not answer within half of it."""
CONNECT_TIMEOUT = 10.0
MAX_MESSAGE_BYTES = 512 * 1024


class SocketConnector:
    """Opens connections with the current app-level token."""

    def __init__(self, api: WebApi, session: aiohttp.ClientSession, settings: Settings) -> None:
        self._api = api
        self._settings = settings
        # The same guarded sockets as the sink's session, but a handshake would follow redirects.
        self.session = aiohttp.ClientSession(
            connector=session.connector,
            connector_owner=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=session.headers,
            trust_env=False,
            middlewares=(_refuse_redirects,),
        )
        """Must be entered as a context manager before `connect`."""

    async def connect(self) -> aiohttp.ClientWebSocketResponse:
        """Return a connection that Slack has greeted.

        Raises Deferred. Its text does not contain the URL, which holds a secret ticket.
        """
        try:
            response = await self._api.call(
                self._api.methods.apps_connections_open, app_token=self._settings.app_level_token()
            )
            url = _parse_socket_url(response.get("url"), allow_http=self._settings.allow_http)
            async with asyncio.timeout(CONNECT_TIMEOUT):
                return await self._connect_and_wait_for_greeting(url)
        except Deferred as error:
            raise Deferred(
                f"Socket Mode: {error.reason}", after=error.after, failure=error.failure
            ) from None
        except (DeliveryError, ValueError) as error:
            raise Deferred(f"Socket Mode: {error}", failure="slow") from None
        except TimeoutError:
            raise Deferred(
                f"Socket Mode: expected a connection within {CONNECT_TIMEOUT:g} s, got none"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
            reason = cause.strerror if isinstance(cause, OSError) else None
            raise Deferred(
                f"Socket Mode: expected a connection, it failed: {reason or type(error).__name__}"
            ) from None

    async def _connect_and_wait_for_greeting(self, url: str) -> aiohttp.ClientWebSocketResponse:
        socket = await self.session.ws_connect(
            url, heartbeat=HEARTBEAT_INTERVAL, max_msg_size=MAX_MESSAGE_BYTES
        )
        is_greeted = False
        try:
            is_greeted = envelope_type(parse_envelope(await socket.receive())) == "hello"
        finally:
            if not is_greeted:
                await socket.close()
        if not is_greeted:
            raise Deferred("expected Slack's hello, got something else")
        return socket


def parse_envelope(message: aiohttp.WSMessage) -> dict[str, Any] | None:
    """Return the JSON object in a message; None for the end and for any other message."""
    if message.type is not aiohttp.WSMsgType.TEXT:
        return None
    try:
        envelope = orjson.loads(message.data)
    except orjson.JSONDecodeError:
        return None
    return envelope if isinstance(envelope, dict) else None


def envelope_type(envelope: Mapping[str, Any] | None) -> str:
    """Return the type of an envelope; an empty text for None."""
    return str(envelope.get("type")) if envelope is not None else ""


def _parse_socket_url(url: Any, *, allow_http: bool) -> str:
    """Return the URL if the relay may call it. Raises ValueError, which does not contain it."""
    scheme, _, rest = url.partition("://") if isinstance(url, str) else ("", "", "")
    if scheme not in ("wss", "ws"):
        raise ValueError(
            "expected a URL that starts with wss:// from apps.connections.open, got another value"
        )
    http_scheme = "https" if scheme == "wss" else "http"
    parse_receiver_url(f"{http_scheme}://{rest}", allow_http=allow_http)
    return str(url)


async def _refuse_redirects(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    response = await handler(request)
    if 300 <= response.status <= 399:  # HTTP
        response.close()
        raise aiohttp.ClientConnectionError("redirects are not followed")
    return response
