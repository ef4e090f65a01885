"""The table of docs/platforms.md keeps the rows of other releases, and tells what failed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.platforms import __main__ as program
from tests.platforms import page
from tests.platforms.__main__ import chosen, outcome
from tests.platforms.page import Row, Step
from tests.platforms.roots import Copy

VERSIONS = {
    "Python": "3.11.2",
    "RabbitMQ": "3.10.8",
    "Erlang": "25.2.3",
    "SQLite": "3.40.1",
    "OpenSSL": "3.0.20",
    "Chromium": "150.0",
}


def row(title: str, commit: str) -> Row:
    """A row in which the tests failed."""
    steps = {
        "demo": Step(ok=True, result="passed", seconds=9.6),
        "test": Step(ok=False, result="failed (1 failed)", seconds=605),
    }
    return Row(title, commit, VERSIONS, steps)


def test_a_run_of_one_release_replaces_its_row_and_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "platforms.md"
    written.write_text(f"# Title\n\n{page.BEGIN}\n| a |\n| --- |\n{page.END}\n\nAfter.\n")
    monkeypatch.setattr(page, "PAGE", written)
    first = Step(ok=True, result="not run (podman missing)", seconds=0)
    page.write([row("Debian 13", "aaaa"), row("Debian 12", "aaaa")], first)
    assert "\nContainers: not run (podman missing) (" in written.read_text()
    page.write([row("Debian 13", "bbbb")], Step(ok=True, result="passed", seconds=61))
    text = written.read_text()
    assert [
        line.split(" | ")[0:3:2] for line in text.splitlines() if line.startswith("| Debian")
    ] == [
        ["| Debian 12", "aaaa"],
        ["| Debian 13", "bbbb"],
    ]
    assert text.count("| passed, 10 s | failed (1 failed), 10 min 5 s | not run |") == 2
    assert re.findall(r"^Containers: (.*) \(.*, commit (.*)\)\.$", text, re.MULTILINE) == [
        ("passed, 1 min 1 s", "bbbb")
    ]
    assert text.startswith("# Title\n\n")
    assert text.endswith("\n\nAfter.\n")


@pytest.mark.parametrize(
    ("status", "output", "expected"),
    [
        (0, "===== 100 passed in 19.97s =====\n", "passed (100 passed)"),
        (
            2,
            (
                "== 2 failed, 4920 passed, 4 skipped in 511.20s (0:08:31) ==\nmake: *** [test] "
                "Error 1\n"
            ),
            "failed (2 failed, 4920 passed, 4 skipped)",
        ),
        (
            2,
            "!!!! KeyboardInterrupt !!!!\n== 5 failed, 2174 passed in 1526.69s (0:25:26) ==\n",
            "stopped (5 failed, 2174 passed)",
        ),
        (2, "E: Unable to locate package\n", "failed"),
        (0, "done in 5.3 s\n", "passed"),
    ],
)
def test_the_outcome_has_the_numbers_of_pytest(
    status: int, output: str, expected: str, tmp_path: Path
) -> None:
    log = tmp_path / "test.log"
    log.write_text(output)
    assert outcome(status, log) == expected


def test_a_release_that_is_not_known_is_named() -> None:
    assert [release.title for release in chosen(["trixie"])] == ["Debian 13"]
    with pytest.raises(
        SystemExit, match="unknown release sarge; known are bookworm, trixie, testing"
    ):
        chosen(["sarge"])


def test_a_step_that_does_not_end_in_time_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(program.SECONDS, "unit", 0.5)
    monkeypatch.setattr(program, "inside", lambda _copy, *command: [*command])
    copy = Copy(tmp_path, tmp_path, overlay=False)
    done = program.step(copy, tmp_path / "unit.log", "sleep", "600")
    assert not done.ok
    assert done.result == "failed (not done in time)"
    assert done.seconds < 300


def test_what_lacks_its_tools_is_not_run_and_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for tool in (*program.TOOLS["containers"], *program.TOOLS["unit"]):
        (tmp_path / tool).touch(mode=0o755)
    assert program.not_run("containers") is None
    assert program.not_run("unit") is None
    (tmp_path / "podman").unlink()
    skipped = program.containers(tmp_path)
    assert skipped.ok
    assert skipped.cell() == "not run (podman missing)"
    assert program.not_run("unit") is None
