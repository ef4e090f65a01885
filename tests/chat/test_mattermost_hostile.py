"""Whatever is sent to where Mattermost calls: a refusal, nothing burnt, no traceback. A corpus of payloads, and Hypothesis."""

from __future__ import annotations

import asyncio
import gzip
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relay.chat import CallbackRefused, ChatSink
from tests.chat.mattermost_server import PUBLIC, SECRET, Mattermost, mattermost, new_id
from tests.chat.running_relay import Stage, rule, stage
from tests.journey.relay_process import eventually

ANN = "annannannannannannannannan"
CLICK: dict[str, Any] = {
    "user_id": ANN,
    "user_name": "ann",
    "channel_id": "4xp9fdt77pncbef59f4k1qe83o",
    "channel_name": "ops",
    "team_id": "4xp9fdt77pncbef59f4k1qe83o",
    "team_domain": "example",
    "post_id": "4xp9fdt77pncbef59f4k1qe83o",
    "trigger_id": "bGs5:x",
    "type": "button",
    "data_source": "",
    "context": {"proof": "e30=.00"},
}
SUBMISSION: dict[str, Any] = {
    "type": "dialog_submission",
    "callback_id": "decision",
    "state": "e30=.00",
    "user_id": ANN,
    "channel_id": "4xp9fdt77pncbef59f4k1qe83o",
    "team_id": "4xp9fdt77pncbef59f4k1qe83o",
    "submission": {},
    "cancelled": False,
}
CORPUS: dict[str, bytes] = {
    "nothing": b"",
    "null": b"null",
    "a number": b"1e999",
    "a text": b'"dialog_submission"',
    "a list": b"[]",
    "an empty object": b"{}",
    "a click": orjson.dumps(CLICK),
    "a submission": orjson.dumps(SUBMISSION),
    "a click in a menu": orjson.dumps(
        {**CLICK, "type": "select", "context": {"selected_option": "approve", **CLICK["context"]}}
    ),
    "without context": orjson.dumps(
        {key: value for key, value in CLICK.items() if key != "context"}
    ),
    "context of another integration": orjson.dumps(
        {**CLICK, "context": {"action": "do_something"}}
    ),
    "context null": orjson.dumps({**CLICK, "context": None}),
    "context a list": orjson.dumps({**CLICK, "context": ["proof"]}),
    "proof a number": orjson.dumps({**CLICK, "context": {"proof": 1}}),
    "proof an object": orjson.dumps({**CLICK, "context": {"proof": {"proof": "x"}}}),
    "proof of a megabyte": orjson.dumps({**CLICK, "context": {"proof": "A" * 60_000}}),
    "proof not ASCII": orjson.dumps({**CLICK, "context": {"proof": "é.\N{PILE OF POO}"}}),
    "ids with a path": orjson.dumps({**CLICK, "user_id": "../../../users/me/../annannan"}),
    "ids with a line": orjson.dumps({**CLICK, "post_id": "4xp9fdt77pncbef59f4k1qe83o\n"}),
    "ids of numbers": orjson.dumps({**CLICK, "user_id": 5}),
    "trigger null": orjson.dumps({**CLICK, "trigger_id": None}),
    "state null": orjson.dumps({**SUBMISSION, "state": None}),
    "state an object": orjson.dumps({**SUBMISSION, "state": {"proof": "x"}}),
    "state with newlines": orjson.dumps({**SUBMISSION, "state": "e30=\n.\n00"}),
    "cancelled a text": orjson.dumps({**SUBMISSION, "cancelled": "false"}),
    "submission a text": orjson.dumps({**SUBMISSION, "submission": "approve"}),
    "another type": orjson.dumps({**SUBMISSION, "type": "dialog_lookup"}),
    "a slash command": b"channel_id=x&command=%2Fazmaint&text=approve&token=x&trigger_id=x&user_id=x",
    "a Slack payload": b"payload=%7B%22type%22%3A%22block_actions%22%7D",
    "an Azure document": b'{"DocumentIncarnation":1,"Events":[]}',
    "an approval": b'{"eventId":"E","decision":"approve","revision":"r"}',
    "twice the key": b'{"user_id":"a","user_id":"b"}',
    "cut off": orjson.dumps(CLICK)[:-9],
    "UTF-16": orjson.dumps(CLICK).decode().encode("utf-16"),
    "with a BOM": b"\xef\xbb\xbf" + orjson.dumps(CLICK),
    "Latin-1": '{"user_id":"é"}'.encode("latin-1"),
    "a lone surrogate": b'{"user_id":"\\ud800"}',
    "NUL": b'{"user_id":"\x00"}',
    "gzip": gzip.compress(orjson.dumps(CLICK)),
    "deep": b'{"context":' * 2000 + b"1" + b"}" * 2000,
    "YAML": b"user_id: ann\n",
    "XML": b"<user_id>ann</user_id>",
}


