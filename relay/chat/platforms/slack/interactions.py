"""Handles verified requests of Slack: passes decisions to the gate and replies to the person.

A click is checked in this order: who clicked, whether this sink made the button, and then whether
the gate accepts the decision. A stranger's click therefore has no effect.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from typing import Any

from relay.approvals.status import ApprovalStatus
from relay.chat import CallbackReply
from relay.chat.context import ChatContext
from relay.chat.platforms.slack.identity import (
    IdentityUnavailable,
    MemberVerifier,
    NotAuthorized,
)
from relay.chat.platforms.slack.private_reply import (
    PrivateReply,
    ResponseUrlSender,
    decision_reply,
    text_reply,
)
from relay.chat.platforms.slack.requests import (
    Actor,
    ButtonClick,
    Call,
    SlashCommand,
    UrlVerification,
    is_action_token_valid,
)
from relay.chat.platforms.slack.settings import Settings
from relay.chat.platforms.slack.slash_command import SlashCommandHandler
from relay.chat.throttled_log import ThrottledLog
from relay.clock import Clock
from relay.errors import StoreUnavailable

_INVALID_BUTTON = (
    "These buttons are no longer valid, so nothing was decided. Look at the newest message."
)
_log = logging.getLogger(__name__)


class Interactions:
    """Handles the requests of one sink."""

    def __init__(
        self,
        settings: Settings,
        context: ChatContext,
        members: MemberVerifier,
        clock: Clock,
        replies: ResponseUrlSender,
    ) -> None:
        self._settings = settings
        self._context = context
        self._clock = clock
        self._replies = replies
        self._members = members
        self._slash_command = SlashCommandHandler(settings, context, members, clock)
        self._throttled_log = ThrottledLog(_log, clock, settings.name)

    async def handle(self, call: Call) -> CallbackReply:
        """Do what was asked for. A decision is on disk when this returns."""
        match call:
            case UrlVerification():
                return CallbackReply({"challenge": call.challenge})
            case ButtonClick():
                reply = await self._result_or_refusal_reply(call.actor, self._handle_click(call))
                if reply is not None:
                    replaces_card = call.is_ephemeral and reply.closes_card
                    self._replies.send(
                        call.actor.response_url,
                        {**reply.body(), "replace_original": replaces_card},
                    )
            case SlashCommand():
                handling = self._slash_command.handle(call)
                reply = await self._result_or_refusal_reply(call.actor, handling)
                return CallbackReply(None if reply is None else reply.body())
        return CallbackReply()

    async def _result_or_refusal_reply(
        self, actor: Actor, handling: Coroutine[Any, Any, PrivateReply | None]
    ) -> PrivateReply | None:
        """Return the result of ``handling``, or a reply that explains why it failed."""
        try:
            return await handling
        except NotAuthorized as error:
            self._throttled_log.warning(f"{actor.principal} was refused: {error}")
            return text_reply((f"Nothing was decided: {error}.",), team_id=actor.team_id)
        except IdentityUnavailable as error:
            self._throttled_log.warning(f"Slack cannot identify {actor.principal}: {error}")
            problem = "Slack cannot tell now who you are"
        except StoreUnavailable:
            problem = "The relay cannot read its records now"
        return text_reply(
            (f"{problem}, so nothing was decided. Try again in a moment.",),
            team_id=actor.team_id,
            closes_card=False,
        )

    async def _handle_click(self, click: ButtonClick) -> PrivateReply | None:
        actor, action = click.actor, click.action
        if not self._settings.approve_in_chat:
            raise NotAuthorized("decisions are taken on the page behind the links")
        caller = await self._members.require_caller(actor, self._context.decisions, self._settings)
        status = await self._find_status_of_own_button(click)
        if status is None:
            return text_reply((_INVALID_BUTTON,), team_id=actor.team_id)
        answer = await self._context.decisions.decide(
            caller,
            event_id=action.event_id,
            decision=action.decision,
            revision=action.revision,
            request_id=actor.request_id,
        )
        if answer.accepted and not click.is_ephemeral:
            return None  # the message in the channel shows the decision
        return decision_reply(answer, status, actor)

    async def _find_status_of_own_button(self, click: ButtonClick) -> ApprovalStatus | None:
        """Return the event's status if this sink made the button; None if it did not."""
        action = click.action
        if not click.is_ephemeral:
            if action.action_token is not None:
                return None
            return await self._context.statuses.find_status_of_shown_event(
                self._settings.name, click.message_ref, action.event_id
            )
        bot_token, now = self._settings.bot_token(), self._clock.now()
        if not is_action_token_valid(self._settings.name, click.actor, action, bot_token, now):
            return None
        statuses = await self._context.statuses.live_statuses(self._settings)
        key = action.event_id.lower()
        return next((status for status in statuses if status.occurrence.key == key), None)
