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
LONG_REASON = "the receiver answered 503 Service Unavailable: down for maintenance until noon"
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


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        (
            ("event", "type", "state", "machines", "not before", "approval"),
            (
                "C7061BAC",
                "Redeploy",
                "Scheduled",
                "db-0, db-1",
                "22:26:58 (in 12 min)",
                "pending, 1 of 2 votes, rule databases",
            ),
        ),
        (
            ("id", "sink", "what", "event", "state", "when", "reason"),
            (
                12345,
                "drain",
                "event.scheduled",
                "C7061BAC",
                "waiting, 3 tries",
                "2026-04-11 22:26:58",
                LONG_REASON,
            ),
        ),
        (
            ("told", "what", "by", "detail"),
            (
                "2026-04-11 22:26:58",
                "approval.recorded",
                "slack:T024BE7LH/U012AB3CD",
                "hold, 1 of 2 votes, " + SETS,
            ),
        ),
    ],
    ids=["events", "deliveries", "history"],
)
def test_a_usual_row_is_a_row_and_no_line_is_longer_than_the_terminal(
    columns: tuple[str, ...], row: tuple[object, ...]
) -> None:
    title, first, *_ = lines = printed(columns, [row])
    assert title.split()[: len(columns)] == " ".join(columns).split()[: len(columns)]
    assert first.startswith(str(row[0]).split()[0])
    assert max(map(len, lines)) <= 80
    last = [line[lines[0].index(columns[-1]) :] for line in lines[1:]]
    assert "".join("".join(last).split()) == "".join(str(row[-1]).split())


CELLS = st.one_of(st.none(), st.integers(), st.text(max_size=90), st.just(SETS), st.just(EVENT_ID))


@given(st.lists(st.tuples(CELLS, CELLS, CELLS, CELLS, CELLS), min_size=1, max_size=4))
def test_no_line_of_any_table_is_longer_than_the_terminal_and_nothing_is_cut(
    rows: list[tuple[object, ...]],
) -> None:
    columns = ("one", "two", "three", "four", "five")
    lines = printed(columns, rows)
    assert max(map(cell_len, lines)) <= 80
    shown = Counter("".join("".join(lines).split()))
    cells = [strip_control("–" if cell is None else str(cell)) for row in rows for cell in row]
    assert shown == Counter("".join("".join([*columns, *cells]).split()))
