"""The state file that most tests of approvals begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from jsonschema import Draft202012Validator

from relay.events.catalog import CATALOG, cloudevent_schema
from tests.approvals.builders import ApprovalFile

_SCHEMAS = {
    event_type.name: Draft202012Validator(cloudevent_schema(event_type)) for event_type in CATALOG
}


@pytest.fixture
def approvals(tmp_path: Path) -> Iterator[ApprovalFile]:
    """An empty state file. At the end every event in it is checked against its schema."""
    approvals_file = ApprovalFile(tmp_path / "relay.db")
    yield approvals_file
    for recorded in approvals_file.events():
        _SCHEMAS[recorded.name].validate(orjson.loads(recorded.body))
    approvals_file.close()
