"""Grants after a restart with other rules, and the summary of an approval."""

from __future__ import annotations

import pytest

from relay.approvals import ApprovalsSettings
from relay.approvals.authorize import HOLD_NOTICE
from relay.approvals.request import Caller, DecisionRequest
from relay.approvals.service import Claim, approval_summary, stricter
from relay.events.catalog import CATALOG, event_schema
from relay.outbox import Mode
from relay.outbox.journal import read_rows
from tests.approvals.builders import SETTINGS, Book, approval, caller, event
from tests.approvals.manual_clock import NOON

REBOOT, USER, FREEZE, ONE = (
    event(),
    event(event_source="User"),
    event(event_type="Freeze"),
    event(event_type="Redeploy"),
)
OPERATOR = caller("op", "operate")
_SCHEMAS = {one.name: Draft202012Validator(event_schema(one)) for one in CATALOG}


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Book]:
    """A state file; whatever a test made it say is checked against the schemas that users are given."""
    made = Book(tmp_path / "relay.db")
    yield made
    for one in made.said():
        _SCHEMAS[one.name].validate(orjson.loads(one.body))
    made.close()


def claim(book: Book) -> list[Claim]:
    """What the gate does last before it sends, for everything that is open."""
    return book.do(lambda tx: book.ledger.claim(tx, tx.decisions.open_grants(), book.clock.now()))


def accept(book: Book, claims: list[Claim]) -> None:
    """IMDS answers 200."""
    book.do(lambda tx: book.ledger.accepted(tx, claims, book.clock.now()))


def data(book: Book, name: str) -> dict[str, Any]:
    """The data of the only event of that name."""
    (one,) = book.said(name)
    return dict(one.data)


def cause(book: Book, name: str) -> str | None:
    """The causationid of the last event of that name."""
    return book.said(name)[-1].attributes.get("causationid")


# --- votes


def test_a_quorum_is_recorded_vote_by_vote_and_then_granted(book: Book) -> None:
    book.see(REBOOT)
    first = book.submit(reason="drained")
    assert (first.status, first.body) == (
        202,
        {
            "approvalId": first.body["approvalId"],
            "eventId": "E-1",
            "decision": "approve",
            "state": "pending",
            "votes": 1,
            "required": 2,
            "rule": "databases",
        },
    )
    second = book.submit(by="bob")
    assert second.body == {
        **first.body,
        "approvalId": second.body["approvalId"],
        "state": "granted",
        "votes": 2,
    }
    assert book.names() == ["approval.recorded", "approval.recorded", "approval.granted"]
    recorded, completing = book.said("approval.recorded")
    assert recorded.data == {
        **book.stands().occurrence.data,
        "approvalId": first.body["approvalId"],
        "decision": "approve",
        "principal": "client:alice",
        "channel": "http",
        "reason": "drained",
        "votes": 1,
        "required": 2,
        "rule": "databases",
    }
    assert data(book, "approval.granted") == {**completing.data, "votes": 2}
    assert recorded.attributes["causationid"] == book.said("event.scheduled")[0].id
    assert cause(book, "approval.granted") == completing.id
    assert [grant.approval_id for grant in book.grants] == [second.body["approvalId"]]


def test_an_automatic_rule_grants_by_itself_in_its_own_name(book: Book) -> None:
    book.see(USER)
    told = data(book, "approval.granted")
    assert {
        key: told[key] for key in ("decision", "principal", "channel", "votes", "required", "rule")
    } == {
        "decision": "approve",
        "principal": "rule:users",
        "channel": "rule",
        "votes": 0,
        "required": 0,
        "rule": "users",
    }
    assert cause(book, "approval.granted") == book.said("event.scheduled")[0].id


def test_every_event_but_event_names_the_journal_s_head_before_it(book: Book) -> None:
    book.see(REBOOT)
    book.submit()
    before, row = list(read_rows(book.connection))[-2:]
    assert orjson.loads(row.body)["journalhead"] == f"{before.position}:{before.hash}"
    assert "journalhead" not in book.said("event.scheduled")[0].attributes


def test_the_event_id_is_compared_without_case_and_told_as_azure_wrote_it(book: Book) -> None:
    book.see(REBOOT)
    assert book.submit(event_id="e-1").body["eventId"] == "E-1"
    assert book.said("approval.recorded")[0].subject == "E-1"


