"""A stand-in for Slack, after its public documentation: the Web API with its checks and error words, clicks, and Socket Mode.

Sources: https://docs.slack.dev/reference/methods, …/reference/block-kit, …/apis/web-api/rate-limits,
…/authentication/verifying-requests-from-slack, …/apis/events-api/using-socket-mode, …/reference/interaction-payloads.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal
from urllib.parse import urlencode

import aiohttp
from aiohttp import web

TOKEN = "xoxb-1234567890-abcdefghijkl"  # of nothing
APP_TOKEN = "xapp-1-A0APP-1234567890"  # of nothing
SECRET = "8f742231b10e8888abcd99yyyzzz85a5"  # of Slack's own example
TEAM, APP, BOT, CHANNEL = "T024BE7LD", "A0APP", "B0BOT", "C024BE91L"
ALICE, BOB, EVE = "U0ALICE", "U0BOB", "U0EVE"

_LIMITS = {
    "section": 3000,
    "header": 150,
    "button": 75,
    "value": 2000,
    "url": 3000,
    "heading": 100,
    "question": 300,
    "verb": 30,
}


def member(user: str, **changes: Any) -> dict[str, Any]:
    """A full member as users.info shows one."""
    flags = {
        "deleted": False,
        "is_bot": False,
        "is_restricted": False,
        "is_ultra_restricted": False,
        "is_app_user": False,
    }
    return {
        "id": user,
        "team_id": TEAM,
        "name": "alice",
        "real_name": "Alice",
        "is_admin": False,
        **flags,
        **changes,
    }


@dataclass(slots=True)
class Posted:
    """A message, as the channel shows it."""

    ts: str
    text: str
    blocks: list[dict[str, Any]]
    thread: str | None = None
    edits: int = 0

    def words(self) -> str:
        """All that can be read in its blocks."""
        return "\n".join(_words(block) for block in self.blocks)

    def buttons(self) -> dict[str, dict[str, Any]]:
        """Its buttons by their labels."""
        found = [
            one for block in self.blocks if block["type"] == "actions" for one in block["elements"]
        ]
        return {one["text"]["text"]: one for one in found}

    def links(self) -> dict[str, str]:
        """Its links by their words."""
        texts = [
            one
            for block in self.blocks
            if block["type"] == "rich_text"
            for one in block["elements"][0]["elements"]
        ]
        return {one["text"]: one["url"] for one in texts if one["type"] == "link"}


@dataclass(slots=True)
class Heard:
    """What the relay answered to a call: over HTTP a status and a body; over a socket the acknowledgement."""

    status: int
    body: dict[str, Any] | None
    took: float


Kind = Literal["interactive", "slash_commands", "events_api"]
Trouble = Callable[[web.Request], Awaitable[web.StreamResponse]]


def says(
    status: int,
    document: Any = None,
    *,
    headers: Mapping[str, str] | None = None,
    body: str | None = None,
) -> Trouble:
    """Trouble that answers this."""

    async def answer(_: web.Request) -> web.StreamResponse:
        if body is not None:
            return web.Response(status=status, text=body, content_type="text/html", headers=headers)
        return web.json_response(document, status=status, headers=headers)

    return answer


def error(word: str, **more: Any) -> Trouble:
    """Trouble that is an error of the Web API: 200, and not ok."""
    return says(200, {"ok": False, "error": word, **more})


def limited(seconds: int) -> Trouble:
    """Trouble that is a rate limit."""
    return says(429, {"ok": False, "error": "ratelimited"}, headers={"Retry-After": str(seconds)})


async def hangs(_: web.Request) -> web.StreamResponse:
    """Trouble that never answers."""
    await asyncio.Event().wait()
    raise AssertionError


@dataclass(slots=True)
class SlackServer:
    """One workspace with one channel. ``relay`` is where the app's request URL leads."""

    port: int = 0
    relay: str = ""
    messages: dict[str, Posted] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    said: list[dict[str, Any]] = field(default_factory=list)
    """What came to response URLs, in order."""
    users: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {one: member(one) for one in (ALICE, BOB, EVE)}
    )
    trouble: dict[str, Trouble] = field(default_factory=dict)
    """By method; ``*`` is for all of them."""
    sockets: list[web.WebSocketResponse] = field(default_factory=list)
    opened: int = 0
    acks: dict[str, dict[str, Any]] = field(default_factory=dict)
    enterprise: str | None = None
    """The organisation that the workspace is one of."""
    greets: bool = True
    deaf: bool = False
    """Sockets that are opened from now on hear nothing, not even a farewell."""
    per_second: int | None = None
    """Posts to a channel that are taken in a second; None: any number."""
    wss: str | None = None
    """Where apps.connections.open sends the relay, instead of here."""
    _numbers: count[int] = field(default_factory=lambda: count(1))
    _stamps: list[float] = field(default_factory=list)
    _acked: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def url(self) -> str:
        """For ``api_url``."""
        return f"http://127.0.0.1:{self.port}/api/"

    def settings(self, **changes: Any) -> dict[str, Any]:
        """A sink's section for this workspace."""
        given = {
            "kind": "slack",
            "name": "ops",
            "token": TOKEN,
            "channel": CHANNEL,
            "api_url": self.url,
            "allow_http": True,
            "signing_secret": SECRET,
            **changes,
        }
        return {name: value for name, value in given.items() if value is not None}

    def tops(self) -> list[Posted]:
        """The messages that stand in the channel itself, in order."""
        return [one for one in self.messages.values() if one.thread is None]

    def thread(self, top: Posted) -> list[str]:
        """What a message's thread says, line by line."""
        return [
            line
            for one in self.messages.values()
            if one.thread == top.ts
            for line in one.words().splitlines()
        ]

    def count(self, method: str) -> int:
        """How often a method was called."""
        return sum(name == method for name, _ in self.calls)

    # --- the Web API

    async def api(self, request: web.Request) -> web.StreamResponse:
        """One call of the Web API."""
        method = request.match_info["method"]
        if request.method == "GET":
            arguments: dict[str, Any] = dict(request.query)
        else:
            raw = await request.read()
            arguments = (
                json.loads(raw) if request.content_type == "application/json" and raw else {}
            )
        self.calls.append((method, arguments))
        trouble = self.trouble.get(method) or self.trouble.get("*")
        if trouble is not None:
            return await trouble(request)
        wanted = APP_TOKEN if method == "apps.connections.open" else TOKEN
        if request.headers.get("Authorization") != f"Bearer {wanted}":
            return web.json_response({"ok": False, "error": "invalid_auth"})
        match method:
            case "auth.test":
                answer: dict[str, Any] = {
                    "url": self.url,
                    "team": "Ops",
                    "user": "relay",
                    "team_id": TEAM,
                    "user_id": "U0BOT",
                    "bot_id": BOT,
                }
                answer["enterprise_id"] = self.enterprise
            case "bots.info":
                answer = {
                    "bot": {
                        "id": BOT,
                        "deleted": False,
                        "name": "relay",
                        "app_id": APP,
                        "user_id": "U0BOT",
                    }
                }
            case "users.info":
                found = self.users.get(arguments.get("user", ""))
                answer = {"user": found} if found is not None else {"error": "user_not_found"}
            case "chat.postMessage":
                return self._post(arguments)
            case "chat.update":
                answer = self._update(arguments)
            case "apps.connections.open":
                self.opened += 1
                answer = {
                    "url": self.wss
                    or f"ws://127.0.0.1:{self.port}/link/?ticket=secret-ticket&app_id=x"
                }
            case _:
                answer = {"error": "unknown_method"}
        return web.json_response({"ok": "error" not in answer, **answer})

    def _post(self, arguments: Mapping[str, Any]) -> web.StreamResponse:
        now = time.monotonic()
        self._stamps = [one for one in self._stamps if now - one < 1]
        if self.per_second is not None and len(self._stamps) >= self.per_second:
            return web.json_response(
                {"ok": False, "error": "ratelimited"}, status=429, headers={"Retry-After": "1"}
            )
        word = self._wrong(arguments)
        if word is None and arguments.get("thread_ts") not in (None, *self.messages):
            word = "thread_not_found"
        if word is not None:
            return web.json_response({"ok": False, "error": word})
        self._stamps.append(now)
        ts = f"1700000000.{next(self._numbers):06d}"
        self.messages[ts] = Posted(
            ts, arguments["text"], arguments["blocks"], arguments.get("thread_ts")
        )
        message = {
            "type": "message",
            "ts": ts,
            "text": arguments["text"],
            "blocks": arguments["blocks"],
            "bot_id": BOT,
            "app_id": APP,
        }
        return web.json_response({"ok": True, "channel": CHANNEL, "ts": ts, "message": message})

    def _update(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        word = self._wrong(arguments)
        if word is not None:
            return {"error": word}
        found = self.messages.get(arguments["ts"])
        if found is None:
            return {"error": "message_not_found"}
        found.text, found.blocks = arguments["text"], arguments["blocks"]
        found.edits += 1
        return {"channel": CHANNEL, "ts": found.ts, "text": found.text}

    def _wrong(self, arguments: Mapping[str, Any]) -> str | None:
        if arguments.get("channel") != CHANNEL:
            return "channel_not_found"
        if not arguments.get("text"):
            return "no_text"
        return None if well_formed(arguments.get("blocks") or []) else "invalid_blocks"

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """A response URL."""
        self.said.append(await request.json())
        return web.Response(text="ok")

    # --- what people do

    def click(
        self, message: Posted, label: str, user: str = ALICE, **changes: Any
    ) -> dict[str, Any]:
        """What Slack sends when somebody clicks a button of a message. ``changes``: other fields than it would send."""
        return self.clicked(
            message.buttons()[label], message.ts, message=message, user=user, **changes
        )

    def clicked(
        self,
        button: Mapping[str, Any],
        ts: str,
        *,
        message: Posted | None = None,
        user: str = ALICE,
        **changes: Any,
    ) -> dict[str, Any]:
        """As `click`; without a message it is one that was shown to one person alone."""
        number = next(self._numbers)
        container: dict[str, Any] = {
            "type": "message",
            "message_ts": ts,
            "channel_id": CHANNEL,
            "is_ephemeral": message is None,
        }
        action = {name: button[name] for name in ("action_id", "value", "style") if name in button}
        return {
            "type": "block_actions",
            "user": {"id": user, "username": "alice", "name": "alice", "team_id": TEAM},
            "api_app_id": APP,
            "token": "deprecated-verification-token",
            "container": container,
            "trigger_id": f"{number}.{number}.8f742231b10e8888abcd99edabc",
            "team": {"id": TEAM, "domain": "ops"},
            "enterprise": None,
            "is_enterprise_install": False,
            "channel": {"id": CHANNEL, "name": "ops"},
            **(
                {
                    "message": {
                        "type": "message",
                        "ts": ts,
                        "text": message.text,
                        "blocks": message.blocks,
                    }
                }
                if message is not None
                else {}
            ),
            "state": {"values": {}},
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

    def typed(self, text: str, user: str = ALICE, **changes: Any) -> dict[str, str]:
        """What Slack sends when somebody types the slash command."""
        number = next(self._numbers)
        return {
            "token": "deprecated-verification-token",
            "team_id": TEAM,
            "team_domain": "ops",
            "channel_id": CHANNEL,
            "channel_name": "ops",
            "user_id": user,
            "user_name": "alice",
            "command": "/azmaint",
            "text": text,
            "api_app_id": APP,
            "is_enterprise_install": "false",
            "response_url": f"http://127.0.0.1:{self.port}/commands/{TEAM}/{number}",
            "trigger_id": f"{number}.{number}.8f742231b10e8888abcd99edabc",
            **changes,
        }

    async def calls_relay(
        self,
        payload: Mapping[str, Any],
        *,
        secret: str = SECRET,
        age: float = 0,
        headers: Mapping[str, str] | None = None,
    ) -> Heard:
        """POST an interaction or, of `typed`, a command to the request URL, signed."""
        body = form(payload)
        began = time.monotonic()
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                self.relay,
                data=body,
                headers={**signed(body, secret=secret, age=age), **(headers or {})},
            ) as answer,
        ):
            text = await answer.text()
            return Heard(
                answer.status, json.loads(text) if text else None, time.monotonic() - began
            )

    # --- Socket Mode

    async def link(self, request: web.Request) -> web.StreamResponse:
        """A socket of the app."""
        socket = web.WebSocketResponse(timeout=0.5)
        await socket.prepare(request)
        self.sockets.append(socket)
        if self.greets:
            await socket.send_json(
                {
                    "type": "hello",
                    "connection_info": {"app_id": APP},
                    "num_connections": len(self.sockets),
                }
            )
        if self.deaf:
            await asyncio.Event().wait()
        async for message in socket:
            if message.type is aiohttp.WSMsgType.TEXT:
                ack = json.loads(message.data)
                async with self._acked:
                    self.acks[ack["envelope_id"]] = ack
                    self._acked.notify_all()
        self.sockets.remove(socket)
        return socket

    async def sends(
        self,
        payload: Mapping[str, Any],
        kind: Literal["interactive", "slash_commands", "events_api"] = "interactive",
    ) -> Heard:
        """Send an envelope over the newest socket, and wait for its acknowledgement, which Slack does for three seconds."""
        envelope = f"e-{next(self._numbers)}"
        began = time.monotonic()
        await self.sockets[-1].send_json(
            {
                "envelope_id": envelope,
                "type": kind,
                "payload": payload,
                "accepts_response_payload": kind == "slash_commands",
            }
        )
        async with asyncio.timeout(30), self._acked:
            await self._acked.wait_for(lambda: envelope in self.acks)
        return Heard(200, self.acks[envelope].get("payload"), time.monotonic() - began)

    async def disconnects(self, reason: str = "refresh_requested") -> None:
        """Tell the app to make another connection, as Slack does every few hours."""
        await self.sockets[-1].send_json({"type": "disconnect", "reason": reason, "debug_info": {}})

    async def cuts(self) -> None:
        """Close every socket without a word."""
        for socket in list(self.sockets):
            await socket.close()


