"""Handles decisions in Mattermost: a click opens a dialog, and its submission is the decision.

Mattermost does not sign its calls (docs/protocol.md#mattermost), so each call must prove three
things:

- What is decided: the action token in the button and in the dialog proves that this relay offered
  the decision.
- Where: the post must be one that this sink made, about that event.
- Who: the server opens a dialog only for a fresh trigger id that it signed for the person who
  clicked, and shows the dialog to that person only. So nobody else gets the dialog's token, and a
  forged click ends there.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from dataclasses import replace
from functools import partial
from typing import Any

from relay.approvals.request import Caller
from relay.approvals.status import ApprovalStatus
from relay.chat import CallbackRefused, CallbackReply
from relay.chat.cards.buttons import LABELS, available_decisions, confirmation_question
from relay.chat.cards.card import Button
from relay.chat.context import ChatContext
from relay.chat.platforms.mattermost.api import MattermostApi
from relay.chat.platforms.mattermost.identity import MemberDirectory, NotEligible
from relay.chat.platforms.mattermost.post_rendering import render_text_as_markdown
from relay.chat.platforms.mattermost.requests import (
    ActionToken,
    Click,
    DialogSubmission,
    TokenKind,
    parse_payload,
    parse_signed_action_token,
    sign_action_token,
    user_id_from_trigger_id,
)
from relay.chat.platforms.mattermost.settings import Settings
from relay.chat.throttled_log import ThrottledLog
from relay.clock import Clock
from relay.errors import ConfigError, Deferred, StoreUnavailable

BUTTON_LIFETIME = 14 * 86400
"""Seconds, longer than Azure's longest notice. NotBefore and the gate end a button earlier."""
DIALOG_LIFETIME = 600
"""Seconds. The relay remembers its answers for a day at least, so a repeat stays one vote."""
MAX_QUESTION_LENGTH = 600
"""Characters of a dialog's question, before they are escaped."""
_UNVERIFIED = "Mattermost could not verify who you are: nothing was decided, try again."
_OUTDATED_MESSAGE = (
    "This message is not current any more: nothing was decided. "
    "Use the newest message about the event."
)
_EXPIRED_DIALOG = "This took too long: nothing was decided. Click the button again."
_EVENT_CHANGED = (
    "The event has changed since this button was made: nothing was decided. "
    "Look at the message again."
)
_DECISION_CLOSED = (
    "This cannot be decided any more: nothing was decided. Look at the message again."
)
_STORE_UNAVAILABLE = "The decision cannot be recorded now: nothing was decided, try again."
_log = logging.getLogger(__name__)


class UserRefusal(Exception):
    """A refusal that only the person who clicked sees. It contains no text of others."""