def test_votes_of_one_principal_are_one_vote_and_said_once(book: Book) -> None:
    book.see(REBOOT)
    first = book.submit()
    assert book.submit() == first
    assert book.names() == ["approval.recorded"]


def test_a_vote_with_an_id_of_its_own_is_told_anew_and_still_one_vote(book: Book) -> None:
    """Over AMQP the event is the answer; and whoever votes again means it from then on."""
    book.see(REBOOT)
    book.submit(request_id="m1", message_id="m1")
    book.clock.turn(200)
    again = book.submit(request_id="m2", message_id="m2")
    assert (again.body["state"], again.body["votes"]) == ("pending", 1)
    assert [one.attributes["causationid"] for one in book.said("approval.recorded")] == ["m1", "m2"]
    book.clock.turn(200)
    book.step()
    assert book.submit(by="bob").body["state"] == "granted"
    assert not book.said("approval.voided")


def test_a_vote_counts_until_it_expires_and_is_told_void_once(book: Book) -> None:
    book.see(REBOOT)
    book.submit()
    moment = book.step()
    assert moment == NOON + timedelta(minutes=5)
    book.clock.turn(300)
    for _ in range(3):
        book.step()
    assert data(book, "approval.voided")["why"] == "expired"
    assert cause(book, "approval.voided") == book.said("approval.recorded")[0].id
    assert book.submit(by="bob").body["votes"] == 1


def test_a_vote_is_told_void_before_a_new_one_takes_its_place(book: Book) -> None:
    """Also when nobody has looked since it expired."""
    book.see(REBOOT)
    book.submit()
    book.clock.turn(301)
    assert book.submit().body["votes"] == 1
    assert book.names() == ["approval.recorded", "approval.voided", "approval.recorded"]


def test_a_changed_event_voids_its_votes_once_also_when_it_changes_back(book: Book) -> None:
    book.see(REBOOT)
    book.submit()
    book.see(event(resources=("db-1", "db-2")))
    voided = book.said("approval.voided")[0]
    assert voided.data["why"] == "changed"
    assert voided.data["resources"] == ["db-1", "db-2"]
    assert "dryRun" not in voided.data
    assert voided.attributes["causationid"] == book.said("event.updated")[0].id
    book.see(REBOOT)
    assert book.submit(by="bob").body["votes"] == 1
    assert len(book.said("approval.voided")) == 1


def test_what_is_no_part_of_the_revision_voids_nothing(book: Book) -> None:
    book.see(REBOOT)
    book.submit()
    book.see(event(description="other words"))
    assert len(book.said("event.updated")) == 1
    assert book.submit(by="bob").body["state"] == "granted"


def test_a_vote_in_flight_is_not_replaced_by_one_for_what_the_event_became(book: Book) -> None:
    """What becomes of it is for the answer to say, and then it is told."""
    book.see(ONE)
    book.submit(of=ONE)
    book.ledger.in_flight = frozenset(one.grant.id for one in claim(book))
    changed = event(event_type="Redeploy", resources=("db-2",))
    book.see(changed)
    assert book.submit(of=changed).body["votes"] == 1
    book.ledger.in_flight = frozenset()
    book.step()
    assert data(book, "approval.voided")["why"] == "changed"


def test_an_ended_event_voids_its_votes(book: Book) -> None:
    book.see(REBOOT)
    book.submit()
    book.see()
    assert data(book, "approval.voided")["why"] == "ended"
    assert cause(book, "approval.voided") == book.said("event.ended")[0].id


def test_the_same_event_id_is_a_new_occurrence_that_inherits_holds_alone(book: Book) -> None:
    """Neither votes nor grants. A hold that survives too much is released; one that is lost is a reboot."""
    book.see(REBOOT)
    book.submit("hold", "eve")
    book.submit()
    book.see(step=False)
    book.see(REBOOT)
    stands = book.stands()
    assert (
        stands.occurrence.number,
        stands.vote_count,
        len(stands.active_holds),
        stands.grants,
    ) == (2, 0, 1, ())
    assert book.submit("release", "eve").body["state"] == "released"
    assert book.submit(by="bob").body["state"] == "pending"
    assert book.submit().body["state"] == "granted"
    book.see(step=False)
    book.see(REBOOT)
    assert book.stands().active_grant is None
    assert claim(book) == []


