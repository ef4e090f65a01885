"""Links of messages against bad input: 4xx for whatever is sent, nothing used up, no traceback."""

from __future__ import annotations

import logging
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.api.confirmation_links import post_preview, render_message
from tests.api.running_relay import RunningRelay
from tests.depth import depth

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False)
    | st.text(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=8,
)
FIELDS = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("token", "code", "reason"), JSON | st.text(max_size=2000))
)
BODIES = st.one_of(st.binary(max_size=200), JSON.map(orjson.dumps), FIELDS.map(orjson.dumps))
PATHS = st.sampled_from(("/v1/confirmations", "/v1/confirmations/look"))
CORPUS = (
    b"",
    b"null",
    b"[]",
    b"{}",
    b'"token"',
    b"{" * 1000,
    b"[" * 60_000,
    b'{"token": "\\ud800"}',
    b'{"token": "x", "token": "y"}',
    b'{"token": "' + b"x" * 60_000 + b'"}',
    b'{"token": "\\u0000"}',
    b'{"token": NaN}',
    b"\xef\xbb\xbf{}",
    '{"token": "x"}'.encode("utf-16"),
    b"token=x&code=1",
    b"payload=%7B%22token%22%3A%22x%22%7D",
    b'{"token": "x", "__proto__": {"code": "1"}}',
    b'{"token": "\' OR 1=1 --"}',
)


async def _refused(relay: RunningRelay, path: str, body: bytes) -> None:
    answer = await relay.call("POST", path, body)
    assert answer.status in (400, 404, 422, 429), (body, answer.body)
    assert "\n" not in answer.json["detail"]


@given(PATHS, BODIES)
@settings(max_examples=depth(150, 30), suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_arbitrary_bodies_are_refused(relay: RunningRelay, path: str, body: bytes) -> None:
    relay.clock.offset += 10  # nobody is too often there
    await _refused(relay, path, body)


@pytest.mark.parametrize("path", ["/v1/confirmations", "/v1/confirmations/look"])
async def test_known_bad_bodies_are_refused_and_leave_no_trace(
    relay: RunningRelay, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    message = await render_message(relay)
    before = await relay.store.read(lambda tx: tx.head())
    for body in CORPUS:
        relay.clock.offset += 10
        await _refused(relay, path, body)
    assert await relay.store.read(lambda tx: tx.head()) == before
    assert not [
        record for record in caplog.records if record.exc_info or record.levelno > logging.WARNING
    ]
    assert (await post_preview(relay, message.tokens["approve"])).json["whyNot"] is None


@given(st.text(max_size=70), st.none() | st.text(max_size=1001))
@settings(max_examples=depth(60, 20), suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_only_the_code_is_accepted_as_the_code(
    relay: RunningRelay, code: str, reason: str | None
) -> None:
    """Of a link that is good; each try is on a fresh one, as five wrong codes void it."""
    relay.clock.offset += 10
    message = await render_message(relay, f"ops-{relay.clock.offset:.0f}")
    body: dict[str, Any] = {"token": message.tokens["approve"], "code": code, "reason": reason}
    answer = await relay.call("POST", "/v1/confirmations", body)
    right = "".join(code.split()) == message.code
    assert answer.status == (
        202
        if right and len(reason or "") <= 1000
        else 422
        if len(code) > 64 or len(reason or "") > 1000
        else 403
    )
    assert right or await relay.recorded_events("approval.recorded") == []
