"""The claim before a StartRequest, and what each answer of IMDS leads to."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import orjson
import pytest

from relay.approvals.service import Claim
from relay.outbox.journal import rows
from tests.approvals.builders import REBOOT, REDEPLOY, SETTINGS, USER_REBOOT, Book, event
from tests.approvals.manual_clock import NOON


def test_a_claim_is_in_the_journal_after_the_grant_and_says_what_will_be_sent(
    approvals: Book,
) -> None:
    approvals.see(USER_REBOOT)
    (claimed,) = approvals.claim()
    kinds = [row.kind for row in rows(approvals.connection)]
    assert kinds == ["event.scheduled", "approval.granted", "claim"]
    note = orjson.loads(list(rows(approvals.connection))[-1].body)
    assert note == {
        "eventId": "E-1",
        "revision": USER_REBOOT.revision,
        "rule": "users",
        "approvalId": claimed.grant.approval_id,
        "grant": claimed.grant.id,
        "attempt": 1,
    }
    assert approvals.grants[0].state == "sent"


def test_a_claim_without_an_answer_is_repeated_while_the_event_is_as_it_was(
    approvals: Book,
) -> None:
    approvals.see(USER_REBOOT)
    approvals.claim()
    approvals.crash()
    (again,) = approvals.claim()
    assert again.grant.attempts == 1
    approvals.accept([again])
    assert approvals.data("startrequest.accepted")["attempts"] == 2
    assert approvals.claim() == []


@pytest.mark.parametrize(
    ("then", "words"),
    [
        ((), "ended"),
        ((event(event_source="User", event_status="Started", not_before=None),), "started"),
        ((event(event_source="User", resources=("db-2",)),), "changed"),
        ((event(event_source="User", due=1000),), "changed"),
    ],
)
def test_a_claim_without_an_answer_is_never_repeated_otherwise(
    approvals: Book, then: tuple[Any, ...], words: str
) -> None:
    approvals.see(USER_REBOOT)
    (before,) = approvals.claim()
    approvals.crash()
    approvals.see(*then, step=False)
    assert [
        claimed.grant.id for claimed in approvals.claim() if claimed.grant.id == before.grant.id
    ] == []
    for _ in range(3):
        approvals.step()
        approvals.crash()
    details = approvals.data("startrequest.failed")
    assert (details["status"], details["attempts"]) == (None, 1)
    assert words in details["reason"]
    assert "not known" in details["reason"]


def test_only_grants_that_were_asked_for_are_claimed(approvals: Book) -> None:
    approvals.see(USER_REBOOT, event("E-2", event_source="User"))
    wanted = approvals.grants[1:]
    assert [
        claimed.event_id
        for claimed in approvals.do(
            lambda tx: approvals.ledger.claim(tx, wanted, approvals.clock.now())
        )
    ] == ["E-2"]


def test_not_before_passes_while_granted(approvals: Book) -> None:
    approvals.see(USER_REBOOT)
    assert approvals.step() == NOON + timedelta(seconds=900)
    approvals.clock.turn(900)
    assert approvals.claim() == []
    for _ in range(2):
        approvals.step()
    details = approvals.data("startrequest.failed")
    assert (details["status"], details["attempts"]) == (None, 0)
    assert "NotBefore" in details["reason"]


def test_a_vote_expires_while_granted(approvals: Book) -> None:
    approvals.see(REBOOT)
    approvals.submit()
    approvals.clock.turn(100)
    approvals.submit(by="bob")
    approvals.clock.turn(200)
    assert approvals.claim() == []
    approvals.step()
    assert "expired" in approvals.data("startrequest.failed")["reason"]
    assert approvals.data("approval.voided")["why"] == "expired"
    assert approvals.submit().body["state"] == "granted"
    assert len(approvals.said("approval.granted")) == 2


def test_what_was_accepted_is_told_once_with_its_cause_and_its_votes_have_served(
    approvals: Book,
) -> None:
    approvals.see(REDEPLOY)
    approvals.submit(of=REDEPLOY)
    approvals.accept(approvals.claim())
    details = approvals.data("startrequest.accepted")
    assert (details["status"], details["attempts"], details["reason"]) == (200, 1, None)
    assert approvals.cause("startrequest.accepted") == approvals.said("approval.granted")[0].id
    approvals.see(event(event_type="Redeploy", event_status="Started", not_before=None))
    approvals.see()
    assert approvals.said("event.started")[0].data["approvedByRelay"] is True
    assert approvals.said("event.ended")[0].data["approvedByRelay"] is True
    assert not approvals.said("approval.voided", "startrequest.failed")


def test_an_answer_that_comes_after_started_was_seen_is_the_only_thing_told(
    approvals: Book,
) -> None:
    approvals.see(REDEPLOY)
    approvals.submit(of=REDEPLOY)
    claims = approvals.claim()
    approvals.ledger.in_flight = frozenset({claims[0].grant.id})
    approvals.see(event(event_type="Redeploy", event_status="Started", not_before=None))
    assert not approvals.said("startrequest.failed", "approval.voided")
    approvals.accept(claims)
    approvals.ledger.in_flight = frozenset()
    approvals.step()
    assert approvals.names()[-1] == "startrequest.accepted"
    assert approvals.said("event.started")[0].data["approvedByRelay"] is False


def test_what_imds_refused_is_told_once_and_never_tried_again(approvals: Book) -> None:
    approvals.see(USER_REBOOT)
    approvals.do(
        lambda tx: approvals.ledger.record_refused(
            tx, claim_in(tx), 400, "400: wrong", approvals.clock.now()
        )
    )
    for _ in range(2):
        approvals.step()
        approvals.crash()
    details = approvals.data("startrequest.failed")
    assert (details["status"], details["attempts"], details["reason"]) == (400, 1, "400: wrong")
    assert approvals.claim() == []
    assert len(approvals.grants) == 1
    assert approvals.submit(by="eve", of=USER_REBOOT).status == 409


def claim_in(tx: Any) -> Claim:
    """Claim everything that is open, in a transaction that goes on."""
    for grant in tx.decisions.open_grants():
        tx.decisions.claim_grant(grant.id)
    (grant,) = tx.decisions.open_grants()
    return Claim(grant, "E-1")


def test_a_start_request_without_an_answer_keeps_its_claim_and_the_last_status(
    approvals: Book,
) -> None:
    approvals.see(USER_REBOOT)
    claims = approvals.claim()
    approvals.do(lambda tx: approvals.ledger.record_unanswered(tx, claims, 503))
    assert (approvals.grants[0].state, approvals.grants[0].status) == ("sent", 503)
    approvals.see()
    assert approvals.data("startrequest.failed")["status"] == 503


def test_a_400_to_a_request_for_several_events_says_nothing_about_one_of_them(
    approvals: Book,
) -> None:
    """Given up for another reason meanwhile, each may still be approved: IMDS has refused neither by itself."""
    approvals.see(USER_REBOOT, event("E-2", event_source="User"))
    both = approvals.do(
        lambda tx: approvals.ledger.claim(tx, tx.decisions.open_grants(), approvals.clock.now())
    )
    approvals.do(lambda tx: approvals.ledger.record_unanswered(tx, both, 400))
    approvals.crash(SETTINGS.model_copy(update={"rules": ()}))
    approvals.step()
    assert [(grant.state, grant.status) for grant in approvals.grants] == [
        ("failed", 400),
        ("failed", 400),
    ]
    approvals.crash(SETTINGS)
    approvals.step()
    assert [grant.state for grant in approvals.grants if grant.status is None] == [
        "granted",
        "granted",
    ]


def test_an_event_that_flips_back_is_granted_anew_and_the_first_grant_is_told_failed(
    approvals: Book,
) -> None:
    approvals.see(USER_REBOOT)
    first = approvals.claim()
    approvals.see(event(event_source="User", resources=("db-2",)))
    approvals.see(USER_REBOOT)
    assert [grant.state for grant in approvals.grants] == ["failed", "failed", "granted"]
    assert len(approvals.said("startrequest.failed")) == 2
    (again,) = approvals.claim()
    assert again.grant.id != first[0].grant.id


def test_a_change_after_it_was_accepted_is_granted_for_itself(approvals: Book) -> None:
    approvals.see(USER_REBOOT)
    approvals.accept(approvals.claim())
    approvals.see(event(event_source="User", due=1000))
    assert [grant.state for grant in approvals.grants] == ["accepted", "granted"]
    assert not approvals.said("startrequest.failed")