# --- repeats


def test_a_repeat_gets_its_first_answer_whatever_happened_since(book: Book) -> None:
    book.see(REBOOT)
    first = book.submit(request_id="r")
    book.submit(by="bob")
    book.see()
    book.crash()
    said = len(book.said())
    assert book.submit(request_id="r") == replace(first, repeat=True)
    assert len(book.said()) == said


@pytest.mark.parametrize(
    ("status", "remembered", "changes"),
    [
        (403, True, {"by": caller("eve")}),
        (409, True, {"revision": "x"}),
        (404, False, {"event_id": "E-9"}),
        (404, False, {"scope": "other"}),
    ],
)
def test_refusals_are_told_once_and_remembered_where_they_are_final(
    book: Book, status: int, remembered: bool, changes: dict[str, Any]
) -> None:
    book.see(REBOOT)
    answers = [book.submit(request_id="r", **changes) for _ in range(2)]
    assert [answer.status for answer in answers] == [status] * 2
    assert len(book.said("approval.refused")) == (1 if remembered else 2)


def test_a_message_that_comes_again_gets_no_second_event_whatever_it_was_answered(
    book: Book,
) -> None:
    """It does, where the relay was killed before it could acknowledge it."""
    for _ in range(2):
        assert book.submit(event_id="E-9", request_id="m", message_id="m").status == 404
    assert len(book.said("approval.refused")) == 1


def test_503_is_neither_told_nor_remembered(book: Book) -> None:
    book.see(REBOOT)
    book.switch("off")
    assert book.submit(request_id="r").status == 503
    book.switch("on")
    assert book.submit(request_id="r").status == 202
    assert not book.said("approval.refused")


def test_another_body_under_a_known_id_is_409_and_decides_nothing(book: Book) -> None:
    book.see(REBOOT)
    first = book.submit(request_id="r")
    other = book.submit("hold", request_id="r", digest="other")
    assert (other.status, other.body["revision"]) == (409, REBOOT.revision)
    assert not book.stands().active_holds
    assert data(book, "approval.refused")["decision"] == "hold"
    assert book.submit(request_id="r") == replace(first, repeat=True)


def test_the_same_id_from_another_principal_is_no_repeat(book: Book) -> None:
    book.see(REBOOT)
    book.submit(request_id="r")
    assert book.submit(by="bob", request_id="r").body["votes"] == 2


# --- refusals


def test_an_unknown_event_is_told_with_the_id_as_it_was_sent_and_nothing_else(book: Book) -> None:
    answer = book.submit(event_id="no-Such", message_id="m")
    assert answer.status == 404
    told = data(book, "approval.refused")
    assert told["eventId"] == book.said()[0].subject == "no-Such"
    assert {
        told[key]
        for key in (
            "eventType",
            "eventStatus",
            "resources",
            "notBefore",
            "revision",
            "documentIncarnation",
            "rule",
        )
    } == {None}
    assert (told["votes"], told["required"], told["refusal"]) == (0, 0, answer.body["detail"])
    assert cause(book, "approval.refused") == "m"


def test_another_scope_is_404_and_betrays_nothing_of_the_event(book: Book) -> None:
    book.see(REBOOT)
    assert book.submit(scope="prod").status == 202
    answer = book.submit(by="bob", scope="test")
    assert (answer.status, set(answer.body)) == (404, {"detail"})
    assert data(book, "approval.refused")["resources"] is None


def test_a_refusal_says_who_wanted_what_and_why_not(book: Book) -> None:
    book.see(REBOOT)
    answer = book.submit(by="eve", reason="please")
    told = data(book, "approval.refused")
    assert {
        key: told[key]
        for key in (
            "principal",
            "decision",
            "channel",
            "reason",
            "votes",
            "required",
            "rule",
            "refusal",
        )
    } == {
        "principal": "client:eve",
        "decision": "approve",
        "channel": "http",
        "reason": "please",
        "votes": 0,
        "required": 2,
        "rule": "databases",
        "refusal": answer.body["detail"],
    }
    assert cause(book, "approval.refused") == book.said("event.scheduled")[0].id
    assert book.stands().decisions == ()


