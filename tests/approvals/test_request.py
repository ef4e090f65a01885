"""What somebody asks: the body as it may come, what is wrong with others, and messages."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.amqp.approval_consumer import UnparsedApprovalMessage
from relay.amqp.connection import UnusableMessage
from relay.approvals.amqp_handler import AmqpApprovalHandler
from relay.approvals.request import InvalidField, MalformedJsonBody, read_json, validate_body
from tests import hostile
from tests.approvals.builders import REDEPLOY, build_caller, write_damaged_row
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
