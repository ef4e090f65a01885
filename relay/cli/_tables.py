"""Prints tables and fields for people.

It is a module of its own because `run` and most calls by programs print none, and Rich is large.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from relay.cli._output import print_lines, print_to_stderr, strip_control


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """Print a table, or ``empty`` if it has no rows. None is printed as a dash."""
    table = _new_table(show_header=True)
    for title in columns:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(_text("–" if cell is None else cell) for cell in row))
    if table.row_count:
        _print(table)
    else:
        print_lines(empty)


def print_page(
    page: Mapping[str, Any],
    columns: Sequence[str],
    row: Callable[[Mapping[str, Any]], Sequence[object]],
    *,
    empty: str,
) -> None:
    print_table(columns, map(row, page["items"]), empty=empty)
    if page["next"] is not None:
        print_to_stderr("there are more: --all")


def print_fields(pairs: Iterable[tuple[str, object]]) -> None:
    """Print names with their values, one on each line. Leave out those without a value."""
    table = _new_table(show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in pairs:
        if value is not None and value != "":
            table.add_row(name, _text(value))
    _print(table)


def _new_table(*, show_header: bool) -> Table:
    return Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=show_header, header_style="bold"
    )


def _text(value: object) -> Text:
    return Text(strip_control(str(value)))


def _print(table: Table) -> None:
    # Rich knows the width of a terminal. Elsewhere a row is one line for grep.
    console = Console(width=None if sys.stdout.isatty() else 500, highlight=False)
    with console.capture() as capture:
        console.print(table)
    # Rich pads each row to the width of its columns. A pipe should not see the padding.
    print("\n".join(line.rstrip() for line in capture.get().splitlines()), flush=True)  # noqa: T201  # the output of the command
