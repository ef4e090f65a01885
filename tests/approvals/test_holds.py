"""How holds are taken, released and expire."""

from __future__ import annotations

from datetime import timedelta

from relay.approvals.authorize import HOLD_NOTICE
from tests.approvals.builders import OPERATOR, REBOOT, SETTINGS, USER_REBOOT, Book, decide, event
from tests.approvals.manual_clock import NOON


def test_votes_under_a_hold_are_recorded_and_weighed_again_at_its_release(approvals: Book) -> None:
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


def test_what_a_release_is_answered(approvals: Book) -> None:
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


def test_an_operator_releases_all(approvals: Book) -> None:
    approvals.see(USER_REBOOT, event("E-2", event_source="User"))
    approvals.submit("hold", "eve", USER_REBOOT)
    approvals.submit("hold", "mallory", USER_REBOOT)
    assert approvals.submit("release", "eve", USER_REBOOT).body["state"] == "held"
    approvals.submit("hold", "eve", USER_REBOOT)
    assert decide(approvals, "release", OPERATOR, of=USER_REBOOT) == "granted"


def test_each_holder_has_one_hold_whatever_revision_it_was_for(approvals: Book) -> None:
    approvals.see(REBOOT)
    first = approvals.submit("hold", "eve")
    assert approvals.submit("hold", "eve") == first
    approvals.see(event(resources=("db-2",)))
    assert len(approvals.stands().active_holds) == 1
    approvals.submit("hold", "eve", event(resources=("db-2",)))
    assert len(approvals.stands().active_holds) == 1
    assert decide(approvals, "release", "eve", revision="whatever") == "released"


def test_a_hold_stops_what_is_granted_until_the_claim(approvals: Book) -> None:
    approvals.see(USER_REBOOT)
    assert decide(approvals, "hold", "eve", of=USER_REBOOT) == "held"
    assert approvals.claim() == []
    assert decide(approvals, "release", "eve", of=USER_REBOOT) == "granted"
    assert len(approvals.said("approval.granted")) == 1
    (claimed,) = approvals.claim()
    assert claimed.event_id == "E-1"
    assert approvals.submit("hold", "eve", USER_REBOOT).status == 409


def test_an_expired_hold_is_told_as_a_release_and_rules_are_weighed_again(approvals: Book) -> None:
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


def test_an_expired_hold_is_told_before_its_holder_holds_again(approvals: Book) -> None:
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
