"""A stand-in for a Mattermost server, written from its public API reference.

It checks what the real server checks: token, membership, lengths, ids of buttons. It does not show
the contents of buttons to readers. It recognizes a repeated post by ``pending_post_id``, the real
one for 30 s. It signs trigger ids, and opens a dialog only for a trigger id of its own.

Sources: https://developers.mattermost.com/api-documentation/ and
https://developers.mattermost.com/integrate/plugins/interactive-messages/; the errors have the form
of server 10.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import re
import secrets
import string
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from yarl import URL

from tests.cli.command import serve_handler

TOKEN = "bot-token-8h3kd9s2m4q7"
PUBLIC_URL = "https://relay.example.com"
CALLBACK_URL = f"{PUBLIC_URL}/v1/chat/ops"
SECRET = "whsec_" + base64.b64encode(b"sealed with thirty-two bytes: ok").decode()
TRIGGER_LIFETIME = 30.0
"""Seconds for which a trigger id opens a dialog."""
_ACTIVE_MARKUP = re.compile(
    r"@\w+|(?<!\w)#\w+|~\w+|:(?!\d\d:)[\w+-]+:|\w+:/+\w*|www\.\w+"
    r"|(?<!\\)\]\([^)]*\)?|(?<!\\)!?\[[^\]]*\]\(|<\w+|&#?\w+;"
)
"""Mentions, hashtags, channel links, emojis, links and HTML entities.

A backslash stops brackets only.
"""
_RELAY_MARKUP = re.compile(
    rf"(?<!\\)`[^`]*`|\*\*\[[A-Z][a-z ]+\]\({PUBLIC_URL}/#/event/[\w%./~-]+\)\*\*"
)
"""The code and the links that the relay itself writes."""
_ID_CHARACTERS = string.ascii_lowercase + string.digits

Json = dict[str, Any]


def new_id() -> str:
    """Return an id in the form of the server's ids: 26 letters and digits."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(26))


def error_response(status: int, error_id: str, message: str = "") -> web.Response:
    body = {"id": error_id, "message": message or error_id, "status_code": status}
    return web.json_response(body, status=status)


def displayed_text(escaped: str) -> str:
    return re.sub(r"\\(?=[\\`*\[\]|$_])", "", escaped.replace("\N{ZERO WIDTH SPACE}", ""))


def button_labels(post: Mapping[str, Any]) -> list[str]:
    return [button["name"] for button in buttons_of(post)]


def buttons_of(post: Mapping[str, Any]) -> list[Json]:
    """Return the buttons of a post with their contents, which only the server has."""
    return [
        button
        for attachment in post["props"].get("attachments", [])
        for button in attachment.get("actions") or []
    ]


def _texts(post: Mapping[str, Any]) -> Iterator[str]:
    yield post["message"]
    for attachment in post["props"].get("attachments", []):
        yield from (attachment.get(name, "") for name in ("title", "text", "footer"))
        yield from (f"{item['title']}: {item['value']}" for item in attachment.get("fields", []))


def post_text(post: Mapping[str, Any]) -> str:
    return displayed_text("\n".join(_texts(post)))


def active_markup(post: Mapping[str, Any]) -> list[str]:
    """Return what mentions somebody or links somewhere in a post, except the relay's links."""
    texts = [_RELAY_MARKUP.sub("", text) for text in _texts(post)]
    return [markup for text in texts for markup in _ACTIVE_MARKUP.findall(text)]


@dataclass(frozen=True, slots=True)
class OpenedDialog:
    """A dialog that the server shows to one person. ``request`` is what the relay sent."""

    user_id: str
    request: Json


