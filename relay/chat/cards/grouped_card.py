"""What is said about a burst of events that one document brought: one message with a line for each, not fifty messages. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from relay.approvals.status import ApprovalStatus
from relay.chat.cards.card import Card, Line, Link, Text, Tone
from relay.chat.cards.rendering import (
    decision_buttons,
    event_title,
    event_tone,
    join_names,
    proceeds_notice,
)

MAX_LISTED_EVENTS = 10
"""Events of a burst that get a line of their own."""


def grouped_card(
    standings: Sequence[ApprovalStatus], scope: str, *, link: Link | None, code: str | None
) -> Card:
    """The message about a burst. ``link`` None: nothing can be decided from this message."""
    live = [one for one in standings if one.occurrence.live]
    # What waits for somebody comes first.
    ordered = sorted(
        live or standings,
        key=lambda one: (
            not _waits(one),
            one.not_before is None,
            one.not_before or one.now,
            one.occurrence.id,
        ),
    )
    lines = tuple(
        Line(event_line(one), decision_buttons(one, link)) for one in ordered[:MAX_LISTED_EVENTS]
    )
    rest = len(ordered) - len(lines)
    notes: list[Text] = []
    if rest:
        notes.append(
            (
                f"And {rest} more: “imds-relay events” on a machine of this scope lists them, and decides about them.",
            )
        )
    notes.extend(proceeds_notice(live))
    return Card(
        title=f"{len(standings)} maintenance events at once",
        tone=_tone_of_all(standings),
        summary=_summary_of_all(standings),
        facts=(
            (
                "Machines",
                (
                    join_names(
                        list(
                            dict.fromkeys(
                                name for one in standings for name in one.occurrence.event.resources
                            )
                        )
                    ),
                ),
            ),
        ),
        notes=tuple(notes),
        lines=lines,
        code=code if any(button.url for line in lines for button in line.buttons) else None,
        footer=scope,
    )


def _waits(standing: ApprovalStatus) -> bool:
    return standing.is_open and standing.votes_missing > 0


def _summary_of_all(standings: Sequence[ApprovalStatus]) -> Text:
    live = [one for one in standings if one.occurrence.live]
    kinds = Counter(one.occurrence.event.event_type or "Maintenance" for one in standings)
    text: Text = (", ".join(f"{count} × {kind}" for kind, count in kinds.most_common()) + ". ",)
    counts = [
        (sum(_waits(one) for one in live), "waiting for votes"),
        (sum(bool(one.is_open and one.active_holds) for one in live), "held"),
        (
            sum(bool(one.is_open and (one.active_grant or one.is_claimed)) for one in live),
            "approved",
        ),
        (sum(one.occurrence.event.started for one in live), "under way"),
        (len(standings) - len(live), "over"),
    ]
    text += (
        (", ".join(f"{count} {what}" for count, what in counts if count) + ". ",)
        if any(count for count, _ in counts)
        else ()
    )
    due = [one.not_before for one in live if one.is_open and one.not_before is not None]
    return (
        (*text, "The first begins at ", min(due), " or soon after, whether or not anybody answers.")
        if due
        else text
    )


def _tone_of_all(standings: Sequence[ApprovalStatus]) -> Tone:
    tones = {event_tone(one) for one in standings}
    order: tuple[Tone, ...] = ("waiting", "held", "running", "approved", "over")
    return next(tone for tone in order if tone in tones)


def event_line(standing: ApprovalStatus) -> Text:
    """One event among others, in one line."""
    text: Text = (event_title(standing),)
    occurrence = standing.occurrence
    if not occurrence.live:
        return (*text, f": {occurrence.outcome or 'over'}")
    if occurrence.event.started:
        return (*text, ": under way")
    if standing.not_before is not None:
        text += (", not before ", standing.not_before)
    if standing.active_holds:
        text += (", held",)
    elif standing.active_grant is not None or standing.is_claimed:
        text += (", approved",)
    elif standing.votes_required:
        text += (f", {standing.vote_count} of {standing.votes_required} votes",)
    return text
