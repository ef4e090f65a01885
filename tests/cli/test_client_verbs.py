"""The verbs that talk to a running relay."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from relay.clock import SystemClock
from relay.config import LoadedConfig, load
from relay.roles.reload import Reloader
from relay.simulator import Plan
from tests.cli.command import CommandResult, environment, run_async
from tests.cli.running_relay import ALICE_KEY, LOCAL_PRINCIPAL, RunningRelay, running_relay
from tests.eventually import eventually


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[RunningRelay]:
    async with running_relay(tmp_path) as relay:
        yield relay


async def elsewhere(relay: RunningRelay, *arguments: str, key: str = ALICE_KEY) -> CommandResult:
    """Call it over TCP, as from another machine."""
    return await run_async(*arguments, "--url", relay.url, "--key", key)


# --- looking


async def test_events_lists_what_comes_and_where_its_approval_stands(relay: RunningRelay) -> None:
    assert (await relay.run("events")).out == "no events\n"
    event = await relay.announce()
    result = await relay.run("events")
    assert result.code == 0
    row = rf"{event.event_id}  Reboot +Scheduled +db-0, db-1 +.*\(in 1[45] min\) +pending, 0 of 2"
    assert re.search(rf"{row} votes, rule two", result.out)
    (listed,) = (await relay.run("events", "--json")).json["items"]
    assert listed["eventId"] == event.event_id


async def test_votes_are_shown_only_while_they_matter(relay: RunningRelay) -> None:
    """A started event has another revision, for which the earlier votes do not count."""
    event = await relay.announce()
    await relay.run("hold", event.event_id)
    assert "held, 0 of 2 votes, rule two" in (await relay.run("events")).out
    await relay.run("release", event.event_id)
    await relay.run("approve", event.event_id, "--yes")
    await elsewhere(relay, "approve", event.event_id, "--yes")
    await relay.wait_for_webhook("event.started", event.event_id)
    for verb in (("events",), ("show", event.event_id)):
        shown = (await relay.run(*verb)).out
        assert re.search(r"\baccepted, rule two\n", shown), shown


async def test_events_prints_one_page_and_says_that_there_are_more(relay: RunningRelay) -> None:
    for _ in range(101):
        relay.azure.schedule(Plan(type="Freeze", notice=900.0))

    async def all_are_there() -> bool:
        return len((await relay.run("events", "--all", "--json")).json["items"]) == 101

    await eventually(all_are_there)
    result = await relay.run("events")
    assert (len(result.out.splitlines()), result.err) == (101, "there are more: --all\n")
    assert len((await relay.run("events", "--all")).out.splitlines()) == 102


async def test_show_tells_history_votes_and_deliveries(relay: RunningRelay) -> None:
    event = await relay.announce()
    await relay.run("approve", event.event_id, "--yes", "--reason", "drained", "--ticket", "CHG-7")
    shown = (await relay.run("show", event.event_id.lower())).out
    for text in (
        event.event_id,
        "db-0, db-1",
        "1 vote, from client:alice",
        "Host server is undergoing maintenance.",
        "pending, 1 of 2 votes, rule two",
    ):
        assert text in shown
    assert re.search(rf"approve +{LOCAL_PRINCIPAL} +local +counts\n", shown)
    assert re.search(
        rf"approval\.recorded +{LOCAL_PRINCIPAL} +{LOCAL_PRINCIPAL} voted to approve, 1 of 2 "
        r"\(“drained”, ticket CHG-7\)\.\n",
        shown,
    )
    assert re.search(r"event\.scheduled +drain +delivered +1", shown)


# --- deciding


async def test_approve_shows_what_is_approved_and_exits_with_0(relay: RunningRelay) -> None:
    event = await relay.announce()
    result = await relay.run("approve", event.event_id, "--yes")
    assert (result.code, result.out) == (0, "recorded, and pending: 1 of 2 votes\n")
    for text in (
        "Reboot",
        "db-0, db-1",
        "not before",
        "(in 1",
        "for all 2 machines",
        "Azure proceeds at NotBefore regardless",
    ):
        assert text in result.err
    granted = await elsewhere(relay, "approve", event.event_id, "--yes")
    assert (granted.code, granted.out) == (0, "granted (2 of 2 votes): the StartRequest follows\n")
    await relay.azure.wait_until_approved(event, within=60)


async def test_where_nobody_can_be_asked_the_revision_or_yes_is_needed(relay: RunningRelay) -> None:
    event = await relay.announce()
    result = await relay.run("approve", event.event_id)
    assert (result.code, result.out) == (2, "")
    assert "--revision" in result.err
    assert "--yes" in result.err
    shown = await relay.get_event(event)
    assert shown["votes"] == []
    assert (await relay.run("approve", event.event_id, "--revision", shown["revision"])).code == 0


@pytest.mark.parametrize(
    ("answer", "code", "votes"),
    [(b"y\n", 0, 1), (b"n\n", 1, 0), (b"\x04", 1, 0), (signal.SIGINT, 1, 0)],
    ids=["yes", "no", "Ctrl-D", "Ctrl-C"],
)
async def test_on_a_terminal_approve_asks(
    relay: RunningRelay, answer: signal.Signals | bytes, code: int, votes: int
) -> None:
    event = await relay.announce()
    keyboard, terminal = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "relay", "approve", event.event_id, "-c", relay.config),
        stdin=terminal,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(60):
            await process.stderr.readuntil(b"[y/N]")
            if isinstance(answer, bytes):
                os.write(keyboard, answer)
            else:
                process.send_signal(answer)
            said = await process.stderr.read()
            await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        os.close(keyboard)
        os.close(terminal)
    assert process.returncode == code
    assert said.endswith(b"imds-relay: nothing was approved\n") is (code == 1)
    assert len((await relay.get_event(event))["votes"]) == votes


async def test_a_revision_that_is_no_longer_current_is_refused_with_3_and_names_the_current_one(
    relay: RunningRelay,
) -> None:
    event = await relay.announce()
    result = await relay.run("approve", event.event_id, "--revision", "0123456789abcdef")
    current = (await relay.get_event(event))["revision"]
    assert (result.code, result.out) == (3, "")
    changed = f"the event has changed since that revision; the current one is {current}"
    assert result.err.splitlines()[-1] == f"imds-relay: refused: {changed}"


async def test_hold_and_release_say_that_azure_proceeds_regardless(relay: RunningRelay) -> None:
    event = await relay.announce()
    held = await relay.run("hold", event.event_id, "--reason", "backup runs")
    assert held.code == 0
    assert held.out.startswith(
        "held: this relay sends no StartRequest for Reboot of db-0, db-1, not before "
    )
    assert (
        "Azure proceeds at NotBefore regardless, and other relays and Azure Resource "
        "Manager can still approve."
    ) in held.err
    voted = await relay.run("approve", event.event_id, "--yes")
    assert voted.out.startswith("recorded, and held (1 of 2 votes)")
    released = await relay.run("release", event.event_id)
    assert (released.code, released.out) == (0, "released; pending: 1 of 2 votes\n")
    again = await relay.run("release", event.event_id)
    assert again.code == 3
    assert again.err.startswith("imds-relay: refused: no hold is on this event")


async def test_approvals_are_switched_and_off_refuses_to_decide(relay: RunningRelay) -> None:
    event = await relay.announce()
    for mode in ("off", "dry-run", "on"):
        result = await relay.run("approvals", mode)
        assert (result.code, result.out) == (0, f"approvals are {mode}\n")
        approved = await relay.run("approve", event.event_id, "--yes")
        assert approved.code == (1 if mode == "off" else 0)
        assert ("approvals are off" in approved.err) is (mode == "off")


# --- sending


async def test_a_sink_is_pinged_paused_and_resumed(relay: RunningRelay) -> None:
    assert (await relay.run("sink", "ping", "drain")).code == 0
    await relay.wait_for_webhook("relay.ping", "drain")
    assert (await relay.run("sink", "pause", "drain")).code == 0
    event = relay.azure.schedule(Plan(type="Freeze", notice=900.0))

    async def waits() -> bool:
        listed = (await relay.run("deliveries", "--json")).json["items"]
        return any(
            (each["eventId"], each["state"]) == (event.event_id, "waiting") for each in listed
        )

    await eventually(waits)
    assert "waiting, 0 tries" in (await relay.run("deliveries")).out
    assert (await relay.run("sink", "resume", "drain")).code == 0
    await relay.wait_for_webhook("event.scheduled", event.event_id)


async def test_an_unknown_sink_or_dead_letter_is_exit_code_1(relay: RunningRelay) -> None:
    for verb in ("ping", "pause", "resume"):
        result = await relay.run("sink", verb, "nope")
        assert result.code == 1
        assert result.err == "imds-relay: no such sink in the configuration; there is drain\n"
    result = await relay.run("redeliver", "--sink", "nope")
    assert (result.code, result.out) == (1, "")
    assert result.err == "imds-relay: no sink 'nope' in the configuration; there is drain\n"
    result = await relay.run("redeliver", "99")
    assert (result.code, result.err.startswith("imds-relay: no such dead letter; ")) == (1, True)


async def test_dead_letters_are_listed_and_go_out_again(relay: RunningRelay) -> None:
    relay.receiver.status = 422  # somebody must mend something: without a NotBefore it is given up
    events = [relay.azure.schedule(Plan(type="Reboot", started=True, lasts=None)) for _ in range(3)]

    async def parked() -> bool:
        return len((await relay.run("deliveries", "--dead", "--json")).json["items"]) == 3

    await eventually(parked)
    letter, *_ = (await relay.run("deliveries", "--dead", "--json")).json["items"]
    assert letter["reason"] in (await relay.run("deliveries", "--dead")).out
    assert "422" in (await relay.run("deliveries", str(letter["id"]))).out
    relay.receiver.status = 204
    assert (await relay.run("redeliver", str(letter["id"]))).code == 0
    result = await relay.run("redeliver", "--sink", "drain")
    assert result.code == 0
    assert result.out == "2 dead letters go out again; see `imds-relay deliveries`\n"
    for event in events:
        await relay.wait_for_webhook("event.started", event.event_id)
    assert (await relay.run("deliveries", "--dead")).out == "no dead letters\n"


# --- who it talks to


async def test_the_key_comes_from_the_option_the_variable_or_a_file(
    relay: RunningRelay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMDS_RELAY_URL", relay.url)
    file = tmp_path / "key"
    file.write_text(f"{ALICE_KEY}\n")
    assert (await run_async("events", "--key", ALICE_KEY)).code == 0
    assert (await run_async("events", "--key-file", str(file))).code == 0
    assert (await run_async("events")).code == 1
    monkeypatch.setenv("IMDS_RELAY_KEY", ALICE_KEY)
    assert (await run_async("events")).code == 0


@pytest.mark.parametrize("key", ["imdsr_wrong", ""], ids=["wrong key", "empty key"])
async def test_a_wrong_key_has_a_remedy_and_is_not_shown(relay: RunningRelay, key: str) -> None:
    result = await elsewhere(relay, "events", key=key)
    assert (result.code, result.out) == (1, "")
    assert "IMDS_RELAY_KEY" in result.err
    assert "imdsr_" not in result.err


async def test_a_reload_prints_what_changed_or_ends_with_what_is_wrong(relay: RunningRelay) -> None:
    file = Path(relay.config)

    def read() -> LoadedConfig:
        return load(file, {})

    def change(old: str, new: str) -> None:
        file.write_text(file.read_text().replace(old, new, 1))

    relay.running.server.state.reloader = Reloader(
        relay.running, read(), read, SystemClock(), nullcontext
    )
    assert (await relay.run("reload")).out == "nothing has changed\n"
    for old, new, code, told in (
        ('"votes":2', '"votes":1', 0, "approvals.rules.two changed\n"),
        ('"scope":"west"', '"scope":"east"', 1, "restart required for: scope"),
        ('"votes":1', '"votes":"all"', 2, "approvals.rules[0].approve.votes: expected"),
    ):
        change(old, new)
        result = await relay.run("reload")
        assert (result.code, told in result.out + " ".join(result.err.split())) == (code, True)
