"""A request that comes again is known for longer than its signature is good, whatever the store forgets and however often it starts."""

from __future__ import annotations

from pathlib import Path

from relay.outbox import StoreSettings
from relay.outbox.retention import prune
from relay.signature import MAX_AGE, MAX_AHEAD
from tests.approvals.builders import Book, event


def test_an_id_is_remembered_across_restarts_for_longer_than_a_signature_is_good(
    tmp_path: Path,
) -> None:
    """A signature that was made ahead of our clock is good for that much longer."""
    book = Book(tmp_path / "relay.db")
    book.see(event())
    first = book.submit(by="alice", request_id="msg_1")
    book.clock.turn(MAX_AGE + MAX_AHEAD + 1)
    forgetful = StoreSettings.model_validate({"retain": "1ms", "audit_retain": "1ms"})
    book.do(lambda tx: prune(tx, forgetful, book.clock.now()))
    book.crash()
    again = book.submit(by="alice", request_id="msg_1")
    assert (again.status, again.body, again.repeat) == (first.status, first.body, True)
    assert book.submit(by="alice", request_id="msg_1", digest="another body").status == 409
    book.close()