@dataclass(slots=True, kw_only=True)
class MattermostServer:
    """The server, with one team, one channel and one bot.

    ``relay_url`` is where the server finds `PUBLIC_URL`.
    """

    port: int = 0
    relay_url: str = ""
    team_id: str = field(default_factory=new_id)
    """Empty: the channel is a direct message."""
    channel_id: str = field(default_factory=new_id)
    bot_id: str = field(default_factory=new_id)
    ann: str = field(default_factory=new_id)
    ben: str = field(default_factory=new_id)
    users: dict[str, Json] = field(default_factory=dict)
    members: dict[str, Json] = field(default_factory=dict)
    """The members of the channel by user id."""
    posts: dict[str, Json] = field(default_factory=dict)
    dialogs: list[OpenedDialog] = field(default_factory=list)
    ephemeral_texts: list[tuple[str, str]] = field(default_factory=list)
    """User ids, and what only that user was shown."""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Methods and paths of all calls of the API."""
    scripted_responses: deque[tuple[str, web.Response]] = field(default_factory=deque)
    """Prefixes of paths, and the response to the next call of such a path."""
    is_down: bool = False
    """Whether every call ends without an answer."""
    hanging_prefix: str | None = None
    """Calls of paths with this prefix get no answer."""
    rejects_tokens: bool = False
    """Whether every call gets 401, with a body that repeats the token."""
    lost_responses: int = 0
    """How many posts are created without an answer."""
    _trigger_key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    _pending_posts: dict[str, str] = field(default_factory=dict)

    # --- the server

    @property
    def url(self) -> str:
        """The value for ``api_url``."""
        return f"http://127.0.0.1:{self.port}"

    def sink_section(self, **settings: Any) -> Json:
        """Return the YAML section of a sink that posts here."""
        return {
            "kind": "mattermost",
            "name": "ops",
            "api_url": self.url,
            "allow_http": True,
            "token": TOKEN,
            "channel": self.channel_id,
            "timeout": "30s",
            **settings,
        }

    # --- what the channel shows

    @property
    def channel_posts(self) -> list[Json]:
        """The posts in the channel now, without replies in threads, oldest first."""
        posts = self.posts.values()
        return [post for post in posts if not post["root_id"] and not post["delete_at"]]

    @property
    def replies(self) -> list[Json]:
        """All replies in threads, oldest first."""
        return [post for post in self.posts.values() if post["root_id"]]

    def thread_lines(self, root: Mapping[str, Any]) -> list[str]:
        return [
            line.replace("\N{ZERO WIDTH SPACE}", "")
            for reply in self.replies
            if reply["root_id"] == root["id"]
            for line in reply["message"].splitlines()
        ]

    def public_post(self, post: Mapping[str, Any]) -> Json:
        """Return a post as clients get it: without the contents of its buttons."""
        copy: Json = orjson.loads(orjson.dumps(post))
        for button in buttons_of(copy):
            del button["integration"]
        return copy

    # --- what people do

    def add_user(self, name: str, user_id: str | None = None, **fields: Any) -> str:
        """Add an account that is a member of the channel; return its id."""
        user_id = user_id or new_id()
        account = {"id": user_id, "username": name, "delete_at": 0, "roles": "system_user"}
        self.users[user_id] = {**account, **fields}
        self.members[user_id] = {
            "channel_id": self.channel_id,
            "user_id": user_id,
            "roles": "channel_user",
            "scheme_guest": False,
        }
        return user_id

    def principal(self, user_id: str) -> str:
        """Return the principal that the relay should use for a user."""
        return f"mattermost:{self.team_id}/{user_id}"

    def delete_post(self, root: Mapping[str, Any]) -> None:
        for post in self.posts.values():
            if root["id"] in (post["id"], post["root_id"]):
                post["delete_at"] = int(time.time() * 1000)

    def trigger_id(self, user_id: str, *, at: float | None = None) -> str:
        """Return a trigger id that is signed for a user who clicks."""
        signed = f"{new_id()}:{user_id}:{int((at or time.time()) * 1000)}:"
        return base64.b64encode(f"{signed}{self._trigger_mac(signed)}".encode()).decode()

    def click_payload(
        self, post: Mapping[str, Any], user_id: str, label: str = "Approve", *, position: int = 0
    ) -> Json:
        """Return a click on a button. ``position`` counts those with this label, from 0."""
        button = [button for button in buttons_of(post) if button["name"] == label][position]
        return {
            "user_id": user_id,
            "channel_id": post["channel_id"],
            "team_id": self.team_id,
            "post_id": post["id"],
            "trigger_id": self.trigger_id(user_id),
            "context": button["integration"]["context"],
        }

    async def click(
        self, post: Mapping[str, Any], label: str, user_id: str, *, position: int = 0
    ) -> tuple[int, Any]:
        """Click a button; return status and body of the relay's answer."""
        payload = self.click_payload(post, user_id, label, position=position)
        return await self.call_relay(buttons_of(post)[0]["integration"]["url"], payload)

    def submission(self, user_id: str, opened: OpenedDialog) -> Json:
        """Return what submits a dialog. The person can be in any channel at that time."""
        dialog = opened.request["dialog"]
        return {
            "type": "dialog_submission",
            "callback_id": dialog["callback_id"],
            "state": dialog["state"],
            "user_id": user_id,
            "channel_id": new_id(),
            "team_id": self.team_id,
            "submission": {},
            "cancelled": False,
        }

    async def submit(self, user_id: str, opened: OpenedDialog) -> tuple[int, Any]:
        """Submit a dialog; return status and body of the relay's answer."""
        return await self.call_relay(opened.request["url"], self.submission(user_id, opened))

    async def decide(
        self, post: Mapping[str, Any], label: str, user_id: str, *, position: int = 0
    ) -> tuple[int, Any]:
        """Click a button and submit the dialog; return the relay's last answer."""
        count = len(self.dialogs)
        answer = await self.click(post, label, user_id, position=position)
        opened = [dialog for dialog in self.dialogs[count:] if dialog.user_id == user_id]
        return await self.submit(user_id, opened[-1]) if opened else answer

    async def call_relay(self, url: str, payload: Json | bytes) -> tuple[int, Any]:
        """Call an integration as the server does; return status and body of the answer."""
        if not url.startswith(PUBLIC_URL):
            raise ValueError(f"expected a URL under {PUBLIC_URL}, got {url}")
        url = self.relay_url + url.removeprefix(PUBLIC_URL)
        body = payload if isinstance(payload, bytes) else orjson.dumps(payload)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, data=body, headers=headers) as response,
        ):
            answer = orjson.loads(await response.read() or b"null")
        is_text = isinstance(answer, dict) and bool(answer.get("ephemeral_text"))
        if response.status == 200 and is_text and isinstance(payload, dict):
            self.ephemeral_texts.append((payload["user_id"], answer["ephemeral_text"]))
        return response.status, answer

    async def answer_to(self, payload: Json) -> str:
        """Call the relay; return what the person alone is shown."""
        status, answer = await self.call_relay(CALLBACK_URL, payload)
        assert status == 200
        text: str = answer.get("ephemeral_text") or answer["error"]
        return text

    # --- the API

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a call as the test wants it, or as the server does."""
        path = request.path.removeprefix("/api/v4/")
        self.calls.append((request.method, path))
        refusal = await self._refusal(request, path)
        return refusal if refusal is not None else await self._answer(request, path)

    async def _refusal(self, request: web.Request, path: str) -> web.Response | None:
        if self.is_down and request.transport is not None:
            request.transport.abort()
        if self.hanging_prefix is not None and path.startswith(self.hanging_prefix):
            await self._wait_for_disconnect(request)
        if self.scripted_responses and path.startswith(self.scripted_responses[0][0]):
            return self.scripted_responses.popleft()[1]
        if self.rejects_tokens:
            repeated = str(dict(request.headers))
            return error_response(401, "api.context.session_expired.app_error", repeated)
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return error_response(401, "api.context.session_expired.app_error")
        return None

    async def _answer(self, request: web.Request, path: str) -> web.StreamResponse:
        match request.method, *path.split("/"):
            case "POST", "posts":
                return await self._create_post(request)
            case "PUT", "posts", post_id, "patch":
                return self._patch_post(post_id, await request.json())
            case "POST", "users", "ids":
                known = [self.users[each] for each in await request.json() if each in self.users]
                return web.json_response(known)
            case "POST", "actions", "dialogs", "open":
                return self._open_dialog(await request.json())
            case "GET", "posts" | "channels", _ if self.bot_id not in self.members:
                return error_response(403, "api.context.permissions.app_error")
        found = self._find(*path.split("/"))
        return web.json_response(found) if found else error_response(404, "app.missing.app_error")

    def _find(self, *path: str) -> Json | None:
        match path:
            case "users", user_id:
                return self.users.get(user_id)
            case "channels", self.channel_id, "members", user_id:
                return self.members.get(user_id)
            case "channels", self.channel_id:
                kind = "P" if self.team_id else "D"
                return {"id": self.channel_id, "team_id": self.team_id, "type": kind}
            case "posts", post_id if post_id in self.posts:
                post = self.posts[post_id]
                return None if post["delete_at"] else self.public_post(post)
        return None

    async def _wait_for_disconnect(self, request: web.Request) -> None:
        while request.transport is not None and not request.transport.is_closing():  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.02)

    async def _create_post(self, request: web.Request) -> web.Response:
        fields = await request.json()
        if fields.get("channel_id") != self.channel_id or self.bot_id not in self.members:
            return error_response(403, "api.context.permissions.app_error")
        pending_post_id = fields.get("pending_post_id") or new_id()
        if pending_post_id in self._pending_posts:
            post = self.posts[self._pending_posts[pending_post_id]]
            return web.json_response(self.public_post(post), status=201)
        root_id = fields.get("root_id") or ""
        if root_id and (root_id not in self.posts or self.posts[root_id]["delete_at"]):
            return error_response(400, "api.post.create_post.root_id.app_error")
        problem = _post_problem(fields)
        if problem is not None:
            return problem
        post = {
            "id": new_id(),
            "channel_id": self.channel_id,
            "user_id": self.bot_id,
            "root_id": root_id,
            "delete_at": 0,
            "message": fields.get("message", ""),
            "props": fields.get("props") or {},
        }
        self.posts[post["id"]] = post
        self._pending_posts[pending_post_id] = post["id"]
        if self.lost_responses > 0:
            self.lost_responses -= 1
            await self._wait_for_disconnect(request)
        return web.json_response(self.public_post(post), status=201)

    def _patch_post(self, post_id: str, changes: Json) -> web.Response:
        post = self.posts.get(post_id)
        if post is None or post["delete_at"] or self.bot_id not in self.members:
            return error_response(403, "api.context.permissions.app_error")
        if "message" in changes:  # as on a server whose time limit for edits is 0 seconds
            return error_response(400, "api.post.update_post.permissions_time_limit.app_error")
        problem = _post_problem(changes)
        if problem is not None:
            return problem
        post["props"] = changes.get("props", post["props"])
        return web.json_response(self.public_post(post))

    def _open_dialog(self, fields: Json) -> web.Response:
        error_prefix = "interactive_message.decode_trigger_id"
        try:
            trigger_id = base64.b64decode(fields["trigger_id"]).decode()
        except ValueError:
            return error_response(400, f"{error_prefix}.base64_decode_failed")
        parts = trigger_id.split(":")
        if len(parts) != 4:
            return error_response(400, f"{error_prefix}.missing_data")
        if time.time() - int(parts[2] or 0) / 1000 > TRIGGER_LIFETIME:
            return error_response(400, f"{error_prefix}.expired")
        if not hmac.compare_digest(self._trigger_mac(":".join((*parts[:3], ""))), parts[3]):
            return error_response(400, f"{error_prefix}.verify_signature_failed")
        is_title_valid = 0 < len(fields["dialog"]["title"].encode()) <= 24
        if not is_title_valid or not fields["url"].startswith(PUBLIC_URL):
            return error_response(400, "api.context.invalid_body_param.app_error")
        self.dialogs.append(OpenedDialog(parts[1], fields))
        return web.json_response({"status": "OK"})

    def _trigger_mac(self, signed: str) -> str:
        digest = hmac.new(self._trigger_key, signed.encode(), hashlib.sha256).digest()
        return base64.b64encode(digest).decode()


def _post_problem(post: Mapping[str, Any]) -> web.Response | None:
    """Return the error for a post that the server does not accept."""
    if len(post.get("message", "")) > 16383:
        return error_response(400, "model.post.is_valid.message_length.app_error")
    props = post.get("props") or {}
    if len(orjson.dumps(props)) > 800_000:
        return error_response(400, "model.post.is_valid.props.app_error")
    if not post.get("message") and not props.get("attachments"):
        return error_response(400, "api.context.invalid_body_param.app_error")
    ids = [button["id"] for button in buttons_of({"props": props})]
    if len(set(ids)) < len(ids) or not all(re.fullmatch(r"[A-Za-z0-9]+", id_) for id_ in ids):
        return error_response(400, "model.post.is_valid.props.app_error")
    return None


@asynccontextmanager
async def running_mattermost() -> AsyncIterator[MattermostServer]:
    server = MattermostServer()
    server.add_user("imds-relay", server.bot_id, is_bot=True)
    server.add_user("ann", server.ann)
    server.add_user("ben", server.ben)
    async with serve_handler(server.handle) as url:
        server.port = URL(url).port or 0
        yield server