# --- holds


def state(book: Book, decision: Any, by: Caller | str, **changes: Any) -> str:
    """The state that an accepted decision is answered with."""
    answer = book.submit(decision, by, **changes)
    assert answer.status == 202, answer
    return str(answer.body["state"])


def test_votes_under_a_hold_are_recorded_and_weighed_again_at_its_release(book: Book) -> None:
    book.see(REBOOT)
    assert state(book, "hold", "eve") == "held"
    assert state(book, "approve", "alice") == "held"
    assert state(book, "approve", "bob") == "held"
    assert not book.said("approval.granted")
    assert state(book, "release", "eve", message_id="m") == "granted"
    assert cause(book, "approval.granted") == "m"
    assert data(book, "approval.granted")["principal"] == "client:bob"
    assert [one.data["votes"] for one in book.said("approval.recorded")] == [0, 1, 2, 2]
    assert [one.decision for one in book.stands().decisions] == ["approve", "approve"]


def test_a_release_is_the_cause_of_the_automatic_grant_that_it_lets_go(book: Book) -> None:
    book.see(FREEZE)
    book.submit("hold", "eve", FREEZE)
    book.see(USER)
    assert book.grants == []
    assert state(book, "release", "eve") == "granted"
    assert cause(book, "approval.granted") == book.said("approval.recorded")[-1].id


def test_a_release_long_ago_is_the_cause_of_nothing(book: Book) -> None:
    book.see(FREEZE)
    book.submit("hold", "eve", FREEZE)
    book.submit("release", "eve", FREEZE)
    book.clock.turn(1)
    book.see(USER)
    assert cause(book, "approval.granted") == book.said("event.updated")[0].id


def test_what_a_release_is_answered(book: Book) -> None:
    book.see(REBOOT)
    book.submit("hold", "eve")
    assert state(book, "release", "eve") == "released"
    book.submit("hold", "eve")
    book.submit()
    assert state(book, "release", "eve") == "pending"
    book.submit("hold", "eve")
    book.submit("hold", "mallory")
    book.submit(by="bob")
    assert state(book, "release", "eve") == "held"
    assert state(book, "release", "mallory") == "granted"


def test_an_operator_releases_all(book: Book) -> None:
    book.see(USER, event("E-2", event_source="User"))
    book.submit("hold", "eve", USER)
    book.submit("hold", "mallory", USER)
    assert book.submit("release", "eve", USER).body["state"] == "held"
    book.submit("hold", "eve", USER)
    assert state(book, "release", OPERATOR, of=USER) == "granted"


def test_each_holder_has_one_hold_whatever_revision_it_was_for(book: Book) -> None:
    book.see(REBOOT)
    first = book.submit("hold", "eve")
    assert book.submit("hold", "eve") == first
    book.see(event(resources=("db-2",)))
    assert len(book.stands().active_holds) == 1
    book.submit("hold", "eve", event(resources=("db-2",)))
    assert len(book.stands().active_holds) == 1
    assert state(book, "release", "eve", revision="whatever") == "released"


def test_a_hold_stops_what_is_granted_until_the_claim(book: Book) -> None:
    book.see(USER)
    assert state(book, "hold", "eve", of=USER) == "held"
    assert claim(book) == []
    assert state(book, "release", "eve", of=USER) == "granted"
    assert len(book.said("approval.granted")) == 1
    (claimed,) = claim(book)
    assert claimed.event_id == "E-1"
    assert book.submit("hold", "eve", USER).status == 409


def test_an_expired_hold_is_told_as_a_release_and_rules_are_weighed_again(book: Book) -> None:
    book.close()
    book.crash(SETTINGS.model_copy(update={"hold_expires": 60.0}))
    book.see(REBOOT)
    book.submit("hold", "eve")
    book.submit()
    book.submit(by="bob")
    assert book.step() == NOON + timedelta(seconds=60)
    book.clock.turn(60)
    for _ in range(3):
        book.step()
    hold, release = book.said("approval.recorded")[0], book.said("approval.recorded")[-1]
    assert {key: release.data[key] for key in ("decision", "principal", "channel", "votes")} == {
        "decision": "release",
        "principal": "relay",
        "channel": "relay",
        "votes": 2,
    }
    assert HOLD_NOTICE in release.data["reason"]
    assert release.attributes["causationid"] == hold.id
    assert cause(book, "approval.granted") == release.id
    assert len(book.said("approval.recorded")) == 4
    assert [one.decision for one in book.stands().decisions] == ["approve", "approve"]


