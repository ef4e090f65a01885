"""What the document of each api-version shows of an event."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from relay.imds.document import API_VERSIONS
from relay.simulator.event import Event, EventType, Plan, event_fields
from relay.simulator.setup import VM, compute_document

NOT_BEFORE = datetime(2022, 4, 11, 22, 26, 58, 999999, tzinfo=UTC)
OLDEST_FIELDS = {"EventId", "EventStatus", "EventType", "ResourceType", "Resources", "NotBefore"}


def event(plan: Plan) -> Event:
    return Event(
        event_id="C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        plan=plan,
        status="Scheduled",
        not_before=NOT_BEFORE,
        starts=NOT_BEFORE,
        ends=None,
    )


@pytest.mark.parametrize(
    ("api_version", "more"),
    [
        ("2017-03-01", set()),
        ("2017-08-01", set()),
        ("2017-11-01", set()),
        ("2019-01-01", set()),
        ("2019-04-01", {"Description"}),
        ("2019-08-01", {"Description", "EventSource"}),
        ("2020-07-01", {"Description", "EventSource", "DurationInSeconds"}),
    ],
)
def test_each_api_version_shows_the_fields_that_it_knows(api_version: str, more: set[str]) -> None:
    entry = event_fields(event(Plan()), api_version)
    assert entry is not None
    assert set(entry) == OLDEST_FIELDS | more


@pytest.mark.parametrize(
    ("kind", "since"),
    [("Freeze", "2017-03-01"), ("Preempt", "2017-11-01"), ("Terminate", "2019-01-01")],
)
def test_a_type_is_shown_from_the_api_version_on_that_knows_it(kind: EventType, since: str) -> None:
    of_kind = event(Plan(type=kind))
    shown = [version for version in API_VERSIONS if event_fields(of_kind, version)]
    assert shown == [version for version in API_VERSIONS if version >= since]


def test_not_before_is_rfc_1123_and_never_later_than_it_is() -> None:
    """The format has whole seconds. Cutting them keeps the promise of NotBefore."""
    entry = event_fields(event(Plan()), "2020-07-01")
    assert entry is not None
    assert entry["NotBefore"] == "Mon, 11 Apr 2022 22:26:58 GMT"


@pytest.mark.parametrize(
    ("vm", "scale_set", "computer_name"),
    [
        (VM("set_18"), "set", "set00000i"),
        (VM("set_0"), "set", "set000000"),
        (VM("db-0"), "", "db-0"),
        (VM("FrontEnd_IN_0", scale_set=""), "", "frontend_in_0"),
        (VM("flex_ab12", scale_set="flex"), "flex", "flex_ab12"),
        (VM("set_18", computer_name="other"), "set", "other"),
    ],
)
def test_a_vm_knows_its_scale_set_and_host_name(vm: VM, scale_set: str, computer_name: str) -> None:
    about = compute_document(vm)
    assert about["vmScaleSetName"] == scale_set
    assert about["osProfile"]["computerName"] == computer_name


def test_vms_of_one_scale_set_share_the_placement_group_and_nothing_else() -> None:
    first, second, stranger = (compute_document(VM(name)) for name in ("a_0", "a_1", "b_0"))
    assert first["placementGroupId"] == second["placementGroupId"] != stranger["placementGroupId"]
    assert len({first["vmId"], second["vmId"], stranger["vmId"]}) == 3
    assert compute_document(VM("a_0")) == first
