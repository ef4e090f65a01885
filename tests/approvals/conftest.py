"""The state file that most tests of approvals begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.approvals.builders import ApprovalFile, checked_file


@pytest.fixture
def approvals(tmp_path: Path) -> Iterator[ApprovalFile]:
    with checked_file(tmp_path) as approvals_file:
        yield approvals_file
