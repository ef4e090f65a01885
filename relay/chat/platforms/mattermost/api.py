"""Mattermost's REST API, version 4, as far as a bot needs it here: what is posted, edited and asked, and what refusals mean.

Source: developers.mattermost.com, "API reference" (posts, users, channels, integration actions, errors, rate limiting).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import aiohttp
import orjson
from yarl import URL

from relay.chat import MessageGone, embedded_secrets
from relay.clock import Clock
from relay.errors import Deferred
from relay.net.http import MAX_RETRY_AFTER, Method, Request, Response, interpret_response, send

_ID = re.compile(r"[A-Za-z0-9]{1,64}")
_CODE = re.compile(r"[A-Za-z0-9_.]{1,128}")
_NO_ROOT = "api.post.create_post.root_id.app_error"
_CHANNEL = "compare channel with the id in the channel's menu, under View Info"
_REMEDIES = {
    "api.post.create_post.can_not_post_to_deleted.error": "the channel is archived: unarchive it, or name another",
    "api.post.update_post.can_not_update_post_in_deleted.error": "the channel is archived: unarchive it, or name another",
    "api.post.create_post.town_square_read_only": "the channel is read-only for the bot: let it post there, or name another",
    "api.context.invalid_param.app_error": _CHANNEL,
    "api.context.invalid_body_param.app_error": _CHANNEL,
    "api.context.invalid_url_param.app_error": _CHANNEL,
}
"""What helps, by the ``id`` of Mattermost's error."""
_AN_EPOCH = 1_000_000_000  # X-Ratelimit-Reset: seconds from now in the server, a moment in its documentation


@dataclass(frozen=True, slots=True)
class ApiResponse:
    """An answer of the API. ``code`` is the ``id`` of its error, empty where it has none; ``found`` its JSON, None without."""

    response: Response
    code: str
    found: Any

    @property
    def ok(self) -> bool:
        """Whether it was done."""
        return 200 <= self.response.status <= 299  # HTTP

    def text(self, name: str) -> str | None:
        """A field that is a text."""
        value = self.found.get(name) if isinstance(self.found, dict) else None
        return value if isinstance(value, str) else None


class Api:
    """One server, one bot, one channel. ``token`` gives the bot's token as it is now, or raises ValueError.

    Every call raises Deferred where no answer came, or none that helps.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base: URL,
        token: Callable[[], str],
        channel: str,
        clock: Clock,
        *,
        timeout: float,
    ) -> None:
        self._session = session
        self._base = base
        self._token = token
        self._channel = channel
        self._clock = clock
        self._timeout = timeout

    async def create(self, post: Mapping[str, Any]) -> str:
        """Post to the channel; returns the post's id. Raises MessageGone where the ``root_id`` is a post that is not there."""
        said = await self.ask("POST", "posts", {"channel_id": self._channel, **post})
        if said.code == _NO_ROOT:
            raise MessageGone("the post at the head of the thread was deleted")
        ref = said.text("id")
        if said.ok and ref is not None and _ID.fullmatch(ref):
            return ref
        raise self.delivery_error(said)

    async def patch(self, ref: str, change: Mapping[str, Any]) -> None:
        """Change a post. Raises MessageGone where it is not there."""
        if _ID.fullmatch(ref) is None:  # a sink of another kind had this one's name
            raise MessageGone("the message was posted elsewhere")
        said = await self.ask("PUT", f"posts/{ref}/patch", change)
        if said.ok:
            return
        # To a deleted post the server answers that it may not be edited: 403, in some versions 400 or 404.
        if (
            said.response.status in {400, 403, 404}
            and (await self.ask("GET", f"posts/{ref}")).response.status == 404
        ):  # HTTP
            raise MessageGone("the post was deleted")
        raise self.delivery_error(said)

    async def ask(
        self, method: Method, path: str, payload: object = None, *, seconds: float | None = None
    ) -> ApiResponse:
        """Call the API and read what it says, refusals included."""
        try:
            token = self._token()
        except ValueError as error:
            raise Deferred(
                f"the token of this sink cannot be used any more: {error}", failure="slow"
            ) from None
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        if payload is not None:
            headers["Content-Type"] = "application/json"
        url = self._base / "api" / "v4" / path
        body = orjson.dumps(payload) if payload is not None else b""
        request = Request(url, headers, body, (token, *embedded_secrets(body)))
        answer = await send(
            self._session, method, request, seconds=min(seconds or self._timeout, self._timeout)
        )
        try:
            found = orjson.loads(answer.body)
        except orjson.JSONDecodeError:
            found = None
        said = ApiResponse(answer, "", found)
        code = said.text("id") if not said.ok else None
        return replace(said, code=code) if code is not None and _CODE.fullmatch(code) else said

    def delivery_error(self, said: ApiResponse) -> Deferred:
        """What a refusal means for the delivery, with its remedy, to be raised."""
        answer, now = said.response, self._clock.now()
        outcome = interpret_response(answer, now)
        if isinstance(outcome, Deferred) and outcome.failure == "transient":
            outcome.after = outcome.after if outcome.after is not None else _reset(answer, now)
            return outcome
        if isinstance(outcome, Deferred) and 300 <= answer.status <= 399:  # HTTP
            return outcome
        return Deferred(_sentence(said), failure="slow", status=answer.status, answer=answer.text)


def _sentence(said: ApiResponse) -> str:
    code = f" ({said.code})" if said.code else ""
    match said.response.status:
        case 401:
            return (
                f"expected a token that Mattermost accepts, it refused this one{code}: make a new one for the bot account under "
                "Integrations > Bot Accounts, and set token"
            )
        case 403:
            return (
                f"expected that the bot may do this in the channel, Mattermost refuses{code}: add the bot to the channel and its team, "
                f"and {_CHANNEL}"
            )
        case 404:
            return f"expected Mattermost's API, got 404{code}: set api_url to the server's own address, without /api/v4, and {_CHANNEL}"
        case status if said.ok:
            return f"expected what Mattermost's API answers, got {status} with something else: set api_url to the server's own address"
        case status:
            remedy = _REMEDIES.get(said.code, "the server's log says more")
            return f"expected Mattermost to do as asked, it refused with {status}{code}: {remedy}"


def _reset(answer: Response, now: datetime) -> float | None:
    """Seconds until the rate limit lets calls through again."""
    text = answer.headers.get("X-Ratelimit-Reset", "").strip()
    if answer.status != 429 or re.fullmatch(r"[0-9]{1,12}", text) is None:  # HTTP
        return None
    value = float(text)
    return min(max(value - now.timestamp() if value > _AN_EPOCH else value, 0.0), MAX_RETRY_AFTER)
