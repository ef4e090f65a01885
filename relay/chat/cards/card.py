"""What a message is made of, whatever the platform: texts with moments and people in them, facts, and buttons.

Moments and people stay what they are in a text: each platform writes them in its own way, in the reader's own time zone
where it can. Plain words are not escaped for any platform yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from relay.approvals.request import DecisionKind
from relay.approvals.status import ApprovalStatus


@dataclass(frozen=True, slots=True)
class PrincipalRef:
    """A principal, for the platform to name as its readers know them."""

    principal: str


Text = tuple[str | datetime | PrincipalRef, ...]
"""A text in pieces: plain words, moments in UTC, and people."""
Tone = Literal["waiting", "held", "approved", "running", "over"]


@dataclass(frozen=True, slots=True)
class Button:
    """One decision that makes sense now. ``url`` leads to the page that confirms it; None: it is answered in the chat itself.

    ``question`` is asked before a click counts, where the platform can.
    """

    decision: DecisionKind
    label: str
    event_id: str
    revision: str
    question: Text
    url: str | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """One event of a burst."""

    text: Text
    buttons: tuple[Button, ...] = ()


@dataclass(frozen=True, slots=True)
class Card:
    """A message: what every platform shows, in its own form.

    ``facts`` are pairs of a label and its text; ``notes`` are sentences that follow; ``lines`` the single events of a burst.
    ``code`` is what the page behind the buttons asks for; None where nothing leads there. ``footer`` names event and scope.
    """

    title: str
    tone: Tone
    summary: Text
    facts: tuple[tuple[str, Text], ...] = ()
    notes: tuple[Text, ...] = ()
    lines: tuple[Line, ...] = ()
    buttons: tuple[Button, ...] = ()
    code: str | None = None
    footer: str = ""


Link = Callable[[ApprovalStatus, DecisionKind], str | None]
"""Where a decision about an event is confirmed; None: in the chat itself."""
