"""``/approve`` and ``/v1/confirmations``: the page behind the links in messages, and the two calls that it makes.

The page is the same for everybody and decides nothing: what a link stands for is in its fragment, which browsers send to
nobody. The first call shows what a link is about, to whoever has it. The second takes the decision, like
``POST /v1/approvals``: with a client's key or a token, and the vote is that principal's.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from datetime import datetime
from importlib import resources
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict

from relay.api.routes.approvals import Accepted
from relay.api.schema.problems import Problem, too_many
from relay.api.schema.responses import json_response, raw_response
from relay.api.schema.route import Call, Route
from relay.api.server.connection import mark_authenticated, request_peer
from relay.api.server.pipeline import RequestPipeline
from relay.approvals.confirmation_link import MAX_WRONG_CODES
from relay.approvals.request import (
    DecisionAnswer,
    DecisionKind,
    DecisionRequest,
    InvalidField,
    LinkUse,
    MalformedBody,
    read_json,
)
from relay.chat.cards.buttons import LABELS, confirmation_question
from relay.chat.cards.card import Text
from relay.chat.cards.confirmation_view import blocking_reason, changed_fields, decision_outcome
from relay.chat.cards.rendering import event_card
from relay.events.timestamps import format_rfc3339
from relay.outbox.chat_messages import ConfirmationLink, token_digest
from relay.outbox.transaction import Transaction

_PAGE = resources.files("relay.api.routes").joinpath("approve.html").read_bytes()
_VOID = "this link is void: it is none of this relay's, its event is over, or too many wrong codes came with it; use the newest message"


class MomentShown(TypedDict):
    """A moment in a text, to be written in the reader's own time zone: RFC 3339."""

    moment: str


class WhoShown(TypedDict):
    """A principal in a text."""

    who: str


TextShown = list[str | MomentShown | WhoShown]


class FactShown(TypedDict):
    """One thing that is known of the event."""

    label: str
    text: TextShown


class InvitationShown(TypedDict):
    """What a link stands for, and how its event stands now. Texts are in pieces, and hold what others wrote: show them as text."""

    decision: DecisionKind
    label: str
    """The decision as a button says it."""
    title: str
    summary: TextShown
    question: TextShown
    """What is asked of whoever decides."""
    whyNot: TextShown | None
    """Why nobody can take the decision now; null: those who may, can."""
    changes: list[TextShown]
    """What Azure changed in the event since the link was made."""
    code: bool
    """Whether the decision asks for the code that the message shows."""
    facts: list[FactShown]
    notes: list[TextShown]
    machines: list[str]
    """All of them."""
    footer: str
    now: str
    """RFC 3339: the relay's clock."""


class Confirmed(Accepted):
    """The decision is on disk."""

    repeat: bool
    """Whether this principal had used the link before: this is the first answer then, and nothing happened twice."""
    said: TextShown
    """What came of it, for people."""


class LinkBody(BaseModel):
    """Which link."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    token: str = Field(min_length=1, max_length=256)
    """The link's fragment."""


class ConfirmationBody(LinkBody):
    """The decision that a link stands for is to be taken. About which event and state it is, the link says."""

    code: str | None = Field(default=None, max_length=64)
    """The code that the message shows: approving asks for it. Spaces do not matter."""
    reason: str | None = Field(default=None, max_length=1000)
    """For the audit."""


