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
from pathlib import Path

import pytest

from relay.simulator import Plan
from tests.cli.command import Ended, called, environment, typed
from tests.cli.running_relay import KEY, ME, READER, Alive, alive
from tests.journey.relay_process import eventually


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Alive]:
    """A relay that runs."""
    async with alive(tmp_path) as running:
        yield running


async def elsewhere(relay: Alive, *arguments: str, key: str = KEY) -> Ended:
    """Call it over TCP, as from another machine."""
    return await called(*arguments, "--url", relay.url, "--key", key)


# --- looking


async def test_events_lists_what_azure_announced_with_where_its_approval_stands(
    relay: Alive,
) -> None:
    assert (await called("events", "-c", relay.config)).out == "no events\n"
    event = await relay.announced()
    done = await called("events", "-c", relay.config)
    assert done.code == 0
    assert re.search(
        rf"{event.event_id}  Reboot +Scheduled +db-0, db-1 +.*\(in 1[45] min\) +pending, 0 of 2 votes, rule two",
        done.out,
    )
    (listed,) = (await called("events", "-c", relay.config, "--json")).json["items"]
    assert listed["eventId"] == event.event_id


async def test_votes_are_shown_only_while_they_matter(relay: Alive) -> None:
    """A started event has another revision, and the votes that started it are not votes on that one."""
    event = await relay.announced()
    await called("hold", event.event_id, "-c", relay.config)
    assert "held, 0 of 2 votes, rule two" in (await called("events", "-c", relay.config)).out
    await called("release", event.event_id, "-c", relay.config)
    await called("approve", event.event_id, "-c", relay.config, "--yes")
    await elsewhere(relay, "approve", event.event_id, "--yes")
    await relay.told("event.started", event.event_id)
    for verb in (("events",), ("show", event.event_id)):
        shown = (await called(*verb, "-c", relay.config)).out
        assert re.search(r"\baccepted, rule two\n", shown), shown


async def test_events_prints_one_page_and_says_that_there_are_more(relay: Alive) -> None:
    for _ in range(101):
        relay.azure.schedule(Plan(type="Freeze", notice=900.0))

    async def all_are_there() -> bool:
        return (
            len((await called("events", "-c", relay.config, "--all", "--json")).json["items"])
            == 101
        )

    await eventually(all_are_there)
    done = await called("events", "-c", relay.config)
    assert (len(done.out.splitlines()), done.err) == (101, "there are more: --all\n")
    assert len((await called("events", "-c", relay.config, "--all")).out.splitlines()) == 102


async def test_show_tells_history_votes_and_deliveries(relay: Alive) -> None:
    event = await relay.announced()
    await called("approve", event.event_id, "-c", relay.config, "--yes", "--reason", "drained")
    shown = (await called("show", event.event_id.lower(), "-c", relay.config)).out
    for said in (
        event.event_id,
        "db-0, db-1",
        "Host server is undergoing maintenance.",
        "pending, 1 of 2 votes, rule two",
    ):
        assert said in shown
    assert re.search(rf"approve +{ME} +local +counts\n", shown)
    assert re.search(rf"approval\.recorded +{ME} +approve, drained, 1 of 2 votes\n", shown)
    assert re.search(r"event\.scheduled +drain +delivered +1", shown)


async def test_an_unknown_event_is_a_sentence_and_exit_code_1(relay: Alive) -> None:
    done = await called("show", "../nope", "-c", relay.config)
    assert (done.code, done.out, done.err) == (
        1,
        "",
        "imds-relay: no such event in this scope; see GET /v1/events, or `imds-relay events`\n",
    )


async def test_what_azure_wrote_cannot_move_the_cursor(relay: Alive) -> None:
    event = await relay.announced(
        Plan(type="Reboot", description="\x1b[2J[bold]gone[/bold]\x07", notice=900.0)
    )
    shown = (await called("show", event.event_id, "-c", relay.config)).out
    assert "\N{REPLACEMENT CHARACTER}[2J[bold]gone[/bold]\N{REPLACEMENT CHARACTER}" in shown


