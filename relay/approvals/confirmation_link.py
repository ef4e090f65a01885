"""What must come with a link of a message before the decision behind it counts. Runs inside a transaction."""

from __future__ import annotations

import hmac

from relay.approvals.authorize import Refusal
from relay.approvals.request import DecisionRequest, LinkUse
from relay.outbox import Occurrence
from relay.outbox.transaction import Transaction

MAX_WRONG_CODES = 5
"""Wrong codes that a link survives, less one."""


def check_confirmation_link(
    tx: Transaction, approval: DecisionRequest, invited: LinkUse, occurrence: Occurrence
) -> Refusal | None:
    """Why a link does not carry a decision about an event. A wrong code is counted; None: it carries it.

    To be asked last, of what nothing else refuses: who may not decide learns nothing of a code, and uses no link up.
    Only approving asks for the code: whoever sees the message has it, and a machine that follows links has not.
    """
    invitation = tx.messages.find_link(invited.token)
    meant = (
        (invitation.occurrence, invitation.revision, invitation.decision)
        if invitation is not None
        else None
    )
    if invitation is None or meant != (occurrence.id, approval.revision, approval.decision):
        return Refusal(
            409,
            "the link stands for another decision, or for an event that has ended; a newer message has its own links",
        )
    if invitation.wrong_codes >= MAX_WRONG_CODES:
        return Refusal(
            403, f"{MAX_WRONG_CODES} wrong codes were given with this link: it is void; {_ANOTHER}"
        )
    if invitation.decision != "approve":
        return None
    given = "".join((invited.code or "").split())
    if not given:
        return Refusal(403, "approving asks for the code that the message shows", "code")
    if hmac.compare_digest(given.encode("utf-8", "surrogateescape"), invitation.code.encode()):
        return None
    tx.messages.count_wrong_code(invitation)
    left = MAX_WRONG_CODES - invitation.wrong_codes - 1
    if not left:
        return Refusal(
            403,
            f"this is not the code that the message shows, and {MAX_WRONG_CODES} wrong ones void a link; {_ANOTHER}",
        )
    tries = f"{left} more tries" if left > 1 else "one more try"
    return Refusal(
        403, f"this is not the code that the message shows; the link takes {tries}", "code"
    )


_ANOTHER = (
    "the message gets a new link when it is edited next, and the API and the command line need none"
)