def test_an_expired_hold_is_told_before_its_holder_holds_again(book: Book) -> None:
    book.close()
    book.crash(SETTINGS.model_copy(update={"hold_expires": 60.0}))
    book.see(REBOOT)
    book.submit("hold", "eve")
    book.clock.turn(61)
    book.submit("hold", "eve")
    assert [one.data["principal"] for one in book.said("approval.recorded")] == [
        "client:eve",
        "relay",
        "client:eve",
    ]


# --- the claim, and what comes of it


def test_a_claim_is_in_the_journal_after_the_grant_and_says_what_will_be_sent(book: Book) -> None:
    book.see(USER)
    (claimed,) = claim(book)
    kinds = [row.kind for row in read_rows(book.connection)]
    assert kinds == ["event.scheduled", "approval.granted", "claim"]
    note = orjson.loads(list(read_rows(book.connection))[-1].body)
    assert note == {
        "eventId": "E-1",
        "revision": USER.revision,
        "rule": "users",
        "approvalId": claimed.grant.approval_id,
        "grant": claimed.grant.id,
        "attempt": 1,
    }
    assert book.grants[0].state == "sent"


def test_a_claim_without_an_answer_is_repeated_while_the_event_is_as_it_was(book: Book) -> None:
    book.see(USER)
    claim(book)
    book.crash()
    (again,) = claim(book)
    assert again.grant.attempts == 1
    accept(book, [again])
    assert data(book, "startrequest.accepted")["attempts"] == 2
    assert claim(book) == []


@pytest.mark.parametrize(
    ("then", "words"),
    [
        ((), "ended"),
        ((event(event_source="User", event_status="Started", not_before=None),), "started"),
        ((event(event_source="User", resources=("db-2",)),), "changed"),
        ((event(event_source="User", due=1000),), "changed"),
    ],
)
def test_a_claim_without_an_answer_is_never_repeated_otherwise(
    book: Book, then: tuple[Any, ...], words: str
) -> None:
    book.see(USER)
    (before,) = claim(book)
    book.crash()
    book.see(*then, step=False)
    assert [one.grant.id for one in claim(book) if one.grant.id == before.grant.id] == []
    for _ in range(3):
        book.step()
        book.crash()
    told = data(book, "startrequest.failed")
    assert (told["status"], told["attempts"]) == (None, 1)
    assert words in told["reason"]
    assert "not known" in told["reason"]


def test_only_grants_that_were_asked_for_are_claimed(book: Book) -> None:
    book.see(USER, event("E-2", event_source="User"))
    wanted = book.grants[1:]
    assert [
        one.event_id for one in book.do(lambda tx: book.ledger.claim(tx, wanted, book.clock.now()))
    ] == ["E-2"]


def test_not_before_passes_while_granted(book: Book) -> None:
    book.see(USER)
    assert book.step() == NOON + timedelta(seconds=900)
    book.clock.turn(900)
    assert claim(book) == []
    for _ in range(2):
        book.step()
    told = data(book, "startrequest.failed")
    assert (told["status"], told["attempts"]) == (None, 0)
    assert "NotBefore" in told["reason"]


def test_a_vote_expires_while_granted(book: Book) -> None:
    book.see(REBOOT)
    book.submit()
    book.clock.turn(100)
    book.submit(by="bob")
    book.clock.turn(200)
    assert claim(book) == []
    book.step()
    assert "expired" in data(book, "startrequest.failed")["reason"]
    assert data(book, "approval.voided")["why"] == "expired"
    assert book.submit().body["state"] == "granted"
    assert len(book.said("approval.granted")) == 2


