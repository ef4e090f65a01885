"""Prints tables and fields for people.

It is a module of its own because `run` and most calls by programs print none, and Rich is large.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from relay.cli._output import print_lines, print_to_stderr, strip_control

_PIPE_WIDTH = 500
"""Characters in a line where no terminal sets a width: a row is then one line for grep."""
_SHORT = 16
"""Characters of a word that is not split."""


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """Print a table, or ``empty`` if it has no rows. None is printed as a dash.

    In a terminal that is too narrow, cells wrap: those with several words or a long one.
    """
    if not rows:
        print_lines(empty)
        return
    cells = [[_text("–" if cell is None else cell) for cell in row] for row in rows]
    widths = [
        max(len(title), *(cell.cell_len for cell in column))
        for title, column in zip(columns, zip(*cells, strict=True), strict=True)
    ]
    is_short = [
        width <= _SHORT and not any(" " in cell.plain for cell in column)
        for width, column in zip(widths, zip(*cells, strict=True), strict=True)
    ]
    # Rich cuts what does not wrap if all else is as narrow as can be.
    may_stay = sum(itertools.compress(widths, is_short)) <= _width() // 2
    table = _new_table(show_header=True)
    for title, stays in zip(columns, is_short, strict=True):
        table.add_column(title, overflow="fold", no_wrap=stays and may_stay)
    for row in cells:
        table.add_row(*row)
    _print(table)


def print_page(
    page: Mapping[str, Any],
    columns: Sequence[str],
    row: Callable[[Mapping[str, Any]], Sequence[object]],
    *,
    empty: str,
) -> None:
    """Print a page of a list of the API as a table with a row for each item."""
    print_table(columns, [row(item) for item in page["items"]], empty=empty)
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


def _width() -> int:
    return Console().width if sys.stdout.isatty() else _PIPE_WIDTH


def _print(table: Table) -> None:
    console = Console(width=_width(), highlight=False)
    with console.capture() as capture:
        console.print(table)
    # Rich pads each row to the width of its columns. A pipe should not see the padding.
    print("\n".join(line.rstrip() for line in capture.get().splitlines()), flush=True)  # noqa: T201  # the output of the command
