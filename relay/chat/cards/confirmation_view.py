"""What the page behind a link says that its message does not: why it is too late, what changed, what came of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from relay.approvals.authorize import HOLD_NOTICE, authorize
from relay.approvals.request import Caller, DecisionKind, DecisionRequest, Rights
from relay.approvals.status import ApprovalStatus
from relay.chat.cards.card import Text
from relay.chat.cards.rendering import ENDED, join_names
from relay.events.cloudevent import CloudEvent
from relay.events.timestamps import parse_timestamp

_ANYBODY = Caller("anybody", "page", Rights(frozenset({"read", "approve", "hold", "operate"})))
_NAMES = {
    "notBefore": "NotBefore:",
    "resources": "machines:",
    "durationSeconds": "seconds that it takes:",
    "eventType": "type:",
    "eventStatus": "status:",
    "eventSource": "source:",
    "resourceType": "kind of machine:",
    "description": "Azure says",
}


def blocking_reason(choice: DecisionKind, revision: str, standing: ApprovalStatus) -> Text | None:
    """Why nobody can take this decision now about the state of that revision; None: those who may, can."""
    event = standing.occurrence.event
    closes = standing.voting_closes_at if choice == "approve" else standing.not_before
    refusal = authorize(
        DecisionRequest(_ANYBODY, event.event_id, choice, revision, standing.now), standing
    )
    if refusal is not None and refusal.status == 409:  # HTTP
        if not standing.occurrence.live:
            return (ENDED.get(standing.occurrence.outcome or "unknown", ENDED["unknown"]),)
        if (
            choice != "release"
            and not event.started
            and closes is not None
            and standing.now >= closes
        ):
            return (
                "Too late: it closed at ",
                closes,
                f". {_sentence(HOLD_NOTICE)}" if choice == "hold" else ".",
            )
        if choice == "approve" and not event.started and revision != standing.occurrence.revision:
            return (
                "Azure has changed the event since this link was made. The message has links for its new state.",
            )
        return (_sentence(refusal.reason),)
    if standing.mode == "off":
        return ("Approvals are off: nothing can be decided now.",)
    return _needless(standing) if choice == "approve" else None


def _needless(standing: ApprovalStatus) -> Text | None:
    """Why no vote is asked for."""
    if standing.rule is None:
        return ("No rule allows this relay to approve it.",)
    if standing.quorum is None:
        return (f"Rule {standing.rule.name} approves it without a vote.",)
    return (
        ("It is approved already.",)
        if standing.active_grant is not None or standing.is_claimed
        else None
    )


def changed_fields(said: Sequence[CloudEvent], revision: str) -> list[Text]:
    """What Azure changed in an event since it had that revision, a line for each; ``said``: all that was said of it."""
    of_azure = [one for one in said if one.name.startswith("event.")]
    later = list(takewhile(lambda one: one.data["revision"] != revision, reversed(of_azure)))
    return [
        line for one in reversed(later) if one.name == "event.updated" for line in _changed(one)
    ]


def _changed(event: CloudEvent) -> Iterator[Text]:
    at = parse_timestamp(event.attributes.get("time"))
    for name, before in event.data["changed"].items():
        if name in _NAMES:
            when: Text = (at, ": ") if at is not None else ()
            yield (
                *when,
                f"{_NAMES[name]} now ",
                *_value(name, event.data[name]),
                "; before ",
                *_value(name, before),
                ".",
            )


def _value(name: str, value: Any) -> Text:
    if isinstance(value, list):
        return (join_names(value) or "none",)
    moment = parse_timestamp(value) if name == "notBefore" else None
    return (moment,) if moment is not None else ("not known" if value is None else str(value),)


def decision_outcome(answer: Mapping[str, Any], *, dry_run: bool, repeat: bool) -> Text:
    """What came of a decision, of the answer that the gate gave to it."""
    said = _came_of(
        answer["decision"], answer["state"], f"{answer['votes']} of {answer['required']} votes"
    )
    if repeat:
        said = f"You have used this link before; nothing happened twice. The answer was: {said}"
    return (said, *((" Approvals are a dry run: no StartRequest is sent.",) if dry_run else ()))


def _came_of(choice: DecisionKind, state: str, count: str) -> str:
    match choice, state:
        case "approve", "granted":
            return f"It is approved, with {count}. It may begin within seconds."
        case "approve", "held":
            return f"Your vote is recorded, and waits while the event is held ({count}); {HOLD_NOTICE}."
        case "approve", _:
            return f"Your vote is recorded: {count}. More are missing, and until they come nothing is sent."
        case "hold", _:
            return f"It is on hold; {HOLD_NOTICE}."
        case _, "held":
            return f"Your hold is released, and others still hold; {HOLD_NOTICE}."
        case _, "granted":
            return f"The hold is released, and it is approved: it may begin within seconds. {_sentence(HOLD_NOTICE)}"
        case _, "pending":
            return (
                f"The hold is released, and it waits for votes: {count}. {_sentence(HOLD_NOTICE)}"
            )
        case _:
            return f"The hold is released, and nobody has voted. {_sentence(HOLD_NOTICE)}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