def form(payload: Mapping[str, Any]) -> bytes:
    """An interaction as a form with a payload; what has a ``command`` is a form by itself."""
    if "command" in payload:
        return urlencode(payload).encode()
    return urlencode({"payload": json.dumps(payload).replace("/", "\\/")}).encode()


def signed(body: bytes, *, secret: str = SECRET, age: float = 0) -> dict[str, str]:
    """The headers that Slack sends with a body."""
    stamp = str(int(time.time() - age))
    digest = hmac.new(secret.encode(), f"v0:{stamp}:".encode() + body, hashlib.sha256).hexdigest()
    return {
        "X-Slack-Request-Timestamp": stamp,
        "X-Slack-Signature": f"v0={digest}",
        "Content-Type": "application/x-www-form-urlencoded",
        "User-Agent": "Slackbot 1.0 (+https://api.slack.com/robots)",
    }


def well_formed(blocks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether Block Kit takes these blocks: those that the relay uses, with their limits."""
    actions = [
        one["action_id"]
        for block in blocks
        if block["type"] == "actions"
        for one in block["elements"]
    ]
    return 1 <= len(blocks) <= 50 and all(map(_block, blocks)) and len(actions) == len(set(actions))


def _block(block: Mapping[str, Any]) -> bool:
    match block["type"]:
        case "header":
            return _plain(block["text"], "header")
        case "context":
            return 1 <= len(block["elements"]) <= 10 and all(
                _plain(one, "section") for one in block["elements"]
            )
        case "rich_text":
            return all(
                section["type"] == "rich_text_section" and _rich(section["elements"])
                for section in block["elements"]
            )
        case "actions":
            return 1 <= len(block["elements"]) <= 25 and all(map(_button, block["elements"]))
    return False


def _plain(text: Mapping[str, Any], limit: str) -> bool:
    return text["type"] == "plain_text" and 1 <= len(text["text"]) <= _LIMITS[limit]


def _rich(elements: Sequence[Mapping[str, Any]]) -> bool:
    return all(
        _part(one)
        and one.get("style", {"bold"})
        and set(one.get("style", ())) <= {"bold", "italic", "strike", "code"}
        for one in elements
    )


def _part(one: Mapping[str, Any]) -> bool:
    match one["type"]:
        case "text":
            return bool(one["text"])
        case "date":
            return isinstance(one["timestamp"], int) and "{" in one["format"]
        case "link":
            return bool(one["text"]) and bool(one["url"].startswith("https://"))
        case "user":
            return bool(one["user_id"].startswith(("U", "W")))
    return False


def _button(one: Mapping[str, Any]) -> bool:
    confirm = one.get("confirm")
    asks = confirm is None or (
        _plain(confirm["title"], "heading")
        and _plain(confirm["text"], "question")
        and _plain(confirm["confirm"], "verb")
        and _plain(confirm["deny"], "verb")
    )
    short = (
        len(one.get("value", "")) <= _LIMITS["value"]
        and len(one.get("url", "")) <= _LIMITS["url"]
        and len(one["action_id"]) <= 255
    )
    return (
        one["type"] == "button"
        and _plain(one["text"], "button")
        and asks
        and short
        and one.get("style") in (None, "primary", "danger")
    )


def _words(block: Mapping[str, Any]) -> str:
    match block["type"]:
        case "header":
            return str(block["text"]["text"])
        case "context":
            return " ".join(one["text"] for one in block["elements"])
        case "actions":
            return " ".join(f"[{one['text']['text']}]" for one in block["elements"])
    return "".join(_word(one) for section in block["elements"] for one in section["elements"])


def _word(one: Mapping[str, Any]) -> str:
    if one["type"] == "user":
        return f"@{one['user_id']}"
    return str(one["fallback"] if one["type"] == "date" else one["text"])


@asynccontextmanager
async def slack(port: int = 0) -> AsyncIterator[SlackServer]:
    """A Slack on loopback."""
    server = SlackServer()
    app = web.Application(client_max_size=1024**2)
    app.router.add_route("*", "/api/{method}", server.api)
    app.router.add_post("/actions/{team}/{number}", server.respond)
    app.router.add_post("/commands/{team}/{number}", server.respond)
    app.router.add_get("/link/", server.link)
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.2)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        server.port = runner.addresses[0][1]
        yield server
    finally:
        await server.cuts()
        await runner.cleanup()
