"""Calls Slack's Web API, knows its workspace, and explains errors with what to do about them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import aiohttp
import orjson
from pydantic import SecretStr, model_validator
from yarl import URL

from relay.approvals.principals import PrincipalForm
from relay.chat import AnswerableChatSettings, MessageGone, raise_deferred_if_secret_unusable
from relay.clock import Clock
from relay.errors import Deferred, DeliveryError, Rejected
from relay.net.egress import parse_receiver_url
from relay.net.http import MAX_ANSWER_BYTES, Method, Request, Response, interpret_response, send
from relay.settings import text_pattern_validator


class Settings(AnswerableChatSettings):
    """A channel in Slack."""

    principals: ClassVar = PrincipalForm(
        "slack", "<team>/<user>", r"[TE][A-Z0-9]{1,31}/[UW][A-Z0-9]{1,31}"
    )

    kind: Literal["slack"]
    token: SecretStr | None = None
    """The app's bot token, xoxb-…, from “OAuth & Permissions” of the app."""
    token_file: Path | None = None
    """A file that holds the token, instead of token."""
    channel: Annotated[
        str,
        text_pattern_validator(
            r"[CG][A-Z0-9]{2,24}", "the id of a channel such as C024BE91L, not its name"
        ),
    ]
    """The id of the channel, such as C024BE91L, from the bottom of the channel's details."""
    app_token: SecretStr | None = None
    """An app-level token, xapp-…, with connections:write. With it the relay connects to Slack for
    clicks and commands (Socket Mode). No port need be open."""
    app_token_file: Path | None = None
    """A file that holds the app-level token, instead of app_token."""
    approve_in_chat: bool = False
    """Take decisions from buttons in the chat and trust Slack's word for who clicked. With false,
    buttons are links to the page."""
    api_url: str = "https://slack.com/api/"
    """The Web API. Another URL for GovSlack (https://slack-gov.com/api/) or a test."""
    allow_http: bool = False
    """Allow an api_url with http, for tests."""

    @model_validator(mode="after")
    def _check_values(self) -> Settings:
        if self.approve_in_chat and not self.uses_socket_mode:
            raise ValueError(
                "approve_in_chat: expected app_token or app_token_file beside it, over which "
                "clicks arrive, got neither"
            )
        self.run_field_checks({"token": self.bot_token, "api_url": self.web_api_url})
        if self.uses_socket_mode:
            self.run_field_checks({"app_token": self.app_level_token})
        return self

    @property
    def uses_socket_mode(self) -> bool:
        """Whether clicks and commands come over Socket Mode."""
        return self.app_token is not None or self.app_token_file is not None

    def web_api_url(self) -> URL:
        """Return the Web API's URL. Raises ValueError if it is wrong."""
        return parse_receiver_url(self.api_url, allow_http=self.allow_http)

    def bot_token(self) -> str:
        """Return the current bot token. Raises ValueError if it is malformed."""
        expected = "a bot token, which starts with xoxb-"
        return self.current_secret("token", r"xoxb-[A-Za-z0-9-]{8,255}", expected)

    def app_level_token(self) -> str:
        """Return the current app-level token. Raises ValueError if it is malformed."""
        expected = "an app-level token, which starts with xapp-"
        return self.current_secret("app_token", r"xapp-[A-Za-z0-9-]{8,255}", expected)