def test_what_was_accepted_is_told_once_with_its_cause_and_its_votes_have_served(
    book: Book,
) -> None:
    book.see(ONE)
    book.submit(of=ONE)
    accept(book, claim(book))
    told = data(book, "startrequest.accepted")
    assert (told["status"], told["attempts"], told["reason"]) == (200, 1, None)
    assert cause(book, "startrequest.accepted") == book.said("approval.granted")[0].id
    book.see(event(event_type="Redeploy", event_status="Started", not_before=None))
    book.see()
    assert book.said("event.started")[0].data["approvedByRelay"] is True
    assert book.said("event.ended")[0].data["approvedByRelay"] is True
    assert not book.said("approval.voided", "startrequest.failed")


def test_an_answer_that_comes_after_started_was_seen_is_the_only_thing_told(book: Book) -> None:
    book.see(ONE)
    book.submit(of=ONE)
    claims = claim(book)
    book.ledger.in_flight = frozenset({claims[0].grant.id})
    book.see(event(event_type="Redeploy", event_status="Started", not_before=None))
    assert not book.said("startrequest.failed", "approval.voided")
    accept(book, claims)
    book.ledger.in_flight = frozenset()
    book.step()
    assert book.names()[-1] == "startrequest.accepted"
    assert book.said("event.started")[0].data["approvedByRelay"] is False


def test_what_imds_refused_is_told_once_and_never_tried_again(book: Book) -> None:
    book.see(USER)
    book.do(lambda tx: book.ledger.failed(tx, claim_in(tx), 400, "400: wrong", book.clock.now()))
    for _ in range(2):
        book.step()
        book.crash()
    told = data(book, "startrequest.failed")
    assert (told["status"], told["attempts"], told["reason"]) == (400, 1, "400: wrong")
    assert claim(book) == []
    assert len(book.grants) == 1
    assert book.submit(by="eve", of=USER).status == 409


def claim_in(tx: Any) -> list[Claim]:
    """Claim everything that is open, in a transaction that goes on."""
    for grant in tx.decisions.open_grants():
        tx.decisions.claim(grant.id)
    return [Claim(grant, "E-1") for grant in tx.decisions.open_grants()]


def test_a_start_request_without_an_answer_keeps_its_claim_and_the_last_status(book: Book) -> None:
    book.see(USER)
    claims = claim(book)
    book.do(lambda tx: book.ledger.unanswered(tx, claims, 503))
    assert (book.grants[0].state, book.grants[0].status) == ("sent", 503)
    book.see()
    assert data(book, "startrequest.failed")["status"] == 503


def test_a_400_to_a_request_for_several_events_says_nothing_about_one_of_them(book: Book) -> None:
    """Given up for another reason meanwhile, each may still be approved: IMDS has refused neither by itself."""
    book.see(USER, event("E-2", event_source="User"))
    both = book.do(lambda tx: book.ledger.claim(tx, tx.decisions.open_grants(), book.clock.now()))
    book.do(lambda tx: book.ledger.unanswered(tx, both, 400))
    book.crash(SETTINGS.model_copy(update={"rules": ()}))
    book.step()
    assert [(grant.state, grant.status) for grant in book.grants] == [
        ("failed", 400),
        ("failed", 400),
    ]
    book.crash(SETTINGS)
    book.step()
    assert [grant.state for grant in book.grants if grant.status is None] == ["granted", "granted"]


def test_an_event_that_flips_back_is_granted_anew_and_the_first_grant_is_told_failed(
    book: Book,
) -> None:
    book.see(USER)
    first = claim(book)
    book.see(event(event_source="User", resources=("db-2",)))
    book.see(USER)
    assert [grant.state for grant in book.grants] == ["failed", "failed", "granted"]
    assert len(book.said("startrequest.failed")) == 2
    (again,) = claim(book)
    assert again.grant.id != first[0].grant.id


def test_a_change_after_it_was_accepted_is_granted_for_itself(book: Book) -> None:
    book.see(USER)
    accept(book, claim(book))
    book.see(event(event_source="User", due=1000))
    assert [grant.state for grant in book.grants] == ["accepted", "granted"]
    assert not book.said("startrequest.failed")


# --- who was the cause, over AMQP


def test_a_message_is_the_cause_of_all_that_it_brings_about(book: Book) -> None:
    book.see(ONE)
    book.submit(by=caller("alice", channel="amqp"), of=ONE, request_id="m", message_id="m")
    accept(book, claim(book))
    assert [
        cause(book, name)
        for name in ("approval.recorded", "approval.granted", "startrequest.accepted")
    ] == ["m"] * 3


