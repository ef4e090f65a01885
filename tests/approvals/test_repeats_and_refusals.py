"""Which requests are repeats, what refusals record, and that a decision is written whole or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from relay.store.journal import read_all_rows
from tests.approvals.builders import REBOOT, REDEPLOY, ApprovalFile, build_caller, build_request


def test_a_repeat_gets_its_first_answer_whatever_happened_since(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    first = approvals.submit(request_id="r")
    approvals.submit(by="bob")
    approvals.record_document()
    approvals.crash()
    events_before = approvals.events()
    assert approvals.submit(request_id="r") == replace(first, repeat=True)
    assert approvals.events() == events_before


@pytest.mark.parametrize(
    ("status", "is_final", "changes"),
    [
        (403, True, {"by": build_caller("eve")}),
        (409, True, {"revision": "x"}),
        (404, False, {"event_id": "E-9"}),
        (404, False, {"scope": "other"}),
    ],
    ids=["not a voter", "another revision", "an unknown event", "another scope"],
)
def test_only_final_refusals_are_first_answers(
    approvals: ApprovalFile, status: int, is_final: bool, changes: dict[str, Any]
) -> None:
    approvals.record_document(REBOOT)
    answers = [approvals.submit(request_id="r", **changes) for _ in range(2)]
    assert [answer.status for answer in answers] == [status] * 2
    assert len(approvals.events("approval.refused")) == (1 if is_final else 2)


def test_a_message_that_comes_again_gets_no_second_event(
    approvals: ApprovalFile,
) -> None:
    """A message comes again if the relay was killed before it could acknowledge it."""
    for _ in range(2):
        assert approvals.submit(event_id="E-9", request_id="m", message_id="m").status == 404
    assert len(approvals.events("approval.refused")) == 1


def test_a_copy_of_a_signed_404_stays_404_across_restarts_and_a_new_signature_does_not(
    approvals: ApprovalFile,
) -> None:
    """A captured callback must not become an approval when Azure uses its EventId."""
    assert approvals.submit(request_id="r", signed_at="1700000000").status == 404
    approvals.record_document(REBOOT)
    approvals.crash()
    copied = approvals.submit(request_id="r", signed_at="1700000000")
    assert (copied.status, copied.repeat) == (404, True)
    assert approvals.submit(request_id="r", signed_at="1700000001").status == 202
    assert len(approvals.events("approval.refused")) == 1


def test_a_503_is_neither_recorded_nor_a_first_answer(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    approvals.set_mode("off")
    assert approvals.submit(request_id="r").status == 503
    approvals.set_mode("on")
    assert approvals.submit(request_id="r").status == 202
    assert not approvals.events("approval.refused")


def test_another_body_under_a_known_id_is_409_and_decides_nothing(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    first = approvals.submit(request_id="r")
    other = approvals.submit("hold", request_id="r", digest="other")
    assert (other.status, other.body["revision"]) == (409, REBOOT.revision)
    assert not approvals.status().active_holds
    assert approvals.data("approval.refused")["decision"] == "hold"
    assert approvals.submit(request_id="r") == replace(first, repeat=True)


def test_the_same_id_from_another_principal_is_no_repeat(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    approvals.submit(request_id="r")
    assert approvals.submit(by="bob", request_id="r").body["votes"] == 2


def test_the_refusal_of_an_unknown_event_holds_only_the_id_that_was_sent(
    approvals: ApprovalFile,
) -> None:
    answer = approvals.submit(event_id="no-Such", message_id="m")
    assert answer.status == 404
    details = approvals.data("approval.refused")
    assert details["eventId"] == approvals.events()[0].subject == "no-Such"
    assert {
        details[key]
        for key in (
            "eventType",
            "eventStatus",
            "resources",
            "notBefore",
            "revision",
            "documentIncarnation",
            "rule",
        )
    } == {None}
    assert (details["votes"], details["required"], details["refusal"]) == (
        0,
        0,
        answer.body["detail"],
    )
    assert approvals.cause("approval.refused") == "m"


def test_another_scope_is_404_and_reveals_nothing_about_the_event(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    assert approvals.submit(scope="prod").status == 202
    answer = approvals.submit(by="bob", scope="test")
    assert (answer.status, set(answer.body)) == (404, {"detail"})
    assert approvals.data("approval.refused")["resources"] is None


def test_a_refusal_records_the_caller_the_decision_and_the_reason(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    answer = approvals.submit(by="eve", reason="please")
    details = approvals.data("approval.refused")
    assert {
        key: details[key]
        for key in (
            "principal",
            "decision",
            "channel",
            "reason",
            "votes",
            "required",
            "rule",
            "refusal",
        )
    } == {
        "principal": "client:eve",
        "decision": "approve",
        "channel": "http",
        "reason": "please",
        "votes": 0,
        "required": 2,
        "rule": "databases",
        "refusal": answer.body["detail"],
    }
    assert approvals.cause("approval.refused") == approvals.events("event.scheduled")[0].id
    assert approvals.status().decisions == ()


def test_a_decision_is_written_as_a_whole_or_not_at_all(approvals: ApprovalFile) -> None:
    approvals.record_document(REDEPLOY)
    rows_before = list(read_all_rows(approvals.connection))

    def submit_and_fail(tx: Any) -> None:
        approvals.engine.decide(tx, build_request(of=REDEPLOY))
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        approvals.transact(submit_and_fail)
    approvals.crash()
    assert list(read_all_rows(approvals.connection)) == rows_before
    assert approvals.grants == []
