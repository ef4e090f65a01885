"""Handles the slash command: list events, hold an event, or show an event with buttons.

`relay.chat.platforms.slack.interactions` passes each command here. The command never approves or
releases by itself: it shows the event first, so that nobody approves a state that they did not see.
It works in the channel of the sink alone, and for members of the workspace. Only with
``approve_in_chat`` it decides: without it, the buttons of the event are links to the confirm page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from relay.approvals.request import Caller, DecisionKind
from relay.approvals.status import ApprovalStatus
from relay.chat.cards.card import Button, Card, Text
from relay.chat.cards.grouped_card import event_line
from relay.chat.context import ChatContext
from relay.chat.platforms.slack.blocks import card_message
from relay.chat.platforms.slack.identity import MemberVerifier, NotAuthorized
from relay.chat.platforms.slack.private_reply import PrivateReply, decision_reply, text_reply
from relay.chat.platforms.slack.requests import (
    Actor,
    SlashCommand,
    format_button_value,
    make_action_token,
)
from relay.chat.platforms.slack.settings import Settings
from relay.clock import Clock

MAX_LISTED_EVENTS = 15
"""Events that a list names; the rest are counted."""
MAX_REASON_LENGTH = 1000
"""Characters of the reason of a hold; the rest is cut."""
_DECISIONS: Mapping[str, DecisionKind] = {
    "approve": "approve",
    "hold": "hold",
    "release": "release",
}
_USAGE: tuple[Text, ...] = (
    ("list: the events that Azure has announced, and their state.",),
    ("approve, hold or release, and an EventId or its first characters: decide about the event.",),
    ("The words after the EventId of a hold are its reason.",),
)


class SlashCommandHandler:
    """Handles the slash commands of one sink."""

    def __init__(
        self, settings: Settings, context: ChatContext, members: MemberVerifier, clock: Clock
    ) -> None:
        self._settings = settings
        self._context = context
        self._members = members
        self._clock = clock

    async def handle(self, command: SlashCommand) -> PrivateReply:
        """Return the reply. Raises NotAuthorized, IdentityUnavailable, StoreUnavailable."""
        actor, arguments = command.actor, command.text.split()
        verb = arguments[0].lower() if arguments else "list"
        if actor.channel_id != self._settings.channel:
            raise NotAuthorized(
                "the command works in the channel in which the relay shows its events"
            )
        if verb == "list" and len(arguments) <= 1:
            await self._members.check_full_member(actor)
            return _list_reply(await self._context.statuses.live_statuses(self._settings), actor)
        if verb not in _DECISIONS or len(arguments) < 2:
            return text_reply(*_USAGE, team_id=actor.team_id)
        decision, event_prefix = _DECISIONS[verb], arguments[1]
        caller = None  # without approve_in_chat nobody decides here
        if self._settings.approve_in_chat:
            caller = await self._members.require_caller(
                actor, self._context.decisions, self._settings
            )
        else:
            await self._members.check_full_member(actor)
        live = await self._context.statuses.live_statuses(self._settings)
        matching = _filter_statuses_by_event_id_prefix(live, event_prefix)
        if len(matching) != 1:
            count = "More than one event" if matching else "No event"
            problem: Text = (f"{count} of the document begins with {event_prefix}.",)
            return _list_reply(matching or live, actor, problem)
        if decision == "hold" and caller is not None:
            reason = " ".join(arguments[2:])[:MAX_REASON_LENGTH] or None
            return await self._hold(actor, caller, matching[0], reason)
        return await self._show_event_with_decision_buttons(
            actor, matching[0], decision, in_chat=caller is not None
        )

    async def _hold(
        self, actor: Actor, caller: Caller, status: ApprovalStatus, reason: str | None
    ) -> PrivateReply:
        # A hold starts nothing, so the actor need not have seen the current state.
        answer = await self._context.decisions.decide(
            caller,
            event_id=status.occurrence.reference,
            decision="hold",
            revision=status.occurrence.revision,
            request_id=actor.request_id,
            reason=reason,
        )
        return decision_reply(answer, status, actor)

    async def _show_event_with_decision_buttons(
        self, actor: Actor, status: ApprovalStatus, decision: DecisionKind, *, in_chat: bool
    ) -> PrivateReply:
        card = await self._context.statuses.make_private_card(
            self._settings, status.occurrence.reference, in_chat=in_chat
        )
        if card is None:
            return text_reply(("The event is over.",), team_id=actor.team_id)
        bot_token, now = self._settings.bot_token(), self._clock.now()

        def value_for_actor(button: Button) -> str:
            token = make_action_token(self._settings.name, actor, button, bot_token, now)
            return format_button_value(button, token)

        card = _filter_card_buttons_by_decision(card, decision)
        return PrivateReply(card_message(card, actor.team_id, value_for_actor))


def _filter_statuses_by_event_id_prefix(
    statuses: Sequence[ApprovalStatus], event_id: str
) -> list[ApprovalStatus]:
    """Return the event with this reference; if there is none, those whose references begin so.

    References are compared without case. The key of an event is its reference in lower case.
    """
    key = event_id.lower()
    same = [status for status in statuses if status.occurrence.key == key]
    if same:
        return same
    return [status for status in statuses if status.occurrence.key.startswith(key)]


def _list_reply(
    statuses: Sequence[ApprovalStatus], actor: Actor, problem: Text | None = None
) -> PrivateReply:
    ordered = sorted(
        statuses,
        key=lambda status: (
            status.not_before is None,
            status.not_before or status.now,
            status.occurrence.id,
        ),
    )
    lines: list[Text] = [] if problem is None else [problem]
    lines += [
        (f"{status.occurrence.event.event_id[:8]}  ", *event_line(status))
        for status in ordered[:MAX_LISTED_EVENTS]
    ]
    if not ordered:
        lines.append(("Azure has announced nothing.",))
    if len(ordered) > MAX_LISTED_EVENTS:
        lines.append((f"… and {len(ordered) - MAX_LISTED_EVENTS} more.",))
    return text_reply(*lines, team_id=actor.team_id)


def _filter_card_buttons_by_decision(card: Card, decision: DecisionKind) -> Card:
    """Return the card with the buttons for one decision, or with a note that there are none."""
    buttons = tuple(button for button in card.buttons if button.decision == decision)
    if buttons:
        return replace(card, buttons=buttons)
    note: Text = (f"There is nothing to {decision} from here now.",)
    return replace(card, buttons=(), code=None, notes=(*card.notes, note))
