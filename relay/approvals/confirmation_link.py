"""Checks the link, and the code beside it, by which a person confirms a decision on the page."""

from __future__ import annotations

import hmac

from relay.approvals.admission import Refusal
from relay.approvals.request import DecisionRequest, LinkCredentials
from relay.store import TrackedEvent
from relay.store.chat_messages import code_digest
from relay.store.transaction import Transaction

MAX_WRONG_CODES = 5
"""The number of wrong codes that voids a link."""
_NEXT_STEP = (
    "the message gets a new link when it is edited next, "
    "and the API and the command line need no link"
)


def find_link_refusal_counting_wrong_code(
    tx: Transaction, request: DecisionRequest, given: LinkCredentials, occurrence: TrackedEvent
) -> Refusal | None:
    """Return why a link does not permit a decision about an event, or None if it does.

    A wrong code is counted. Call this after every other check, so that a person who may not decide
    can neither guess codes nor use the link up. Only an approval needs the code: the person who
    reads the message has it, and a program that follows links does not.
    """
    link = tx.messages.find_confirmation_link_by_token(given.token)
    wanted = (occurrence.id, request.revision, request.decision)
    if link is None or (link.occurrence, link.revision, link.decision) != wanted:
        return Refusal(
            409,
            "the link is for another decision, or for an event that has ended; "
            "a newer message has its own links",
        )
    if link.wrong_codes >= MAX_WRONG_CODES:
        reason = f"{MAX_WRONG_CODES} wrong codes were given with this link: it is void"
        return Refusal(403, f"{reason}; {_NEXT_STEP}")
    if link.decision != "approve":
        return None
    code = "".join((given.code or "").split())
    if not code:
        reason = "approving asks for the code that the message shows"
        return Refusal(403, reason, field="code")
    if link.code is None:
        reason = "an older version of the relay made this link, and it approves nothing"
        return Refusal(409, f"{reason}; {_NEXT_STEP}")
    if hmac.compare_digest(code_digest(given.token, code), link.code):
        return None
    tx.messages.record_wrong_confirmation_code(link)
    reason = "this is not the code that the message shows"
    tries_left = MAX_WRONG_CODES - link.wrong_codes - 1
    if tries_left == 0:
        consequence = f"and {MAX_WRONG_CODES} wrong codes void a link"
        return Refusal(403, f"{reason}, {consequence}; {_NEXT_STEP}")
    tries = "one more try" if tries_left == 1 else f"{tries_left} more tries"
    return Refusal(403, f"{reason}; the link takes {tries}", field="code")