def headers() -> dict[str, str]:
    """Headers of the page: it may run its own script and style, call this relay, and do nothing else."""
    hashes = {
        tag: re.search(rb"<%b>(.*?)</%b>" % (tag.encode(), tag.encode()), _PAGE, re.DOTALL)
        for tag in ("script", "style")
    }
    inline = {
        tag: base64.b64encode(hashlib.sha256(found[1]).digest()).decode()
        for tag, found in hashes.items()
        if found is not None
    }  # CSP 3, section 2.3.1
    policy = (
        "default-src 'none'",
        f"script-src 'sha256-{inline['script']}'",
        f"style-src 'sha256-{inline['style']}'",
        "img-src data:",  # the page's empty icon; without one, browsers ask for /favicon.ico
        "connect-src 'self'",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return {
        "Content-Security-Policy": "; ".join(policy),
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Permissions-Policy": "camera=(), display-capture=(), geolocation=(), microphone=(), payment=(), usb=()",
        "Referrer-Policy": "no-referrer",
        "X-Frame-Options": "DENY",
        "X-Robots-Tag": "noindex, nofollow",
    }


def routes(desk: RequestPipeline) -> tuple[Route, ...]:
    """The page and its calls. Who comes with a link that is none counts as a stranger, like whoever comes with a wrong key."""
    sent = headers()

    async def page(_call: Call) -> web.StreamResponse:
        return raw_response(200, _PAGE, "text/html; charset=utf-8", sent)

    async def look(call: Call) -> web.StreamResponse:
        peer, now = request_peer(call.request), desk.clock.monotonic()
        digest = token_digest(call.content.token)
        shown = await call.relay.store.read(lambda tx: _look(tx, call, desk.clock.now()))
        if shown is None:
            desk.rejections.unauthenticated_call(peer, "a link that is none was looked at", now)
            raise Problem(404, _VOID)
        desk.by_address.refund(peer.network, now)
        mark_authenticated(call.request)
        if wait := desk.by_client.take(f"link {digest}", now):
            raise too_many("too many looks at this link", wait)
        return json_response(200, shown)

    return (
        Route(
            "GET",
            "/approve",
            "the page behind the links in messages; what a link stands for is in its fragment, which is not sent",
            page,
            {200: str},
            access="anyone",
            media=("text/html",),
        ),
        Route(
            "POST",
            "/v1/confirmations/look",
            "what a link stands for, and how its event stands; decides nothing",
            look,
            {200: InvitationShown},
            access="proof",
            parse=lambda _, body: _read(LinkBody, body),
            body=LinkBody,
            problem_statuses=(404,),
        ),
        Route(
            "POST",
            "/v1/confirmations",
            f"take the decision that a link stands for; approving asks for the message's code, and {MAX_WRONG_CODES} wrong ones void the link",
            _confirm,
            {202: Confirmed},
            parse=lambda _, body: _read(ConfirmationBody, body),
            lookup=_find,
            body=ConfirmationBody,
            problem_statuses=(403, 404, 409),
        ),
    )


async def _find(call: Call) -> tuple[ConfirmationLink, str]:
    """What the link stands for, and its EventId. Raises Problem 404."""

    def work(tx: Transaction) -> tuple[ConfirmationLink, str] | None:
        found = tx.messages.find_link(call.content.token)
        return (
            (found, tx.snapshot.by_id(found.occurrence).event.event_id)
            if found is not None
            else None
        )

    found = await call.relay.store.read(work)
    if found is None:
        raise Problem(404, _VOID)
    return found


async def _confirm(call: Call) -> web.StreamResponse:
    relay, given = call.relay, call.content
    invitation, event_id = call.found
    said: DecisionAnswer = await relay.gate.submit(
        DecisionRequest(
            caller=replace(call.caller, channel="page"),
            event_id=event_id,
            decision=invitation.decision,
            revision=invitation.revision,
            at=relay.clock.now(),
            reason=given.reason or None,
            # The space keeps it apart from every Idempotency-Key. Whatever else comes with it, the link is used once.
            request_id=f"link {invitation.token}",
            digest=invitation.token,
            link=LinkUse(given.token, given.code),
        )
    )
    if not said.accepted:
        raise Problem(said.status, **said.body)
    came = decision_outcome(
        said.body, dry_run=await relay.gate.mode() == "dry-run", repeat=said.repeat
    )
    return json_response(said.status, {**said.body, "repeat": said.repeat, "said": _pieces(came)})


def _look(tx: Transaction, call: Call, now: datetime) -> dict[str, Any] | None:
    """What the page shows; None: the link is void."""
    invitation = tx.messages.find_link(call.content.token)
    if invitation is None or invitation.wrong_codes >= MAX_WRONG_CODES:
        return None
    ledger = call.relay.gate.service
    occurrence = tx.snapshot.by_id(invitation.occurrence)
    standing = ledger.status(tx, occurrence, now)
    card = event_card(
        standing, ledger.origin.scope, link=lambda *_: "", code=None
    )  # the form is where its buttons lead
    why_not = blocking_reason(invitation.decision, invitation.revision, standing)
    return {
        "decision": invitation.decision,
        "label": LABELS[invitation.decision],
        "title": card.title,
        "summary": _pieces(card.summary),
        "question": _pieces(confirmation_question(invitation.decision, standing)),
        "whyNot": _pieces(why_not) if why_not is not None else None,
        "changes": [
            _pieces(one)
            for one in changed_fields(
                tx.journal.history(occurrence.key, occurrence.first_seen), invitation.revision
            )
        ],
        "code": invitation.decision == "approve",
        "facts": [{"label": label, "text": _pieces(text)} for label, text in card.facts],
        "notes": [_pieces(one) for one in card.notes],
        "machines": list(occurrence.event.resources),
        "footer": card.footer,
        "now": format_rfc3339(now),
    }


def _pieces(text: Text) -> list[str | dict[str, str]]:
    return [
        one
        if isinstance(one, str)
        else {"moment": format_rfc3339(one)}
        if isinstance(one, datetime)
        else {"who": one.principal}
        for one in text
    ]


def _read(model: type[BaseModel], body: bytes) -> BaseModel:
    try:
        return model.model_validate(read_json(body))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        if not first["loc"]:
            raise MalformedBody("expected a JSON object") from error
        raise InvalidField(".".join(str(part) for part in first["loc"]), first["msg"]) from error