def test_a_message_is_not_the_cause_of_what_another_completed(book: Book) -> None:
    book.see(REBOOT)
    book.submit(request_id="m", message_id="m")
    book.submit(by="bob")
    accept(book, claim(book))
    assert cause(book, "approval.granted") == book.said("approval.recorded")[1].id
    assert cause(book, "startrequest.accepted") == book.said("approval.granted")[0].id


def test_a_clock_that_was_set_back_changes_no_cause(book: Book) -> None:
    book.see(REBOOT)
    book.submit()
    book.clock.set(NOON - timedelta(hours=1))
    book.submit(by="bob")
    assert cause(book, "approval.granted") == book.said("approval.recorded")[1].id


# --- the switch, and the dry run


@pytest.mark.parametrize(
    ("expected", "file", "remembered", "trusted"),
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
    expected: Mode, file: dict[str, Any], remembered: Mode, trusted: bool
) -> None:
    assert stricter(ApprovalsSettings.model_validate(file), remembered, trusted=trusted) == expected


def test_the_switch_survives_a_restart_and_stops_a_claim(book: Book) -> None:
    book.see(USER)
    book.switch("off")
    book.crash()
    assert claim(book) == []
    assert book.submit(by="eve", of=USER).status == 503
    book.switch("on")
    assert len(claim(book)) == 1


def test_a_store_that_cannot_be_compared_with_this_vm_starts_nothing(book: Book) -> None:
    book.trusted = False
    book.crash()
    book.see(USER)
    assert book.grants == []
    assert book.submit(by="eve", of=USER).status == 503


def test_a_dry_run_says_everything_and_sends_nothing(book: Book) -> None:
    book.switch("dry-run")
    book.see(REBOOT)
    book.submit(by="mallory")
    book.submit()
    assert book.submit(by="bob").body["state"] == "granted"
    assert claim(book) == []
    book.see(event(event_status="Started", not_before=None))
    assert book.names() == [
        "approval.refused",
        "approval.recorded",
        "approval.recorded",
        "approval.granted",
        "approval.voided",
    ]
    assert all(
        one.data["dryRun"] is True for one in book.said() if one.name.startswith("approval.")
    )


def test_what_was_said_in_a_dry_run_never_becomes_real(book: Book) -> None:
    book.switch("dry-run")
    book.see(REBOOT, event("E-2", event_source="User"))
    book.submit()
    book.submit(by="bob")
    book.switch("on")
    assert [one.event_id for one in claim(book)] == ["E-2"]
    assert book.submit().body["votes"] == 1
    assert book.submit(by="bob").body["state"] == "granted"
    assert "dryRun" not in book.said("approval.recorded")[-1].data
    assert not book.said("startrequest.failed")


def test_what_was_meant_survives_a_dry_run(book: Book) -> None:
    book.see(REBOOT)
    book.submit()
    book.switch("dry-run")
    assert book.submit().body["votes"] == 1
    assert book.submit(request_id="again").body["votes"] == 1
    book.switch("on")
    assert book.submit(by="bob").body["state"] == "granted"


def test_votes_of_a_dry_run_are_voided_as_such_also_later(book: Book) -> None:
    book.switch("dry-run")
    book.see(REBOOT)
    book.submit()
    book.switch("on")
    book.see()
    assert data(book, "approval.voided")["dryRun"] is True


def test_a_grant_that_was_meant_is_told_failed_also_in_a_dry_run(book: Book) -> None:
    book.see(USER)
    book.switch("dry-run")
    book.see()
    assert len(book.said("startrequest.failed")) == 1


def test_a_hold_given_in_a_dry_run_holds(book: Book) -> None:
    book.switch("dry-run")
    book.see(USER)
    book.submit("hold", "eve", USER)
    book.switch("on")
    assert claim(book) == []


def test_a_hold_belongs_to_the_event_id_also_when_it_was_gone_for_a_while(book: Book) -> None:
    """A document that is empty once must not let an automatic rule start what somebody holds."""
    book.see(USER)
    book.submit("hold", "eve", USER)
    book.see()
    book.crash()
    book.see(USER)
    assert claim(book) == []
    assert len(book.stands().active_holds) == 1
    assert book.submit("release", "eve", USER).body["state"] == "granted"
    assert claim(book) != []


