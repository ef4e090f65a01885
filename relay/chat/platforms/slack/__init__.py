"""Slack: one message per event, kept current; people answer with buttons or links.

`api` has the platform's section of the configuration and calls Slack, `messages` renders and posts
cards, and `clicks` does what clicks and commands ask for and knows who may. They come over Socket
Mode: a connection that the relay opens to Slack, and opens again whenever it ends. Each envelope,
which holds one click or command, is acknowledged after it was answered: a decision is on disk by
then. Slack repeats what is not acknowledged, and a click counts once. Source:
https://docs.slack.dev/apis/events-api/using-socket-mode.

`manifest` is that of the Slack app that the relay needs, with no scope that it does not use:
``imds-relay schema slack-manifest`` prints it for whoever makes the app at Slack
(https://docs.slack.dev/reference/app-manifest). A running relay does not use it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import aiohttp
import orjson

from relay.chat import ChatSink
from relay.chat.context import ChatContext
from relay.chat.live_message import LiveMessageSink, background_task_until_exit
from relay.chat.platforms.slack.api import Settings, WebApi
from relay.chat.platforms.slack.clicks import Answers
from relay.chat.platforms.slack.messages import Channel
from relay.clock import Clock
from relay.errors import Deferred, DeliveryError
from relay.logs import Finding, LogOnce, failure, log_extra, ok
from relay.net import exponential_backoff, with_jitter
from relay.net.http import explain_error, open_session

HEARTBEAT_INTERVAL = 10.0
"""Seconds between pings. aiohttp closes a connection that does not answer within half of it."""
CONNECT_TIMEOUT = 10.0
"""Seconds from the start of the handshake to the greeting."""
CLOSE_TIMEOUT = 0.5
"""Seconds for Slack's part of the closing handshake."""
MAX_MESSAGE_BYTES = 512 * 1024
"""aiohttp closes a connection on which a longer message arrives."""
INITIAL_RECONNECT_DELAY = 0.5
MAX_RECONNECT_DELAY = 60.0
"""Seconds before the relay connects again."""
STABLE_CONNECTION_TIME = 30.0
"""Seconds after which a connection counts as successful and resets the delay."""
MAX_OPEN_ENVELOPES = 16
"""Envelopes that are answered at once. Nothing is read while there are so many."""
_log = logging.getLogger(__name__)


@asynccontextmanager
async def connect(
    settings: Settings, clock: Clock, context: ChatContext
) -> AsyncIterator[ChatSink]:
    async with open_session() as session:
        api = WebApi(session, settings, clock)
        channel = Channel(api, settings)
        sink = LiveMessageSink(settings, context, channel, clock, in_chat=settings.approve_in_chat)
        receiving: AbstractAsyncContextManager[None] = nullcontext()
        if settings.uses_socket_mode:
            answers = Answers(settings, context, api, clock)
            socket_mode = SocketMode(session, api, answers, clock, settings.name)
            task_name = f"{settings.name}: Socket Mode"
            receiving = background_task_until_exit(socket_mode.run(), task_name)
        async with sink.refreshing(), receiving:
            yield sink


async def diagnose(settings: Settings, clock: Clock, scope: str) -> list[Finding]:  # noqa: ARG001  # the signature of all sinks
    """Return whether Slack accepts the tokens and grants the scopes. Posts nothing."""
    subject = f"sink {settings.name}"
    async with open_session() as session:
        api = WebApi(session, settings, clock)
        try:
            workspace = await api.workspace()
            if settings.uses_socket_mode:
                bot = str((await api.call("auth.test")).get("user_id"))
                await api.call("users.info", {"user": bot})  # needs users:read
                await api.open_socket_url()
        except DeliveryError as error:
            return [failure(subject, error.reason, "see docs/chat/slack.md")]
        return [ok(subject, f"Slack accepts the tokens, for the workspace {workspace.team_id}")]


