"""Malformed and forged requests: 4xx, no effect and no traceback.

The SDK's verifier is the oracle for signatures.
"""

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
from multidict import CIMultiDict
from slack_sdk.signature import SignatureVerifier

from relay.chat import CallbackRefused
from relay.chat.cards.card import Button
from relay.chat.platforms.slack.requests import (
    ButtonClick,
    ButtonDecision,
    IgnoredCall,
    SlashCommand,
    UrlVerification,
    format_button_value,
    parse_click_or_command_http_body,
    verify_signature,
)
from tests.chat.running_relay import rule, stage
from tests.chat.slack_server import (
    ALICE,
    APP,
    CHANNEL,
    SECRET,
    TEAM,
    PostedMessage,
    SlackServer,
    encode_form,
    running_slack,
    signed_headers,
)
from tests.eventually import eventually

SLACK = SlackServer(port=80)
BUTTON = {
    "type": "button",
    "action_id": "approve-1",
    "text": {"type": "plain_text", "text": "Approve"},
    "value": "approve 3f - E-1",
}
MESSAGE = PostedMessage("1700000000.000001", "text", [])


def click_payload(**changes: Any) -> dict[str, Any]:
    """Return a well-formed click with other fields."""
    return SLACK.button_payload(BUTTON, MESSAGE.ts, message=MESSAGE) | changes


# --- signatures


def test_the_example_of_slacks_documentation_verifies() -> None:
    """https://docs.slack.dev/authentication/verifying-requests-from-slack."""
    body = (
        b"token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow"
        b"&channel_id=G8PSS9T3V&channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner"
        b"&command=%2Fwebhook-collect&text=&response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands"
        b"%2FT1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN"
        b"&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c"
    )
    headers = {
        "x-slack-request-timestamp": "1531420618",
        "X-SLACK-SIGNATURE": "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503",
    }
    now = datetime.fromtimestamp(1531420618, UTC)
    verify_signature(headers, body, SECRET.encode(), now)
    for changed_body in (body + b" ", body[:-1]):
        with pytest.raises(CallbackRefused):
            verify_signature(headers, changed_body, SECRET.encode(), now)


@pytest.mark.parametrize("name", ["X-Slack-Request-Timestamp", "X-Slack-Signature"])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_signature_header_that_comes_twice_is_refused(name: str, *, is_first: bool) -> None:
    headers = CIMultiDict(signed_headers(b"body"))
    verify_signature(headers, b"body", SECRET.encode(), datetime.now(UTC))
    genuine = headers.popall(name)
    for value in [*genuine, "1"] if is_first else ["1", *genuine]:
        headers.add(name.lower(), value)
    with pytest.raises(CallbackRefused, match="once"):
        verify_signature(headers, b"body", SECRET.encode(), datetime.now(UTC))


@given(
    st.binary(max_size=200),
    st.integers(-400, 400),
    st.sampled_from(["good", "other secret", "other body", "none"]) | st.text(max_size=80),
)
def test_the_sdks_verifier_agrees(body: bytes, age: int, signature_kind: str) -> None:
    now = int(time.time())
    timestamp = str(now - age)
    clock = type("FixedClock", (), {"now": lambda _: float(now)})()
    sdk_verifier = SignatureVerifier(SECRET, clock=clock)
    match signature_kind:
        case "good":
            signature = signature_of(SECRET, timestamp, body)
        case "other secret":
            signature = signature_of("0" * 32, timestamp, body)
        case "other body":
            signature = signature_of(SECRET, timestamp, body + b"x")
        case _:
            signature = signature_kind
    headers = {"X-Slack-Request-Timestamp": timestamp, "X-Slack-Signature": signature}
    try:
        sdk_accepts = sdk_verifier.is_valid_request(body, headers)
    except (UnicodeDecodeError, TypeError):
        # The SDK raises for a body that is not UTF-8 and for a signature that is not ASCII.
        sdk_accepts = None
    try:
        verify_signature(headers, body, SECRET.encode(), datetime.fromtimestamp(now, UTC))
        relay_accepts = True
    except CallbackRefused:
        relay_accepts = False
    assert sdk_accepts in (None, relay_accepts)
    assert relay_accepts == (signature_kind == "good" and abs(age) <= 300)


def signature_of(secret: str, timestamp: str, body: bytes) -> str:
    """Return the signature header."""
    signed_text = b"v0:" + timestamp.encode() + b":" + body
    return "v0=" + hmac.new(secret.encode(), signed_text, hashlib.sha256).hexdigest()


