"""Slack's door against bad input: 4xx, nothing burnt, no traceback; and the SDK's own verifier agrees about signatures."""

from __future__ import annotations

import copy
import hashlib
import hmac
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slack_sdk.signature import SignatureVerifier

from relay.chat import CallbackRefused
from relay.chat.cards.card import Button
from relay.chat.platforms.slack.payloads import (
    ButtonAction,
    Challenge,
    Click,
    Command,
    IgnoredCall,
    button_value,
    parse_payload,
    verify_signature,
)
from tests.chat.running_relay import rule, stage
from tests.chat.slack_server import (
    ALICE,
    APP,
    CHANNEL,
    SECRET,
    TEAM,
    Posted,
    SlackServer,
    form,
    signed,
    slack,
)
from tests.journey.relay_process import eventually

SLACK = SlackServer(port=80)
BUTTON = {
    "type": "button",
    "action_id": "approve-1",
    "text": {"type": "plain_text", "text": "Approve"},
    "value": "approve 3f - E-1",
}
MESSAGE = Posted("1700000000.000001", "text", [])


def a_click(**changes: Any) -> dict[str, Any]:
    return SLACK.clicked(BUTTON, MESSAGE.ts, message=MESSAGE) | changes


# --- signatures


def test_slacks_own_example_verifies() -> None:
    """https://docs.slack.dev/authentication/verifying-requests-from-slack: secret, body, timestamp and signature."""
    body = (
        b"token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V&channel_name=foobar"
        b"&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text=&response_url=https%3A%2F%2Fhooks.slack.com%2F"
        b"commands%2FT1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c"
    )
    headers = {
        "x-slack-request-timestamp": "1531420618",
        "X-SLACK-SIGNATURE": "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503",
    }
    now = datetime.fromtimestamp(1531420618, UTC)
    verify_signature(headers, body, SECRET.encode(), now)
    for wrong in (body + b" ", body[:-1]):
        with pytest.raises(CallbackRefused):
            verify_signature(headers, wrong, SECRET.encode(), now)


@given(
    st.binary(max_size=200),
    st.integers(-400, 400),
    st.sampled_from(["good", "other secret", "other body", "none"]) | st.text(max_size=80),
)
def test_the_sdks_verifier_is_of_the_same_opinion(body: bytes, age: int, how: str) -> None:
    now = int(time.time())
    stamp = str(now - age)
    oracle = SignatureVerifier(SECRET, clock=type("At", (), {"now": lambda _: float(now)})())
    if how == "good":
        signature = signature_of(SECRET, stamp, body)
    elif how == "other secret":
        signature = signature_of("0" * 32, stamp, body)
    elif how == "other body":
        signature = signature_of(SECRET, stamp, body + b"x")
    else:
        signature = how
    headers = {"X-Slack-Request-Timestamp": stamp, "X-Slack-Signature": signature}
    try:
        theirs = oracle.is_valid_request(body, headers)
    except (
        UnicodeDecodeError,
        TypeError,
    ):  # it raises on what is not UTF-8, and on a signature that is not ASCII
        theirs = None
    try:
        verify_signature(headers, body, SECRET.encode(), datetime.fromtimestamp(now, UTC))
        ours = True
    except CallbackRefused:
        ours = False
    assert theirs in (None, ours)
    assert ours == (how == "good" and abs(age) <= 300)


def signature_of(secret: str, stamp: str, body: bytes) -> str:
    return (
        "v0="
        + hmac.new(
            secret.encode(), b"v0:" + stamp.encode() + b":" + body, hashlib.sha256
        ).hexdigest()
    )


# --- shapes


def test_a_click_a_command_a_challenge_and_a_check_are_read() -> None:
    click = parse_payload(form(a_click()))
    assert isinstance(click, Click)
    assert (click.message, click.alone, click.decided) == (
        f"{CHANNEL}/{MESSAGE.ts}",
        False,
        ButtonAction("approve", "3f", "E-1"),
    )
    assert (click.by.user, click.by.team, click.by.app, click.by.channel) == (
        ALICE,
        TEAM,
        APP,
        CHANNEL,
    )
    typed = parse_payload(form(SLACK.typed("hold  E-1 why not")))
    assert isinstance(typed, Command)
    assert typed.words == ("hold", "E-1", "why", "not")
    assert parse_payload(
        orjson.dumps({"type": "url_verification", "token": "x", "challenge": "3eZb"})
    ) == Challenge("3eZb")
    assert parse_payload(b"ssl_check=1&token=x") == IgnoredCall()
    assert (
        parse_payload(
            form(a_click(actions=[{**a_click()["actions"][0], "action_id": "link-approve-1"}]))
        )
        == IgnoredCall()
    )


@given(
    st.text(min_size=1, max_size=256).filter(
        lambda one: all(ord(char) > 31 and not 126 < ord(char) < 160 for char in one)
    )
)
def test_what_a_button_brings_back_is_what_it_was_given(event_id: str) -> None:
    value = button_value(
        Button(decision="hold", label="Hold", event_id=event_id, revision="3f" * 16, question=())
    )
    click = parse_payload(form(a_click(actions=[{**a_click()["actions"][0], "value": value}])))
    assert isinstance(click, Click)
    assert click.decided == ButtonAction("hold", "3f" * 16, event_id)