_COPY_AGAIN = (
    "token does not belong to an installed app, or no longer does: "
    "copy the bot token again from “OAuth & Permissions”"
)
_ADD_SCOPES = "add the scopes that the app's manifest names, and install the app again"
_ENTERPRISE_ADMIN = "an administrator of the organization must allow the app in this workspace"
REMEDIES: Mapping[str, str] = {
    "invalid_auth": _COPY_AGAIN,
    "not_authed": _COPY_AGAIN,
    "token_revoked": "the token was revoked: install the app again and copy its new bot token",
    "token_expired": "the token has expired: "
    "switch token rotation off in the app's settings, and install the app again",
    "account_inactive": "the app was removed from the workspace: "
    "install it again and copy its new bot token",
    "not_allowed_token_type": "the token is of the wrong kind: "
    "token starts with xoxb-, app_token with xapp-",
    "missing_scope": _ADD_SCOPES,
    "no_permission": _ADD_SCOPES,
    "channel_not_found": "channel must be the id of a channel of this workspace; "
    "invite the app into a private channel (/invite)",
    "not_in_channel": "invite the app into the channel: /invite, and its name",
    "is_archived": "the channel is archived: restore it, or configure another channel",
    "restricted_action": "only some members may post in this channel: "
    "allow the app to, in the channel's settings",
    "team_access_not_granted": _ENTERPRISE_ADMIN,
    "access_denied": "an administrator of the workspace must allow the app",
    "forbidden_team": _ENTERPRISE_ADMIN,
    "org_login_required": "the workspace is being moved into an organization; "
    "wait until that is done",
}
"""What somebody must do about an error of the Web API. Each method's reference lists its errors:
https://docs.slack.dev/reference/methods."""
_RATE_LIMIT_ERRORS = frozenset({"ratelimited", "rate_limited"})
_TRANSIENT_ERRORS = frozenset(
    {
        "external_channel_migrating",
        "failed_for_some_users",
        "fatal_error",
        "internal_error",
        "message_limit_exceeded",
        "org_login_required",
        "request_timeout",
        "service_unavailable",
        "team_added_to_org",
    }
)
_MESSAGE_GONE_ERRORS = frozenset(
    {
        "cannot_reply_to_message",
        "cant_update_message",
        "edit_window_closed",
        "message_not_found",
        "thread_not_found",
    }
)
_INVALID_MESSAGE_ERRORS = frozenset(
    {
        "invalid_arguments",
        "invalid_blocks",
        "invalid_blocks_format",
        "msg_blocks_too_long",
        "msg_too_long",
        "no_text",
    }
)
_ERROR_CODE = re.compile(r"[a-z0-9_:]{1,80}")
_ID = re.compile(r"[A-Z0-9]{2,32}")
_SCOPES = re.compile(r"[a-z:,._ ]{1,200}")


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where the app is installed."""

    team_id: str
    enterprise_id: str | None


class WebApi:
    """Calls methods with the tokens of one sink, which are read again for each call."""

    def __init__(self, session: aiohttp.ClientSession, settings: Settings, clock: Clock) -> None:
        self._session = session
        self._settings = settings
        self._url = settings.web_api_url()
        self._clock = clock
        self._workspace: tuple[str, Workspace] | None = None
        """With the token that it belongs to."""

    def token(self) -> str:
        """Return the current bot token. Raises Deferred if its file holds none."""
        with raise_deferred_if_secret_unusable("token"):
            return self._settings.bot_token()

    async def workspace(self) -> Workspace:
        """Return the workspace of the current token. Raises Deferred."""
        token = self.token()
        if self._workspace is None or self._workspace[0] != token:
            found = await self.call("auth.test")
            team_id, enterprise_id = found.get("team_id"), found.get("enterprise_id")
            if not isinstance(team_id, str) or _ID.fullmatch(team_id) is None:
                raise Deferred(
                    "expected team_id in Slack's answer, it is missing: "
                    "is token a bot token, and api_url Slack's Web API?"
                )
            enterprise_id = enterprise_id if isinstance(enterprise_id, str) else None
            self._workspace = token, Workspace(team_id, enterprise_id)
        return self._workspace[1]

    async def open_socket_url(self) -> str:
        """Return the URL for one connection of Socket Mode, which is secret. Raises Deferred."""
        with raise_deferred_if_secret_unusable("app_token"):
            token = self._settings.app_level_token()
        url = (await self.call("apps.connections.open", token=token)).get("url")
        schemes = ("wss://", "ws://") if self._settings.allow_http else ("wss://",)
        if not isinstance(url, str) or not url.startswith(schemes):
            raise Deferred(
                "expected a URL that starts with wss:// from apps.connections.open, "
                "got another value",
                failure="slow",
            )
        return url

    async def call(
        self, method: str, fields: Mapping[str, Any] | None = None, *, token: str | None = None
    ) -> Mapping[str, Any]:
        """Call a method, with the bot token if no other is given.

        Methods that only read take their fields in the query, all others take JSON. Raises
        Deferred, Rejected, MessageGone.
        """
        token = token or self.token()
        verb: Method = "GET" if method.endswith(".info") else "POST"
        request = Request(
            url=(self._url / method).with_query(fields if verb == "GET" else None),
            headers={
                "Authorization": f"Bearer {token}",
                "Content-Type": "application/json; charset=utf-8",
            },
            body=orjson.dumps(fields or {}) if verb == "POST" else b"",
            secrets=(token,),
        )
        seconds = self._settings.timeout
        response = await send(self._session, verb, request, seconds=seconds, most=MAX_ANSWER_BYTES)
        content = response.json()
        document = content if isinstance(content, dict) else {}
        if response.status == 200 and document.get("ok") is True:  # HTTP
            return document
        raise _error(response, document, self._clock.now())


def _error(
    response: Response, document: Mapping[str, Any], now: datetime
) -> DeliveryError | MessageGone:
    code, status = document.get("error"), response.status
    outcome = interpret_response(response, now)
    if not isinstance(code, str) or _ERROR_CODE.fullmatch(code) is None:
        return outcome or Deferred(
            "expected a response of Slack's Web API, got something else with status "
            f"{status}: is api_url correct?",
            status=status,
        )
    if code in _RATE_LIMIT_ERRORS:
        pause = outcome.after if outcome is not None else None
        return Deferred("Slack limits the rate of this app's calls", after=pause, status=status)
    if code in _MESSAGE_GONE_ERRORS:
        return MessageGone(code)
    if code in _INVALID_MESSAGE_ERRORS:
        return Rejected(
            f"Slack refuses the message: {code}. This is a bug of the relay: "
            "report it with the event",
            status=status,
        )
    remedy = REMEDIES.get(code, "see the method's reference at docs.slack.dev")
    needed = document.get("needed")
    if code == "missing_scope" and isinstance(needed, str) and _SCOPES.fullmatch(needed):
        remedy = f"the app lacks the scope {needed}: {remedy}"
    return Deferred(
        f"Slack answered {code}: {remedy}",
        failure="transient" if code in _TRANSIENT_ERRORS else "slow",
        status=status,
    )