# --- deciding


async def test_approve_shows_what_is_approved_and_exits_with_0(relay: Alive) -> None:
    event = await relay.announced()
    done = await called("approve", event.event_id, "-c", relay.config, "--yes")
    assert (done.code, done.out) == (0, "recorded, and pending: 1 of 2 votes\n")
    for said in (
        "Reboot",
        "db-0, db-1",
        "not before",
        "(in 1",
        "for all 2 machines",
        "Azure proceeds at NotBefore regardless",
    ):
        assert said in done.err
    granted = await elsewhere(relay, "approve", event.event_id, "--yes")
    assert (granted.code, granted.out) == (0, "granted (2 of 2 votes): the StartRequest follows\n")
    await relay.azure.approved(event, within=60)


async def test_approve_prints_the_answer_as_json(relay: Alive) -> None:
    event = await relay.announced()
    done = await called("approve", event.event_id, "-c", relay.config, "--yes", "--json")
    assert done.json | {"approvalId": ""} == {
        "approvalId": "",
        "eventId": event.event_id,
        "decision": "approve",
        "state": "pending",
        "votes": 1,
        "required": 2,
        "rule": "two",
    }


async def test_where_nobody_can_be_asked_the_revision_or_yes_is_needed(relay: Alive) -> None:
    event = await relay.announced()
    done = await called("approve", event.event_id, "-c", relay.config)
    assert (done.code, done.out) == (2, "")
    assert "--revision" in done.err
    assert "--yes" in done.err
    shown = await relay.shown(event)
    assert shown["votes"] == []
    assert (
        await called("approve", event.event_id, "-c", relay.config, "--revision", shown["revision"])
    ).code == 0


@pytest.mark.parametrize(("answer", "code", "votes"), [("y", 0, 1), ("n", 1, 0), ("", 1, 0)])
async def test_on_a_terminal_approve_asks(relay: Alive, answer: str, code: int, votes: int) -> None:
    event = await relay.announced()
    ours, its = pty.openpty()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "relay", "approve", event.event_id, "-c", relay.config),
            stdin=its,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment(),
        )
        os.write(ours, f"{answer}\n".encode())
        async with asyncio.timeout(60):
            _, err = await process.communicate()
    finally:
        os.close(ours)
        os.close(its)
    assert b"Approve this? [y/N]" in err
    assert process.returncode == code
    assert len((await relay.shown(event))["votes"]) == votes


@pytest.mark.parametrize("end", [signal.SIGINT, b"\x04"], ids=["Ctrl-C", "Ctrl-D"])
async def test_whoever_leaves_the_question_of_approve_has_approved_nothing(
    relay: Alive, end: signal.Signals | bytes
) -> None:
    event = await relay.announced()
    ours, its = pty.openpty()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "relay", "approve", event.event_id, "-c", relay.config),
            stdin=its,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=environment(),
        )
        assert process.stderr is not None
        async with asyncio.timeout(60):
            said = await process.stderr.readuntil(b"[y/N]")
            if isinstance(end, bytes):
                os.write(ours, end)
            else:
                process.send_signal(end)
            said += await process.stderr.read()
            await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        os.close(ours)
        os.close(its)
    assert (process.returncode, said.splitlines()[-1]) == (1, b"imds-relay: nothing was approved")
    assert (await relay.shown(event))["votes"] == []


async def test_a_revision_that_is_no_longer_current_is_refused_with_3_and_names_the_current_one(
    relay: Alive,
) -> None:
    event = await relay.announced()
    done = await called(
        "approve", event.event_id, "-c", relay.config, "--revision", "0123456789abcdef"
    )
    current = (await relay.shown(event))["revision"]
    assert (done.code, done.out) == (3, "")
    assert (
        done.err.splitlines()[-1]
        == f"imds-relay: refused: the event has changed since that revision; the current one is {current}"
    )


