"""What a person reads: tables, moments in the local time zone, and text that cannot move the cursor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from relay.events.timestamps import parse_timestamp

_WIDEST = 500  # where no terminal sets a width, a row is one line for grep
_LAST = 20  # what the last column needs at least


def print_output(*parts: str | Table) -> None:
    """Print to standard output."""
    for part in parts:
        text = strip_control(part) if isinstance(part, str) else _drawn(part)
        print(text, flush=True)  # noqa: T201  # this is where a person is spoken to


def print_status(text: str) -> None:
    """Print for the person alone: standard error, so that what a program reads stays clean."""
    print(strip_control(text), file=sys.stderr, flush=True)  # noqa: T201  # the same


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, for the person alone; yields what tells it how many are done, and of how many."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def print_json(value: object) -> None:
    """Print for a program, and for people who have no jq."""
    print(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode(), flush=True)  # noqa: T201  # the same


def print_json_line(value: object) -> None:
    """Print one line of JSON lines."""
    print(orjson.dumps(value).decode(), flush=True)  # noqa: T201  # the same


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """Print a table, of which the last column alone is broken into lines; where it is too wide, a block for each row.

    None is a dash; without rows ``empty`` is printed.
    """
    if not rows:
        print_output(empty)
        return
    cells = [["–" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(len(line[index]) for line in (columns, *cells)) for index in range(len(columns))]
    if sum(widths[:-1]) + 2 * len(widths) + min(widths[-1], _LAST) > _width():
        print_output(
            *(part for row in cells for part in ("", print_fields(zip(columns, row, strict=True))))
        )
        return
    made = _grid(header=True)
    for column in columns[:-1]:
        made.add_column(column, no_wrap=True)
    made.add_column(columns[-1], overflow="fold")
    for row in cells:
        made.add_row(*(Text(strip_control(cell)) for cell in row))
    print_output(made)


def print_fields(pairs: Iterable[tuple[str, object]]) -> Table:
    """Names and what they are, a line each; those without a value are left out."""
    made = _grid(header=False)
    made.add_column(no_wrap=True, style="bold")
    made.add_column(overflow="fold")
    for name, value in pairs:
        if value is not None and value != "":
            made.add_row(name, Text(strip_control(str(value))))
    return made


def strip_control(text: str) -> str:
    """The same without what moves the cursor or colours the screen: some of it was written by strangers."""
    return "".join(
        char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text
    )


def format_local_time(
    moment: str | None, now: datetime | None = None, *, relative: bool = True
) -> str | None:
    """A moment for people: ``14:26:58 (in 12 min)``, in the local time zone, with the date where it is not today.

    What cannot be read as a moment is given back as it came. ``relative``: say how far away it is.
    """
    at = parse_timestamp(moment)
    if at is None:
        return moment
    now = now or datetime.now(UTC)
    here, today = at.astimezone(), now.astimezone()
    day = "" if here.date() == today.date() else f"{here:%Y-%m-%d} "
    return f"{day}{here:%H:%M:%S}" + (
        f" ({format_relative((at - now).total_seconds())})" if relative else ""
    )


def format_relative(seconds: float) -> str:
    """How far a moment is away: ``in 12 min``, ``3 h ago``."""
    span = format_duration(abs(seconds))
    return f"in {span}" if seconds > 0 else f"{span} ago"


def format_duration(seconds: float) -> str:
    """A length of time in at most two units: ``45 s``, ``12 min``, ``3 h 5 min``, ``2 d 4 h``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes = whole // 60
    if minutes < 60:
        rest = whole % 60 if minutes < 5 else 0
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    large, small, units = (
        (minutes // 60, minutes % 60, ("h", "min"))
        if minutes < 1440
        else (minutes // 1440, minutes // 60 % 24, ("d", "h"))
    )
    return f"{large} {units[0]} {small} {units[1]}" if small else f"{large} {units[0]}"


def join_names(things: Sequence[Any] | None, *, most: int = 5) -> str:
    """Names in a row, the first few of many."""
    if not things:
        return ""
    rest = len(things) - most
    return ", ".join(str(thing) for thing in things[:most]) + (
        f" and {rest} more" if rest > 0 else ""
    )


def pluralize(number: int, thing: str) -> str:
    """A number of things: ``1 vote``, ``2 votes``, ``3 tries``."""
    many = f"{thing[:-1]}ies" if thing.endswith("y") else f"{thing}s"
    return f"{number} {thing if number == 1 else many}"


def _grid(*, header: bool) -> Table:
    return Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=header, header_style="bold"
    )


def _width() -> int:
    return Console().width if sys.stdout.isatty() else _WIDEST


def _drawn(table: Table) -> str:
    console = Console(width=_width(), highlight=False)
    with console.capture() as drawn:
        console.print(table)
    # Rows are filled up to the width of their columns, of which a pipe should see nothing.
    return "\n".join(line.rstrip() for line in drawn.get().splitlines())
