"""Requests about several scopes and by links, and rules of which only one has hours or reminds."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from relay.approvals import ApprovalsSettings
from relay.approvals.limits import Limit
from relay.approvals.refusal_aggregation import MAX_RECORDED_ABOUT_EVENT, AggregatedRefusals
from relay.approvals.request import LinkCredentials
from relay.events.tracing import SpanContext
from relay.outbox.decisions import MAX_REFUSALS
from relay.outbox.journal import read_all_rows
from relay.outbox.transaction import Transaction
from tests.approvals.builders import (
    REBOOT,
    REDEPLOY,
    STARTED,
    USER_REBOOT,
    ApprovalFile,
    build_event,
    build_request,
)
from tests.approvals.manual_clock import NOON
from tests.approvals.running_gate import REFUSED

REDEPLOY_2 = build_event("E-2", event_type="Redeploy")
VOTE = {"votes": 1, "from": ["client:alice"]}


def rules(*each: dict[str, Any]) -> ApprovalsSettings:
    """The rules of a relay, each with a name."""
    named = [{"name": f"r{number}", "approve": VOTE} | rule for number, rule in enumerate(each)]
    return ApprovalsSettings.model_validate({"rules": named})


# --- several scopes


def test_a_request_about_an_event_of_several_scopes_decides_nothing_until_it_names_one(
    tmp_path: Path,
) -> None:
    approvals = ApprovalFile(tmp_path / "hub.db", is_hub=True)
    approvals.record_in_scopes(REDEPLOY, "a", "b")
    answer = approvals.submit(of=REDEPLOY, request_id="r")
    assert (answer.status, answer.body["field"]) == (422, "scope")
    assert answer.body["detail"].endswith("known in several: a, b")
    assert "revision" not in answer.body
    assert approvals.event_names() == []
    assert approvals.submit(of=REDEPLOY, request_id="r", scope="b").body["state"] == "granted"
    (grant,) = approvals.events("approval.granted")
    assert grant.attributes["scope"] == "b"
    approvals.close()


@pytest.mark.parametrize(
    ("status", "changes"),
    [
        (202, {"arrival_scope": "b"}),
        (202, {"arrival_scope": "b", "scope": "b"}),
        (404, {"arrival_scope": "b", "scope": "a"}),
        (404, {"arrival_scope": "c"}),
        (404, {"scope": "c"}),
    ],
)
def test_a_request_is_about_the_scope_for_which_it_arrived(
    tmp_path: Path, status: int, changes: dict[str, Any]
) -> None:
    approvals = ApprovalFile(tmp_path / "hub.db", is_hub=True)
    approvals.record_in_scopes(REDEPLOY, "a", "b")
    assert approvals.submit(of=REDEPLOY, **changes).status == status
    granted = approvals.events("approval.granted")
    assert [each.attributes["scope"] for each in granted] == ["b"] * (status == 202)
    approvals.close()


# --- links of the confirm page

TOKEN, CODE = "of the message", "123456"


def add_link(approvals: ApprovalFile) -> None:
    """Add the link of a message to approve the reboot."""
    occurrence = approvals.status().occurrence.id

    def add(tx: Transaction) -> None:
        now = approvals.clock.now()
        tx.messages.begin("ops", [occurrence], 0)
        message = tx.messages.find("ops", occurrence)
        assert message is not None
        tx.messages.add_confirmation_link(
            message.id, TOKEN, CODE, occurrence, REBOOT.revision, "approve", now
        )

    approvals.transact(add)


def test_a_link_decides_only_with_its_code(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    add_link(approvals)
    unknown = approvals.submit(request_id="l", link=LinkCredentials("other", CODE))
    assert (unknown.status, unknown.body["revision"]) == (409, REBOOT.revision)
    wrong = approvals.submit(request_id="l", link=LinkCredentials(TOKEN, "000000"))
    assert (wrong.status, wrong.body["field"]) == (403, "code")
    assert approvals.status().vote_count == 0
    right = approvals.submit(request_id="l", link=LinkCredentials(TOKEN, CODE))
    assert (right.status, right.body["votes"]) == (202, 1)
    again = approvals.submit(request_id="l", link=LinkCredentials(TOKEN, "000000"))
    assert (again.status, again.repeat) == (202, True)


def test_a_wrong_code_is_not_counted_for_somebody_who_may_not_decide(
    approvals: ApprovalFile,
) -> None:
    approvals.record_document(REBOOT)
    add_link(approvals)
    refused = approvals.submit(by="eve", link=LinkCredentials(TOKEN, "000000"))
    assert (refused.status, "takes votes from others only" in refused.body["detail"]) == (403, True)
    link = approvals.transact(lambda tx: tx.messages.find_confirmation_link_by_token(TOKEN))
    assert link is not None
    assert link.wrong_codes == 0


# --- one rule of several


@pytest.mark.parametrize("position", [0, 1])
def test_a_rule_reminds_though_another_does_not(tmp_path: Path, position: int) -> None:
    match = {"event_type": ["Reboot"]}
    each: list[dict[str, Any]] = [
        {"match": match, "approve": VOTE | {"remind": "10m"}},
        {"match": {"scope": ["x"]}},
    ]
    approvals = ApprovalFile(tmp_path / "relay.db", rules(*each[position:], *each[:position]))
    approvals.record_document(build_event())
    assert approvals.apply_transitions() == NOON + timedelta(minutes=5)
    approvals.clock.advance(300.0)
    approvals.apply_transitions()
    assert len(approvals.events("approval.reminder")) == 1
    approvals.close()


@pytest.mark.parametrize("position", [0, 1])
def test_a_rule_has_hours_though_another_has_none(tmp_path: Path, position: int) -> None:
    hours = {"time": {"from": "12:01", "to": "12:03"}, "event_type": ["Reboot"]}
    each: list[dict[str, Any]] = [
        {"match": hours, "approve": "automatic"},
        {"match": {"scope": ["x"]}},
    ]
    approvals = ApprovalFile(tmp_path / "relay.db", rules(*each[position:], *each[:position]))
    approvals.clock.advance(1.5)
    approvals.record_document(build_event())
    assert approvals.apply_transitions() == NOON + timedelta(minutes=1)
    approvals.clock.advance(58.5)
    approvals.apply_transitions()
    assert len(approvals.claim()) == 1
    approvals.close()


# --- what the engine itself refuses


def test_the_id_of_a_request_belongs_to_one_body(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    approvals.submit(request_id="r")
    answer = approvals.submit(request_id="r", digest="other")
    assert (answer.status, answer.body) == (
        409,
        {
            "detail": "this id came before with another body; give each request an id of its own",
            "revision": REBOOT.revision,
        },
    )


def test_a_refusal_names_the_current_revision_only_where_that_helps(
    approvals: ApprovalFile,
) -> None:
    approvals.record_document(REBOOT)
    assert approvals.submit(revision="x").body["revision"] == REBOOT.revision
    assert set(approvals.submit(by="eve").body) == {"detail"}
    assert set(approvals.submit(event_id="E-9").body) == {"detail"}
    approvals.submit(request_id="r")
    reused = approvals.submit(event_id="E-9", request_id="r", digest="other")
    assert (reused.status, set(reused.body)) == (409, {"detail"})


def test_a_principal_gets_an_event_for_its_first_refusals_alone(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    answers = [approvals.submit(by="eve") for _ in range(MAX_RECORDED_ABOUT_EVENT + 1)]
    assert [answer.is_aggregated for answer in answers] == [
        *[False] * MAX_RECORDED_ABOUT_EVENT,
        True,
    ]
    assert {answer.event_key for answer in answers} == {REBOOT.lowercase_event_id}
    assert len(approvals.events("approval.refused")) == MAX_RECORDED_ABOUT_EVENT
    assert approvals.submit(event_id="E-9").event_key is None
    approvals.set_mode("off")
    answer = approvals.submit()
    assert (answer.status, answer.is_aggregated) == (503, False)


def test_refusals_that_were_only_counted_become_one_event_with_the_newest_reason(
    tmp_path: Path,
) -> None:
    approvals = ApprovalFile(tmp_path / "hub.db", is_hub=True)
    approvals.record_in_scopes(REBOOT, "a")
    approvals.record_in_scopes(REDEPLOY_2, "a", "b")
    now = NOON + timedelta(minutes=1)
    counted = [
        AggregatedRefusals(build_request(by="eve", of=of), f"reason {count}", count)
        for count, of in enumerate([REBOOT, REDEPLOY_2, build_event("E-9")], start=2)
    ]
    approvals.transact(lambda tx: approvals.engine.record_aggregated_refusals(tx, counted, now))
    refused = approvals.events("approval.refused")
    assert [
        (each.data["count"], each.data["refusal"], each.data["revision"]) for each in refused
    ] == [
        (2, "reason 2", REBOOT.revision),
        (3, "reason 3", None),  # nobody knows which of the two events
        (4, "reason 4", None),
    ]
    assert {each.attributes["time"] for each in refused} == {"2026-04-11T12:01:00Z"}
    approvals.close()


def test_surplus_first_answers_go_when_counted_refusals_are_recorded(
    approvals: ApprovalFile,
) -> None:
    def remember(tx: Transaction) -> None:
        for number in range(MAX_REFUSALS + 1):
            at = NOON + timedelta(milliseconds=number)
            tx.decisions.remember_answer("client:eve", f"r{number}", "d", 403, {}, at)

    approvals.transact(remember)
    now = NOON + timedelta(hours=1)
    approvals.transact(lambda tx: approvals.engine.record_aggregated_refusals(tx, [], now))
    first, second = approvals.transact(
        lambda tx: [tx.decisions.first_answer("client:eve", each) for each in ("r0", "r1")]
    )
    assert (first is None, second is not None) == (True, True)


# --- traces


def test_a_decision_is_traced_to_the_span_of_its_caller(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    span = SpanContext("a" * 32, "b" * 16)
    approvals.connection.execute("BEGIN IMMEDIATE")
    tx = Transaction(approvals.connection, lambda _: (), traced=True)
    approvals.engine.decide(tx, build_request(trace=span))
    approvals.connection.execute("COMMIT")
    (recorded,) = tx.recorded
    assert recorded.event is not None
    assert (recorded.event.name, recorded.caller) == ("approval.recorded", span)


# --- claims


def claim_notes(approvals: ApprovalFile) -> list[dict[str, Any]]:
    """What the journal says about the claims."""
    rows = [row for row in read_all_rows(approvals.connection) if row.kind == "claim"]
    return [json.loads(row.body) for row in rows]


@pytest.mark.parametrize(("agent", "noted"), [(None, {}), ("vm-1", {"agent": "vm-1"})])
def test_a_claim_notes_the_agent_that_sends_the_start_request(
    approvals: ApprovalFile, agent: str | None, noted: dict[str, str]
) -> None:
    approvals.record_document(USER_REBOOT)
    now = approvals.clock.now()
    (claim,) = approvals.transact(
        lambda tx: approvals.engine.claim_grants(tx, tx.decisions.open_grants(), now, agent=agent)
    )
    assert claim.agent == agent
    (note,) = claim_notes(approvals)
    assert {key: note[key] for key in note if key == "agent"} == noted


def test_the_claim_for_an_automatic_rule_names_no_votes(approvals: ApprovalFile) -> None:
    approvals.record_document(USER_REBOOT)
    approvals.submit(of=USER_REBOOT)
    approvals.claim()
    (note,) = claim_notes(approvals)
    assert (note["required"], note["recorded"]) == (0, [])


# --- which transitions are due, and when


def test_only_the_named_events_are_considered(approvals: ApprovalFile) -> None:
    other = build_event("E-2", event_source="User")
    approvals.record_document(USER_REBOOT, other, step=False)
    now = approvals.clock.now()
    approvals.transact(lambda tx: approvals.engine.apply_due_transitions(tx, now, ["e-2"]))
    (granted,) = approvals.events("approval.granted")
    assert granted.subject == "E-2"
    approvals.transact(lambda tx: approvals.engine.apply_due_transitions(tx, now))
    assert len(approvals.events("approval.granted")) == 2


def test_the_begin_and_the_end_of_a_standing_hold_are_next_changes(
    approvals: ApprovalFile,
) -> None:
    approvals.hold_ahead(starts=60.0, ends=120.0)
    assert approvals.apply_transitions() == NOON + timedelta(seconds=60)
    approvals.clock.advance(60.0)
    assert approvals.apply_transitions() == NOON + timedelta(seconds=120)
    approvals.clock.advance(60.0)
    assert approvals.apply_transitions() is None
    assert len(approvals.events("standing-hold.expired")) == 1


def test_hours_change_nothing_about_an_event_that_has_started(tmp_path: Path) -> None:
    hours = {"time": {"from": "12:01", "to": "12:03"}}
    approvals = ApprovalFile(tmp_path / "relay.db", rules({"match": hours, "approve": "automatic"}))
    approvals.record_document(STARTED)
    assert approvals.apply_transitions() is None
    approvals.close()


def test_an_event_is_granted_at_the_end_of_a_standing_hold_whatever_event_was_named(
    approvals: ApprovalFile,
) -> None:
    approvals.hold_ahead(ends=60.0)
    approvals.record_document(USER_REBOOT)
    approvals.clock.advance(60.0)
    now = approvals.clock.now()
    approvals.transact(lambda tx: approvals.engine.apply_due_transitions(tx, now, ["e-9"]))
    assert len(approvals.events("approval.granted")) == 1


def test_nothing_is_due_for_an_event_about_which_nobody_has_decided(tmp_path: Path) -> None:
    """Unless a rule is automatic or reminds."""
    hours = {"time": {"from": "11:00", "to": "13:00"}}
    approvals = ApprovalFile(tmp_path / "relay.db", rules({"match": hours}))
    approvals.record_document(REBOOT)
    assert approvals.apply_transitions() is None
    approvals.submit()
    assert approvals.apply_transitions() == NOON + timedelta(minutes=1)
    approvals.close()


def test_a_slot_goes_on_at_once_when_the_start_request_of_its_event_cannot_be_accepted(
    tmp_path: Path,
) -> None:
    freezes = {"match": {"event_type": ["Freeze"]}, "approve": "automatic"}
    limits = [Limit.model_validate({"name": "one", "match": {"resources": ["db-*"]}, "max": 1})]
    limited = {"limits": tuple(limits)}
    everything = rules({"approve": "automatic"}).model_copy(update=limited)
    approvals = ApprovalFile(tmp_path / "relay.db", everything)
    waiting = build_event("E-2", event_type="Freeze", resources=("db-2",))
    other = build_event("E-3", event_type="Freeze", resources=("web-1",))
    approvals.record_document(REBOOT, waiting, other)
    claims = approvals.claim()
    assert [claim.event_id for claim in claims] == ["E-1", "E-3"]
    approvals.answer(claims, REFUSED)  # IMDS does not say for which of the two
    approvals.reload(rules(freezes).model_copy(update=limited))
    approvals.apply_transitions()
    (failed,) = approvals.events("startrequest.failed")
    assert failed.subject == "E-1"
    assert approvals.status("E-2").active_grant is not None
    approvals.close()
