"""A Mattermost server, as far as a bot sees it, written from its public API reference: posts, users, channels, buttons, dialogs.

It checks what the real one checks: token, membership, lengths, ids of buttons; it keeps what a button carries to itself; it knows
a post again by its ``pending_post_id``; it answers that a deleted post may not be edited; it signs trigger ids and opens a dialog
against its own alone; and it says itself who clicked. Sources: developers.mattermost.com, "API reference" and "Interactive
messages"; the shapes of errors are those of server 10.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import itertools
import re
import secrets
import string
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from aiohttp import web

TOKEN = "bot-token-8h3kd9s2m4q7"
PUBLIC = "https://relay.example.com"
SECRET = "whsec_" + base64.b64encode(b"sealed with thirty-two bytes: ok").decode()
PENDING = 30.0
"""Seconds for which a post is known again."""
_ALIVE = re.compile(
    r"@\w+|(?<!\w)#\w+|~\w+|:(?!\d\d:)[\w+-]+:|\w+:/+\w*|www\.\w+|(?<!\\)\]\([^)]*\)?|(?<!\\)!?\[[^\]]*\]\(|<\w+|&\S+;"
)
"""What Mattermost makes something of, wherever Markdown lets it: a backslash helps against brackets alone."""
_OURS = re.compile(rf"(?<!\\)`[^`]*`|\*\*\[[A-Z][a-z ]+\]\({PUBLIC}/approve#[\w-]+\)\*\*")
_LETTERS = string.ascii_lowercase + string.digits


def new_id() -> str:
    """As the server names everything: 26 letters and digits."""
    return "".join(secrets.choice(_LETTERS) for _ in range(26))


def said(
    status: int, code: str, message: str = "", headers: Mapping[str, str] | None = None
) -> web.Response:
    """An error as the API words it."""
    body = {
        "id": code,
        "message": message or code,
        "detailed_error": "",
        "request_id": new_id(),
        "status_code": status,
    }
    return web.json_response(body, status=status, headers=headers)


@dataclass(slots=True)
class Mattermost:
    """The server. ``relay`` is where it finds what its buttons call `PUBLIC`; ``refusals`` are answered before all else."""

    port: int = 0
    relay: str = ""
    team: str = field(default_factory=new_id)
    channel: str = field(default_factory=new_id)
    bot: str = field(default_factory=new_id)
    users: dict[str, dict[str, Any]] = field(default_factory=dict)
    members: dict[str, dict[str, Any]] = field(default_factory=dict)
    posts: dict[str, dict[str, Any]] = field(default_factory=dict)
    dialogs: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Every dialog that was opened: for whom, and what is asked."""
    whispers: list[tuple[str, str]] = field(default_factory=list)
    """What was said to one person alone."""
    calls: list[tuple[str, str]] = field(default_factory=list)
    refusals: deque[tuple[str, web.Response]] = field(default_factory=deque)
    """Paths, from their first characters, and what the next call of one is answered with."""
    stalled: str | None = None
    """Calls of paths that begin so are not answered."""
    mistrusts: bool = False
    """Every token is refused, and repeated."""
    swallows: int = 0
    """So many posts are created, and the answer is lost."""
    rate: int | None = None
    """Calls that are let through; None: all of them."""
    _key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    _pending: dict[str, tuple[str, float]] = field(default_factory=dict)
    _runner: web.AppRunner | None = None
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def url(self) -> str:
        """What ``api_url`` is set to."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def roots(self) -> list[dict[str, Any]]:
        """The posts that stand in the channel now, threads aside, oldest first."""
        return [
            post for post in self.posts.values() if not post["root_id"] and not post["delete_at"]
        ]

    def thread(self, root: Mapping[str, Any]) -> list[str]:
        """What its thread says, line by line, without the gaps that keep words from being markup."""
        replies = [post for post in self.posts.values() if post["root_id"] == root["id"]]
        return [
            line.replace("\N{ZERO WIDTH SPACE}", "")
            for post in replies
            for line in post["message"].splitlines()
        ]

    def person(self, name: str, *, member: bool = True, **more: Any) -> str:
        """Somebody has an account; returns their id."""
        id_ = new_id()
        account = {
            "id": id_,
            "username": name,
            "delete_at": 0,
            "roles": "system_user",
            "locale": "en",
            "notify_props": {},
        }
        self.users[id_] = {**account, **more}
        if member:
            self.join(id_)
        return id_

    def join(self, user: str, **more: Any) -> None:
        """Somebody is in the channel from now on."""
        seat = {
            "channel_id": self.channel,
            "user_id": user,
            "roles": "channel_user",
            "scheme_guest": False,
            "scheme_user": True,
        }
        self.members[user] = {**seat, **more}

    def delete(self, post: Mapping[str, Any]) -> None:
        """Somebody deletes a post, and its thread with it."""
        for one in self.posts.values():
            if post["id"] in (one["id"], one["root_id"]):
                one["delete_at"] = self._now()

    async def leave(self) -> None:
        """From now on it is gone: connections are cut and refused."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def come(self) -> None:
        """It is there and well, at the same place."""
        self.stalled, self.mistrusts = None, False
        if self._runner is not None:
            return
        app = web.Application(middlewares=[self._door], client_max_size=1 << 22)
        app.add_routes(
            [
                web.post("/api/v4/posts", self._create),
                web.put("/api/v4/posts/{post}/patch", self._patch),
                web.get("/api/v4/posts/{post}", self._get),
                web.post("/api/v4/users/ids", self._by_ids),
                web.get("/api/v4/users/{user}", self._user),
                web.get("/api/v4/channels/{channel}", self._channel_of),
                web.get("/api/v4/channels/{channel}/members/{user}", self._member),
                web.post("/api/v4/actions/dialogs/open", self._open),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    def sink(self, **more: Any) -> dict[str, Any]:
        """The section of a sink that posts here."""
        return {
            "kind": "mattermost",
            "name": "ops",
            "api_url": self.url,
            "allow_http": True,
            "token": TOKEN,
            "channel": self.channel,
            "timeout": "30s",
            **more,
        }

    def texts_of(self, post: Mapping[str, Any]) -> str:
        """All that a post says to its readers."""
        said_ = [post["message"]]
        for one in post["props"].get("attachments", []):
            said_ += [one.get("title", ""), one.get("text", ""), one.get("footer", "")]
            said_ += [f"{found['title']}: {found['value']}" for found in one.get("fields", [])]
        return re.sub(
            r"\\(?=[\\`*\[\]|$_])", "", "\n".join(said_).replace("\N{ZERO WIDTH SPACE}", "")
        )

    def alive_in(self, post: Mapping[str, Any]) -> list[str]:
        """What in a post calls somebody, or leads somewhere: mentions, hashtags, links to channels, emojis, links."""
        said_ = [post["message"]]
        for one in post["props"].get("attachments", []):
            said_ += [
                one.get("title", ""),
                one.get("text", ""),
                one.get("footer", ""),
                *(found["value"] for found in one.get("fields", [])),
            ]
        return [found for text in said_ for found in _ALIVE.findall(_OURS.sub("", text))]

    # --- what people do

    def buttons(self, post: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The buttons of a post, whole, as only the server has them."""
        return [
            one
            for attachment in post["props"].get("attachments", [])
            for one in attachment.get("actions") or []
        ]

    def trigger(self, user: str, *, at: float | None = None) -> str:
        """A trigger id, signed, for whoever clicked."""
        signed = f"{new_id()}:{user}:{int((at or time.time()) * 1000)}:"
        mac = base64.b64encode(
            hmac.new(self._key, signed.encode(), hashlib.sha256).digest()
        ).decode()
        return base64.b64encode(f"{signed}{mac}".encode()).decode()

    def call_of(
        self, post: Mapping[str, Any], button: Mapping[str, Any], user: str
    ) -> dict[str, Any]:
        """What the server sends when somebody clicks."""
        return {
            "user_id": user,
            "user_name": self.users.get(user, {}).get("username", ""),
            "channel_id": post["channel_id"],
            "channel_name": "ops",
            "team_id": self.team,
            "team_domain": "example",
            "post_id": post["id"],
            "trigger_id": self.trigger(user),
            "type": button["type"],
            "data_source": "",
            "context": button["integration"]["context"],
        }

    async def click(
        self, post: Mapping[str, Any], label: str, user: str, *, number: int = 0
    ) -> tuple[int, Any]:
        """Somebody clicks the button of that label, the ``number``-th if there are several; returns what the relay answered."""
        button = [one for one in self.buttons(post) if one["name"] == label][number]
        return await self.send(button["integration"]["url"], self.call_of(post, button, user))

    async def submit(self, user: str, dialog: Mapping[str, Any], **more: Any) -> tuple[int, Any]:
        """Somebody submits a dialog, wherever in Mattermost they are by then; returns what the relay answered."""
        call = {
            "type": "dialog_submission",
            "callback_id": dialog["dialog"]["callback_id"],
            "state": dialog["dialog"]["state"],
            "user_id": user,
            "channel_id": new_id(),
            "team_id": self.team,
            "submission": {},
            "cancelled": False,
            **more,
        }
        return await self.send(dialog["url"], call)

    async def decide(
        self, post: Mapping[str, Any], label: str, user: str, *, number: int = 0
    ) -> tuple[int, Any]:
        """Somebody clicks, and submits the dialog that opens; returns what the relay answered last."""
        before = len(self.dialogs)
        status, answer = await self.click(post, label, user, number=number)
        mine = [dialog for person, dialog in self.dialogs[before:] if person == user]
        return await self.submit(user, mine[-1]) if mine else (status, answer)

    async def send(self, url: str, call: object) -> tuple[int, Any]:
        """The server calls an integration."""
        if not url.startswith(PUBLIC):
            raise ValueError(f"expected a URL under {PUBLIC}, got {url}")
        body = call if isinstance(call, bytes) else orjson.dumps(call)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.relay + url.removeprefix(PUBLIC), data=body, headers=headers) as got,
        ):
            answer = orjson.loads(await got.read() or b"null")
        if (
            got.status == 200
            and isinstance(answer, dict)
            and answer.get("ephemeral_text")
            and isinstance(call, dict)
        ):
            self.whispers.append((call["user_id"], answer["ephemeral_text"]))
        return got.status, answer

    # --- the API

    @web.middleware
    async def _door(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        path = request.path.removeprefix("/api/v4/")
        self.calls.append((request.method, path))
        if self.stalled is not None and path.startswith(self.stalled):
            await self._never(request)
        if self.refusals and path.startswith(self.refusals[0][0]):
            return self.refusals.popleft()[1]
        if self.rate is not None:
            self.rate -= 1
            if self.rate < 0:
                headers = {
                    "X-Ratelimit-Limit": "10",
                    "X-Ratelimit-Remaining": "0",
                    "X-Ratelimit-Reset": "1",
                    "Retry-After": "1",
                }
                return web.Response(status=429, text="limit exceeded", headers=headers)
        if self.mistrusts:
            return said(401, "api.context.session_expired.app_error", str(dict(request.headers)))
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return said(
                401,
                "api.context.session_expired.app_error",
                "Invalid or expired session, please login again.",
            )
        return await handler(request)

    async def _never(self, request: web.Request) -> None:
        while request.transport is not None and not request.transport.is_closing():  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.02)

    async def _create(self, request: web.Request) -> web.Response:
        wanted = await request.json()
        if wanted.get("channel_id") != self.channel or self.bot not in self.members:
            return said(
                403,
                "api.context.permissions.app_error",
                "You do not have the appropriate permissions.",
            )
        pending = wanted.get("pending_post_id") or ""
        known = self._pending.get(pending)
        if known is not None and time.monotonic() < known[1]:
            return web.json_response(self.seen(self.posts[known[0]]), status=201)
        root = wanted.get("root_id") or ""
        if root and (root not in self.posts or self.posts[root]["delete_at"]):
            return said(400, "api.post.create_post.root_id.app_error", "Invalid RootId parameter.")
        wrong = self._wrong(wanted)
        if wrong is not None:
            return wrong
        id_, now = new_id(), self._now()
        post = {
            "id": id_,
            "channel_id": self.channel,
            "user_id": self.bot,
            "root_id": root,
            "create_at": now,
            "update_at": now,
        }
        self.posts[id_] = {
            **post,
            "edit_at": 0,
            "delete_at": 0,
            "message": wanted.get("message", ""),
            "props": wanted.get("props") or {},
        }
        if pending:
            self._pending[pending] = (id_, time.monotonic() + PENDING)
        if self.swallows > 0:
            self.swallows -= 1
            await self._never(request)
        return web.json_response(self.seen(self.posts[id_]), status=201)

    async def _patch(self, request: web.Request) -> web.Response:
        change = await request.json()
        post = self.posts.get(request.match_info["post"])
        if post is None or post["delete_at"] or self.bot not in self.members:
            return said(
                403,
                "api.context.permissions.app_error",
                "You do not have the appropriate permissions.",
            )
        if "message" in change:  # as where edits are allowed for no time at all
            return said(
                400,
                "api.post.update_post.permissions_time_limit.app_error",
                "Post edit is only allowed for 0 seconds.",
            )
        wrong = self._wrong(change)
        if wrong is not None:
            return wrong
        post.update({"props": change.get("props", post["props"]), "update_at": self._now()})
        return web.json_response(self.seen(post))

    async def _get(self, request: web.Request) -> web.Response:
        post = self.posts.get(request.match_info["post"])
        if self.bot not in self.members:
            return said(403, "api.context.permissions.app_error")
        if post is None or post["delete_at"]:
            return said(404, "app.post.get.app_error", "Unable to get the post.")
        return web.json_response(self.seen(post))

    async def _by_ids(self, request: web.Request) -> web.Response:
        return web.json_response(
            [self.users[one] for one in await request.json() if one in self.users]
        )

    async def _user(self, request: web.Request) -> web.Response:
        user = self.users.get(request.match_info["user"])
        return (
            web.json_response(user)
            if user is not None
            else said(404, "app.user.missing_account.const", "Unable to find the user.")
        )

    async def _channel_of(self, request: web.Request) -> web.Response:
        if request.match_info["channel"] != self.channel:
            return said(
                404, "app.channel.get.existing.app_error", "Unable to find the existing channel."
            )
        if self.bot not in self.members:
            return said(403, "api.context.permissions.app_error")
        kind = "P" if self.team else "D"
        return web.json_response(
            {"id": self.channel, "team_id": self.team, "type": kind, "delete_at": 0, "name": "ops"}
        )

    async def _member(self, request: web.Request) -> web.Response:
        member = self.members.get(request.match_info["user"])
        if member is None or request.match_info["channel"] != self.channel:
            return said(
                404,
                "app.channel.get_member.missing.app_error",
                "No channel member found for that user ID and channel ID.",
            )
        return web.json_response(member)

    async def _open(self, request: web.Request) -> web.Response:
        wanted = await request.json()
        try:
            trigger = base64.b64decode(wanted["trigger_id"]).decode()
        except ValueError:
            return said(400, "interactive_message.decode_trigger_id.base64_decode_failed")
        parts = trigger.split(":")
        if len(parts) != 4:
            return said(400, "interactive_message.decode_trigger_id.missing_data")
        if time.time() - int(parts[2] or 0) / 1000 > 30:
            return said(400, "interactive_message.decode_trigger_id.expired")
        mac = base64.b64encode(
            hmac.new(self._key, ":".join((*parts[:3], "")).encode(), hashlib.sha256).digest()
        ).decode()
        if not hmac.compare_digest(mac, parts[3]):
            return said(400, "interactive_message.decode_trigger_id.verify_signature_failed")
        if not 0 < len(wanted["dialog"]["title"].encode()) <= 24 or not wanted["url"].startswith(
            PUBLIC
        ):
            return said(400, "api.context.invalid_body_param.app_error")
        self.dialogs.append((parts[1], wanted))
        return web.json_response({"status": "OK"})

    def _wrong(self, post: Mapping[str, Any]) -> web.Response | None:
        if len(post.get("message", "")) > 16383:
            return said(
                400,
                "model.post.is_valid.message_length.app_error",
                "Post Message property is longer than the maximum.",
            )
        props = post.get("props") or {}
        if len(orjson.dumps(props)) > 800_000:
            return said(400, "model.post.is_valid.props.app_error", "Invalid props.")
        if not post.get("message") and not props.get("attachments"):
            return said(
                400,
                "api.context.invalid_body_param.app_error",
                "Invalid or missing post in request body.",
            )
        ids = [one["id"] for one in self.buttons({"props": props})]
        if len(set(ids)) < len(ids) or not all(re.fullmatch(r"[A-Za-z0-9]+", one) for one in ids):
            return said(
                400,
                "model.post.is_valid.props.app_error",
                "The ids of actions must be different, of letters and digits.",
            )
        return None

    def seen(self, post: Mapping[str, Any]) -> dict[str, Any]:
        """A post as clients get it: without what its buttons carry."""
        shown: dict[str, Any] = orjson.loads(orjson.dumps(post))
        for one in self.buttons(shown):
            del one["integration"]
        return shown

    def _now(self) -> int:
        return int(time.time() * 1000) + next(self._numbers)


@asynccontextmanager
async def mattermost() -> AsyncIterator[Mattermost]:
    """A server with a team, a channel, and the bot in it."""
    server = Mattermost()
    server.users[server.bot] = {
        "id": server.bot,
        "username": "imds-relay",
        "delete_at": 0,
        "roles": "system_user",
        "is_bot": True,
    }
    server.join(server.bot)
    await server.come()
    try:
        yield server
    finally:
        await server.leave()
