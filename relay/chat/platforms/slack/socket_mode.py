"""Socket Mode: receives clicks and commands over a connection that the relay opens to Slack.

`SocketConnector` opens one connection: it asks Slack for the URL, connects, and waits for the
greeting. `SocketMode` stays connected, passes each envelope on and acknowledges it. An envelope is
a message of Slack with one click or command. Source:
https://docs.slack.dev/apis/events-api/using-socket-mode. The SDK's client is not used for the
reasons in docs/decisions/0017-own-slack-socket.md.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import aiohttp
import orjson

from relay.chat import CallbackRefused, CallbackReply
from relay.chat.platforms.slack.requests import (
    Call,
    parse_button_interaction,
    parse_slash_command_fields,
)
from relay.chat.platforms.slack.settings import Settings
from relay.chat.platforms.slack.web import WebApi
from relay.clock import Clock
from relay.errors import Deferred, DeliveryError
from relay.log_fields import log_extra
from relay.log_once import LogOnce
from relay.net.backoff import exponential_backoff_without_jitter, with_jitter
from relay.net.egress import parse_receiver_url

HEARTBEAT_INTERVAL = 10.0
"""Seconds between pings. aiohttp closes a connection that does not answer within half of it."""
CONNECT_TIMEOUT = 10.0
"""Seconds from the start of the handshake to the greeting."""
MAX_MESSAGE_BYTES = 512 * 1024
"""aiohttp closes a connection on which a longer message arrives."""
INITIAL_RECONNECT_DELAY = 0.5
MAX_RECONNECT_DELAY = 60.0
"""Seconds before the relay connects again."""
STABLE_CONNECTION_TIME = 30.0
"""Seconds after which a connection counts as successful and resets the delay."""
DRAIN_TIMEOUT = 30.0
"""Seconds for which the relay reads from a connection that Slack has replaced."""
MAX_OPEN_ENVELOPES = 16
"""Envelopes that are handled at once. Nothing is read while there are so many."""
_SWITCHED_OFF = (
    "Socket Mode is switched off in the app's settings: "
    "switch it on, or give signing_secret instead of app_token"
)
_log = logging.getLogger(__name__)

HandleCall = Callable[[Call], Awaitable[CallbackReply]]


class SocketConnector:
    """Opens connections for one sink, with its current app-level token."""

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
            is_greeted = _envelope_type(_parse_envelope(await socket.receive())) == "hello"
        finally:
            if not is_greeted:
                await socket.close()
        if not is_greeted:
            raise Deferred("expected Slack's hello, got something else")
        return socket


class SocketMode:
    """Stays connected for one sink. An envelope is acknowledged after ``handle`` has returned.

    A decision is therefore on disk before Slack gets the acknowledgement. ``random_fraction``
    returns a number from 0 to 1, and varies the pause before the next connection.
    """

    def __init__(
        self,
        connector: SocketConnector,
        clock: Clock,
        handle: HandleCall,
        *,
        sink_name: str,
        drain_timeout: float = DRAIN_TIMEOUT,
        random_fraction: Callable[[], float] = random.random,
    ) -> None:
        self._connector = connector
        self._clock = clock
        self._handle = handle
        self._sink_name = sink_name
        self._drain_timeout = drain_timeout
        self._random_fraction = random_fraction
        self._open_envelopes = asyncio.Semaphore(MAX_OPEN_ENVELOPES)
        self._state_log = LogOnce(_log)

    async def run(self) -> NoReturn:
        """Receive envelopes until cancelled, and then end within a second."""
        failures = 0
        async with self._connector.session, asyncio.TaskGroup() as tasks:
            while True:
                started_at = self._clock.monotonic()
                minimum_delay = 0.0
                try:
                    await self._connect_until_new_connection_needed(tasks)
                except Deferred as error:
                    self._state_log.log_if_changed(
                        logging.WARNING,
                        "sink %s: clicks and commands do not arrive: %s",
                        self._sink_name,
                        error.reason,
                        extra=log_extra(sink=self._sink_name, reason=error.reason),
                    )
                    slow_delay = MAX_RECONNECT_DELAY if error.failure == "slow" else 0.0
                    minimum_delay = error.after or slow_delay
                except Exception:  # noqa: BLE001  # an internal error must not end Socket Mode
                    _log.exception(
                        "sink %s: an internal error ended the Socket Mode connection; "
                        "the relay connects again",
                        self._sink_name,
                    )
                if self._clock.monotonic() - started_at > STABLE_CONNECTION_TIME:
                    failures = 0
                failures += 1
                delay = exponential_backoff_without_jitter(
                    failures, first=INITIAL_RECONNECT_DELAY, maximum=MAX_RECONNECT_DELAY
                )
                delay = with_jitter(max(delay, minimum_delay), self._random_fraction())
                await self._clock.sleep(delay)

    async def _connect_until_new_connection_needed(self, tasks: asyncio.TaskGroup) -> None:
        """Connect, and return when a new connection is needed. Raises Deferred.

        The old connection may still be read for a while after this returns.
        """
        socket = await self._connector.connect()
        self._state_log.log_if_changed(
            logging.INFO,
            "sink %s: Socket Mode is connected",
            self._sink_name,
            extra=log_extra(sink=self._sink_name),
        )
        ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        tasks.create_task(
            self._read_envelopes_until_connection_closes(socket, tasks, ended),
            name=f"{self._sink_name}: socket",
        )
        problem = await ended
        if problem is not None:
            raise Deferred(problem, failure="slow")

    async def _read_envelopes_until_connection_closes(
        self,
        socket: aiohttp.ClientWebSocketResponse,
        tasks: asyncio.TaskGroup,
        ended: asyncio.Future[str | None],
    ) -> None:
        """Read envelopes until the connection closes.

        ``ended`` is set as soon as a new connection is needed: to None, or to a problem that a new
        connection will have, too.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as limit:
                async for message in socket:
                    envelope = _parse_envelope(message)
                    if envelope is None:
                        break
                    if _envelope_type(envelope) == "disconnect":
                        limit.reschedule(loop.time() + self._drain_timeout)
                        is_switched_off = envelope.get("reason") == "link_disabled"
                        _set_result_unless_done(ended, _SWITCHED_OFF if is_switched_off else None)
                        continue
                    await self._open_envelopes.acquire()
                    tasks.create_task(
                        self._handle_and_acknowledge_envelope(socket, envelope),
                        name=f"{self._sink_name}: envelope",
                    )
        except TimeoutError:
            pass  # the replaced connection was read for long enough
        except Exception:  # noqa: BLE001  # an internal error must not end Socket Mode
            _log.exception(
                "sink %s: an internal error ended the Socket Mode connection", self._sink_name
            )
        finally:
            _set_result_unless_done(ended, None)
            await socket.close()

    async def _handle_and_acknowledge_envelope(
        self, socket: aiohttp.ClientWebSocketResponse, envelope: Mapping[str, Any]
    ) -> None:
        try:
            reply = await self._dispatch_envelope_and_return_reply(envelope)
            if not isinstance(envelope.get("envelope_id"), str):
                return
            acknowledgement: dict[str, Any] = {"envelope_id": envelope["envelope_id"]}
            if reply.body is not None and envelope.get("accepts_response_payload") is True:
                acknowledgement["payload"] = reply.body
            # If the acknowledgement is lost, Slack repeats the envelope. It counts once.
            with suppress(aiohttp.ClientError, OSError):
                await socket.send_str(orjson.dumps(acknowledgement).decode())
        except Exception:  # noqa: BLE001  # Slack tells the person that the click failed
            _log.exception(
                "sink %s: an internal error kept a click or command from being handled",
                self._sink_name,
            )
        finally:
            self._open_envelopes.release()

    async def _dispatch_envelope_and_return_reply(
        self, envelope: Mapping[str, Any]
    ) -> CallbackReply:
        try:
            match _envelope_type(envelope):
                case "interactive":
                    return await self._handle(parse_button_interaction(envelope.get("payload")))
                case "slash_commands":
                    return await self._handle(parse_slash_command_fields(envelope.get("payload")))
        except CallbackRefused as error:
            _log.warning("sink %s: ignored an unreadable envelope: %s", self._sink_name, error)
        return CallbackReply()


def _set_result_unless_done(future: asyncio.Future[str | None], result: str | None) -> None:
    if not future.done():
        future.set_result(result)


def _parse_envelope(message: aiohttp.WSMessage) -> dict[str, Any] | None:
    """Return the JSON object in a message; None for the end and for any other message."""
    if message.type is not aiohttp.WSMsgType.TEXT:
        return None
    try:
        envelope = orjson.loads(message.data)
    except orjson.JSONDecodeError:
        return None
    return envelope if isinstance(envelope, dict) else None


def _envelope_type(envelope: Mapping[str, Any] | None) -> str:
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
