"""Writes docs/platforms.md: a row for each release from its last complete run; the containers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "platforms.md"
BEGIN = "<!-- written by make platforms -->"
END = "<!-- end -->"
HEAD = (
    "Release",
    "Date",
    "Commit",
    "Python",
    "RabbitMQ",
    "Erlang",
    "SQLite",
    "OpenSSL",
    "Chromium",
    "`make demo`",
    "`make test`",
    "Unit",
)


@dataclass(frozen=True, slots=True)
class Step:
    """What came of a step, and how long it took."""

    ok: bool
    result: str
    seconds: float

    def cell(self) -> str:
        """The step as a cell of the table."""
        return f"{self.result}, {duration(self.seconds)}" if self.seconds else self.result


@dataclass(frozen=True, slots=True)
class Row:
    """A release, what runs there, and what came of each step."""

    title: str
    commit: str
    versions: dict[str, str]
    steps: dict[str, Step]

    def cells(self) -> list[str]:
        """The row as text, in the order of the head."""
        versions = [
            self.versions.get(name, "unknown")
            for name in ("Python", "RabbitMQ", "Erlang", "SQLite", "OpenSSL", "Chromium")
        ]
        steps = [
            self.steps[name].cell() if name in self.steps else "not run"
            for name in ("demo", "test", "unit")
        ]
        return [
            self.title,
            date.today().isoformat(),  # noqa: DTZ011  # the local day
            self.commit,
            *versions,
            *steps,
        ]  # the day here


def duration(seconds: float) -> str:
    """Return a duration in words."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def table(rows: list[list[str]]) -> str:
    """Return a table of Markdown."""
    lines = [list(HEAD), ["---"] * len(HEAD), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write(rows: list[Row], containers: Step) -> None:
    """Put the rows and what came of the containers into the page.

    Rows of releases that did not run now stay as they were.
    """
    before, _, rest = PAGE.read_text().partition(BEGIN)
    written, _, after = rest.partition(END)
    lines = [line for line in written.splitlines() if line.startswith("|")]
    kept = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    by_title = {cells[0]: cells for cells in kept} | {row.title: row.cells() for row in rows}
    today = date.today().isoformat()  # noqa: DTZ011  # the day here
    below = f"Containers: {containers.cell()} ({today}, commit {rows[0].commit})."
    text = f"{table([by_title[title] for title in sorted(by_title)])}\n{below}\n"
    PAGE.write_text(f"{before}{BEGIN}\n{text}{END}{after}")
