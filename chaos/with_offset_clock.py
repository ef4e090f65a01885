"""Runs a relay whose wall clock is wrong by the seconds that a file holds.

Usage: ``python -m chaos.with_offset_clock FILE python -m relay run …``. The file may change while
the relay runs, as a clock may be stepped.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from relay import clock
from relay.cli import main


def _now(offset: Path) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=float(offset.read_text("ascii") or 0))


if __name__ == "__main__":
    file = Path(sys.argv[1])
    # The clock of a machine cannot be stepped for one process alone.
    setattr(clock.SystemClock, "now", lambda _: _now(file))  # noqa: B010  # mypy knows it as a method
    sys.argv = ["imds-relay", *sys.argv[5:]]
    main()
