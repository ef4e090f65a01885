"""What the state machines of Hypothesis share: a folder in memory, and answers of IMDS."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from hypothesis.stateful import RuleBasedStateMachine
from typing_extensions import override  # in typing from Python 3.12

from relay.errors import SourceError
from tests.approvals.running_gate import REFUSED, TIMEOUT, UNAVAILABLE

_MEMORY = Path("/dev/shm")  # noqa: S108  # in memory, because no test cuts the power
ANSWERS: dict[str, SourceError | None] = {
    "200": None,
    "400": REFUSED,
    "503": UNAVAILABLE,
    "timeout": TIMEOUT,
}


class MachineOnFile(RuleBasedStateMachine):
    """A machine with a folder that is gone afterwards, as is all that `closing` was given."""

    def __init__(self) -> None:
        super().__init__()
        self.closing = ExitStack()
        folder = tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None)
        self.folder = Path(self.closing.enter_context(folder))

    @override
    def teardown(self) -> None:
        self.closing.close()