# --- payloads


def test_a_click_is_parsed() -> None:
    click = parse_click_or_command_http_body(encode_form(click_payload()))
    assert isinstance(click, ButtonClick)
    assert (click.message_ref, click.is_ephemeral) == (f"{CHANNEL}/{MESSAGE.ts}", False)
    assert click.action == ButtonDecision(decision="approve", revision="3f", event_id="E-1")
    actor = click.actor
    assert (actor.user_id, actor.team_id, actor.home_team_id) == (ALICE, TEAM, TEAM)
    assert (actor.app_id, actor.channel_id) == (APP, CHANNEL)
    assert actor.principal == f"slack:{TEAM}/{ALICE}"


def test_a_command_is_parsed() -> None:
    command = parse_click_or_command_http_body(
        encode_form(SLACK.command_payload("hold  E-1 why not"))
    )
    assert isinstance(command, SlashCommand)
    assert command.text == "hold  E-1 why not"
    assert command.actor.principal == f"slack:{TEAM}/{ALICE}"


def test_a_url_verification_is_parsed() -> None:
    document = {"type": "url_verification", "token": "x", "challenge": "3eZb"}
    assert parse_click_or_command_http_body(orjson.dumps(document)) == UrlVerification(
        type="url_verification", challenge="3eZb"
    )


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"ssl_check=1&token=x", id="certificate check"),
        pytest.param(
            encode_form(
                click_payload(
                    actions=[{**click_payload()["actions"][0], "action_id": "link-approve-1"}]
                )
            ),
            id="click on a link button",
        ),
    ],
)
def test_a_request_without_consequences_is_ignored(body: bytes) -> None:
    assert parse_click_or_command_http_body(body) == IgnoredCall()


@given(
    st.text(min_size=1, max_size=256).filter(
        lambda text: all(ord(char) > 31 and not 126 < ord(char) < 160 for char in text)
    )
)
def test_a_click_returns_the_decision_of_its_button(event_id: str) -> None:
    button = Button(
        decision="hold", label="Hold", event_id=event_id, revision="3f" * 16, question=()
    )
    action = {**click_payload()["actions"][0], "value": format_button_value(button)}
    click = parse_click_or_command_http_body(encode_form(click_payload(actions=[action])))
    assert isinstance(click, ButtonClick)
    assert click.action == ButtonDecision(decision="hold", revision="3f" * 16, event_id=event_id)


def click_with_action(**changes: Any) -> bytes:
    """Return the body of a click whose action has other fields."""
    action = {**click_payload()["actions"][0], **changes}
    return encode_form(click_payload(actions=[action]))


def command_body(text: str = "list", **changes: str) -> bytes:
    """Return the body of a command with other fields."""
    return urlencode(SLACK.command_payload(text) | changes).encode()


CONTAINER = click_payload()["container"]
MALFORMED_BODIES: dict[str, bytes] = {
    "empty": b"",
    "field without value": b"payload",
    "empty payload": b"payload=",
    "payload null": b"payload=null",
    "payload list": b"payload=[]",
    "payload not UTF-8": b"payload=%FF%FE",
    "two payloads": b"payload={}&payload={}",
    "body not UTF-8": b"\xff\xfe\x00",
    "truncated JSON": b"{",
    "empty JSON object": b"{}",
    "verification without challenge": b'{"type": "url_verification"}',
    "challenge not a text": b'{"type": "url_verification", "challenge": 5}',
    "event callback": b'{"type": "event_callback", "event": {}}',
    "deeply nested body": b"[" * 5000,
    "deeply nested payload": b"payload=" + b"%5B" * 5000,
    "too many fields": b"&".join(b"a%d=1" % number for number in range(100)),
    "certificate check switched off": b"ssl_check=0",
    "command by name": command_body(user_id="alice"),
    "command without workspace": command_body(team_id=""),
    "long command": command_body("x" * 5000),
    "view submission": encode_form(click_payload(type="view_submission")),
    "message action": encode_form(click_payload(type="message_action")),
    "no action": encode_form(click_payload(actions=[])),
    "two actions": encode_form(click_payload(actions=[click_payload()["actions"][0]] * 2)),
    "action not of a button": click_with_action(type="overflow"),
    "value with one field": click_with_action(value="approve"),
    "unknown decision": click_with_action(value="start 3f - E-1"),
    "control character": click_with_action(value="approve 3f - \x07"),
    "long EventId": click_with_action(value="approve 3f - " + "E" * 300),
    "value not a text": click_with_action(value=7),
    "no workspace": encode_form(click_payload(team=None)),
    "user id a list": encode_form(click_payload(user={"id": ["U1"]})),
    "user a text": encode_form(click_payload(user="alice")),
    "other channel than the container's": encode_form(click_payload(channel={"id": "C0OTHER"})),
    "container a view": encode_form(click_payload(container={"type": "view", "view_id": "V1"})),
    "timestamp as 1e9": encode_form(click_payload(container={**CONTAINER, "message_ts": "1e9"})),
    "timestamp a word": encode_form(click_payload(container={**CONTAINER, "message_ts": "now"})),
    "empty trigger": encode_form(click_payload(trigger_id="")),
    "long trigger": encode_form(click_payload(trigger_id="x" * 1000)),
    "no trigger": encode_form(click_payload(trigger_id=None)),
    "app id an object": encode_form(click_payload(api_app_id={"$ne": 1})),
    "response URL a list": encode_form(click_payload(response_url=["https://hooks.slack.com/"])),
}


