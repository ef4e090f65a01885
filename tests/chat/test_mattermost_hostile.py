"""Changes that Hypothesis makes to genuine calls of Mattermost: each is refused, without effect."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relay.chat import CallbackRefused
from tests.chat.conformance import HOSTILE_BODIES
from tests.chat.mattermost_server import Json, new_id, running_mattermost
from tests.chat.running_relay import running_mattermost_relay
from tests.conftest import DebugLoop
from tests.depth import depth
from tests.hostile import ANY_JSON
from tests.relay_in_process import RelayInProcess, simulated


async def genuine_calls(stack: AsyncExitStack, folder: Path) -> tuple[RelayInProcess, Json, Json]:
    """Return a running relay, a click and the submission after it, which was not sent yet."""
    server = await stack.enter_async_context(running_mattermost())
    azure = await stack.enter_async_context(simulated())
    ops = await stack.enter_async_context(running_mattermost_relay(folder, server, azure))
    _, post = await ops.announce_reboot()
    await server.click(post, "Approve", server.ann)
    click, (opened,) = server.click_payload(post, server.ann), server.dialogs
    return ops.relay, click, server.submission(server.ann, opened)


_SUBMISSION_PROOF = ("user_id", "state", "type")
"""A submission with another value in one of these fields is not the person's."""


@st.composite
def changed_calls(draw: st.DrawFn, call: Json, required_changes: tuple[str, ...]) -> bytes:
    """Return a genuine call with another value in a required field, and in any others."""
    others = st.sets(st.sampled_from(sorted(call)))
    changed_fields = {draw(st.sampled_from(required_changes)), *draw(others)}
    text = st.text() | st.just(new_id()) | st.just("e30=.00") | st.just("button")
    changed = {**call, **{field: draw(ANY_JSON | text) for field in sorted(changed_fields)}}
    required = changed_fields & set(required_changes)
    if any(changed[field] == call[field] for field in required):
        changed.pop(min(required))
    return json.dumps(changed).encode()


def test_a_changed_call_decides_nothing(tmp_path: Path) -> None:
    """Any field of a click is changed; of a submission, a field that proves who decides what."""
    with asyncio.Runner(debug=True, loop_factory=DebugLoop) as runner:
        stack = AsyncExitStack()
        relay, click, submission = runner.run(genuine_calls(stack, tmp_path))
        chat, store = relay.running.relay.chats["ops"], relay.running.relay.store

        def answer_keys(body: bytes) -> set[str]:
            """Return the keys of the answer to a call; "refused" if the call proves nothing."""
            try:
                return set(runner.run(chat.handle_callback({}, body)) or ())
            except CallbackRefused:
                return {"refused"}

        async def head() -> str:
            """Return the head of the journal, which every decision and every refusal moves."""
            return str(await store.read(lambda tx: tx.head()))

        before = runner.run(head())
        for body in HOSTILE_BODIES:
            assert answer_keys(body) == {"refused"}

        @settings(max_examples=depth(250, 40), suppress_health_check=[HealthCheck.too_slow])
        @given(
            st.one_of(
                st.binary(max_size=200),
                ANY_JSON.map(lambda value: json.dumps(value).encode()),
                changed_calls(click, tuple(click)),
                changed_calls(submission, _SUBMISSION_PROOF),
            ).filter(lambda body: len(body) < 65536)
        )
        def send(body: bytes) -> None:
            assert answer_keys(body) <= {"refused", "ephemeral_text", "skip_slack_parsing", "error"}

        send()
        assert runner.run(head()) == before
        runner.run(stack.aclose())
