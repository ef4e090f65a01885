"""Slack's Web API: one call within a bound of time, and its refusals as sentences that say what to do.

The SDK makes the arguments and judges the answers; sent are they as by every sink (`relay.net.http`). By itself the SDK
would take proxies of the environment, follow redirects, try again, read answers of any length, and log what it sends.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn, cast

import aiohttp
import orjson
from slack_sdk.errors import SlackApiError
from slack_sdk.web.async_client import AsyncWebClient
from slack_sdk.web.async_slack_response import AsyncSlackResponse
from typing_extensions import override
from yarl import URL

from relay.chat import MessageGone
from relay.errors import Deferred, Rejected
from relay.net.http import MAX_RETRY_AFTER, Method, Request, send

REMEDIES: Mapping[str, str] = {
    "invalid_auth": "token is not, or no longer, that of an installed app: copy the bot token again from “OAuth & Permissions”",
    "not_authed": "token is not, or no longer, that of an installed app: copy the bot token again from “OAuth & Permissions”",
    "token_revoked": "the token was revoked: install the app again and copy its new bot token",
    "token_expired": "the token has expired: switch token rotation off in the app's settings, and install the app again",
    "account_inactive": "the app was removed from the workspace: install it again and copy its new bot token",
    "not_allowed_token_type": "the token is of the wrong kind: token starts with xoxb-, app_token with xapp-",
    "missing_scope": "add the scopes that the app's manifest names, and install the app again",
    "no_permission": "add the scopes that the app's manifest names, and install the app again",
    "channel_not_found": "channel must be the id of a channel of this workspace; into a private one the app must be invited (/invite)",
    "not_in_channel": "invite the app into the channel: /invite, and its name",
    "is_archived": "the channel is archived: restore it, or give another channel",
    "restricted_action": "only some may post in this channel: allow the app to, in the channel's settings",
    "team_access_not_granted": "an administrator of the organisation must allow the app in this workspace",
    "access_denied": "an administrator of the workspace must allow the app",
    "method_not_supported_for_channel_type": "channel must be the id of a channel, not of a conversation between people",
    "messages_tab_disabled": "channel must be the id of a channel, not of the app's own page",
    "forbidden_team": "an administrator of the organisation must allow the app in this workspace",
    "org_login_required": "the workspace is being moved into an organisation; it passes by itself",
}
"""What somebody must mend, by Slack's word for it (its reference, "Errors" of each method)."""
_PASSING = frozenset(
    {
        "ratelimited",
        "rate_limited",
        "internal_error",
        "fatal_error",
        "service_unavailable",
        "request_timeout",
        "org_login_required",
    }
    | {
        "team_added_to_org",
        "message_limit_exceeded",
        "external_channel_migrating",
        "failed_for_some_users",
    }
)
_GONE = frozenset(
    {
        "message_not_found",
        "cant_update_message",
        "edit_window_closed",
        "thread_not_found",
        "cannot_reply_to_message",
    }
)
_OURS = frozenset(
    {
        "msg_too_long",
        "msg_blocks_too_long",
        "invalid_blocks",
        "invalid_blocks_format",
        "no_text",
        "invalid_arguments",
    }
)
_WORD = re.compile(r"[a-z0-9_:]{1,80}")
_silent = logging.getLogger(f"{__name__}.sdk")
_silent.setLevel(
    logging.CRITICAL + 1
)  # it would log proxies of the environment, with their passwords

Slackish = Callable[..., Awaitable[AsyncSlackResponse]]


