"""Requests: their bodies, which are repeats, what refusals record, and whose scope they mean."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.amqp.approval_consumer import UnparsedApprovalMessage
from relay.amqp.connection import UnusableMessage
from relay.approvals import ApprovalsSettings
from relay.approvals.amqp_handler import AmqpApprovalHandler
from relay.approvals.engine import MAX_REFUSALS
from relay.approvals.request import InvalidField, MalformedJsonBody, read_json, validate_body
from relay.approvals.status import approval_json_fields
from relay.signature import MAX_AGE, MAX_AHEAD
from relay.store.journal import read_all_rows
from tests import hostile
from tests.approvals.builders import (
    REBOOT,
    REDEPLOY,
    ApprovalFile,
    build_caller,
    build_event,
    build_request,
    write_damaged_row,
)
from tests.approvals.running_gate import GateHarness, running_gate
from tests.clocks import NOON

WHOLE: dict[str, Any] = {
    "eventId": "E-1",
    "decision": "approve",
    "revision": "r",
    "reason": "drained",
    "ticket": "CHG-1",
    "scope": "prod",
}


def test_a_body_becomes_the_request_of_its_caller() -> None:
    raw = orjson.dumps(WHOLE)
    request = validate_body(read_json(raw)).to_request(
        build_caller(), NOON, raw, request_id="i", message_id="m"
    )
    said = [request.event_id, request.decision, request.revision, *request.remarks.values()]
    assert [*said, request.scope] == list(WHOLE.values())
    assert (request.caller, request.at) == (build_caller(), NOON)
    assert (request.request_id, request.message_id) == ("i", "m")
    assert request.digest == hashlib.sha256(raw).hexdigest()


def test_reason_and_scope_may_be_left_out() -> None:
    body = validate_body(read_json(b'{"eventId": "E-1", "decision": "hold", "revision": "r"}'))
    assert (body.reason, body.scope) == (None, None)


@pytest.mark.parametrize("raw", hostile.NO_OBJECTS, ids=lambda raw: repr(raw[:20]))
def test_anything_but_a_json_object_is_malformed(raw: bytes) -> None:
    with pytest.raises(MalformedJsonBody, match="expected a JSON object"):
        validate_body(read_json(raw))


@pytest.mark.parametrize("raw", [*hostile.REPEATED_KEYS, b'[{"a": 1, "a": 1}]'])
def test_an_object_with_a_repeated_key_is_malformed(raw: bytes) -> None:
    with pytest.raises(MalformedJsonBody, match="every key once"):
        read_json(raw)


def test_unambiguous_json_is_read() -> None:
    read = read_json(b'{"a": [{"b": 1}, {"b": 2}], "c": {"a": null}}')
    assert read == {"a": [{"b": 1}, {"b": 2}], "c": {"a": None}}
    for depth in (100, 990, 1020, 2000):
        try:
            read_json(b'{"a":' * depth + b"1" + b"}" * depth)
        except MalformedJsonBody:
            assert depth > 100


@pytest.mark.parametrize(("field", "value"), hostile.WRONG_FIELDS, ids=repr)
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidField) as raised:
        validate_body(hostile.with_wrong_field(WHOLE, field, value))
    assert raised.value.field == field


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_other_json_raises_one_of_the_two_errors(anything: Any) -> None:
    with pytest.raises((MalformedJsonBody, InvalidField)):
        validate_body(anything)


async def decide(harness: GateHarness) -> bool:
    handler = AmqpApprovalHandler(
        callers={"drain": build_caller("alice", channel="amqp")},
        gate=harness.gate,
        store=harness.store,
        clock=harness.clock,
    )
    vote = {"eventId": "E-1", "decision": "approve", "revision": REDEPLOY.revision}
    message = UnparsedApprovalMessage("drain", None, "m", orjson.dumps(vote))
    return await handler.read(message).decide()


async def test_a_message_about_an_event_with_damaged_rows_is_dead_lettered(tmp_path: Path) -> None:
    async with running_gate(tmp_path, REDEPLOY) as harness:
        assert (await harness.submit("hold", of=REDEPLOY)).accepted
        await harness.store.transact(lambda tx: write_damaged_row(tx, "approval.recorded", "e-1"))
        with pytest.raises(UnusableMessage, match=r"^journal: .* approvals of this event are off"):
            await decide(harness)


async def test_a_message_waits_while_damage_turns_all_approvals_off(tmp_path: Path) -> None:
    """It was read before anybody saw the damage."""
    async with running_gate(tmp_path, REDEPLOY) as harness:
        assert (await harness.hold_ahead()).accepted
        await harness.store.transact(lambda tx: write_damaged_row(tx, "standing-hold.created"))
        assert await decide(harness) is False


# --- repeats and refusals


def test_a_repeat_gets_its_first_answer_whatever_happened_since(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    first = approvals.submit(request_id="r")
    approvals.submit(by="bob")
    approvals.record_document()
    approvals.crash()
    events_before = approvals.events()
    assert approvals.submit(request_id="r") == replace(first, repeat=True)
    assert approvals.events() == events_before


@pytest.mark.parametrize("channel", ["http", "callback"])
def test_the_same_decision_within_a_minute_is_the_same_answer_and_later_it_is_renewed(
    approvals: ApprovalFile, channel: str
) -> None:
    approvals.record_document(REBOOT)
    caller = build_caller("alice", channel=channel)
    first = approvals.submit("hold", caller, request_id="r0")
    for number in range(1, 20):
        assert approvals.submit("hold", caller, request_id=f"r{number}") == first
    (hold,) = approvals.status().active_holds
    assert len(approvals.events("approval.recorded")) == 1
    approvals.clock.advance(60)
    approvals.submit("hold", caller)
    (renewed,) = approvals.status().active_holds
    assert renewed.expires is not None
    assert hold.expires is not None
    assert renewed.expires - hold.expires == timedelta(minutes=1)


def test_over_amqp_each_message_has_an_event_as_its_answer(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    for name in ("m1", "m2"):
        assert approvals.submit(request_id=name, message_id=name).status == 202
    causes = [event.attributes["causationid"] for event in approvals.events("approval.recorded")]
    assert causes == ["m1", "m2"]
    assert approvals.status().vote_count == 1


def test_a_copy_of_what_changed_nothing_changes_nothing_later(approvals: ApprovalFile) -> None:
    """Whoever captured it could otherwise take the hold again after its release."""
    approvals.record_document(REBOOT)
    for number in range(2):
        approvals.submit("hold", request_id=f"r{number}")
    approvals.submit("release", request_id="release")
    approvals.crash()
    copied = approvals.submit("hold", request_id="r1")
    assert (copied.status, copied.repeat) == (202, True)
    assert not approvals.status().active_holds


def test_a_refused_request_that_is_sent_again_is_judged_again(approvals: ApprovalFile) -> None:
    assert approvals.submit(request_id="r").status == 404
    approvals.record_document(REBOOT)
    assert approvals.submit(request_id="r").status == 202


def test_of_many_refusals_a_hundred_a_minute_are_events_and_all_are_counted_and_logged(
    approvals: ApprovalFile, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    approvals.record_document(REBOOT)
    for _ in range(MAX_REFUSALS + 20):
        assert approvals.submit(by="eve").status == 403
    assert len(approvals.events("approval.refused")) == MAX_REFUSALS
    assert approvals.engine.unrecorded_refusals == {"approve": 20}
    assert caplog.text.count("client:eve may not approve event E-1: ") == 20
    assert approvals.submit(by="dave").status == 403
    approvals.clock.advance(1.0)
    for _ in range(2):
        approvals.submit(by="eve")
    assert len(approvals.events("approval.refused")) == MAX_REFUSALS + 2


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


def test_a_refusal_of_an_unknown_event_holds_only_the_id_as_sent(approvals: ApprovalFile) -> None:
    answer = approvals.submit(event_id="no-Such", message_id="m")
    assert answer.status == 404
    details = approvals.data("approval.refused")
    assert details["eventId"] == approvals.events()[0].subject == "no-Such"
    unknown = ["eventType", "eventStatus", "resources", "notBefore", "revision", "rule"]
    assert {details[key] for key in (*unknown, "documentIncarnation")} == {None}
    wanted = {"votes": 0, "required": 0, "refusal": answer.body["detail"]}
    assert wanted.items() <= details.items()
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
    wanted = {"principal": "client:eve", "channel": "http", "refusal": answer.body["detail"]}
    wanted |= {"decision": "approve", "rule": "databases", "reason": "please"}
    assert (wanted | {"votes": 0, "required": 2}).items() <= details.items()
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


def test_a_request_id_is_known_longer_than_a_signature_is_valid(approvals: ApprovalFile) -> None:
    """Across restarts, too. A clock ahead of ours makes a signature valid for longer."""
    approvals.record_document(REBOOT)
    first = approvals.submit(by="alice", request_id="msg_1")
    approvals.clock.advance(MAX_AGE + MAX_AHEAD + 1)
    approvals.prune(retain=0.001, audit_retain=0.001)
    approvals.crash()
    again = approvals.submit(by="alice", request_id="msg_1")
    assert (again.status, again.body, again.repeat) == (first.status, first.body, True)
    assert approvals.submit(by="alice", request_id="msg_1", digest="another body").status == 409


# --- scopes, hours, and the summary


def test_the_summary_says_what_is_missing_and_when_voting_closes(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT, build_event("E-2", event_type="Freeze", due=None))
    approvals.submit()
    assert approval_json_fields(approvals.status()) == {
        "state": "pending",
        "rule": "databases",
        "votes": 1,
        "required": 2,
        "missing": 1,
        "closes": "2026-04-11T12:14:00Z",
        "waitingFor": [],
        "standingHolds": [],
        "runbook": None,
    }
    nothing: dict[str, Any] = {"state": "none", "votes": 0, "required": 0, "missing": 0}
    nothing |= {
        "waitingFor": [],
        "standingHolds": [],
        "rule": None,
        "closes": None,
        "runbook": None,
    }
    assert approval_json_fields(approvals.status("E-2")) == nothing
    approvals.record_document()
    assert approval_json_fields(approvals.status())["missing"] == 0


VOTE = {"votes": 1, "from": ["client:alice"]}


def rules(*each: dict[str, Any]) -> ApprovalsSettings:
    named = [{"name": f"r{number}", "approve": VOTE} | rule for number, rule in enumerate(each)]
    return ApprovalsSettings.model_validate({"rules": named})


def test_a_request_about_several_scopes_decides_nothing_until_it_names_one(tmp_path: Path) -> None:
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
        (404, {"arrival_scope": "c", "event_id": "E-1@b"}),
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