@dataclass(frozen=True, slots=True)
class _There:
    here: Stage
    server: Mattermost
    chat: ChatSink
    click: dict[str, Any]
    submission: dict[str, Any]

    async def position(self) -> int:
        """How much the journal holds: whatever is decided or refused to somebody is in it."""
        return (await self.here.running.relay.store.read(lambda tx: tx.head())).position


async def _there(stack: AsyncExitStack, directory: Path) -> _There:
    """A relay, a post with buttons, a genuine click on it, and a genuine submission, not sent yet."""
    server = await stack.enter_async_context(mattermost())
    ann = server.person("ann")
    approvals = {"rules": [rule(2, f"mattermost:{server.team}/{ann}", "client:alice")]}
    sink = server.sink(approve_in_chat=True, secret=SECRET)
    here = await stack.enter_async_context(stage(directory, [sink], approvals=approvals))
    server.relay = here.url
    here.reboot()
    await eventually(lambda: bool(server.roots))
    await eventually(lambda: here.running.relay.dispatcher.status()[0].waiting == 0)
    post = server.roots[0]
    await server.click(post, "Approve", ann)
    click = server.call_of(post, server.buttons(post)[0], ann)
    submission = {**SUBMISSION, "user_id": ann, "state": server.dialogs[0][1]["dialog"]["state"]}
    return _There(here, server, here.running.relay.chats["ops"], click, submission)


async def test_no_payload_that_proves_nothing_is_answered_with_more_than_a_refusal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncExitStack() as stack:
        there = await _there(stack, tmp_path)
        before = await there.position()
        answered = {name: await _answered(there.chat, body) for name, body in CORPUS.items()}
        assert [name for name, words in answered.items() if words != {"refused"}] == []
        assert await there.position() == before
    assert "Traceback" not in caplog.text


async def test_over_http_a_refusal_is_its_status_and_says_nothing_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncExitStack() as stack:
        there = await _there(stack, tmp_path)
        for name, wanted in {
            "nothing": 400,
            "a list": 400,
            "UTF-16": 400,
            "deep": 400,
            "a click": 401,
            "a submission": 401,
        }.items():
            status, answer = await there.server.send(f"{PUBLIC}/v1/chat/ops", CORPUS[name])
            assert (name, status, set(answer)) == (
                name,
                wanted,
                {"type", "title", "status", "detail"},
            )
    assert "Traceback" not in caplog.text


async def _answered(chat: ChatSink, body: bytes) -> set[str]:
    """What an answer has in it."""
    try:
        reply = await chat.handle_callback({}, body)
    except CallbackRefused:
        return {"refused"}
    return set(reply.body or ())


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
_PROVING = ("user_id", "state", "type")
"""Without these as they are, a submission is none of the person's."""


@st.composite
def changed(draw: st.DrawFn, call: dict[str, Any], fields: tuple[str, ...]) -> bytes:
    """A genuine call with another value in at least one of these fields, and in any others."""
    wrong = {draw(st.sampled_from(fields)), *draw(st.sets(st.sampled_from(sorted(call))))}
    text = st.text() | st.just(new_id()) | st.just("e30=.00") | st.just("button")
    made = {**call, **{field: draw(_JSON | text) for field in sorted(wrong)}}
    if any(made[field] == call[field] for field in wrong & set(fields)):
        made.pop(min(wrong & set(fields)))
    return json.dumps(made).encode()


def test_whatever_is_changed_in_a_genuine_call_decides_nothing(tmp_path: Path) -> None:
    """Of a click, anything may change and no vote is cast; of a submission, who submits, or the state."""
    with asyncio.Runner(debug=True) as runner:
        stack = AsyncExitStack()
        there = runner.run(_there(stack, tmp_path))
        before = runner.run(there.position())

        @settings(max_examples=250, suppress_health_check=[HealthCheck.too_slow])
        @given(
            st.one_of(
                st.binary(max_size=200),
                _JSON.map(lambda value: json.dumps(value).encode()),
                changed(there.click, tuple(there.click)),
                changed(there.submission, _PROVING),
            ).filter(lambda body: len(body) < 65536)
        )
        def each(body: bytes) -> None:
            assert runner.run(_answered(there.chat, body)) <= {
                "refused",
                "ephemeral_text",
                "skip_slack_parsing",
                "error",
            }

        each()
        assert runner.run(there.position()) == before
        runner.run(stack.aclose())
