"""Playbooks: invalid ones are refused, packaged ones run to their end, steps keep their times."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from relay.errors import ConfigError
from relay.simulator import Simulator, load_packaged_playbooks
from relay.simulator.playbook import Playbook, load_playbook, play_playbook
from tests.cli.command import run_command
from tests.clocks import ManualClock

SHIPPED = load_packaged_playbooks()
FINITE = sorted(name for name, playbook in SHIPPED.items() if not playbook.loop)
STEPS = "description: a case\nsteps:\n"


def load(folder: Path, text: str) -> Playbook:
    file = folder / "own.yaml"
    file.write_text(text, encoding="utf-8")
    return load_playbook(file)


async def play(playbook: Playbook) -> list[tuple[float, str]]:
    """Play to the end; return what was told, and after how many seconds."""
    clock, told = ManualClock(), list[tuple[float, str]]()  # a machine that stalls is not late

    def report(line: str) -> None:
        told.append((clock.monotonic(), line))

    async with Simulator(playbook.azure, clock=clock, report=report) as sim:

        async def settle() -> None:
            sim.tick()
            sim.wake_waiters()
            for _ in range(10):  # the playbook's next step
                await asyncio.sleep(0)

        playing = asyncio.create_task(play_playbook(sim, playbook))
        async with asyncio.timeout(60):
            await settle()
            while not playing.done():
                due = sim.next_transition_at()
                moments = [] if due is None else [(due - clock.now()).total_seconds()]
                soonest = min((*moments, *clock.remaining_sleeps), default=60.0)
                await clock.forward(max(soonest, 0.0), settle)
        await playing
        assert sim.events == ()
    return told


@pytest.mark.parametrize("name", FINITE)
async def test_every_shipped_playbook_runs_to_its_end(name: str) -> None:
    lines = [line for _, line in await play(SHIPPED[name])]
    assert not [line for line in lines if "left out" in line]
    assert [line for line in lines if "completed" in line or "canceled" in line]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            STEPS + "  - schedule: {type: Rebot}",
            (
                "steps[0].schedule.type: expected 'Freeze', 'Reboot', 'Redeploy', 'Preempt' or "
                "'Terminate', got 'Rebot'"
            ),
        ),
        (STEPS + "  - after: 5s", "steps[0]: expected exactly one of schedule, start"),
        (STEPS + "  - {say: hello, disable: true}", "got disable and say"),
        (STEPS + "  - disable: false", "steps[0].disable: expected true, got False"),
        (
            STEPS + "  - {at: 5s, after: 5s, say: hello}",
            "steps[0]: expected at alone, or after and when",
        ),
        (
            STEPS + "  - cancel: reboot",
            (
                "steps[0]: expected the name or id of an event that an earlier step schedules, "
                "got 'reboot'"
            ),
        ),
        (
            STEPS + "  - {say: hello, when: {event: x, is: started}}",
            "expected the name or id of an event that an earlier step schedules, got 'x'",
        ),
        (STEPS, "steps: expected a valid tuple, got None"),
        ("description: a case", "steps: expected a value, got none"),
        ("[]", "the document: expected a valid dictionary or instance of Playbook, got []"),
        ("description: [", "expected YAML"),
        (
            "azure: {vms: []}\n" + STEPS + "  - say: hello",
            "azure: expected at least one VM and no name twice, got []",
        ),
        (
            "azure: {vms: [a, {name: b, colour: red}]}\n" + STEPS + "  - say: hello",
            "azure.vms[1].colour: unknown key",
        ),
        (
            "azure: {vms: [a], scale: 0}\n" + STEPS + "  - say: hello",
            "azure: expected scale above 0",
        ),
    ],
)
def test_a_wrong_playbook_is_named_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert str(caught.value).startswith(str(tmp_path / "own.yaml"))
    assert message in str(caught.value)


async def test_steps_keep_their_times(tmp_path: Path) -> None:
    """``at`` counts from the start, ``after`` from the previous step or from ``when``."""
    playbook = load(
        tmp_path,
        STEPS + "  - {at: 6s, schedule: {name: a, notice: 3s, starts_after: 0s, lasts: 6s}}\n"
        "  - {when: {event: a, is: started}, after: 3s, say: b}\n"
        "  - {when: {event: a, is: gone}, say: c}\n"
        "  - {after: 3s, say: d}\n"
        "  - {at: 21s, say: e}\n",
    )
    told = [(after, line.split()[1]) for after, line in await play(playbook)]
    expected = [(6, "scheduled"), (9, "started"), (12, "b"), (15, "completed"), (15, "c")]
    assert told == [*expected, (18, "d"), (21, "e")]


async def test_a_playbook_can_go_round_and_round(tmp_path: Path) -> None:
    playbook = load(
        tmp_path,
        "loop: true\n" + STEPS + "  - schedule: {id: A, notice: 1s, starts_after: 0s, lasts: 1s}",
    )
    lines: list[str] = []
    async with Simulator(replace(playbook.azure, scale=100.0), report=lines.append) as sim:
        playing = asyncio.create_task(play_playbook(sim, playbook))
        await sim.wait_until(lambda: sum("scheduled" in line for line in lines) > 2, within=60)
        assert not playing.done()
        assert lines[0].endswith(", Platform, unknown duration")
        playing.cancel()
        await asyncio.wait({playing})


def test_the_program_tells_addresses_description_and_end(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(
        "azure: {vms: [a, b], scale: 2}\n" + STEPS + "  - schedule: {notice: 5s, lasts: 5s}",
        encoding="utf-8",
    )
    result = run_command("simulate", str(file), "--once", "--scale", "100", "--port", "0")
    assert (result.code, result.err) == (0, "")
    texts = [line.split(" ", 1)[1] for line in result.out.splitlines()]
    assert texts[0].startswith("a finds its IMDS at http://127.0.0.1:")
    assert texts[1].startswith("b finds its IMDS at http://127.0.0.1:")
    assert texts[2] == "a case"
    assert texts[3].startswith("scheduled Reboot ")
    assert texts[-1] == "the playbook has ended"
