"""The switch and the dry run: what they stop, and what survives them."""

from __future__ import annotations

from typing import Any

import pytest

from relay.approvals import ApprovalsSettings
from relay.approvals.engine import effective_approvals_mode
from relay.store import Mode
from tests.approvals.builders import REBOOT, USER_REBOOT, ApprovalFile, build_event


@pytest.mark.parametrize(
    ("what", "expected", "configured", "switch", "trusted"),
    [
        ("on", "on", {}, "on", True),
        ("configured as a dry run", "dry-run", {"dry_run": True}, "on", True),
        ("switched to a dry run", "dry-run", {}, "dry-run", True),
        ("disabled", "off", {"enabled": False}, "on", True),
        ("disabled and a dry run", "off", {"enabled": False, "dry_run": True}, "dry-run", True),
        ("dry run and off", "off", {"dry_run": True}, "off", True),
        ("switched off", "off", {}, "off", True),
        ("an untrusted store", "off", {}, "on", False),
    ],
)
def test_the_stricter_of_configuration_and_switch_is_in_force(
    what: str, expected: Mode, configured: dict[str, Any], switch: Mode, trusted: bool
) -> None:
    settings = ApprovalsSettings.model_validate(configured)
    assert effective_approvals_mode(settings, switch, trusted=trusted) == expected, what


def test_the_switch_survives_a_restart_and_stops_a_claim(approvals: ApprovalFile) -> None:
    approvals.record_document(USER_REBOOT)
    approvals.set_mode("off")
    approvals.crash()
    assert approvals.claim() == []
    assert approvals.submit(by="eve", of=USER_REBOOT).status == 503
    approvals.set_mode("on")
    assert len(approvals.claim()) == 1


def test_a_store_that_may_belong_to_another_vm_grants_nothing(approvals: ApprovalFile) -> None:
    approvals.trusted = False
    approvals.crash()
    approvals.record_document(USER_REBOOT)
    assert approvals.grants == []
    assert approvals.submit(by="eve", of=USER_REBOOT).status == 503


def test_a_dry_run_records_every_event_and_claims_nothing(approvals: ApprovalFile) -> None:
    approvals.set_mode("dry-run")
    approvals.record_document(REBOOT)
    approvals.submit(by="mallory")
    approvals.submit()
    assert approvals.submit(by="bob").body["state"] == "granted"
    assert approvals.claim() == []
    approvals.record_document(build_event(event_status="Started", not_before=None))
    assert approvals.event_names() == [
        "approval.refused",
        "approval.recorded",
        "approval.recorded",
        "approval.granted",
        "approval.voided",
    ]
    assert all(
        recorded.data["dryRun"] is True
        for recorded in approvals.events()
        if recorded.name.startswith("approval.")
    )


def test_a_hold_after_a_dry_run_is_not_the_one_of_the_dry_run(approvals: ApprovalFile) -> None:
    """Which a later dry run can release."""
    approvals.record_document(USER_REBOOT, step=False)
    for mode in ("dry-run", "on"):
        approvals.set_mode(mode)
        assert approvals.submit("hold", "eve", USER_REBOOT).body["state"] == "held"
    approvals.set_mode("dry-run")
    approvals.submit("release", "eve", USER_REBOOT)
    approvals.set_mode("on")
    assert approvals.claim() == []
