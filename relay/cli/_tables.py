"""Prints tables, fields and a progress bar for people.

It is a module of its own because `run` and most calls by programs print none, and Rich is large.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from relay.cli._output import print_json, print_lines, print_to_stderr, strip_control

_PIPE_WIDTH = 500
"""Characters in a line where no terminal sets a width: a row is then one line for grep."""
_MIN_COLUMN_WIDTH, _MIN_LAST_COLUMN_WIDTH = 8, 16
"""Characters at which a column of a narrow table is not made narrower, if it has as many."""
_PADDING = 2


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """Print a table, or ``empty`` if it has no rows. None is printed as a dash.

    If it is too wide for the terminal, its last column wraps, then others with several words. If
    that is not enough, each row becomes a block of fields.
    """
    if not rows:
        print_lines(empty)
        return
    cells = [["–" if cell is None else strip_control(str(cell)) for cell in row] for row in rows]
    widths = _column_widths(list(zip(columns, *cells, strict=True)), _terminal_width())
    if widths is None:
        for row in cells:
            print_lines("")
            print_fields(zip(columns, row, strict=True))
        return
    table = _new_table(show_header=True)
    for column, width in zip(columns, widths, strict=True):
        table.add_column(column, width=width, overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    _print_rich_table(table)


def _column_widths(columns: Sequence[Sequence[str]], available: int) -> list[int] | None:
    """Return the width of each column of a table; None if it cannot be made narrow enough.

    Each column is the texts of its cells and its title.
    """
    widths = [max(map(cell_len, column)) for column in columns]
    excess = sum(widths) + _PADDING * (len(widths) - 1) - available
    last = len(widths) - 1
    for index in sorted(range(len(widths)), key=lambda index: (index != last, -widths[index])):
        if excess <= 0:
            break
        narrowest = _min_column_width(columns[index], is_last=index == last)
        cut = min(excess, max(0, widths[index] - narrowest))
        widths[index] -= cut
        excess -= cut
    return widths if excess <= 0 else None


def _min_column_width(column: Sequence[str], *, is_last: bool) -> int:
    """Return how narrow a column may be: its words stay whole, but for those of the last one."""
    if is_last:
        return _MIN_LAST_COLUMN_WIDTH
    return max(_MIN_COLUMN_WIDTH, *(cell_len(word) for cell in column for word in cell.split()), 1)


def print_page(
    page: Mapping[str, Any],
    columns: Sequence[str],
    row: Callable[[Mapping[str, Any]], Sequence[object]],
    *,
    empty: str,
    as_json: bool,
) -> None:
    """Print a page of a list of the API, as JSON or as a table with a row for each item."""
    if as_json:
        print_json(page)
        return
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
            table.add_row(name, Text(strip_control(str(value))))
    _print_rich_table(table)


@contextmanager
def show_progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar if standard error is a terminal. Yield a function of done and total."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _new_table(*, show_header: bool) -> Table:
    return Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=show_header, header_style="bold"
    )


def _terminal_width() -> int:
    return Console().width if sys.stdout.isatty() else _PIPE_WIDTH


def _print_rich_table(table: Table) -> None:
    console = Console(width=_terminal_width(), highlight=False)
    with console.capture() as capture:
        console.print(table)
    # Rich pads each row to the width of its columns. A pipe should not see the padding.
    print("\n".join(line.rstrip() for line in capture.get().splitlines()), flush=True)  # noqa: T201  # the output of the command
