"""Answers clicks and commands: passes decisions to the gate, and lists events with links.

A click is checked in this order: who clicked, whether this sink made the button, and then whether
the gate accepts the decision. A stranger's click therefore has no effect. The command decides
nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from relay.chat.cards.card import event_page
from relay.chat.cards.event_card import event_line
from relay.chat.context import ChatContext
from relay.chat.platforms.slack.api import Settings
from relay.chat.platforms.slack.members import (
    Actor,
    ButtonDecision,
    Click,
    Command,
    Members,
    NotAuthorized,
    Unreadable,
    parse_click,
    parse_command,
)
from relay.chat.platforms.slack.messages import Json, text_message
from relay.clock import Clock
from relay.errors import DeliveryError, StoreUnavailable
from relay.logs import throttled_sink_log
from relay.sentences import Text

MAX_LISTED_EVENTS = 15
"""Events that a list names; the rest are counted."""
_INVALID_BUTTON = (
    "These buttons are no longer valid, so nothing was decided. Look at the newest message."
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reply:
    actor: Actor
    message: Json


class Answers:
    def __init__(
        self, settings: Settings, context: ChatContext, members: Members, clock: Clock
    ) -> None:
        self._settings = settings
        self._context = context
        self._members = members
        self._warn = throttled_sink_log(_log, clock, settings.name)

    async def answer(self, envelope: Mapping[str, Any]) -> Reply | None:
        """Do what an envelope asks for. A decision is on disk when this returns."""
        try:
            match envelope.get("type"):
                case "interactive":
                    parsed = parse_click(envelope.get("payload"))
                    if parsed is None:
                        return None
                    actor: Actor = parsed[0]
                    handling: Coroutine[Any, Any, Json | None] = self._decide(*parsed)
                case "slash_commands":
                    actor = command = parse_command(envelope.get("payload"))
                    handling = self._list(command)
                case _:
                    return None
        except Unreadable as error:
            self._warn(f"ignored an unreadable envelope: {error}")
            return None
        try:
            message = await handling
            return Reply(actor, message) if message is not None else None
        except NotAuthorized as error:
            self._warn(f"{actor.principal} was refused: {error}")
            problem = f"Nothing was decided: {error}."
        except DeliveryError as error:
            self._warn(f"Slack cannot identify {actor.principal}: {error.reason}")
            problem = (
                "Slack cannot tell now who you are, so nothing was decided. Try again in a moment."
            )
        except StoreUnavailable:
            problem = (
                "The relay cannot read its records now, so nothing was decided. "
                "Try again in a moment."
            )
        return Reply(actor, text_message([(problem,)], actor.team_id))

    async def _decide(self, click: Click, action: ButtonDecision) -> Json | None:
        """Return why nothing was decided. Raises NotAuthorized, DeliveryError, StoreUnavailable."""
        if not self._settings.approve_in_chat:
            raise NotAuthorized("decisions are taken on the page behind the links")
        decisions = self._context.decisions
        caller = decisions.caller(click.principal, self._settings)
        if caller is None:  # Slack is not asked about strangers
            raise NotAuthorized(f"no rule of this relay names you, {click.principal}")
        await self._members.check(click)
        status = await self._context.messages.find_status_of_shown_event(
            self._settings.name, click.message_ref, action.event_id
        )
        if status is None:
            return text_message([(_INVALID_BUTTON,)], click.team_id)
        answer = await decisions.decide(
            caller,
            event_id=action.event_id,
            decision=action.decision,
            revision=action.revision,
            request_id=f"slack {click.trigger_id}",
        )
        if answer.accepted:
            return None  # the message in the channel shows the decision
        refusal = answer.body.get("detail") or "the relay refuses it"
        return text_message([(f"Nothing was decided: {refusal}.",)], click.team_id)

    async def _list(self, command: Command) -> Json:
        """Return the live events, or those whose EventIds begin as the person typed."""
        if command.channel_id != self._settings.channel:
            raise NotAuthorized(
                "the command works in the channel in which the relay shows its events"
            )
        await self._members.check(command)
        beginning = command.text.strip().lower()
        beginning = "" if beginning == "list" else beginning
        listed = sorted(
            (
                status
                for status in await self._context.messages.live_statuses(self._settings)
                if status.occurrence.event.event_id.lower().startswith(beginning)
            ),
            key=lambda status: (
                status.not_before is None,
                status.not_before or status.now,
                status.occurrence.id,
            ),
        )
        shown = listed[:MAX_LISTED_EVENTS]
        lines: list[Text] = [
            (f"{status.occurrence.event.event_id[:8]}: ", *event_line(status)) for status in shown
        ]
        if len(listed) > MAX_LISTED_EVENTS:
            lines.append((f"… and {len(listed) - MAX_LISTED_EVENTS} more.",))
        elif not listed and beginning:
            lines.append((f"No event of the document begins with {beginning}.",))
        elif not listed:
            lines.append(("Azure has announced nothing.",))
        url = self._context.public_url
        pages = [event_page(url, status) for status in shown] if url is not None else []
        return text_message(lines, command.team_id, pages)
