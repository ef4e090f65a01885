"""The switch and the dry run: what they stop, and what survives them."""

from __future__ import annotations

from typing import Any

import pytest

from relay.approvals import ApprovalsSettings
from relay.approvals.service import effective_mode
from relay.outbox import Mode
from tests.approvals.builders import REBOOT, USER_REBOOT, Book, caller, event


@pytest.mark.parametrize(
    ("expected", "configured", "switch", "trusted"),
    [
        ("on", {}, "on", True),
        ("dry-run", {"dry_run": True}, "on", True),
        ("dry-run", {}, "dry-run", True),
        ("off", {"enabled": False}, "on", True),
        ("off", {"enabled": False, "dry_run": True}, "dry-run", True),
        ("off", {"dry_run": True}, "off", True),
        ("off", {}, "off", True),
        ("off", {}, "on", False),
    ],
)
def test_of_file_and_switch_the_stricter_holds(
    expected: Mode, configured: dict[str, Any], switch: Mode, trusted: bool
) -> None:
    assert (
        effective_mode(ApprovalsSettings.model_validate(configured), switch, trusted=trusted)
        == expected
    )


def test_the_switch_survives_a_restart_and_stops_a_claim(approvals: Book) -> None:
    approvals.see(USER_REBOOT)
    approvals.switch("off")
    approvals.crash()
    assert approvals.claim() == []
    assert approvals.submit(by="eve", of=USER_REBOOT).status == 503
    approvals.switch("on")
    assert len(approvals.claim()) == 1


def test_a_store_that_cannot_be_compared_with_this_vm_starts_nothing(approvals: Book) -> None:
    approvals.trusted = False
    approvals.crash()
    approvals.see(USER_REBOOT)
    assert approvals.grants == []
    assert approvals.submit(by="eve", of=USER_REBOOT).status == 503


def test_a_dry_run_says_everything_and_sends_nothing(approvals: Book) -> None:
    approvals.switch("dry-run")
    approvals.see(REBOOT)
    approvals.submit(by="mallory")
    approvals.submit()
    assert approvals.submit(by="bob").body["state"] == "granted"
    assert approvals.claim() == []
    approvals.see(event(event_status="Started", not_before=None))
    assert approvals.names() == [
        "approval.refused",
        "approval.recorded",
        "approval.recorded",
        "approval.granted",
        "approval.voided",
    ]
    assert all(
        recorded.data["dryRun"] is True
        for recorded in approvals.said()
        if recorded.name.startswith("approval.")
    )


def test_what_was_said_in_a_dry_run_never_becomes_real(approvals: Book) -> None:
    approvals.switch("dry-run")
    approvals.see(REBOOT, event("E-2", event_source="User"))
    approvals.submit()
    approvals.submit(by="bob")
    approvals.switch("on")
    assert [claimed.event_id for claimed in approvals.claim()] == ["E-2"]
    assert approvals.submit().body["votes"] == 1
    assert approvals.submit(by="bob").body["state"] == "granted"
    assert "dryRun" not in approvals.said("approval.recorded")[-1].data
    assert not approvals.said("startrequest.failed")


def test_what_was_meant_survives_a_dry_run(approvals: Book) -> None:
    approvals.see(REBOOT)
    approvals.submit()
    approvals.switch("dry-run")
    assert approvals.submit().body["votes"] == 1
    assert approvals.submit(request_id="again").body["votes"] == 1
    approvals.switch("on")
    assert approvals.submit(by="bob").body["state"] == "granted"


def test_votes_of_a_dry_run_are_voided_as_such_also_later(approvals: Book) -> None:
    approvals.switch("dry-run")
    approvals.see(REBOOT)
    approvals.submit()
    approvals.switch("on")
    approvals.see()
    assert approvals.data("approval.voided")["dryRun"] is True


def test_a_grant_that_was_meant_is_told_failed_also_in_a_dry_run(approvals: Book) -> None:
    approvals.see(USER_REBOOT)
    approvals.switch("dry-run")
    approvals.see()
    assert len(approvals.said("startrequest.failed")) == 1


def test_a_hold_given_in_a_dry_run_holds(approvals: Book) -> None:
    approvals.switch("dry-run")
    approvals.see(USER_REBOOT)
    approvals.submit("hold", "eve", USER_REBOOT)
    approvals.switch("on")
    assert approvals.claim() == []


def test_a_hold_belongs_to_the_event_id_also_when_it_was_gone_for_a_while(approvals: Book) -> None:
    """A document that is empty once must not let an automatic rule start what somebody holds."""
    approvals.see(USER_REBOOT)
    approvals.submit("hold", "eve", USER_REBOOT)
    approvals.see()
    approvals.crash()
    approvals.see(USER_REBOOT)
    assert approvals.claim() == []
    assert len(approvals.stands().active_holds) == 1
    assert approvals.submit("release", "eve", USER_REBOOT).body["state"] == "granted"
    assert approvals.claim() != []


def test_a_hold_that_expires_is_told_of_the_event_that_is_back_and_of_none_that_is_gone(
    approvals: Book,
) -> None:
    for back in (True, False):
        of = event("E-2" if back else "E-3", event_source="User", due=1e6)
        approvals.see(of)
        approvals.submit("hold", "eve", of, event_id=of.event_id)
        approvals.see()
        if back:
            approvals.see(of)
        said = len(approvals.said("approval.recorded"))
        approvals.clock.turn(86401)
        approvals.step()
        assert len(approvals.said("approval.recorded")) - said == back
        assert not approvals.connection.execute("SELECT 1 FROM decision WHERE counts").fetchall()
        approvals.see()


def test_a_hold_that_was_meant_is_not_released_in_a_dry_run(approvals: Book) -> None:
    """Whoever released it was details that nothing would happen."""
    approvals.see(USER_REBOOT)
    approvals.submit("hold", "eve", USER_REBOOT)
    approvals.switch("dry-run")
    answer = approvals.submit("release", "eve", USER_REBOOT)
    assert (answer.status, answer.body["state"]) == (202, "held")
    assert (
        approvals.submit("release", caller("root", "operate"), USER_REBOOT).body["state"] == "held"
    )
    approvals.switch("on")
    assert approvals.claim() == []
    assert approvals.submit("release", "eve", USER_REBOOT).body["state"] == "granted"
    assert approvals.claim() != []


def test_a_hold_of_a_dry_run_is_released_in_it(approvals: Book) -> None:
    approvals.switch("dry-run")
    approvals.see(USER_REBOOT)
    approvals.submit("hold", "eve", USER_REBOOT)
    assert approvals.submit("release", "eve", USER_REBOOT).body["state"] == "granted"
    assert not approvals.stands().active_holds