class Interactions:
    """Handles the calls for one sink. ``lookup_timeout`` limits the call that opens a dialog."""

    def __init__(
        self,
        settings: Settings,
        context: ChatContext,
        api: MattermostApi,
        members: MemberDirectory,
        clock: Clock,
        *,
        lookup_timeout: float,
    ) -> None:
        if context.public_url is None:
            raise ConfigError(
                f"sink {settings.name}: approve_in_chat needs api.public_url, "
                "which Mattermost calls"
            )
        self._settings = settings
        self._context = context
        self._api = api
        self._members = members
        self._clock = clock
        self._lookup_timeout = lookup_timeout
        self._throttled_log = ThrottledLog(_log, clock, settings.name)
        self._callback_url = f"{context.public_url}/v1/chat/{settings.name}"

    def build_integration(self, button: Button) -> dict[str, Any]:
        """Return what a button contains. The server does not show it to anybody.

        Raises ValueError if there is no key.
        """
        token = ActionToken(
            kind="button",
            sink=self._settings.name,
            channel_id=self._settings.channel,
            event_id=button.event_id,
            revision=button.revision,
            decision=button.decision,
            expires_at=self._now_in_unix_seconds() + BUTTON_LIFETIME,
            nonce=secrets.token_urlsafe(12),
        )
        proof = sign_action_token(self._settings.signing_key(), token)
        return {"url": self._callback_url, "context": {"proof": proof}}

    async def handle_callback(self, body: bytes) -> CallbackReply:
        """Handle a click or a submission. Its decision is on disk when this returns.

        Raises CallbackRefused if the call proves nothing or cannot be read.
        """
        payload = parse_payload(body)
        if isinstance(payload, Click):
            try:
                await self._verify_click_and_open_dialog(payload)
            except UserRefusal as refusal:
                return CallbackReply({"ephemeral_text": str(refusal), "skip_slack_parsing": True})
        elif not payload.cancelled:
            try:
                await self._submit_dialog_decision_or_raise_refusal(payload)
            except UserRefusal as refusal:
                return CallbackReply({"error": str(refusal)})
        return CallbackReply({})

    async def _verify_click_and_open_dialog(self, click: Click) -> None:
        token = self._verify_action_token(click.context.action_token, "button")
        if click.channel_id != self._settings.channel:
            raise CallbackRefused("expected a click in the sink's channel, it was in another")
        status = await self._require_current_message(token, click.post_id)
        if user_id_from_trigger_id(click.trigger_id) != click.user_id:
            raise CallbackRefused(
                "expected a trigger id of the person who clicked, got another person's or none"
            )
        await self._require_caller(token, click.user_id)
        if status.occurrence.revision != token.revision:
            raise UserRefusal(_EVENT_CHANGED)
        if token.decision not in available_decisions(status):
            raise UserRefusal(_DECISION_CLOSED)
        dialog_token = replace(
            token,
            kind="dialog",
            # The decision of a button can be taken, ended, and taken again from the same post.
            nonce=secrets.token_urlsafe(12),
            expires_at=self._now_in_unix_seconds() + DIALOG_LIFETIME,
            post_id=click.post_id,
            user_id=click.user_id,
        )
        await self._open_dialog(click.trigger_id, dialog_token, status)

    async def _submit_dialog_decision_or_raise_refusal(self, submission: DialogSubmission) -> None:
        token = self._verify_action_token(submission.state, "dialog")
        if submission.user_id != token.user_id:
            raise CallbackRefused(
                "expected the dialog of the person who submits it, it is another person's"
            )
        await self._require_current_message(token, token.post_id)
        caller = await self._require_caller(token, token.user_id)
        request_id = hashlib.sha256(f"{token.nonce}\n{token.user_id}".encode()).hexdigest()
        answer = await self._context.decisions.decide(
            caller,
            event_id=token.event_id,
            decision=token.decision,
            revision=token.revision,
            request_id=request_id,
        )
        if not answer.accepted:
            raise UserRefusal(f"Refused: {answer.body.get('detail', 'no reason is known')}.")

    async def _open_dialog(
        self, trigger_id: str, token: ActionToken, status: ApprovalStatus
    ) -> None:
        question = confirmation_question(token.decision, status)
        label = LABELS[token.decision]
        dialog = {
            "callback_id": "decision",
            "title": label,
            "introduction_text": render_text_as_markdown(
                question, {}, max_length=MAX_QUESTION_LENGTH
            ),
            "elements": [],
            "submit_label": label,
            "notify_on_cancel": False,
            "state": sign_action_token(self._settings.signing_key(), token),
        }
        try:
            response = await self._api.call(
                "POST",
                "actions/dialogs/open",
                {"trigger_id": trigger_id, "url": self._callback_url, "dialog": dialog},
                within=self._lookup_timeout,
            )
        except Deferred as error:
            raise self._log_failure_and_make_user_refusal(
                "a dialog could not be opened", error
            ) from None
        if "trigger_id" in response.error_id:
            raise CallbackRefused(
                "expected a trigger id that Mattermost signed, "
                f"it refuses this trigger id ({response.error_id})"
            )
        if not response.ok:
            raise self._log_failure_and_make_user_refusal(
                "a dialog could not be opened", self._api.delivery_error(response)
            )

    def _verify_action_token(self, text: str, kind: TokenKind) -> ActionToken:
        """Return a token that this sink made and that has not expired."""
        try:
            key = self._settings.signing_key()
        except ValueError as error:
            raise CallbackRefused(f"the secret of this sink is no longer usable: {error}") from None
        token = parse_signed_action_token(key, text, kind)
        if (token.sink, token.channel_id) != (self._settings.name, self._settings.channel):
            raise CallbackRefused("expected a token of this sink and channel, it is of another")
        if self._now_in_unix_seconds() >= token.expires_at:
            raise UserRefusal(_OUTDATED_MESSAGE if kind == "button" else _EXPIRED_DIALOG)
        return token

    async def _require_current_message(self, token: ActionToken, post_id: str) -> ApprovalStatus:
        """Return the status of the token's event if the post is this sink's message about it."""
        try:
            status = await self._context.statuses.find_status_of_shown_event(
                self._settings.name, post_id, token.event_id
            )
        except StoreUnavailable:
            raise UserRefusal(_STORE_UNAVAILABLE) from None
        if status is None:
            raise UserRefusal(_OUTDATED_MESSAGE)
        return status

    async def _require_caller(self, token: ActionToken, user_id: str) -> Caller:
        """Return the caller for a person whom the server and the rules know."""
        try:
            return await self._members.require_caller(
                user_id, partial(self._context.decisions.caller, sink=self._settings)
            )
        except NotEligible as error:
            self._throttled_log.warning(f"refused {token.decision} by user {user_id}: {error}")
            raise UserRefusal(str(error)) from None
        except Deferred as error:
            raise self._log_failure_and_make_user_refusal(
                "a person could not be verified", error
            ) from None

    def _log_failure_and_make_user_refusal(self, problem: str, error: Deferred) -> UserRefusal:
        self._throttled_log.warning(f"{problem}, nothing was decided: {error.reason}")
        return UserRefusal(_UNVERIFIED)

    def _now_in_unix_seconds(self) -> int:
        return int(self._clock.now().timestamp())