async def test_one_who_may_not_approve_is_refused_with_3(relay: Alive) -> None:
    event = await relay.announced()
    done = await elsewhere(relay, "approve", event.event_id, "--yes", key=READER)
    assert done.code == 3
    assert (
        done.err.splitlines()[-1]
        == "imds-relay: refused: you may not approve: it is not in your rights (can)"
    )


async def test_hold_and_release_say_that_azure_proceeds_regardless(relay: Alive) -> None:
    event = await relay.announced()
    held = await called("hold", event.event_id, "-c", relay.config, "--reason", "backup runs")
    assert held.code == 0
    assert held.out.startswith(
        "held: this relay sends no StartRequest for Reboot of db-0, db-1, not before "
    )
    assert (
        "Azure proceeds at NotBefore regardless, and other relays and Azure Resource Manager can still approve."
        in held.err
    )
    voted = await called("approve", event.event_id, "-c", relay.config, "--yes")
    assert voted.out.startswith("recorded, and held (1 of 2 votes)")
    released = await called("release", event.event_id, "-c", relay.config)
    assert (released.code, released.out) == (0, "released; pending: 1 of 2 votes\n")
    again = await called("release", event.event_id, "-c", relay.config)
    assert again.code == 3
    assert again.err.startswith("imds-relay: refused: no hold is on this event")


def test_the_help_of_hold_says_that_azure_proceeds_regardless() -> None:
    said = " ".join(typed("hold", "--help").out.replace("│", "").split())
    assert (
        "Azure proceeds at NotBefore regardless, and other relays and Azure Resource Manager can still approve."
        in said
    )


async def test_approvals_are_switched_and_off_refuses_to_decide(relay: Alive) -> None:
    event = await relay.announced()
    for mode in ("off", "dry-run", "on"):
        done = await called("approvals", mode, "-c", relay.config)
        assert (done.code, done.out) == (0, f"approvals are {mode}\n")
        approved = await called("approve", event.event_id, "-c", relay.config, "--yes")
        assert approved.code == (1 if mode == "off" else 0)
        assert ("approvals are off" in approved.err) is (mode == "off")


async def test_the_switch_says_where_the_configuration_is_stricter(tmp_path: Path) -> None:
    async with alive(tmp_path, dry_run=True) as relay:
        done = await called("approvals", "on", "-c", relay.config)
        assert (
            done.out
            == "approvals are dry-run, not on: the configuration is stricter (approvals.enabled, approvals.dry_run)\n"
        )
        assert (await called("approvals", "on", "-c", relay.config, "--json")).json == {
            "mode": "dry-run"
        }


async def test_one_who_may_not_operate_cannot_switch(relay: Alive) -> None:
    assert (await elsewhere(relay, "approvals", "off")).code == 3


# --- sending


async def test_a_sink_is_pinged_paused_and_resumed(relay: Alive) -> None:
    assert (await called("ping", "drain", "-c", relay.config)).code == 0
    await relay.told("relay.ping", "drain")
    assert (await called("pause", "drain", "-c", relay.config)).code == 0
    event = relay.azure.schedule(Plan(type="Freeze", notice=900.0))

    async def waits() -> bool:
        listed = (await called("deliveries", "-c", relay.config, "--json")).json["items"]
        return any((one["eventId"], one["state"]) == (event.event_id, "waiting") for one in listed)

    await eventually(waits)
    assert "waiting, 0 tries" in (await called("deliveries", "-c", relay.config)).out
    assert (await called("resume", "drain", "-c", relay.config)).code == 0
    await relay.told("event.scheduled", event.event_id)


async def test_an_unknown_sink_or_dead_letter_is_exit_code_1(relay: Alive) -> None:
    for verb in ("ping", "pause", "resume"):
        done = await called(verb, "nope", "-c", relay.config)
        assert (done.code, done.err) == (1, "imds-relay: no such sink in the configuration\n")
    done = await called("redeliver", "--sink", "nope", "-c", relay.config)
    assert (done.code, done.out, done.err) == (
        1,
        "",
        "imds-relay: no sink 'nope' in the configuration; there are: drain\n",
    )
    done = await called("redeliver", "99", "-c", relay.config)
    assert (done.code, done.err) == (
        1,
        "imds-relay: no such dead letter; see GET /v1/dead-letters, or `imds-relay dead-letters`\n",
    )


