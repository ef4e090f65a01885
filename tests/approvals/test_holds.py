"""How holds are taken, released and expire."""

from __future__ import annotations

from datetime import timedelta

import pytest

from relay.approvals.authorize import HOLD_NOTICE
from tests.approvals.builders import OPERATOR, REBOOT, SETTINGS, USER_REBOOT, Book, decide, event
from tests.approvals.manual_clock import NOON


def test_votes_under_a_hold_are_recorded_and_grant_at_its_release(approvals: Book) -> None:
    approvals.see(REBOOT)
    assert decide(approvals, "hold", "eve") == "held"
    assert decide(approvals, "approve", "alice") == "held"
    assert decide(approvals, "approve", "bob") == "held"
    assert not approvals.said("approval.granted")
    assert decide(approvals, "release", "eve", message_id="m") == "granted"
    assert approvals.cause("approval.granted") == "m"
    assert approvals.data("approval.granted")["principal"] == "client:bob"
    assert [recorded.data["votes"] for recorded in approvals.said("approval.recorded")] == [
        0,
        1,
        2,
        2,
    ]
    assert [decision.decision for decision in approvals.stands().decisions] == [
        "approve",
        "approve",
    ]


def test_the_state_in_the_answer_to_a_release(approvals: Book) -> None:
    approvals.see(REBOOT)
    approvals.submit("hold", "eve")
    assert decide(approvals, "release", "eve") == "released"
    approvals.submit("hold", "eve")
    approvals.submit()
    assert decide(approvals, "release", "eve") == "pending"
    approvals.submit("hold", "eve")
    approvals.submit("hold", "mallory")
    approvals.submit(by="bob")
    assert decide(approvals, "release", "eve") == "held"
    assert decide(approvals, "release", "mallory") == "granted"


def test_an_operator_releases_every_hold(approvals: Book) -> None:
    approvals.see(USER_REBOOT, event("E-2", event_source="User"))
    approvals.submit("hold", "eve", USER_REBOOT)
    approvals.submit("hold", "mallory", USER_REBOOT)
    assert approvals.submit("release", "eve", USER_REBOOT).body["state"] == "held"
    approvals.submit("hold", "eve", USER_REBOOT)
    assert decide(approvals, "release", OPERATOR, of=USER_REBOOT) == "granted"


def test_each_holder_has_one_hold_for_all_revisions(approvals: Book) -> None:
    approvals.see(REBOOT)
    first = approvals.submit("hold", "eve")
    assert approvals.submit("hold", "eve") == first
    approvals.see(event(resources=("db-2",)))
    assert len(approvals.stands().active_holds) == 1
    approvals.submit("hold", "eve", event(resources=("db-2",)))
    assert len(approvals.stands().active_holds) == 1
    assert decide(approvals, "release", "eve", revision="whatever") == "released"


def test_a_hold_stops_a_grant_until_the_claim(approvals: Book) -> None:
    approvals.see(USER_REBOOT)
    assert decide(approvals, "hold", "eve", of=USER_REBOOT) == "held"
    assert approvals.claim() == []
    assert decide(approvals, "release", "eve", of=USER_REBOOT) == "granted"
    assert len(approvals.said("approval.granted")) == 1
    (claimed,) = approvals.claim()
    assert claimed.event_id == "E-1"
    assert approvals.submit("hold", "eve", USER_REBOOT).status == 409


def test_an_expired_hold_is_recorded_as_a_release_and_lets_the_votes_grant(approvals: Book) -> None:
    approvals.close()
    approvals.crash(SETTINGS.model_copy(update={"hold_expires": 60.0}))
    approvals.see(REBOOT)
    approvals.submit("hold", "eve")
    approvals.submit()
    approvals.submit(by="bob")
    assert approvals.step() == NOON + timedelta(seconds=60)
    approvals.clock.turn(60)
    for _ in range(3):
        approvals.step()
    hold, release = approvals.said("approval.recorded")[0], approvals.said("approval.recorded")[-1]
    assert {key: release.data[key] for key in ("decision", "principal", "channel", "votes")} == {
        "decision": "release",
        "principal": "relay",
        "channel": "relay",
        "votes": 2,
    }
    assert HOLD_NOTICE in release.data["reason"]
    assert release.attributes["causationid"] == hold.id
    assert approvals.cause("approval.granted") == release.id
    assert len(approvals.said("approval.recorded")) == 4
    assert [decision.decision for decision in approvals.stands().decisions] == [
        "approve",
        "approve",
    ]


def test_the_expiry_of_a_hold_is_recorded_before_a_new_hold(approvals: Book) -> None:
    approvals.close()
    approvals.crash(SETTINGS.model_copy(update={"hold_expires": 60.0}))
    approvals.see(REBOOT)
    approvals.submit("hold", "eve")
    approvals.clock.turn(61)
    approvals.submit("hold", "eve")
    assert [recorded.data["principal"] for recorded in approvals.said("approval.recorded")] == [
        "client:eve",
        "relay",
        "client:eve",
    ]


def test_a_hold_stays_in_force_when_its_event_id_comes_back(approvals: Book) -> None:
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


@pytest.mark.parametrize("is_back", [True, False])
def test_the_expiry_of_a_hold_is_recorded_only_if_its_event_is_back(
    approvals: Book, is_back: bool
) -> None:
    about = event(event_source="User", due=1e6)
    approvals.see(about)
    approvals.submit("hold", "eve", about)
    approvals.see()
    if is_back:
        approvals.see(about)
    recorded_before = len(approvals.said("approval.recorded"))
    approvals.clock.turn(86401)
    approvals.step()
    assert len(approvals.said("approval.recorded")) - recorded_before == int(is_back)
    assert not approvals.connection.execute("SELECT 1 FROM decision WHERE counts").fetchall()
