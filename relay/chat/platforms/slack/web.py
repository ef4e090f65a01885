"""Calls Slack's Web API, and explains its errors with what to do about them.

The SDK builds the requests and checks the responses. `relay.net.http` sends them, as for every
sink: the SDK would use proxies of the environment, follow redirects, retry, read responses of any
length, and log what it sends (docs/decisions/0017-own-slack-socket.md).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn, cast

import aiohttp
import orjson
from slack_sdk.errors import SlackApiError
from slack_sdk.web.async_client import AsyncWebClient
from slack_sdk.web.async_slack_response import AsyncSlackResponse
from typing_extensions import override
from yarl import URL

from relay.chat import MessageGone, raise_deferred_if_secret_unusable
from relay.chat.platforms.slack.settings import Settings
from relay.clock import Clock
from relay.errors import Deferred, Rejected
from relay.net.http import MAX_RETRY_AFTER, Method, Request, parse_retry_after, send

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
    "method_not_supported_for_channel_type": "channel must be the id of a channel, "
    "not of a conversation between people",
    "messages_tab_disabled": "channel must be the id of a channel, not of the app's own page",
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
_SCOPES = re.compile(r"[a-z:,._ ]{1,200}")
# The SDK would log proxies of the environment, with their passwords.
_silent_log = logging.getLogger(f"{__name__}.sdk")
_silent_log.setLevel(logging.CRITICAL + 1)

SdkMethod = Callable[..., Awaitable[AsyncSlackResponse]]


class WebApi:
    """Calls methods of the Web API with the bot token of one sink.

    Example: ``await api.call(api.methods.users_info, user="U7")``.
    """

    def __init__(self, session: aiohttp.ClientSession, settings: Settings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self.methods = _GuardedSdkClient(session, settings.web_api_base_url(), settings.timeout)
        """The SDK's client, whose methods are those of the Web API. Pass them to `call`."""

    def token(self) -> str:
        """Return the current bot token. Raises Deferred if its file holds none."""
        with raise_deferred_if_secret_unusable("token"):
            return self._settings.bot_token()

    async def call(
        self, method: SdkMethod, *, refers_to_message: bool = False, **arguments: Any
    ) -> Mapping[str, Any]:
        """Call a method with its arguments and return the JSON object of the response.

        ``refers_to_message``: the call is about a message that was posted before. Only then some
        errors mean that somebody deleted it: MessageGone. Also raises Deferred and Rejected. None
        of these errors contains a secret.
        """
        self.methods.token = self.token()
        try:
            response = await method(**arguments)
        except SlackApiError as error:
            _raise_error(
                cast("AsyncSlackResponse", error.response),
                self._clock.now(),
                refers_to_message=refers_to_message,
            )
        return cast("Mapping[str, Any]", response.data)


class _GuardedSdkClient(AsyncWebClient):
    """The SDK's client, but its requests go through `relay.net.http`.

    `WebApi.call` sets ``token`` before each method. The SDK reads it before the method first
    waits, so calls at the same time cannot mix up their tokens.
    """

    def __init__(self, session: aiohttp.ClientSession, url: URL, request_timeout: float) -> None:
        super().__init__(base_url=str(url), session=session, retry_handlers=[], logger=_silent_log)
        self._guarded_session = session
        self._request_timeout = request_timeout

    @override
    async def _request(
        self, *, http_verb: str, api_url: str, req_args: dict[str, Any]
    ) -> dict[str, Any]:
        url = URL(api_url).with_query(req_args.get("params") or None)
        body = orjson.dumps(req_args["json"]) if req_args.get("json") is not None else b""
        request = Request(url=url, headers=req_args["headers"], body=body)
        response = await send(
            self._guarded_session,
            cast("Method", http_verb),
            request,
            seconds=self._request_timeout,
        )
        try:
            document = orjson.loads(response.body)
        except orjson.JSONDecodeError:
            document = None
        return {
            "data": document if isinstance(document, dict) else {},
            "headers": response.headers,
            "status_code": response.status,
        }


def _raise_error(
    response: AsyncSlackResponse, now: datetime, *, refers_to_message: bool
) -> NoReturn:
    """Raise Deferred, Rejected or MessageGone for an error response of the Web API."""
    document = cast("Mapping[str, Any]", response.data)
    status = response.status_code
    code = document.get("error")
    if not isinstance(code, str) or _ERROR_CODE.fullmatch(code) is None:
        code = None
    if status == 429 or code in _RATE_LIMIT_ERRORS:  # HTTP
        retry_after = response.headers.get("Retry-After")
        raise Deferred(
            "Slack limits the rate of this app's calls",
            after=parse_retry_after(retry_after, now, maximum=MAX_RETRY_AFTER),
            status=status,
        )
    if status >= 500:  # HTTP
        raise Deferred(
            f"expected a response of Slack's Web API, got {status}: Slack has a problem",
            status=status,
        )
    if 300 <= status <= 399:  # HTTP
        raise Deferred(
            f"expected a response of Slack's Web API, got {status}: "
            "redirects are not followed, correct api_url",
            failure="slow",
            status=status,
        )
    if code is None:
        raise Deferred(
            "expected a response of Slack's Web API, got something else with status "
            f"{status}: is api_url correct?",
            failure="transient" if status == 200 else "slow",  # HTTP
            status=status,
        )
    if refers_to_message and code in _MESSAGE_GONE_ERRORS:
        raise MessageGone(code)
    if code in _INVALID_MESSAGE_ERRORS:
        raise Rejected(
            f"Slack refuses the message: {code}. This is a bug of the relay: "
            "report it with the event",
            status=status,
        )
    raise Deferred(
        f"Slack answered {code}: {_remedy(code, document)}",
        failure="transient" if code in _TRANSIENT_ERRORS else "slow",
        status=status,
    )


def _remedy(code: str, document: Mapping[str, Any]) -> str:
    remedy = REMEDIES.get(code, "see the method's reference at docs.slack.dev")
    needed = document.get("needed")
    if code == "missing_scope" and isinstance(needed, str) and _SCOPES.fullmatch(needed):
        return f"the app lacks the scope {needed}: {remedy}"
    return remedy
