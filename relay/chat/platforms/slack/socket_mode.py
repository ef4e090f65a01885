"""Socket Mode: clicks and commands over a connection that we make, so that no port need be open.

Source: https://docs.slack.dev/apis/events-api/using-socket-mode. Why not the SDK's client: docs/decisions/0017-own-slack-socket.md.
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
from relay.chat.platforms.slack.payloads import Call, parse_command, parse_interaction
from relay.chat.platforms.slack.web import WebApi
from relay.clock import Clock
from relay.errors import Deferred, DeliveryError
from relay.net.egress import parse_receiver_url

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
"""Seconds before the next attempt to connect; doubled from one to the other, and up to a quarter more by chance."""
HEARTBEAT = 10.0
"""Seconds between two pings; a connection that leaves one unanswered for half as long is given up."""
_PATIENCE = 10.0
_WELL = 30.0
"""Seconds after which a connection had been well, and the next attempt needs no long pause."""
_LINGERS = 30.0
"""Seconds that a connection is listened to that Slack is about to close, while the next one is there already."""
_LARGEST = 512 * 1024
_AT_ONCE = 16
_OFF = "Socket Mode is switched off in the app's settings: switch it on, or give signing_secret instead of app_token"
_log = logging.getLogger(__name__)


class SocketMode:
    """Connects for ever. ``take`` does what a call asks for; it is acknowledged when that returns, and so is on disk."""

    def __init__(
        self,
        api: WebApi,
        token: Callable[[], str],
        session: aiohttp.ClientSession,
        clock: Clock,
        take: Callable[[Call], Awaitable[CallbackReply]],
        *,
        name: str,
        allow_http: bool,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._api = api
        self._token = token
        # The same guarded sockets, and no redirects, which a handshake would follow.
        self._session = aiohttp.ClientSession(
            connector=session.connector,
            connector_owner=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=session.headers,
            trust_env=False,
            middlewares=(_no_redirects,),
        )
        self._clock = clock
        self._take = take
        self._name = name
        self._allow_http = allow_http
        self._chance = chance
        self._busy = asyncio.Semaphore(_AT_ONCE)
        self._trouble: str | None = None
        self._told = False

    async def run(self) -> NoReturn:
        """Listen until cancelled; then it is over within a second."""
        pause = FIRST_PAUSE
        async with self._session, asyncio.TaskGroup() as group:
            while True:
                began, rest = self._clock.monotonic(), 0.0
                try:
                    await self._serve(group)
                except Deferred as error:
                    self._tell(error.reason)
                    rest = error.after or (LONGEST_PAUSE if error.failure == "slow" else 0.0)
                except Exception:  # noqa: BLE001  # whatever it is: logged, and tried again
                    _log.exception(
                        "sink %s: an error in the relay's own code ended its socket; it connects again",
                        self._name,
                    )
                if self._clock.monotonic() - began > _WELL:
                    pause = FIRST_PAUSE
                await self._clock.sleep(max(pause, rest) * (1 + self._chance() / 4))
                pause = min(pause * 2, LONGEST_PAUSE)

    async def _serve(self, group: asyncio.TaskGroup) -> None:
        """Return when another connection is needed; the old one is listened to a little longer. Raises Deferred."""
        socket = await self._connect()
        self._tell(None)
        over: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        group.create_task(self._listen(socket, group, over), name=f"{self._name}: socket")
        reason = await over
        if reason is not None:
            raise Deferred(reason, failure="slow")

    async def _connect(self) -> aiohttp.ClientWebSocketResponse:
        """A connection that Slack has greeted. Raises Deferred, whose text does not hold the URL: there is a ticket in it."""
        try:
            answer = await self._api.call(
                self._api.methods.apps_connections_open, app_token=self._token()
            )
            url = _checked(answer.get("url"), allow_http=self._allow_http)
            async with asyncio.timeout(_PATIENCE):
                return await self._greeted(url)
        except Deferred as error:
            raise Deferred(
                f"Socket Mode: {error.reason}", after=error.after, failure=error.failure
            ) from None
        except (DeliveryError, ValueError) as error:
            raise Deferred(f"Socket Mode: {error}", failure="slow") from None
        except TimeoutError:
            raise Deferred(
                f"Socket Mode: expected a connection within {_PATIENCE:g} s, none came"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
            said = cause.strerror if isinstance(cause, OSError) else None
            raise Deferred(
                f"Socket Mode: expected a connection, it failed: {said or type(error).__name__}"
            ) from None

    async def _greeted(self, url: str) -> aiohttp.ClientWebSocketResponse:
        socket = await self._session.ws_connect(url, heartbeat=HEARTBEAT, max_msg_size=_LARGEST)
        greeted = False
        try:
            greeted = _kind(_read(await socket.receive())) == "hello"
        finally:
            if not greeted:
                await socket.close()
        if not greeted:
            raise Deferred("expected a hello of Slack's, got something else")
        return socket

    async def _listen(
        self,
        socket: aiohttp.ClientWebSocketResponse,
        group: asyncio.TaskGroup,
        over: asyncio.Future[str | None],
    ) -> None:
        """Take what comes until the connection ends. ``over`` is set when another one is needed, to a reason if that is in vain."""
        try:
            async with asyncio.timeout(None) as limit:
                async for message in socket:
                    envelope = _read(message)
                    if envelope is None:
                        break
                    if _kind(envelope) == "disconnect":
                        limit.reschedule(asyncio.get_running_loop().time() + _LINGERS)
                        _set(over, _OFF if envelope.get("reason") == "link_disabled" else None)
                        continue
                    await self._busy.acquire()
                    group.create_task(
                        self._answer(socket, envelope), name=f"{self._name}: envelope"
                    )
        except TimeoutError:
            pass  # it lingered long enough
        except Exception:  # noqa: BLE001  # whatever it is: another connection is made
            _log.exception("sink %s: an error in the relay's own code ended its socket", self._name)
        finally:
            _set(over, None)
            await socket.close()

    async def _answer(
        self, socket: aiohttp.ClientWebSocketResponse, envelope: Mapping[str, Any]
    ) -> None:
        """Do what an envelope asks for, and acknowledge it."""
        try:
            reply = await self._taken(envelope)
            if not isinstance(envelope.get("envelope_id"), str):
                return
            ack: dict[str, Any] = {"envelope_id": envelope["envelope_id"]}
            if reply.body is not None and envelope.get("accepts_response_payload") is True:
                ack["payload"] = reply.body
            with suppress(
                aiohttp.ClientError, OSError
            ):  # it is done; Slack sends it again, and gets the first answer
                await socket.send_str(orjson.dumps(ack).decode())
        except Exception:  # noqa: BLE001  # whatever it is: what is not acknowledged, Slack shows to the person as failed
            _log.exception(
                "sink %s: an error in the relay's own code; a click was not answered", self._name
            )
        finally:
            self._busy.release()

    async def _taken(self, envelope: Mapping[str, Any]) -> CallbackReply:
        try:
            match _kind(envelope):
                case "interactive":
                    return await self._take(parse_interaction(envelope.get("payload")))
                case "slash_commands":
                    return await self._take(parse_command(envelope.get("payload")))
        except CallbackRefused as error:
            _log.warning("sink %s: an envelope could not be read: %s", self._name, error)
        return CallbackReply()

    def _tell(self, trouble: str | None) -> None:
        if trouble == self._trouble and self._told:
            return
        if trouble is None:
            _log.info("sink %s: Socket Mode is connected", self._name)
        else:
            _log.warning("sink %s: clicks and commands do not arrive: %s", self._name, trouble)
        self._trouble, self._told = trouble, True


def _checked(url: Any, *, allow_http: bool) -> str:
    """The socket's URL, if it may be called. Raises ValueError, which does not hold it."""
    scheme, _, rest = url.partition("://") if isinstance(url, str) else ("", "", "")
    if scheme not in ("wss", "ws"):
        raise ValueError(
            "expected a URL that starts with wss:// from apps.connections.open, got something else"
        )
    parse_receiver_url(f"{'https' if scheme == 'wss' else 'http'}://{rest}", allow_http=allow_http)
    return str(url)


def _read(message: aiohttp.WSMessage) -> dict[str, Any] | None:
    """The JSON object of a message; None for the end, and for what is none."""
    if message.type is not aiohttp.WSMsgType.TEXT:
        return None
    try:
        found = orjson.loads(message.data)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def _kind(envelope: Mapping[str, Any] | None) -> str:
    return str(envelope.get("type")) if envelope is not None else ""


def _set(over: asyncio.Future[str | None], reason: str | None) -> None:
    if not over.done():
        over.set_result(reason)


async def _no_redirects(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    answer = await handler(request)
    if 300 <= answer.status <= 399:  # HTTP
        answer.close()
        raise aiohttp.ClientConnectionError("redirects are not followed")
    return answer
