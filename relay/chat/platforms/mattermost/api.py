"""Mattermost's REST API, version 4, as far as the bot uses it, and what its refusals mean.

Source: https://developers.mattermost.com/api-documentation/ (posts, users, channels, integration
actions, errors, rate limiting).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import aiohttp
import orjson
from pydantic import SecretStr, model_validator
from typing_extensions import override
from yarl import URL

from relay import signature
from relay.approvals.principals import PrincipalForm
from relay.chat import AnswerableChatSettings, MessageGone, raise_deferred_if_secret_unusable
from relay.clock import Clock
from relay.errors import Deferred
from relay.net.egress import parse_receiver_url
from relay.net.http import MAX_ANSWER_BYTES, Method, Request, interpret_response, send
from relay.settings import text_pattern_validator


class Settings(AnswerableChatSettings):
    """A channel of a Mattermost server, and the bot that posts there."""

    principals: ClassVar = PrincipalForm(
        "mattermost", "<team>/<user>", r"[a-z0-9]{26}/[a-z0-9]{26}"
    )

    kind: Literal["mattermost"]
    api_url: str
    """The server's own address, such as https://chat.example.com."""
    channel: Annotated[
        str,
        text_pattern_validator(
            r"[a-z0-9]{26}", "the id of a channel such as 4xp9fdt77pncbef59f4k1qe83o, not its name"
        ),
    ]
    """The id of the channel, in its menu under View Info. The bot must be a member."""
    token: SecretStr | None = None
    """The bot account's access token."""
    token_file: Path | None = None
    """A file with the token, instead of token."""
    approve_in_chat: bool = False
    """true: buttons that decide in the chat; needs secret. false: links to the page."""
    secret: SecretStr | None = None
    """Signs buttons: whsec_ and 24 to 64 random bytes in base64, known to this relay alone."""
    secret_file: Path | None = None
    """A file with the secret, instead of secret."""
    allow_http: bool = False
    """Allow an api_url with http: token and messages are then readable on the way."""

    @model_validator(mode="after")
    def _check_values(self) -> Settings:
        self.run_field_checks({"api_url": self.server_url, "token": self.bot_token})
        if self.approve_in_chat:
            self.run_field_checks({"secret": self.signing_key})
        return self

    @property
    @override
    def needs_public_url(self) -> bool:
        """Whether Mattermost calls the relay: for each click on a button, never for a link."""
        return self.approve_in_chat

    def server_url(self) -> URL:
        """Return the server's address. Raises ValueError if it is not usable."""
        return parse_receiver_url(self.api_url, allow_http=self.allow_http)

    def bot_token(self) -> str:
        """Return the current token. Raises ValueError if it cannot be sent."""
        expected = "the bot account's access token, of ASCII characters without spaces"
        return self.current_secret("token", "[!-~]+", expected)

    def signing_key(self) -> bytes:
        """Return the current key that signs action tokens. Raises ValueError if there is none."""
        secret = self.reveal("secret")
        if secret is None:
            raise ValueError(
                "expected a secret or secret_file for approve_in_chat, got neither; "
                "imds-relay keys makes one"
            )
        return signature.decode_secret(secret)


NO_API = (
    "expected an answer of Mattermost's API, got something else: "
    "set api_url to the server's own address"
)
_ACTION_TOKENS = re.compile(rb'"(?:proof|state)":"([^"]+)"')
"""Those of buttons and dialogs. The server may repeat the message in an answer, which is logged."""
_POST_ID = re.compile(r"[A-Za-z0-9]{1,64}")
_ERROR_ID = re.compile(r"[A-Za-z0-9_.]{1,128}")
_THREAD_GONE = "api.post.create_post.root_id.app_error"
_ARCHIVED = "the channel is archived: unarchive it, or name another"
_COMPARE_CHANNEL = "compare channel with the id in the channel's menu, under View Info"
_REMEDIES = {
    "api.post.create_post.can_not_post_to_deleted.error": _ARCHIVED,
    "api.post.update_post.can_not_update_post_in_deleted.error": _ARCHIVED,
    "api.post.create_post.town_square_read_only": (
        "the channel is read-only for the bot: let it post there, or name another"
    ),
    "api.context.invalid_param.app_error": _COMPARE_CHANNEL,
    "api.context.invalid_body_param.app_error": _COMPARE_CHANNEL,
    "api.context.invalid_url_param.app_error": _COMPARE_CHANNEL,
}
"""What the operator can do, by the ``id`` of Mattermost's error."""


@dataclass(eq=False, repr=False, kw_only=True)
class Refused(Deferred):
    """A person must correct something. ``error_id`` is Mattermost's; empty if it gave none."""

    error_id: str = ""