@pytest.mark.parametrize("body", MALFORMED_BODIES.values(), ids=MALFORMED_BODIES.keys())
def test_a_malformed_body_is_refused_with_400(body: bytes) -> None:
    with pytest.raises(CallbackRefused) as caught:
        parse_click_or_command_http_body(body)
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


def paths(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a document."""
    yield path
    if isinstance(document, dict):
        for key, value in document.items():
            yield from paths(value, (*path, key))
    elif isinstance(document, list):
        for index, value in enumerate(document):
            yield from paths(value, (*path, index))


PATHS = [path for path in paths(click_payload()) if path]


@st.composite
def altered_clicks(draw: Callable[[st.SearchStrategy[Any]], Any]) -> dict[str, Any]:
    """Return a click in which one value is missing or replaced."""
    click = copy.deepcopy(click_payload())
    *path, last = draw(st.sampled_from(PATHS))
    parent: Any = click
    for key in path:
        parent = parent[key]
    if isinstance(parent, dict) and draw(st.booleans()):
        del parent[last]
    else:
        parent[last] = draw(json_values)
    return click


def parse_or_none(body: bytes) -> object:
    """Return the parsed body; None if it is refused with status 400."""
    try:
        return parse_click_or_command_http_body(body)
    except CallbackRefused as error:
        return None if error.status == 400 else pytest.fail(f"{error.status}")


@given(altered_clicks())
def test_an_altered_click_is_parsed_or_refused_with_400(click: dict[str, Any]) -> None:
    assert isinstance(parse_or_none(encode_form(click)), ButtonClick | IgnoredCall | None)


@given(
    st.binary(max_size=400)
    | json_values.map(orjson.dumps)
    | json_values.map(lambda document: b"payload=" + orjson.dumps(document))
)
def test_arbitrary_bytes_are_never_a_click(body: bytes) -> None:
    assert not isinstance(parse_or_none(body), ButtonClick)


async def test_a_malformed_request_has_no_effect_and_logs_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    approvals = {"rules": [rule(1, f"slack:{TEAM}/{ALICE}")]}
    async with (
        running_slack() as slack,
        stage(tmp_path, [slack.settings(approve_in_chat=True)], approvals=approvals) as relay,
    ):
        relay.reboot("vm-0")
        await eventually(lambda: len(slack.channel_messages()) == 1)
        store, sink = relay.running.relay.store, relay.running.relay.chats["ops"]
        head = await store.read(lambda tx: tx.head())
        for body in MALFORMED_BODIES.values():
            with pytest.raises(CallbackRefused) as caught:
                await sink.handle_callback(signed_headers(body), body)
            assert caught.value.status == 400
        for body in list(MALFORMED_BODIES.values())[:20]:
            for headers in (signed_headers(body), {}):
                async with relay.web.post(
                    f"{relay.url}/v1/chat/ops", data=body, headers=headers
                ) as response:
                    assert response.status == (400 if headers else 401)
        assert await store.read(lambda tx: tx.head()) == head
        assert "Traceback" not in caplog.text
        assert slack.call_count("users.info") == 0


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.text(max_size=200))
def test_a_command_with_any_text_is_parsed(text: str) -> None:
    command = parse_click_or_command_http_body(encode_form(SLACK.command_payload(text)))
    assert isinstance(command, SlashCommand)