class WebApi:
    """The methods of the Web API, called with the token as it is now."""

    def __init__(
        self, session: aiohttp.ClientSession, url: URL, token: Callable[[], str], seconds: float
    ) -> None:
        self._revealed = token
        self._seconds = seconds
        self.methods = _Client(session, url)
        """The SDK's client, whose methods are handed to `call`."""

    def token(self) -> str:
        """The bot token as it is now. Raises Deferred where its file holds none."""
        try:
            return self._revealed()
        except ValueError as error:
            raise Deferred(
                f"the token of this sink cannot be used any more: {error}", failure="slow"
            ) from None

    async def call(
        self,
        method: Slackish,
        *,
        seconds: float | None = None,
        of_message: bool = False,
        **arguments: Any,
    ) -> Mapping[str, Any]:
        """What a method answers. Raises Deferred and Rejected, neither of which holds a secret.

        ``seconds``: how long it may take, in place of the sink's timeout. ``of_message``: it is about a message that was
        posted before; raises MessageGone too.
        """
        self.methods.token = self.token()
        self.methods.seconds = seconds if seconds is not None else self._seconds
        try:
            answer = await method(**arguments)
        except SlackApiError as error:
            _refuse(cast("AsyncSlackResponse", error.response), of_message=of_message)
        return cast("Mapping[str, Any]", answer.data)


class _Client(AsyncWebClient):
    """The SDK's client, which sends in the way of this relay. Token and seconds are those of the call that is begun."""

    def __init__(self, session: aiohttp.ClientSession, url: URL) -> None:
        super().__init__(base_url=str(url), session=session, retry_handlers=[], logger=_silent)
        self._guarded = session
        self.seconds = 0.0

    @override
    async def _request(
        self, *, http_verb: str, api_url: str, req_args: dict[str, Any]
    ) -> dict[str, Any]:
        url = URL(api_url).with_query(req_args.get("params") or None)
        body = orjson.dumps(req_args["json"]) if req_args.get("json") is not None else b""
        request = Request(url, req_args["headers"], body)
        answer = await send(self._guarded, cast("Method", http_verb), request, seconds=self.seconds)
        try:
            data = orjson.loads(answer.body)
        except orjson.JSONDecodeError:
            data = None
        return {
            "data": data if isinstance(data, dict) else {},
            "headers": answer.headers,
            "status_code": answer.status,
        }


def _refuse(answer: AsyncSlackResponse, *, of_message: bool) -> NoReturn:
    """Say what a refusal means. Raises Deferred, Rejected or MessageGone, always."""
    data: Mapping[str, Any] = cast("Mapping[str, Any]", answer.data)
    status, error = answer.status_code, data.get("error")
    word = error if isinstance(error, str) and _WORD.fullmatch(error) else None
    if status == 429 or word in ("ratelimited", "rate_limited"):  # HTTP
        raise Deferred(
            "Slack asks for a rest: too many calls of this app",
            after=_rest(answer.headers),
            status=status,
        )
    if status >= 500:  # HTTP
        raise Deferred(
            f"expected Slack's answer, got {status}: it has trouble of its own", status=status
        )
    if 300 <= status <= 399:  # HTTP
        raise Deferred(
            f"expected Slack's answer, got {status}: redirects are not followed, mend api_url",
            failure="slow",
            status=status,
        )
    if word is None:
        reason = f"expected an answer of Slack's Web API, got something else with status {status}: does api_url name it?"
        raise Deferred(
            reason, failure="transient" if status == 200 else "slow", status=status
        )  # HTTP
    if of_message and word in _GONE:
        raise MessageGone(word)
    if word in _OURS:
        raise Rejected(
            f"Slack takes no such message: {word}. It is a fault of the relay: report it with the event",
            status=status,
        )
    advice = REMEDIES.get(word, "its reference at docs.slack.dev says what that means")
    if (
        word == "missing_scope"
        and isinstance(needed := data.get("needed"), str)
        and re.fullmatch(r"[a-z:,._ ]{1,200}", needed)
    ):
        advice = f"the app lacks the scope {needed}: {advice}"
    raise Deferred(
        f"Slack answered {word}: {advice}",
        failure="transient" if word in _PASSING else "slow",
        status=status,
    )


def _rest(headers: Mapping[str, str]) -> float | None:
    """Seconds of ``Retry-After``, which Slack gives as a number."""
    text = headers.get("Retry-After", "").strip()
    return min(float(text), MAX_RETRY_AFTER) if re.fullmatch(r"[0-9]{1,9}", text) else None