class MattermostApi:
    """Calls one channel with one token. Raises Deferred without an answer or a token."""

    def __init__(self, session: aiohttp.ClientSession, settings: Settings, clock: Clock) -> None:
        self._session = session
        self._settings = settings
        self._base_url = settings.server_url() / "api" / "v4"
        self._clock = clock
        # The server compares ids of pending posts across channels.
        self._session_id = secrets.token_hex(8)

    async def create_post(self, content: object, **fields: object) -> str:
        """Post and return the id. Raises MessageGone without the ``root_id``, Deferred.

        A repeat of the same ``content`` after a lost answer makes no second post: the server
        recognizes it for half a minute.
        """
        pending_post_id = sha256(f"{self._session_id}\n{content!r}".encode()).hexdigest()
        post = {"channel_id": self._settings.channel, "pending_post_id": pending_post_id, **fields}
        try:
            made = await self.call("POST", "posts", post)
        except Refused as error:
            if error.error_id == _THREAD_GONE:
                raise MessageGone("the first post of the thread was deleted") from None
            raise
        post_id = made.get("id")
        if not isinstance(post_id, str) or _POST_ID.fullmatch(post_id) is None:
            raise Deferred(NO_API, failure="slow")
        return post_id

    async def patch_post(self, post_id: str, changes: Mapping[str, Any]) -> None:
        """Change fields of a post. Raises MessageGone if it does not exist, and Deferred."""
        if _POST_ID.fullmatch(post_id) is None:  # a sink of another kind had this sink's name
            raise MessageGone("the message was posted on another platform")
        try:
            await self.call("PUT", f"posts/{post_id}/patch", changes)
        except Refused as error:
            # For a deleted post the server answers 403, and some versions 400 or 404.
            if error.status in {400, 403, 404}:
                with suppress(Refused):  # the first refusal says more
                    if not await self.find(f"posts/{post_id}"):
                        raise MessageGone("the post was deleted") from None
            raise

    async def find(self, path: str) -> Mapping[str, Any]:
        """Return an object of the API; an empty one if it does not exist. Raises Deferred."""
        try:
            found: Mapping[str, Any] = await self.call("GET", path)
        except Refused as error:
            if error.status == 404:
                return {}
            raise
        return found

    async def call(
        self, method: Method, path: str, payload: object = None, *, expected: type = dict
    ) -> Any:
        """Call the API and return the JSON of its answer. Raises Refused, and Deferred.

        What can pass by itself, such as 429 and 5xx, is tried again soon. A redirect is explained
        as for every sink. Everything else is Refused, with a remedy.
        """
        with raise_deferred_if_secret_unusable("token"):
            token = self._settings.bot_token()
        body = orjson.dumps(payload) if payload is not None else b""
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        if body:
            headers["Content-Type"] = "application/json"
        request = Request(
            url=self._base_url / path,
            headers=headers,
            body=body,
            secrets=(token, *map(bytes.decode, _ACTION_TOKENS.findall(body))),
        )
        seconds = self._settings.timeout
        response = await send(
            self._session, method, request, seconds=seconds, most=MAX_ANSWER_BYTES
        )
        status, document = response.status, response.json()
        outcome = interpret_response(response, self._clock.now())
        if outcome is None and isinstance(document, expected):
            return document
        if outcome is not None and (outcome.failure == "transient" or 300 <= status <= 399):
            raise outcome
        found = document.get("id") if isinstance(document, dict) else None
        error_id = found if isinstance(found, str) and _ERROR_ID.fullmatch(found) else ""
        reason = _refusal_reason(status, error_id) if outcome is not None else NO_API
        raise Refused(
            reason, failure="slow", status=status, answer=response.text, error_id=error_id
        )


def _refusal_reason(status: int, error_id: str) -> str:
    named = f" ({error_id})" if error_id else ""
    match status:
        case 401:
            return (
                f"expected a token that Mattermost accepts, it refused this token{named}: make a "
                "new one for the bot account under Integrations > Bot Accounts, and set token"
            )
        case 403:
            return (
                "expected that the bot may do this in the channel, Mattermost refuses"
                f"{named}: add the bot to the channel and its team, and {_COMPARE_CHANNEL}"
            )
        case 404:
            return (
                f"expected Mattermost's API, got 404{named}: set api_url to the server's own "
                f"address, without /api/v4, and {_COMPARE_CHANNEL}"
            )
    remedy = _REMEDIES.get(error_id, "the server's log says more")
    return f"expected success, Mattermost refused with {status}{named}: {remedy}"
