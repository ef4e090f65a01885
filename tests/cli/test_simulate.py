"""``simulate`` and ``demo``: programs that bring their own Azure."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import time
from pathlib import Path

import aiohttp
import pytest

from relay.cli._output import CommandFailed, unwrap_exception_group
from relay.cli.demo import Demo, run_demo
from relay.simulator import load_packaged_playbooks
from tests.cli.command import read_until, run_async, run_command, run_process, start_process
from tests.store.open_store import file_names

STEPS = (
    "an Azure is simulated at http://127.0.0.1:",
    "a webhook receiver listens at http://127.0.0.1:",
    "the relay runs, its API is at http://127.0.0.1:",
    "Azure announces a Reboot of demo-vm, not before",
    "the receiver has event.scheduled, its signature is good",
    ": pending, 1 vote missing",
    "POST /v1/approvals by client:operator: granted, 1 of 1 vote",
    "the receiver has approval.recorded",
    "the receiver has approval.granted",
    "Azure has the StartRequest",
    "the receiver has startrequest.accepted",
    "Azure starts the event",
    "the receiver has event.started",
    "the event is over",
    "the receiver has event.ended",
    "its hash chain holds",
)


# --- simulate


def test_the_playbooks_are_listed() -> None:
    result, names = run_command("simulate", "--list"), list(load_packaged_playbooks())
    assert result.code == 0
    assert [line.split()[0] for line in result.out.splitlines()[1:]] == names
    as_json = run_command("simulate", "--list", "--json").json
    assert [playbook["name"] for playbook in as_json] == names


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
async def test_a_signal_is_the_simulators_normal_end(stop: signal.Signals) -> None:
    async with start_process("simulate", "--port", "0") as simulator:
        line = await read_until(simulator.stdout, "finds its IMDS at ")
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{line.split()[-1]}/sim/state") as state,
        ):
            assert (await state.json())["vms"] == ["vm-0"]
        simulator.send_signal(stop)
        _, err = await simulator.communicate()
    assert (simulator.returncode, err) == (0, b"")


# --- demo


async def test_the_demo_shows_every_step_in_order_and_ends_by_itself(tmp_path: Path) -> None:
    began = time.monotonic()
    result = await asyncio.to_thread(run_process, "demo", TMPDIR=str(tmp_path))
    assert (result.code, result.err) == (0, "")
    assert time.monotonic() - began < 40 + 40  # for a machine that stands still
    place = 0
    for step in STEPS:
        assert step in result.out[place:], f"{step!r} does not come in its turn: {result.out}"
        place = result.out.index(step, place)
    *steps, summary = result.out.splitlines()
    assert all(re.match(r" *\d+\.\d\d s +\+\d+(\.\d\d)? m?s  \S", step) for step in steps)
    assert re.fullmatch(
        r"done in \d\.\d s: told in 6 signed CloudEvents, approved by client:operator, completed",
        summary,
    )
    assert file_names(tmp_path) == []


async def test_a_demo_that_stays_can_be_played_with_and_listens_on_loopback_alone() -> None:
    async with start_process("demo", "--stay") as stays:
        output = await read_until(stays.stdout, "imds-relay approve <event>")
        assert "done in" in output
        assert set(listening(stays.pid)) == {"127.0.0.1"}
        found = re.search(r"IMDS_RELAY_URL=(\S+) IMDS_RELAY_KEY=(\S+)\n", output)
        azure = re.search(r"curl (\S+)/sim/schedule -d '(.+)'\n", output)
        assert found is not None
        assert azure is not None
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{azure[1]}/sim/schedule", data=azure[2]) as answer,
        ):
            event = (await answer.json())["event_id"]
        await read_until(stays.stdout, "the receiver has event.scheduled")
        result = await run_async("approve", event, "--yes", "--url", found[1], "--key", found[2])
        assert result.out == "granted (1 of 1 vote): the StartRequest follows\n"
        stays.send_signal(signal.SIGINT)
        _, err = await stays.communicate()
    assert (stays.returncode, err) == (0, b"")


def listening(pid: int) -> list[str]:
    """The addresses on which a process listens: Linux, proc(5)."""
    inodes = {
        link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()
    }
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            found.append(socket.inet_ntoa(bytes.fromhex(fields[1].partition(":")[0])[::-1]))
    return found


async def test_the_receiver_of_the_demo_takes_nothing_without_a_good_signature() -> None:
    demo = Demo()
    unsigned = {"webhook-id": "a", "webhook-timestamp": "1", "webhook-signature": "v1,x"}
    async with (
        demo.receive() as url,
        aiohttp.ClientSession() as session,
        session.post(url, data=b"{}", headers=unsigned) as answer,
    ):
        assert (answer.status, demo.event_ids) == (401, set())


async def test_a_step_of_the_demo_that_does_not_come_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.cli.demo.STEP_TIMEOUT", 0.001)
    with pytest.raises(ExceptionGroup) as caught:
        await run_demo(stay=False)
    error = unwrap_exception_group(caught.value)
    assert isinstance(error, CommandFailed)
    assert str(error) == "expected event.scheduled at the receiver within 0.001 s, it did not come"
    assert "done in" not in capsys.readouterr().out
