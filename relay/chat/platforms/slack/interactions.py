"""What people answer in Slack, brought to the board: buttons of messages, and the slash command.

Who it is comes first, so that a stranger's click burns nothing; then, whether the button is one that we showed; then the gate.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from relay.approvals.request import Caller, DecisionAnswer, DecisionKind
from relay.approvals.status import ApprovalStatus
from relay.chat import CallbackReply
from relay.chat.cards.card import Button, Card, Text
from relay.chat.cards.confirmation_view import decision_outcome
from relay.chat.cards.grouped_card import event_line
from relay.chat.context import ChatContext
from relay.chat.platforms.slack.action_token import is_valid_action_token, make_action_token
from relay.chat.platforms.slack.blocks import Message, card_message, text_message
from relay.chat.platforms.slack.identity import (
    PATIENCE,
    IdentityUnavailable,
    MemberDirectory,
    NotAuthorized,
)
from relay.chat.platforms.slack.payloads import (
    Actor,
    Call,
    Challenge,
    Click,
    Command,
    IgnoredCall,
    button_value,
)
from relay.chat.platforms.slack.settings import Settings
from relay.clock import Clock
from relay.errors import StoreUnavailable

_MOST_LISTED = 15
_LONGEST_REASON = 1000
_AGAIN = 60.0
"""Seconds after which the same is logged again."""
_CHOICES: Mapping[str, DecisionKind] = {"approve": "approve", "hold": "hold", "release": "release"}
_USAGE: tuple[Text, ...] = (
    ("list: what Azure has announced, and how it stands.",),
    (
        "approve, hold or release, and an EventId or its beginning: decide about it. What follows behind hold is its reason.",
    ),
)
_log = logging.getLogger(__name__)

Respond = Callable[[str, Mapping[str, Any]], None]
"""Sends to a response URL, soon; nothing is waited for."""


@dataclass(frozen=True, slots=True)
class _Said:
    """What the person is told, visible to them alone. ``final``: the card that was shown to them alone is done with."""

    message: Message
    final: bool = True


class Interactions:
    """Takes calls that were proved, of one sink."""

    def __init__(
        self,
        settings: Settings,
        context: ChatContext,
        people: MemberDirectory,
        clock: Clock,
        respond: Respond,
    ) -> None:
        self._settings = settings
        self._context = context
        self._people = people
        self._clock = clock
        self._respond = respond
        self._noted: dict[str, float] = {}

    async def handle(self, call: Call) -> CallbackReply:
        """Do what was asked; it is on disk when this returns."""
        match call:
            case Challenge(text):
                return CallbackReply({"challenge": text})
            case Click():
                told = await self._safely(call.by, self._click(call))
                if told is not None:
                    self._respond(
                        call.by.response_url,
                        _alone(told.message) | {"replace_original": call.alone and told.final},
                    )
            case Command():
                told = await self._safely(call.by, self._command(call))
                return CallbackReply(_alone(told.message) if told is not None else None)
            case IgnoredCall():
                pass
        return CallbackReply()

    async def _safely(self, by: Actor, work: Coroutine[Any, Any, _Said | None]) -> _Said | None:
        """What is told of work that can end in a refusal, or in nothing that can be known now."""
        try:
            return await work
        except NotAuthorized as error:
            self._note(f"slack:{by.team}/{by.user} was refused: {error}")
            return _Said(text_message([(f"Nothing was decided: {error}.",)], by.team))
        except IdentityUnavailable as error:
            self._note(f"it cannot be found out who slack:{by.team}/{by.user} is: {error}")
            return _Said(
                text_message(
                    [
                        (
                            "Slack cannot tell now who you are, so nothing was decided. Try again in a moment.",
                        )
                    ],
                    by.team,
                ),
                final=False,
            )
        except StoreUnavailable:
            return _Said(
                text_message(
                    [
                        (
                            "The relay cannot read its records now, so nothing was decided. Try again in a moment.",
                        )
                    ],
                    by.team,
                ),
                final=False,
            )

    def _note(self, text: str) -> None:
        """Log it, the same once a minute at the most."""
        now = self._clock.monotonic()
        self._noted = {one: at for one, at in self._noted.items() if now - at < _AGAIN}
        if text not in self._noted:
            self._noted[text] = now
            _log.warning("sink %s: %s", self._settings.name, text)

    async def _click(self, click: Click) -> _Said | None:
        by, decided = click.by, click.decided
        if not self._settings.approve_in_chat:
            raise NotAuthorized("decisions are taken on the page behind the links")
        caller = await self._caller(by)
        if click.alone:
            what = (decided.decision, decided.revision, decided.event_id)
            who = (by.user, by.channel)
            ours = decided.proof is not None and is_valid_action_token(
                decided.proof, self._settings.bot_token(), who, what, self._clock.now()
            )
            standing = next(iter(await self._found(decided.event_id, exact=True)), None)
        else:
            standing = await self._context.statuses.shown_in(
                self._settings.name, click.message, decided.event_id
            )
            ours = decided.proof is None
        if standing is None or not ours:
            return _Said(
                text_message(
                    [
                        (
                            "These buttons are not good any more, so nothing was decided. Look at the newest message.",
                        )
                    ],
                    by.team,
                )
            )
        answer = await self._context.decisions.decide(
            caller,
            event_id=decided.event_id,
            decision=decided.decision,
            revision=decided.revision,
            request_id=_request(by),
        )
        if answer.accepted and not click.alone:
            return None  # the message itself shows it
        return self._came(answer, standing, by)

    async def _command(self, command: Command) -> _Said:
        by, words = command.by, command.words
        word = words[0].lower() if words else "list"
        if by.channel != self._settings.channel:
            raise NotAuthorized(
                "the command works in the channel in which the relay shows its events"
            )
        if word == "list" and len(words) <= 1:
            await self._member(by)
            return self._listed(await self._context.statuses.live_statuses(self._settings), by)
        if word not in _CHOICES or len(words) < 2:
            return _Said(text_message(_USAGE, by.team))
        choice = _CHOICES[word]
        caller = await self._caller(by) if self._settings.approve_in_chat else None
        if caller is None:
            await self._member(by)
        found = await self._found(words[1])
        if len(found) != 1:
            none: Text = (
                f"{'No event' if not found else 'More than one event'} of the document begins with {words[1]}.",
            )
            return self._listed(
                found or await self._context.statuses.live_statuses(self._settings), by, none
            )
        if choice == "hold" and caller is not None:
            return await self._hold(
                by, caller, found[0], " ".join(words[2:])[:_LONGEST_REASON] or None
            )
        card = await self._context.statuses.private_card(
            self._settings, found[0].occurrence.event.event_id, in_chat=caller is not None
        )
        if card is None:
            return _Said(text_message([("The event is over.",)], by.team))
        return _Said(
            card_message(_about(card, choice), by.team, lambda button: self._spoken(by, button))
        )

    async def _hold(
        self, by: Actor, caller: Caller, standing: ApprovalStatus, reason: str | None
    ) -> _Said:
        # A hold needs no state that was seen: it starts nothing, and counts for whatever the event becomes.
        event_id, revision = standing.occurrence.event.event_id, standing.occurrence.revision
        answer = await self._context.decisions.decide(
            caller,
            event_id=event_id,
            decision="hold",
            revision=revision,
            request_id=_request(by),
            reason=reason,
        )
        return self._came(answer, standing, by)

    async def _caller(self, by: Actor) -> Caller:
        """Who may speak to the gate. Raises Unwelcome, NotKnown."""
        async with _within():
            principal = f"slack:{await self._people.prefetch(by)}/{by.user}"
            caller = self._context.decisions.caller(principal, "slack")
            if caller is None:
                raise NotAuthorized(f"no rule of this relay names you, {principal}")
            await self._people.require_member(by)
        return caller

    async def _member(self, by: Actor) -> None:
        """Raises Unwelcome, NotKnown for who is no full member of the workspace."""
        async with _within():
            await self._people.prefetch(by)
            await self._people.require_member(by)

    async def _found(self, words: str, *, exact: bool = False) -> list[ApprovalStatus]:
        """The events of the document whose EventId begins so, or, if there is one, has just that name."""
        key = words.lower()
        live = await self._context.statuses.live_statuses(self._settings)
        same = [one for one in live if one.occurrence.key == key]
        return (
            same if same or exact else [one for one in live if one.occurrence.key.startswith(key)]
        )

    def _spoken(self, by: Actor, button: Button) -> str:
        what = (button.decision, button.revision, button.event_id)
        return button_value(
            button,
            make_action_token(
                self._settings.bot_token(), (by.user, by.channel), what, self._clock.now()
            ),
        )

    def _came(self, answer: DecisionAnswer, standing: ApprovalStatus, by: Actor) -> _Said:
        if answer.accepted:
            text = decision_outcome(answer.body, dry_run=standing.mode == "dry-run", repeat=False)
            return _Said(text_message([text], by.team))
        return _Said(
            text_message(
                [(f"Nothing was decided: {answer.body.get('detail') or 'the relay refuses it'}.",)],
                by.team,
            )
        )

    def _listed(self, standings: Sequence[ApprovalStatus], by: Actor, first: Text = ()) -> _Said:
        ordered = sorted(
            standings,
            key=lambda one: (one.not_before is None, one.not_before or one.now, one.occurrence.id),
        )
        lines = [
            (f"{one.occurrence.event.event_id[:8]}  ", *event_line(one))
            for one in ordered[:_MOST_LISTED]
        ]
        if len(ordered) > len(lines):
            lines.append((f"… and {len(ordered) - len(lines)} more.",))
        return _Said(
            text_message(
                [*([first] if first else ()), *(lines or [("Azure has announced nothing.",)])],
                by.team,
            )
        )


@asynccontextmanager
async def _within() -> AsyncIterator[None]:
    """Raises NotKnown where Slack takes its time: it waits three seconds for our answer itself."""
    try:
        async with asyncio.timeout(PATIENCE):
            yield
    except TimeoutError:
        raise IdentityUnavailable(f"no answer within {PATIENCE:g} s") from None


def _about(card: Card, choice: DecisionKind) -> Card:
    """A card with the buttons for one decision; where there is none, it says so."""
    buttons = tuple(one for one in card.buttons if one.decision == choice)
    if buttons:
        return replace(card, buttons=buttons)
    return replace(
        card,
        buttons=(),
        code=None,
        notes=(*card.notes, (f"There is nothing to {choice} from here now.",)),
    )


def _request(by: Actor) -> str:
    """Names this click or command, so that it counts once however often it comes."""
    return f"slack {by.trigger}"


def _alone(message: Message) -> dict[str, Any]:
    return {"response_type": "ephemeral", "text": message.text, "blocks": list(message.blocks)}
