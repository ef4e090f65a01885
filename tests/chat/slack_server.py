"""A stand-in for Slack: the Web API with its checks and errors, and Socket Mode.

It follows the public documentation: https://docs.slack.dev/reference/methods,
https://docs.slack.dev/apis/web-api/rate-limits,
https://docs.slack.dev/apis/events-api/using-socket-mode and
https://docs.slack.dev/reference/interaction-payloads.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

import aiohttp
from aiohttp import web
from yarl import URL

from tests.chat.slack_block_kit import (
    elements,
    is_valid_block_kit,
    rich_text_elements,
    text_of_blocks,
)
from tests.cli.command import serve_handler

TOKEN = "xoxb-1234567890-abcdefghijkl"  # of nothing
APP_TOKEN = "xapp-1-A0APP-1234567890"  # of nothing
TEAM, APP, BOT, CHANNEL = "T024BE7LD", "A0APP", "B0BOT", "C024BE91L"
ALICE, BOB, EVE, BOT_USER = "U0ALICE", "U0BOB", "U0EVE", "U0BOT"


def member(user_id: str, **changes: Any) -> dict[str, Any]:
    """Return a full member as users.info shows it."""
    return {
        "id": user_id,
        "team_id": TEAM,
        "name": "alice",
        "deleted": False,
        "is_bot": False,
        "is_restricted": False,
        "is_ultra_restricted": False,
        "is_app_user": False,
        **changes,
    }


@dataclass(slots=True)
class PostedMessage:
    """A message as the channel shows it now."""

    ts: str
    text: str
    blocks: list[dict[str, Any]]
    thread_ts: str | None = None

    def text_of_blocks(self) -> str:
        """Return what a reader sees in its blocks, one line per block."""
        return text_of_blocks(self.blocks)

    def buttons(self) -> dict[str, dict[str, Any]]:
        return {button["text"]["text"]: button for button in elements(self.blocks, "actions")}

    def links(self) -> dict[str, str]:
        return {
            element["text"]: element["url"]
            for element in rich_text_elements(self.blocks)
            if element["type"] == "link"
        }


FailureHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]
"""Answers requests in place of a Slack that works."""


def responds(
    status: int,
    document: Any = None,
    *,
    headers: Mapping[str, str] | None = None,
    body: str | None = None,
) -> FailureHandler:
    async def respond(_: web.Request) -> web.StreamResponse:
        if body is not None:
            return web.Response(status=status, text=body, content_type="text/html", headers=headers)
        return web.json_response(document, status=status, headers=headers)

    return respond


def api_error(code: str, **fields: Any) -> FailureHandler:
    """Return a handler that answers with an error of the Web API: 200, and not ok."""
    return responds(200, {"ok": False, "error": code, **fields})


def rate_limited(seconds: int) -> FailureHandler:
    headers = {"Retry-After": str(seconds)}
    return responds(429, {"ok": False, "error": "ratelimited"}, headers=headers)


async def never_answers(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


@dataclass(slots=True)
class SlackServer:
    port: int = 0
    messages: dict[str, PostedMessage] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    private_replies: list[dict[str, Any]] = field(default_factory=list)
    """What chat.postEphemeral showed to one person, in order."""
    users: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {
            user_id: member(user_id) for user_id in (ALICE, BOB, EVE, BOT_USER)
        }
    )
    failures: dict[str, FailureHandler] = field(default_factory=dict)
    """By method; ``*`` stands for all methods."""
    sockets: list[web.WebSocketResponse] = field(default_factory=list)
    opened_sockets: int = 0
    acknowledgements: dict[str, dict[str, Any]] = field(default_factory=dict)
    sends_hello: bool = True
    ignores_close: bool = False
    """Whether new sockets read nothing, not even a closing handshake."""
    _numbers: count[int] = field(default_factory=lambda: count(1))
    _acknowledged: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def url(self) -> str:
        """The value for ``api_url``."""
        return f"http://127.0.0.1:{self.port}/api/"

    def settings(self, **changes: Any) -> dict[str, Any]:
        """Return a sink's section for this workspace. A change to None removes a key."""
        section = {"kind": "slack", "name": "ops", "api_url": self.url, "allow_http": True}
        section |= {"token": TOKEN, "app_token": APP_TOKEN, "channel": CHANNEL, **changes}
        return {key: value for key, value in section.items() if value is not None}

    def channel_messages(self) -> list[PostedMessage]:
        """Return the messages in the channel itself, in order."""
        return [message for message in self.messages.values() if message.thread_ts is None]

    def thread_lines(self, message: PostedMessage) -> list[str]:
        return [
            line
            for reply in self.messages.values()
            if reply.thread_ts == message.ts
            for line in reply.text_of_blocks().splitlines()
        ]

    def call_count(self, method: str) -> int:
        return sum(called_method == method for called_method, _ in self.calls)

    # --- the Web API

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/link/":
            return await self._handle_socket(request)
        return await self._handle_api_call(request, request.path.removeprefix("/api/"))

    async def _handle_api_call(self, request: web.Request, method: str) -> web.StreamResponse:
        if method.endswith(".info"):  # these methods take no JSON
            arguments: dict[str, Any] = dict(request.query)
        else:
            body = await request.read()
            arguments = json.loads(body) if body else {}
        self.calls.append((method, arguments))
        failure = self.failures.get(method) or self.failures.get("*")
        if failure is not None:
            return await failure(request)
        expected_token = APP_TOKEN if method == "apps.connections.open" else TOKEN
        if request.headers.get("Authorization") != f"Bearer {expected_token}":
            return web.json_response({"ok": False, "error": "invalid_auth"})
        if method == "chat.postMessage":
            return self._post_message(arguments)
        response = self._response(method, arguments)
        return web.json_response({"ok": "error" not in response, **response})

    def _response(self, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        match method:
            case "auth.test":
                names = {"url": self.url, "team": "Ops", "user": "relay"}
                return {**names, "team_id": TEAM, "user_id": BOT_USER, "bot_id": BOT}
            case "users.info":
                user = self.users.get(arguments.get("user", ""))
                return {"user": user} if user is not None else {"error": "user_not_found"}
            case "chat.update":
                return self._update_message(arguments)
            case "chat.postEphemeral":
                error = self._message_error(arguments)
                self.private_replies.append(dict(arguments))
                return {"error": error} if error is not None else {"message_ts": "1700000001.1"}
            case "apps.connections.open":
                self.opened_sockets += 1
                return {"url": f"ws://127.0.0.1:{self.port}/link/?ticket=secret-ticket&app_id=x"}
        return {"error": "unknown_method"}

    def _post_message(self, arguments: Mapping[str, Any]) -> web.StreamResponse:
        error = self._message_error(arguments)
        if error is None and arguments.get("thread_ts") not in (None, *self.messages):
            error = "thread_not_found"
        if error is not None:
            return web.json_response({"ok": False, "error": error})
        ts = f"1700000000.{next(self._numbers):06d}"
        text, blocks = arguments["text"], arguments["blocks"]
        self.messages[ts] = PostedMessage(ts, text, blocks, arguments.get("thread_ts"))
        message = {"text": text, "blocks": blocks}
        return web.json_response({"ok": True, "channel": CHANNEL, "ts": ts, "message": message})

    def _update_message(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        error = self._message_error(arguments)
        if error is not None:
            return {"error": error}
        message = self.messages.get(arguments["ts"])
        if message is None:
            return {"error": "message_not_found"}
        message.text, message.blocks = arguments["text"], arguments["blocks"]
        return {"channel": CHANNEL, "ts": message.ts, "text": message.text}

    def _message_error(self, arguments: Mapping[str, Any]) -> str | None:
        if arguments.get("channel") != CHANNEL:
            return "channel_not_found"
        if not arguments.get("text"):
            return "no_text"
        return None if is_valid_block_kit(arguments.get("blocks") or []) else "invalid_blocks"

    # --- what Slack sends when people click and type

    def click_payload(
        self, message: PostedMessage, label: str, user_id: str = ALICE, **changes: Any
    ) -> dict[str, Any]:
        """Return the payload of a click on a message's button. ``changes`` replace its fields."""
        return self.button_payload(message, message.buttons()[label], user_id, **changes)

    def button_payload(
        self,
        message: PostedMessage,
        button: Mapping[str, Any],
        user_id: str = ALICE,
        **changes: Any,
    ) -> dict[str, Any]:
        """Return the payload of a click on a button, which the message need not have."""
        number = next(self._numbers)
        action = {key: button[key] for key in ("action_id", "value", "style") if key in button}
        return {
            "type": "block_actions",
            "user": {"id": user_id, "name": "alice", "team_id": TEAM},
            "container": {
                "type": "message",
                "message_ts": message.ts,
                "channel_id": CHANNEL,
                "is_ephemeral": False,
            },
            "trigger_id": f"{number}.{number}.8f742231b10e8888abcd99edabc",
            "team": {"id": TEAM},
            "response_url": f"http://127.0.0.1:{self.port}/actions/{TEAM}/{number}",
            "actions": [
                {
                    "type": "button",
                    "block_id": "b1",
                    "text": button["text"],
                    "action_ts": f"{number}.1",
                    **action,
                }
            ],
            **changes,
        }

    def command_payload(self, text: str, user_id: str = ALICE, **changes: Any) -> dict[str, str]:
        number = next(self._numbers)
        return {
            "team_id": TEAM,
            "channel_id": CHANNEL,
            "user_id": user_id,
            "user_name": "alice",
            "command": "/azmaint",
            "text": text,
            "response_url": f"http://127.0.0.1:{self.port}/commands/{TEAM}/{number}",
            "trigger_id": f"{number}.{number}.8f742231b10e8888abcd99edabc",
            **changes,
        }

    # --- Socket Mode

    async def _handle_socket(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(timeout=0.5)
        await socket.prepare(request)
        self.sockets.append(socket)
        if self.sends_hello:
            hello = {"type": "hello", "connection_info": {"app_id": APP}}
            await socket.send_json({**hello, "num_connections": len(self.sockets)})
        if self.ignores_close:
            await asyncio.Event().wait()
        async for message in socket:
            if message.type is aiohttp.WSMsgType.TEXT:
                acknowledgement = json.loads(message.data)
                async with self._acknowledged:
                    self.acknowledgements[acknowledgement["envelope_id"]] = acknowledgement
                    self._acknowledged.notify_all()
        self.sockets.remove(socket)
        return socket

    async def send_envelope(
        self,
        payload: Mapping[str, Any],
        kind: Literal["interactive", "slash_commands", "events_api"] = "interactive",
    ) -> dict[str, Any] | None:
        """Send an envelope over the newest socket, and return what its acknowledgement says."""
        envelope_id = f"e-{next(self._numbers)}"
        await self.sockets[-1].send_json(
            {
                "envelope_id": envelope_id,
                "type": kind,
                "payload": payload,
                "accepts_response_payload": kind == "slash_commands",
            }
        )
        async with asyncio.timeout(60), self._acknowledged:
            await self._acknowledged.wait_for(lambda: envelope_id in self.acknowledgements)
        reply: dict[str, Any] | None = self.acknowledgements[envelope_id].get("payload")
        return reply

    async def click(
        self, message: PostedMessage, label: str, user_id: str = ALICE, **changes: Any
    ) -> None:
        await self.send_envelope(self.click_payload(message, label, user_id, **changes))

    async def send_disconnect(self, reason: str = "refresh_requested") -> None:
        """Ask the app to open another connection, as Slack does every few hours."""
        await self.sockets[-1].send_json({"type": "disconnect", "reason": reason, "debug_info": {}})

    async def close_sockets(self) -> None:
        """Close every socket without a disconnect message."""
        for socket in list(self.sockets):
            await socket.close()


@asynccontextmanager
async def running_slack() -> AsyncIterator[SlackServer]:
    server = SlackServer()
    async with serve_handler(server.handle) as url:
        server.port = URL(url).port or 0
        yield server
        await server.close_sockets()