def test_a_hold_that_expires_is_told_of_the_event_that_is_back_and_of_none_that_is_gone(
    book: Book,
) -> None:
    for back in (True, False):
        of = event("E-2" if back else "E-3", event_source="User", due=1e6)
        book.see(of)
        book.submit("hold", "eve", of, event_id=of.event_id)
        book.see()
        if back:
            book.see(of)
        said = len(book.said("approval.recorded"))
        book.clock.turn(86401)
        book.step()
        assert len(book.said("approval.recorded")) - said == back
        assert not book.connection.execute("SELECT 1 FROM decision WHERE counts").fetchall()
        book.see()


def test_a_hold_that_was_meant_is_not_released_in_a_dry_run(book: Book) -> None:
    """Whoever released it was told that nothing would happen."""
    book.see(USER)
    book.submit("hold", "eve", USER)
    book.switch("dry-run")
    answer = book.submit("release", "eve", USER)
    assert (answer.status, answer.body["state"]) == (202, "held")
    assert book.submit("release", caller("root", "operate"), USER).body["state"] == "held"
    book.switch("on")
    assert claim(book) == []
    assert book.submit("release", "eve", USER).body["state"] == "granted"
    assert claim(book) != []


def test_a_hold_of_a_dry_run_is_released_in_it(book: Book) -> None:
    book.switch("dry-run")
    book.see(USER)
    book.submit("hold", "eve", USER)
    assert book.submit("release", "eve", USER).body["state"] == "granted"
    assert not book.stands().active_holds


# --- other rules after a restart

_NO_RULES = ApprovalsSettings()
_ALL_AUTOMATIC = ApprovalsSettings.model_validate(
    {"rules": [{"name": "all", "approve": "automatic"}]}
)
_ALL_VOTE = ApprovalsSettings.model_validate(
    {"rules": [{"name": "all", "approve": {"votes": 1, "from": ["client:alice"]}}]}
)


@pytest.mark.parametrize("settings", [_NO_RULES, _ALL_VOTE], ids=["no rules", "votes"])
def test_a_grant_fails_if_its_rule_is_gone_or_needs_votes_now(
    approvals: ApprovalFile, settings: ApprovalsSettings
) -> None:
    approvals.record_document(USER_REBOOT)
    approvals.crash(settings)
    assert approvals.claim() == []
    approvals.apply_transitions()
    assert "rules changed" in approvals.data("startrequest.failed")["reason"]


def test_votes_count_by_the_current_rule(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    approvals.submit(by="drain")
    approvals.crash(_ALL_VOTE)
    assert approvals.status().vote_count == 0
    approvals.apply_transitions()
    assert approvals.grants == []
    assert approvals.submit().body["state"] == "granted"


def test_a_grant_by_votes_stays_if_the_rule_is_automatic_now(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT)
    approvals.submit()
    approvals.submit(by="bob")
    approvals.crash(_ALL_AUTOMATIC)
    approvals.apply_transitions()
    assert len(approvals.claim()) == 1
    assert len(approvals.grants) == 1


def test_the_summary_says_what_is_missing_and_when_voting_closes(approvals: ApprovalFile) -> None:
    approvals.record_document(REBOOT, build_event("E-2", event_type="Freeze", due=None))
    approvals.submit()
    assert approval_summary(approvals.status()) == {
        "state": "pending",
        "rule": "databases",
        "votes": 1,
        "required": 2,
        "missing": 1,
        "closes": "2026-04-11T12:14:00Z",
    }
    assert approval_summary(approvals.status("E-2")) == {
        "state": "none",
        "rule": None,
        "votes": 0,
        "required": 0,
        "missing": 0,
        "closes": None,
    }
    book.see()
    assert approval_summary(book.stands())["missing"] == 0


# --- one transaction


def test_a_decision_that_cannot_be_written_whole_is_not_written_at_all(book: Book) -> None:
    book.see(ONE)
    before = list(read_rows(book.connection))

    def work(tx: Any) -> None:
        request: DecisionRequest = approval(of=ONE)
        book.ledger.submit(tx, request)
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        book.do(work)
    book.crash()
    assert list(read_rows(book.connection)) == before
    assert book.grants == []
