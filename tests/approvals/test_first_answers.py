"""First answers are kept for longer than the signature of a request is valid."""

from __future__ import annotations

from relay.signature import MAX_AGE, MAX_AHEAD
from relay.store import StoreSettings
from relay.store.retention import prune_all_tables
from tests.approvals.builders import ApprovalFile, build_event


def test_a_request_id_is_known_across_restarts_for_longer_than_a_signature_is_valid(
    approvals: ApprovalFile,
) -> None:
    """A clock ahead of ours makes a signature valid for longer."""
    approvals.record_document(build_event())
    first = approvals.submit(by="alice", request_id="msg_1")
    approvals.clock.advance(MAX_AGE + MAX_AHEAD + 1)
    short_retention = StoreSettings.model_validate({"retain": "1ms", "audit_retain": "1ms"})
    approvals.transact(lambda tx: prune_all_tables(tx, short_retention, approvals.clock.now()))
    approvals.crash()
    again = approvals.submit(by="alice", request_id="msg_1")
    assert (again.status, again.body, again.repeat) == (first.status, first.body, True)
    assert approvals.submit(by="alice", request_id="msg_1", digest="another body").status == 409
