"""`/v1/confirmations`: the calls of the page behind the links in chat messages.

A link stands for one decision about one revision of an event. Its secret token is in the link; the
store has only the token's digest. The preview shows the decision to everybody who has the link. The
confirmation takes the decision like `POST /v1/approvals`: the caller needs credentials, and the
vote is the caller's. Texts are lists of parts, so that the page can show times and principals.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from pydantic import Field
from typing_extensions import TypedDict

from relay.api.routes.approvals import DecisionRecorded, require_accepted_answer_body
from relay.api.schema.responses import Problem
from relay.api.schema.route import Call, Route
from relay.approvals.confirmation_link import MAX_WRONG_CODES
from relay.approvals.request import DecisionKind, DecisionRequest, LinkCredentials
from relay.chat.cards.buttons import LABELS, confirmation_question
from relay.chat.cards.card import PrincipalRef, Text
from relay.chat.cards.confirmation_view import (
    blocking_reason,
    change_lines_since_revision,
    decision_outcome_text,
)
from relay.chat.cards.event_card import event_card
from relay.events.timestamps import format_rfc3339
from relay.store.chat_messages import ConfirmationLink, confirmation_link_token_digest
from relay.store.rows import PageLimit
from relay.store.transaction import Transaction
from relay.validation import RequestBody

_MAX_CHANGES = 50
"""Changes of an event that the preview reads, the newest."""
_INVALID_LINK = (
    "invalid link: it is unknown, its event has ended, or it got too many wrong codes; "
    "use the newest message"
)


class RichTextTimestamp(TypedDict):
    """A time in a text. Show it in the reader's time zone."""

    moment: str
    """RFC 3339."""


class PrincipalTextPart(TypedDict):
    """A principal in a text."""

    who: str


RichText = list[str | RichTextTimestamp | PrincipalTextPart]


class EventFact(TypedDict):
    """A labeled fact about the event."""

    label: str
    text: RichText


class RunbookLink(TypedDict):
    """The runbook of a rule."""

    rule: str
    url: str
    """An https URL."""


class ConfirmationPreview(TypedDict):
    """The decision of a link, and the current state of its event.

    The texts contain what others wrote: show them as text, not as markup.
    """

    decision: DecisionKind
    label: str
    """The label of the button for the decision."""
    title: str
    summary: RichText
    question: RichText
    """The question to whoever decides."""
    whyNot: RichText | None
    """Why nobody can take the decision now; null: it can be taken."""
    changes: list[RichText]
    """Azure's changes of the event since the link was made, the newest."""
    code: bool
    """Whether the decision needs the code in the message."""
    facts: list[EventFact]
    notes: list[RichText]
    machines: list[str]
    """All machines of the event."""
    runbooks: list[RunbookLink]
    footer: str
    now: str
    """RFC 3339: the relay's clock."""


class ConfirmationRecorded(DecisionRecorded):
    """The decision is on disk."""

    repeat: bool
    """Whether this principal used the link before. Then this repeats the first answer."""
    said: RichText
    """The result, for people."""


class ConfirmationPreviewRequest(RequestBody):
    """Names a link."""

    token: str = Field(min_length=1, max_length=256)
    """The link's fragment."""


class ConfirmationRequest(ConfirmationPreviewRequest):
    """Takes the decision of a link about the link's event and revision."""

    code: str | None = Field(default=None, max_length=64)
    """The code in the message, which approving needs. Spaces do not matter."""
    reason: str | None = Field(default=None, max_length=1000)
    """For the audit."""


async def _answer_preview_request(call: Call) -> ConfirmationPreview:
    body: ConfirmationPreviewRequest = call.body
    preview = await call.run_long_read(
        lambda tx: _build_preview_if_link_valid(tx, call, body.token)
    )
    if preview is None:
        call.server.charges.count_and_log_failed_authentication(
            call.request, "an invalid link was looked at"
        )
        raise Problem(404, _INVALID_LINK)
    # The token proves the call. From now on its limit is that of the link, not of the address.
    call.server.charges.refund_address_charge(call.request)
    call.server.charges.charge_caller(
        f"link {confirmation_link_token_digest(body.token)}", "with this link"
    )
    return preview