WRONG: list[bytes] = [
    b"",
    b"payload",
    b"payload=",
    b"payload=null",
    b"payload=[]",
    b"payload=%FF%FE",
    b"payload={}&payload={}",
    b"\xff\xfe\x00",
    b"{",
    b"{}",
    b'{"type": "url_verification"}',
    b'{"type": "url_verification", "challenge": 5}',
    b'{"type": "event_callback", "event": {}}',
    b"[" * 5000,
    b"payload=" + b"%5B" * 5000,
    b"&".join(b"a%d=1" % number for number in range(100)),
    b"ssl_check=0",
    urlencode(SLACK.typed("list") | {"user_id": "alice"}).encode(),
    urlencode(SLACK.typed("list") | {"team_id": ""}).encode(),
    urlencode(SLACK.typed("x" * 5000)).encode(),
    form(a_click(type="view_submission")),
    form(a_click(type="message_action")),
    form(a_click(actions=[])),
    form(a_click(actions=[a_click()["actions"][0]] * 2)),
    form(a_click(actions=[{**a_click()["actions"][0], "type": "overflow"}])),
    form(a_click(actions=[{**a_click()["actions"][0], "value": "approve"}])),
    form(a_click(actions=[{**a_click()["actions"][0], "value": "start 3f - E-1"}])),
    form(a_click(actions=[{**a_click()["actions"][0], "value": "approve 3f - \x07"}])),
    form(a_click(actions=[{**a_click()["actions"][0], "value": "approve 3f - " + "E" * 300}])),
    form(a_click(actions=[{**a_click()["actions"][0], "value": 7}])),
    form(a_click(team=None)),
    form(a_click(user={"id": ["U1"]})),
    form(a_click(user="alice")),
    form(a_click(channel={"id": "C0OTHER"})),
    form(a_click(container={"type": "view", "view_id": "V1"})),
    form(a_click(container={**a_click()["container"], "message_ts": "1e9"})),
    form(a_click(container={**a_click()["container"], "message_ts": "now"})),
    form(a_click(trigger_id="")),
    form(a_click(trigger_id="x" * 1000)),
    form(a_click(trigger_id=None)),
    form(a_click(api_app_id={"$ne": 1})),
    form(a_click(response_url=["https://hooks.slack.com/"])),
]


@pytest.mark.parametrize("body", WRONG)
def test_what_cannot_be_read_is_400(body: bytes) -> None:
    with pytest.raises(CallbackRefused) as caught:
        parse_payload(body)
    assert caught.value.status == 400


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.just("x" * 10_000),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3)
    ),
    max_leaves=10,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from places(inner, (*path, number))


PLACES = [path for path in places(a_click()) if path]


@st.composite
def bent(draw: Callable[[st.SearchStrategy[Any]], Any]) -> dict[str, Any]:
    """A click in which something is missing, or is something else."""
    click = copy.deepcopy(a_click())
    *path, last = draw(st.sampled_from(PLACES))
    place: Any = click
    for key in path:
        place = place[key]
    if isinstance(place, dict) and draw(st.booleans()):
        del place[last]
    else:
        place[last] = draw(json_values)
    return click


def read_or_400(body: bytes) -> object:
    """What a body says; None where it is refused, as what cannot be read is."""
    try:
        return parse_payload(body)
    except CallbackRefused as error:
        return None if error.status == 400 else pytest.fail(f"{error.status}")


@given(bent())
def test_a_click_that_was_bent_is_read_or_is_400(click: dict[str, Any]) -> None:
    assert isinstance(read_or_400(form(click)), Click | IgnoredCall | None)


@given(
    st.binary(max_size=400)
    | json_values.map(orjson.dumps)
    | json_values.map(lambda one: b"payload=" + orjson.dumps(one))
)
def test_any_bytes_are_read_or_are_400(body: bytes) -> None:
    assert not isinstance(read_or_400(body), Click)


async def test_no_bad_call_burns_anything_or_shows_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    approvals = {"rules": [rule(1, f"slack:{TEAM}/{ALICE}")]}
    async with (
        slack() as here,
        stage(tmp_path, [here.settings(approve_in_chat=True)], approvals=approvals) as relay,
    ):
        relay.reboot("vm-0")
        await eventually(lambda: len(here.tops()) == 1)
        store = relay.running.relay.store
        before = await store.read(lambda tx: tx.head())
        for body in WRONG:
            with pytest.raises(CallbackRefused) as caught:
                await relay.running.relay.chats["ops"].handle_callback(signed(body), body)
            assert caught.value.status == 400
        for body in WRONG[:20]:
            for headers in (signed(body), {}):
                async with relay.web.post(
                    f"{relay.url}/v1/chat/ops", data=body, headers=headers
                ) as answer:
                    assert answer.status == (400 if headers else 401)
        assert await store.read(lambda tx: tx.head()) == before
        assert "Traceback" not in caplog.text
        assert here.count("users.info") == 0


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.text(max_size=200))
def test_any_text_of_a_command_is_read(text: str) -> None:
    found = parse_payload(form(SLACK.typed(text)))
    assert isinstance(found, Command)
