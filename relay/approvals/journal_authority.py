"""Makes the journal the authority for votes and holds: it corrects the table that is read.

Another program can change the table of decisions. The journal has a chain of hashes. `engine` asks
before a grant and before a claim. `standing_hold_engine` does the same for standing holds.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from relay.approvals.status import ApprovalStatus
from relay.outbox.transaction import Transaction

_log = logging.getLogger(__name__)


def restore_from_journal(tx: Transaction, status: ApprovalStatus) -> bool:
    """Correct the votes and holds in the table by the journal; return whether they differed.

    This reads all that was decided about the EventId, so it comes only before a grant and
    before a claim. It finds a vote that was ended and made to count again, and a hold whose
    row was removed or changed.
    """
    occurrence = status.occurrence
    in_force = tx.decisions.decisions_in_force_by_journal(occurrence.key)
    known = {decision.approval_id for decision in status.decisions}
    # A dry run can grant once more with the votes of an accepted StartRequest; it sends none.
    is_rehearsal = status.mode == "dry-run" and status.accepted_by_imds
    revived = [
        decision
        for decision in status.counted_votes
        if decision.approval_id not in in_force and not is_rehearsal
    ]
    removed = [
        replace(decision, occurrence=occurrence.id)
        for decision in in_force.values()
        if decision.decision == "hold" and decision.approval_id not in known
    ]
    for decision in revived:
        tx.decisions.end_decision(decision.approval_id)
    for decision in removed:
        tx.decisions.replace_decision(decision)
    if revived or removed:
        _log.error(
            "the approvals of event %s in the state file were changed by another program: "
            "%d votes count again that had ended, %d holds are missing. The relay follows "
            "the journal",
            occurrence.event.event_id,
            len(revived),
            len(removed),
        )
    return bool(revived or removed)
