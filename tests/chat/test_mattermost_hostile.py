"""Changes that Hypothesis makes to genuine calls of Mattermost: each is refused, without effect."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relay.chat import CallbackRefused
from relay.simulator import VM, Setup, Simulator
from tests.chat.conformance import HOSTILE_BODIES
from tests.chat.mattermost_relay import running_mattermost_relay
from tests.chat.mattermost_server import Json, buttons_of, new_id, running_mattermost
from tests.conftest import DebugLoop
from tests.depth import depth
from tests.relay_in_process import RelayInProcess

USER_ID = "annannannannannannannannan"
SUBMISSION: Json = {
    "type": "dialog_submission",
    "callback_id": "decision",
    "state": "e30=.00",
    "user_id": USER_ID,
    "channel_id": "4xp9fdt77pncbef59f4k1qe83o",
    "team_id": "4xp9fdt77pncbef59f4k1qe83o",
    "submission": {},
    "cancelled": False,
}


async def genuine_calls(
    stack: AsyncExitStack, directory: Path
) -> tuple[RelayInProcess, Json, Json]:
    """Return a running relay, a click and the submission after it, which was not sent yet."""
    server = await stack.enter_async_context(running_mattermost())
    azure = await stack.enter_async_context(Simulator(Setup(vms=(VM("vm-0"),))))
    ann, ben = server.add_user("ann"), server.add_user("ben")
    ops = await stack.enter_async_context(
        running_mattermost_relay(directory, server, azure, ann=ann, ben=ben)
    )
    _, post = await ops.announce_reboot()
    await server.click(post, "Approve", ann)
    (opened,) = server.dialogs
    click = server.click_payload(post, buttons_of(post)[0], ann)
    state = opened.request["dialog"]["state"]
    return ops.relay, click, {**SUBMISSION, "user_id": ann, "state": state}


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
_SUBMISSION_PROOF = ("user_id", "state", "type")
"""A submission with another value in one of these fields is not the person's."""


@st.composite
def changed_calls(draw: st.DrawFn, call: Json, required_changes: tuple[str, ...]) -> bytes:
    """Return a genuine call with another value in a required field, and in any others."""
    changed_fields = {
        draw(st.sampled_from(required_changes)),
        *draw(st.sets(st.sampled_from(sorted(call)))),
    }
    text = st.text() | st.just(new_id()) | st.just("e30=.00") | st.just("button")
    changed = {**call, **{field: draw(_JSON | text) for field in sorted(changed_fields)}}
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
                _JSON.map(lambda value: json.dumps(value).encode()),
                changed_calls(click, tuple(click)),
                changed_calls(submission, _SUBMISSION_PROOF),
            ).filter(lambda body: len(body) < 65536)
        )
        def send(body: bytes) -> None:
            assert answer_keys(body) <= {"refused", "ephemeral_text", "skip_slack_parsing", "error"}

        send()
        assert runner.run(head()) == before
        runner.run(stack.aclose())