def _build_preview_if_link_valid(
    tx: Transaction, call: Call, token: str
) -> ConfirmationPreview | None:
    """Return the preview of a link; None if the link is invalid."""
    link = tx.messages.find_confirmation_link_by_token(token)
    if link is None or link.wrong_codes >= MAX_WRONG_CODES:
        return None
    service, now = call.relay.gate.engine, call.server.clock.now()
    occurrence = tx.occurrences.require_occurrence(link.occurrence)
    status = service.status(tx, occurrence, now)
    # The page has its own form, so the card's buttons need no links.
    card = event_card(status, link=lambda *_: "", code=None)
    reason = blocking_reason(link.decision, link.revision, status)
    changes = tx.journal.newest_changes_of_event_since_time(
        occurrence.key, occurrence.first_seen, PageLimit(_MAX_CHANGES)
    )
    return ConfirmationPreview(
        decision=link.decision,
        label=LABELS[link.decision],
        title=card.title,
        summary=_rich_text_json(card.summary),
        question=_rich_text_json(confirmation_question(link.decision, status)),
        whyNot=None if reason is None else _rich_text_json(reason),
        changes=[
            _rich_text_json(text) for text in change_lines_since_revision(changes, link.revision)
        ],
        code=link.decision == "approve",
        facts=[EventFact(label=label, text=_rich_text_json(text)) for label, text in card.facts],
        notes=[_rich_text_json(note) for note in card.notes],
        machines=list(occurrence.event.resources),
        runbooks=[RunbookLink(rule=rule, url=url) for rule, url in card.runbooks],
        footer=card.footer,
        now=format_rfc3339(now),
    )


async def _find_link_and_event_id(call: Call) -> tuple[ConfirmationLink, str]:
    """Return the link and the EventId of its event. Raises Problem 404."""
    body: ConfirmationRequest = call.body

    def find_link_and_event_id(tx: Transaction) -> tuple[ConfirmationLink, str] | None:
        link = tx.messages.find_confirmation_link_by_token(body.token)
        if link is None:
            return None
        return link, tx.occurrences.require_occurrence(link.occurrence).reference

    found = await call.relay.store.read(find_link_and_event_id)
    if found is None:
        raise Problem(404, _INVALID_LINK)
    return found


async def _confirm(call: Call) -> ConfirmationRecorded:
    relay = call.relay
    body: ConfirmationRequest = call.body
    link, event_id = call.resource
    answer = await relay.gate.submit(
        DecisionRequest(
            caller=replace(call.caller, channel="page"),
            event_id=event_id,
            decision=link.decision,
            revision=link.revision,
            at=relay.clock.now(),
            reason=body.reason or None,
            # `link.token` is the digest of the token. The space separates the id from every
            # Idempotency-Key. The request's digest ignores code and reason: each principal uses
            # the link once.
            request_id=f"link {link.token}",
            digest=link.token,
            link=LinkCredentials(body.token, body.code),
        )
    )
    recorded = require_accepted_answer_body(answer)
    is_dry_run = await relay.gate.approval_mode() == "dry-run"
    outcome = decision_outcome_text(recorded, dry_run=is_dry_run, repeat=answer.repeat)
    return ConfirmationRecorded(**recorded, repeat=answer.repeat, said=_rich_text_json(outcome))


def _rich_text_json(text: Text) -> RichText:
    return [_rich_text_part_json(part) for part in text]


def _rich_text_part_json(
    part: str | datetime | PrincipalRef,
) -> str | RichTextTimestamp | PrincipalTextPart:
    if isinstance(part, str):
        return part
    if isinstance(part, datetime):
        return RichTextTimestamp(moment=format_rfc3339(part))
    return PrincipalTextPart(who=part.principal)


ROUTES = (
    Route(
        method="POST",
        path="/v1/confirmations/look",
        summary="the decision of a link, and the state of its event; decides nothing",
        handler=_answer_preview_request,
        access="handler",
        is_large=True,
        body=ConfirmationPreviewRequest,
        problem_statuses=(404,),
    ),
    Route(
        method="POST",
        path="/v1/confirmations",
        summary="take the decision of a link; approving needs the message's code, "
        f"and {MAX_WRONG_CODES} wrong codes make the link invalid",
        handler=_confirm,
        status=202,
        body=ConfirmationRequest,
        find_resource=_find_link_and_event_id,
        problem_statuses=(403, 404, 409),
    ),
)
