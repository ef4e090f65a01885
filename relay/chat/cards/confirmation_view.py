"""The texts around one decision: why it is not possible, what changed, and its result. Pure.

`relay.api.routes.confirmations` shows them on the confirm page, to which the links in messages
lead, beside the card of the event. Slack's private replies have the result, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from relay.approvals.admission import HOLD_NOTICE
from relay.approvals.limits import LIMIT_NOTICE
from relay.approvals.request import Caller, DecisionKind, Rights
from relay.approvals.status import ApprovalStatus
from relay.chat.cards.buttons import find_gate_refusal_of_decision
from relay.chat.cards.card import Text
from relay.chat.cards.timeline import standing_holds_text
from relay.chat.cards.wording import event_outcome_text, join_names, sentence
from relay.events.cloudevent import CloudEvent
from relay.events.timestamps import parse_timestamp

_CALLER_WITH_ALL_RIGHTS = Caller(
    "anybody", "page", Rights(frozenset({"read", "approve", "hold", "operate"}))
)
_CONFLICT = 409
"""The status of a refusal that has its reason in the event, and not in the caller."""
_CHANGED_SINCE_LINK = (
    "Azure has changed the event since this link was made. The message has links for its new state."
)
_FIELD_LABELS = {
    "notBefore": "NotBefore:",
    "resources": "machines:",
    "durationSeconds": "seconds that it takes:",
    "eventType": "type:",
    "eventStatus": "status:",
    "eventSource": "source:",
    "resourceType": "kind of machine:",
    "description": "Azure says",
}


def blocking_reason(decision: DecisionKind, revision: str, status: ApprovalStatus) -> Text | None:
    """Return why nobody can take a decision now, whatever their rights; None if somebody can.

    ``revision`` is the one that the link is for.
    """
    refusal = find_gate_refusal_of_decision(_CALLER_WITH_ALL_RIGHTS, decision, revision, status)
    if refusal is not None and refusal.status == _CONFLICT:
        return _too_late_or_changed_text(decision, revision, status) or (sentence(refusal.reason),)
    if status.mode == "off":
        return ("Approvals are off: nothing can be decided now.",)
    return _votes_have_no_effect_reason(status) if decision == "approve" else None


def _too_late_or_changed_text(
    decision: DecisionKind, revision: str, status: ApprovalStatus
) -> Text | None:
    """Return what says more to a reader of the page than the reason of the refusal."""
    if not status.occurrence.live:
        return (event_outcome_text(status.occurrence.outcome),)
    if status.occurrence.event.is_started:
        return None
    closes_at = status.voting_closes_at if decision == "approve" else status.not_before
    if decision != "release" and closes_at is not None and status.now >= closes_at:
        notice = f" {sentence(HOLD_NOTICE)}" if decision == "hold" else ""
        return ("Too late: it closed at ", closes_at, f".{notice}")
    if decision == "approve" and revision != status.occurrence.revision:
        return (_CHANGED_SINCE_LINK,)
    return None


def _votes_have_no_effect_reason(status: ApprovalStatus) -> Text | None:
    if status.rule is None:
        return ("No rule allows this relay to approve it.",)
    if status.quorum is None:
        return (f"Rule {status.rule.name} approves it without a vote.",)
    if status.is_granted_or_claimed:
        return ("It is approved already.",)
    return None


def change_lines_since_revision(changes: Sequence[CloudEvent], revision: str) -> list[Text]:
    """Return a line for each field that Azure changed since the event had this revision.

    ``changes`` holds the newest ``event.*`` about the event, oldest first.
    """
    newest_first = takewhile(lambda event: event.data["revision"] != revision, reversed(changes))
    return [
        line
        for event in reversed(list(newest_first))
        if event.name == "event.updated"
        for line in _changed_field_lines_of_update(event)
    ]


def _changed_field_lines_of_update(event: CloudEvent) -> Iterator[Text]:
    at = parse_timestamp(event.attributes.get("time"))
    prefix: Text = (at, ": ") if at is not None else ()
    for name, value_before in event.data["changed"].items():
        if name in _FIELD_LABELS:
            value = _value_text(name, event.data[name])
            before = _value_text(name, value_before)
            yield (*prefix, f"{_FIELD_LABELS[name]} now ", *value, "; before ", *before, ".")


def _value_text(name: str, value: Any) -> Text:
    if isinstance(value, list):
        return (join_names(value) or "none",)
    time = parse_timestamp(value) if name == "notBefore" else None
    if time is not None:
        return (time,)
    return ("not known" if value is None else str(value),)


def decision_outcome_text(answer: Mapping[str, Any], *, dry_run: bool, repeat: bool) -> Text:
    """Return the result of a decision; ``answer`` is the body that the gate gave."""
    votes = f"{answer['votes']} of {answer['required']} votes"
    outcome = _state_after_decision_text(answer["decision"], answer["state"], votes)
    if "notice" in answer:
        outcome = f"{outcome} {sentence(answer['notice'])}"
    holds = standing_holds_text(answer)
    if repeat:
        outcome = (
            f"You have used this link before; nothing happened twice. The answer was: {outcome}"
        )
    if dry_run:
        return (outcome, *holds, " Approvals are a dry run: no StartRequest is sent.")
    return (outcome, *holds)


def _state_after_decision_text(decision: DecisionKind, state: str, votes: str) -> str:
    notice = sentence(HOLD_NOTICE)
    match decision, state:
        case "approve", "granted":
            return f"It is approved, with {votes}. It may begin within seconds."
        case "approve", "waiting":
            return f"It is approved, with {votes}, and waits for a limit; {LIMIT_NOTICE}."
        case "approve", "held":
            return (
                "Your vote is recorded, and waits while the event is held "
                f"({votes}); {HOLD_NOTICE}."
            )
        case "approve", _:
            return (
                f"Your vote is recorded: {votes}. "
                "More are missing, and until they come nothing is sent."
            )
        case "hold", _:
            return f"It is on hold; {HOLD_NOTICE}."
        case _, "held":
            return f"Your hold is released, and it is still held; {HOLD_NOTICE}."
        case _, "granted":
            return (
                f"The hold is released, and it is approved: it may begin within seconds. {notice}"
            )
        case _, "waiting":
            return (
                "The hold is released, and it is approved and waits for a limit; "
                f"{LIMIT_NOTICE}. {notice}"
            )
        case _, "pending":
            return f"The hold is released, and it waits for votes: {votes}. {notice}"
        case _:
            return f"The hold is released, and nobody has voted. {notice}"
