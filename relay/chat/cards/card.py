"""What a message shows, without the form of any platform: texts, facts and buttons. Pure.

Times and people stay objects in a text, so that a platform can show a time in the reader's time
zone. Plain strings are not escaped for any platform.

A button offers what the gate would accept from somebody who has the right. The gate checks each
decision again. `available_decisions` is for messages, which everybody sees, and
`decisions_available_to_caller` for the API, which knows the caller.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Self, TypeVar
from urllib.parse import quote

from relay.approvals.admission import find_decision_refusal, hold_caveat
from relay.approvals.request import Caller, DecisionKind, DecisionRequest, Right
from relay.approvals.status import ApprovalStatus
from relay.chat import AnswerableChatSettings
from relay.chat.cards.wording import Tone, event_title
from relay.sentences import PrincipalRef, Text
from relay.sinks import SinkSettings

_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class Button:
    """One decision that is possible now.

    ``question`` is asked before a click counts, where the platform can ask. ``url`` leads to the
    page, where the decision is prepared; None if it is taken in the chat itself.
    """

    decision: DecisionKind
    label: str
    event_id: str
    revision: str
    question: Text
    url: str | None = None


@dataclass(frozen=True, slots=True)
class EventLine:
    text: Text
    buttons: tuple[Button, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The content of a message. Every platform shows all of it, in its own form.

    ``facts`` are pairs of a label and a text. ``notes`` are sentences that follow them. ``lines``
    are the events of a grouped message. ``footer`` names event and scope. ``runbooks`` are the
    https URLs of runbooks, each with the name of its rule.
    """

    title: str
    tone: Tone
    summary: Text
    facts: tuple[tuple[str, Text], ...] = ()
    notes: tuple[Text, ...] = ()
    lines: tuple[EventLine, ...] = ()
    buttons: tuple[Button, ...] = ()
    footer: str = ""
    runbooks: tuple[tuple[str, str], ...] = ()


def one_line(text: Text, limit: int) -> Text:
    """Return one line of at most ``limit`` characters of words; times and people do not count."""
    pieces: list[str | datetime | PrincipalRef] = []
    for piece in text:
        if isinstance(piece, str):
            words = on_one_line(piece)
            pieces.append(cut(words, limit))
            if len(words) > limit:
                break
            limit -= len(words)
        else:
            pieces.append(piece)
    return tuple(pieces)


def on_one_line(words: str) -> str:
    """Return words without line breaks, and without characters that change their direction."""
    printable = "".join(char if char.isprintable() else " " for char in words)
    return re.sub(r"\s+", " ", printable)


def cut(words: str, limit: int) -> str:
    """Return at most ``limit`` characters. The end stays: it may say how many more there are."""
    if len(words) <= limit:
        return words
    end = len(words) - limit // 2
    return f"{words[: max(limit - limit // 2 - 1, 0)]}…{words[end:]}"


def longest_fitting(
    make: Callable[[int], _Made], limits: Sequence[int], fits: Callable[[_Made], bool]
) -> _Made:
    """Return what ``make`` returns for the first limit at which it fits, or else for the last."""
    *longer, shortest = limits
    return next((made for made in map(make, longer) if fits(made)), None) or make(shortest)


# --- buttons


LABELS: dict[DecisionKind, str] = {
    "approve": "Approve",
    "hold": "Hold",
    "release": "Release the hold",
}
_RIGHTS: dict[DecisionKind, Right] = {"approve": "approve", "hold": "hold", "release": "hold"}
"""The right that each decision needs at least. People release their own holds with ``hold``."""


def available_decisions(status: ApprovalStatus) -> tuple[DecisionKind, ...]:
    """Return the decisions that the gate would not refuse now, whoever takes them."""
    if not status.is_startable or status.mode == "off":
        return ()
    decisions: list[DecisionKind] = []
    is_settled = status.is_granted_or_claimed or status.is_refused_by_imds
    if status.quorum is not None and not status.is_past_voting_close_time and not is_settled:
        decisions.append("approve")
    if status.active_holds:
        decisions.append("release")
    elif not status.is_accepted_by_imds:
        # The gate also refuses a hold for the moment in which a StartRequest is being sent.
        decisions.append("hold")
    return tuple(decisions)


def decisions_available_to_caller(caller: Caller, status: ApprovalStatus) -> list[DecisionKind]:
    """Return the decisions that the gate would take from a caller now, and that change something.

    A caller can add a hold to the holds of others, and cannot repeat their own vote or hold.
    """
    possible = {*available_decisions(status)}
    if possible:
        possible.add("hold")
    for decision in (*status.counted_votes, *status.active_holds):
        if decision.principal == caller.principal:
            possible.discard(decision.decision)
    return [
        kind
        for kind in LABELS
        if kind in possible
        and find_decision_refusal(
            DecisionRequest(
                caller=caller,
                event_id=status.occurrence.reference,
                decision=kind,
                revision=status.occurrence.revision,
                at=status.now,
            ),
            status,
        )
        is None
    ]


def event_page(public_url: str, status: ApprovalStatus, *more: str) -> str:
    """Return the URL of the page at an event. ``more``: a decision, and for which revision."""
    parts = (status.occurrence.scope, status.occurrence.event.event_id, *more)
    return f"{public_url}/#/event/" + "/".join(quote(part, safe="") for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buttons:
    """Which buttons a card has, and where they lead.

    ``in_chat``: the chat takes the decision. ``can`` are then the rights whose buttons it shows:
    what it refuses to everybody gets none. Otherwise they open the page of ``public_url`` at the
    event, with the decision about its present revision prepared. That is no authority: the page
    asks for a key or a sign-in, and alone knows the rights of its callers.
    """

    public_url: str | None = None
    in_chat: bool = False
    can: Container[Right] | None = None

    @classmethod
    def of_sink(cls, sink: SinkSettings, public_url: str | None, *, in_chat: bool) -> Self:
        if not in_chat:
            return cls(public_url=public_url)
        return cls(in_chat=True, can=sink.can if isinstance(sink, AnswerableChatSettings) else None)

    @property
    def lead_nowhere(self) -> bool:
        """Whether a card has no buttons: this relay has no address for links."""
        return self.public_url is None and not self.in_chat

    def about(self, status: ApprovalStatus) -> tuple[Button, ...]:
        """Return a button for each decision that is possible now."""
        if self.lead_nowhere:
            return ()
        return tuple(
            Button(
                decision=decision,
                label=LABELS[decision],
                event_id=status.occurrence.reference,
                revision=status.occurrence.revision,
                question=confirmation_question(decision, status),
                url=event_page(self.public_url, status, decision, status.occurrence.revision)
                if self.public_url is not None
                else None,
            )
            for decision in available_decisions(status)
            if self.can is None or _RIGHTS[decision] in self.can
        )


def confirmation_question(decision: DecisionKind, status: ApprovalStatus) -> Text:
    consequences: dict[DecisionKind, str] = {
        "approve": "it may begin within seconds, and cannot be taken back",
        "hold": hold_caveat(status),
        "release": "votes and rules are weighed again, and it may begin within seconds",
    }
    return (f"{event_title(status)}: {consequences[decision]}.",)