@dataclass(frozen=True, slots=True)
class SocketMode:
    session: aiohttp.ClientSession
    api: WebApi
    answers: Answers
    clock: Clock
    sink_name: str
    state_log: LogOnce = field(default_factory=lambda: LogOnce(_log))

    async def run(self) -> NoReturn:
        """Receive envelopes until cancelled, and then end within a second."""
        failures = 0
        while True:
            started_at = self.clock.monotonic()
            minimum_delay = 0.0
            try:
                async with self._connection() as socket:
                    self._log_state(logging.INFO, "Socket Mode is connected")
                    await self._receive(socket)
            except Deferred as error:
                problem = f"clicks and commands do not arrive: {error.reason}"
                self._log_state(logging.WARNING, problem)
                slow_delay = MAX_RECONNECT_DELAY if error.failure == "slow" else 0.0
                minimum_delay = error.after or slow_delay
            except Exception:  # noqa: BLE001  # an internal error must not end Socket Mode
                _log.exception("sink %s: an internal error in Socket Mode", self.sink_name)
            if self.clock.monotonic() - started_at > STABLE_CONNECTION_TIME:
                failures = 0
            failures += 1
            delay = exponential_backoff(
                failures, first=INITIAL_RECONNECT_DELAY, maximum=MAX_RECONNECT_DELAY
            )
            await self.clock.sleep(with_jitter(max(delay, minimum_delay), random.random()))  # noqa: S311  # not a secret

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Connect; wait for the greeting. Raises Deferred without the URL, which is secret."""
        try:
            url = await self.api.open_socket_url()
            async with asyncio.timeout(CONNECT_TIMEOUT):
                socket = await self.session.ws_connect(
                    url,
                    heartbeat=HEARTBEAT_INTERVAL,
                    max_msg_size=MAX_MESSAGE_BYTES,
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_TIMEOUT),
                )
        except TimeoutError:
            raise Deferred(f"no connection within {CONNECT_TIMEOUT:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise explain_error(error) from None
        try:
            greeting = None
            with suppress(TimeoutError):
                greeting = _parse(await socket.receive(CONNECT_TIMEOUT))
            if greeting is None or greeting.get("type") != "hello":
                raise Deferred("expected Slack's hello, got something else")
            yield socket
        finally:
            await socket.close()

    async def _receive(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Answer envelopes until the connection ends, or Slack wants another. Raises Deferred."""
        open_envelopes = asyncio.Semaphore(MAX_OPEN_ENVELOPES)
        is_switched_off = False
        async with asyncio.TaskGroup() as tasks:  # what was received is answered before it ends
            async for message in socket:
                envelope = _parse(message)
                if envelope is None:
                    break
                if envelope.get("type") == "disconnect":
                    is_switched_off = envelope.get("reason") == "link_disabled"
                    break
                await open_envelopes.acquire()
                task = tasks.create_task(
                    self._answer(socket, envelope), name=f"{self.sink_name}: envelope"
                )
                task.add_done_callback(lambda _: open_envelopes.release())
        if is_switched_off:
            problem = "Socket Mode is switched off in the app's settings: switch it on"
            raise Deferred(problem, failure="slow")

    async def _answer(
        self, socket: aiohttp.ClientWebSocketResponse, envelope: Mapping[str, Any]
    ) -> None:
        try:
            reply = await self.answers.answer(envelope)
            acknowledgement = {"envelope_id": envelope.get("envelope_id")}
            if not isinstance(acknowledgement["envelope_id"], str):
                return
            takes_reply = envelope.get("accepts_response_payload") is True
            if reply is not None and takes_reply:
                acknowledgement["payload"] = {"response_type": "ephemeral", **reply.message}
            # If the acknowledgement is lost, Slack repeats the envelope. It counts once.
            with suppress(aiohttp.ClientError, OSError):
                await socket.send_str(orjson.dumps(acknowledgement).decode())
            if reply is not None and not takes_reply:
                place = {"channel": reply.actor.channel_id, "user": reply.actor.user_id}
                fields = {**place, **reply.message}
                await self.api.call("chat.postEphemeral", fields)
        except DeliveryError as error:
            _log.info("sink %s: a person was not told: %s", self.sink_name, error.reason)
        except Exception:  # noqa: BLE001  # Slack tells the person that the click failed
            _log.exception(
                "sink %s: an internal error kept a click or command from being handled",
                self.sink_name,
            )

    def _log_state(self, level: int, state: str) -> None:
        extra = log_extra(sink=self.sink_name)
        self.state_log.log_if_changed(level, "sink %s: %s", self.sink_name, state, extra=extra)


def _parse(message: aiohttp.WSMessage) -> dict[str, Any] | None:
    if message.type is not aiohttp.WSMsgType.TEXT:
        return None
    try:
        envelope = orjson.loads(message.data)
    except orjson.JSONDecodeError:
        return None
    return envelope if isinstance(envelope, dict) else None


# --- the app


COMMAND = "/azmaint"
SCOPES = {
    "chat:write": "post messages and edit the app's own messages",
    "commands": f"receive {COMMAND}",
    "users:read": "check that a person who answers is a full member, and of which workspace",
}
"""The bot's scopes and their use. An app that takes no answers needs only the first scope."""


def manifest(answers: str) -> dict[str, Any]:
    """Return the manifest as JSON values.

    ``answers`` says how clicks and commands reach the relay: ``none``, or ``socket`` (Socket Mode).
    """
    takes_answers = answers == "socket"
    command = {
        "command": COMMAND,
        "description": "Maintenance that Azure has announced",
        "usage_hint": "list | EVENT",
        "should_escape": False,
    }
    return {
        "display_information": {
            "name": "Azure maintenance",
            "description": "Shows maintenance that Azure has announced for virtual machines, "
            "and takes approvals.",
            "background_color": "#1f3a5f",
        },
        "features": {
            "bot_user": {"display_name": "azure-maintenance", "always_online": False},
            **({"slash_commands": [command]} if takes_answers else {}),
        },
        "oauth_config": {"scopes": {"bot": list(SCOPES) if takes_answers else ["chat:write"]}},
        "settings": {
            **({"interactivity": {"is_enabled": True}} if takes_answers else {}),
            "org_deploy_enabled": False,
            "socket_mode_enabled": takes_answers,
            "token_rotation_enabled": False,
        },
    }
