"""Tables for people fit the terminal."""

from __future__ import annotations

import io
import re
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from typing_extensions import override

from relay.cli._output import strip_control
from relay.cli._tables import print_table

EVENT_ID = "C7061BAC-AFDC-4513-B24B-AA5F13A16123"
SETS = "aks-nodepool1-12345678-vmss_0, aks-nodepool1-12345678-vmss_1 and 97 more"


class Terminal(io.StringIO):
    @override
    def isatty(self) -> bool:
        return True


def printed(columns: tuple[str, ...], rows: list[tuple[object, ...]]) -> list[str]:
    """Return the lines of a table on a terminal of 80 columns."""
    with pytest.MonkeyPatch.context() as patch:
        terminal = Terminal()
        patch.setattr(sys, "stdout", terminal)
        patch.setenv("COLUMNS", "80")
        print_table(columns, rows, empty="nothing")
    return re.sub(r"\x1b\[\d+m", "", terminal.getvalue()).splitlines()


CELLS = st.one_of(st.none(), st.integers(), st.text(max_size=90), st.just(SETS), st.just(EVENT_ID))


@given(st.lists(st.tuples(CELLS, CELLS, CELLS, CELLS, CELLS), min_size=1, max_size=4))
def test_tables_fit_the_terminal_and_nothing_is_cut(rows: list[tuple[object, ...]]) -> None:
    columns = ("one", "two", "three", "four", "five")
    lines = printed(columns, rows)
    assert max(map(cell_len, lines)) <= 80
    shown = Counter("".join("".join(lines).split()))
    cells = [strip_control("–" if cell is None else str(cell)) for row in rows for cell in row]
    assert shown == Counter("".join("".join([*columns, *cells]).split()))