async def test_a_dead_letter_is_listed_and_goes_out_again(relay: Alive) -> None:
    relay.receiver.status = (
        422  # somebody must mend something: without a NotBefore ahead it is parked at once
    )
    event = relay.azure.schedule(Plan(type="Reboot", started=True, lasts=None))

    async def parked() -> bool:
        return bool((await called("dead-letters", "-c", relay.config, "--json")).json["items"])

    await eventually(parked)
    (letter,) = (await called("dead-letters", "-c", relay.config, "--json")).json["items"]
    assert (letter["eventId"], letter["lastStatus"]) == (event.event_id, 422)
    assert letter["reason"] in (await called("dead-letters", "-c", relay.config)).out
    relay.receiver.status = 204
    assert (await called("redeliver", str(letter["id"]), "-c", relay.config)).code == 0
    await relay.told("event.started", event.event_id)
    assert (await called("dead-letters", "-c", relay.config)).out == "no dead letters\n"


# --- who it talks to


async def test_the_key_comes_from_the_option_the_variable_or_a_file(
    relay: Alive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMDS_RELAY_URL", relay.url)
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert (await called("events", "--key", KEY)).code == 0
    assert (await called("events", "--key-file", str(file))).code == 0
    assert (await called("events")).code == 1
    monkeypatch.setenv("IMDS_RELAY_KEY", KEY)
    assert (await called("events")).code == 0


@pytest.mark.parametrize("key", ["imdsr_wrong", ""])
async def test_a_wrong_key_says_where_to_put_the_right_one_and_is_not_shown(
    relay: Alive, key: str
) -> None:
    done = await elsewhere(relay, "events", key=key)
    assert (done.code, done.out) == (1, "")
    assert "IMDS_RELAY_KEY" in done.err
    assert "imdsr_" not in done.err


def test_a_key_file_that_cannot_be_read_is_exit_code_2(tmp_path: Path) -> None:
    done = typed("events", "--url", "http://127.0.0.1:1", "--key-file", str(tmp_path / "absent"))
    assert (done.code, done.err) == (
        2,
        f"imds-relay: --key-file: expected a file that can be read, {tmp_path / 'absent'}: No such file or directory\n",
    )


def test_without_a_relay_there_is_a_sentence_and_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "relay.yaml").write_text(f"api: {{socket: {tmp_path}/relay.sock}}")
    done = typed("events", "-c", str(tmp_path / "relay.yaml"))
    assert (done.code, done.err) == (
        1,
        f"imds-relay: no relay answers at {tmp_path}/relay.sock: No such file or directory. Is the relay running?\n",
    )


def test_without_a_socket_or_url_it_is_said_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "relay.yaml").write_text("")
    done = typed("events", "-c", str(tmp_path / "relay.yaml"))
    assert done.code == 2
    assert done.err.startswith(f"imds-relay: {tmp_path}/relay.yaml has no api.socket")


async def test_the_socket_of_the_service_is_used_by_those_who_have_not_its_variables(
    relay: Alive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret.yaml").write_text("scope: ${NOPE}")
    monkeypatch.setenv("IMDS_RELAY_CONFIG", str(tmp_path / "secret.yaml"))
    done = await called("events")
    assert (done.code, "NOPE" in done.err) == (2, True)
    monkeypatch.setattr("relay.cli._connection.SERVICE_SOCKET", relay.store.with_name("relay.sock"))
    assert (await called("events")).code == 0


@pytest.mark.parametrize(
    "url", ["relay.example.com:8443", "ftp://x", "http://", "http://[x", "http://x:y"]
)
def test_a_url_that_is_none_is_exit_code_2(url: str) -> None:
    done = typed("events", "--url", url)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("imds-relay: --url: expected http:// or https:// and a host")
