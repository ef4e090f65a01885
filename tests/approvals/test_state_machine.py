"""Random sequences of documents, votes, holds, crashes and answers, compared with a small model.

The engine, the recorder and the file are real; the state machine does what the gate does between
them. It checks the journal, and every StartRequest that would be sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

import orjson
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from relay.approvals import ApprovalsSettings, ClaimedGrant
from relay.approvals.transitions import due_transitions, next_change_at
from relay.events.cloudevent import CloudEvent
from relay.events.model import ScheduledEvent
from relay.store import Decision, Mode
from relay.store.approvals import Memory
from relay.store.audit import verify_journal
from relay.store.journal import read_all_rows
from relay.store.rows import PageLimit
from relay.store.transaction import Transaction
from tests.approvals.builders import (
    NO_EVENTS,
    ApprovalFile,
    build_caller,
    build_creation,
    build_event,
    build_request,
    open_grants,
)
from tests.approvals.running_gate import ANSWERS, MachineOnFile
from tests.clocks import NOON, ManualClock
from tests.depth import depth

_VOTERS = ["client:alice", "client:bob", "client:carol"]
_USERS = {"name": "users", "match": {"event_source": ["User"]}, "approve": "automatic"}


def _reboots(**quorum: Any) -> dict[str, Any]:
    approve = {"votes": 1, "from": _VOTERS, "expires": "2m"} | quorum
    return {"name": "reboots", "match": {"event_type": ["Reboot"]}, "approve": approve}


_USUAL, _LENIENT = [_USERS, _reboots(votes=2, close_before="30s")], [_USERS, _reboots()]
_WINDOW = {
    "name": "window",
    "match": {"event_type": ["Reboot"], "time": {"from": "12:02", "to": "12:06"}},
    "approve": {"votes": 1, "from": ["group:team"]},
}
_TIMED = [_USERS, _WINDOW, _USUAL[1]]
_PRINCIPALS = {"ann": ["client:alice", "client:carol", "mtls:ann.internal"]}
_RULES: dict[str, ApprovalsSettings] = {
    name: ApprovalsSettings.model_validate(
        {
            "hold_expires": "90s",
            "rules": rules,
            "people": _PRINCIPALS,
            "groups": {"team": ["person:ann", "client:bob"]},
        }
    )
    for name, rules in {"usual": _USUAL, "lenient": _LENIENT, "timed": _TIMED, "none": []}.items()
}
_LONG_AGO = NOON - timedelta(days=1)
_OPENS, _CLOSES = NOON + timedelta(minutes=2), NOON + timedelta(minutes=6)
_IDS = st.sampled_from(["A", "B"])
_KINDS: dict[str, dict[str, Any]] = {
    "user": {"event_source": "User"},
    "user, other machine": {"event_source": "User", "resources": ("db-2",)},
    "voted": {},
    "voted, other machine": {"resources": ("db-2",)},
    "voted, other words": {"description": "x"},
    "without a rule": {"event_type": "Freeze"},
    "started": {"event_status": "Started", "not_before": None},
    "odd": {"event_source": "User", "event_status": "Paused"},
}
_PEOPLE = st.sampled_from(["alice", "bob", "carol", "eve"])


@dataclass(frozen=True)
class Requirement:
    """What the rules require for a Reboot at a moment."""

    people: int
    vote_lifetime: timedelta | None = timedelta(minutes=2)


def requirement(rules: str, now: datetime) -> Requirement:
    """The window of `timed` needs one person; otherwise it needs two."""
    if rules == "timed" and _OPENS <= now < _CLOSES:
        return Requirement(1, None)
    return Requirement(1 if rules == "lenient" else 2)


class Vote(NamedTuple):
    revision: str
    given_at: datetime
    expires_at: datetime


_CONDITIONS: dict[str, dict[str, Any]] = {
    "everything": {},
    "of users": {"event_source": ["User"]},
    "of a machine": {"resources": ["db-2"]},
}


@dataclass
class Ahead:
    hold_id: str
    conditions: str
    starts: datetime
    ends: datetime

    def holds(self, event: ScheduledEvent, now: datetime) -> bool:
        is_met = {
            "everything": True,
            "of users": event.event_source == "User",
            "of a machine": "db-2" in event.resources,
        }[self.conditions]
        return is_met and self.starts <= now < self.ends


@dataclass
class Model:
    seen: ScheduledEvent
    votes: dict[str, Vote] = field(default_factory=dict)
    """The newest vote of each voter."""
    holds: dict[tuple[str, bool], datetime] = field(default_factory=dict)
    """When each hold expires, by holder and by whether it was taken in a dry run."""
    refused: set[str] = field(default_factory=set)
    """The revisions that IMDS refused."""
    ahead: list[Ahead] = field(default_factory=list)
    """The standing holds that are not over, of all events."""

    def may_start(self, rules: str, now: datetime) -> bool:
        """Whether a rule or quorum allows the Scheduled event, in time and without a hold."""
        if any(hold.holds(self.seen, now) for hold in self.ahead):
            return False
        if self.seen.event_status != "Scheduled" or (
            self.seen.not_before_time is not None and now >= self.seen.not_before_time
        ):
            return False
        if any(until > now for until in self.holds.values()) or rules == "none":
            return False
        if self.seen.event_source == "User":
            return True
        voters = {
            voter
            for voter, vote in self.votes.items()
            if vote.revision == self.seen.revision and self.counts_until(vote, rules, now) > now
        }
        voters -= {"eve"}
        required = requirement(rules, now).people
        return self.seen.event_type == "Reboot" and len(people(voters)) >= required

    def counts_until(self, vote: Vote, rules: str, now: datetime) -> datetime:
        """The shorter of the lifetime at the vote and the current one."""
        is_voted = self.seen.event_source != "User" and self.seen.event_type == "Reboot"
        lifetime = requirement(rules, now).vote_lifetime
        if rules == "none" or not is_voted or lifetime is None:
            return vote.expires_at
        return min(vote.expires_at, vote.given_at + lifetime)


def people(names: set[str]) -> set[str]:
    """The people behind these names: alice and carol are one person."""
    return {name.replace("carol", "alice") for name in names}


class _RolledBack(Exception):
    pass


@dataclass
class Post:
    """A StartRequest that was sent, between two crashes; ``answer`` is None if none came."""

    restarts: int
    occurrence: int
    revision: str
    answer: str | None = None


class Approvals(MachineOnFile):
    @initialize(
        rules=st.sampled_from(["usual", "timed"]),
        now=st.sampled_from([NOON, _OPENS]),
        opening=st.sampled_from([None, ("bob", 20.0), ("carol", 20.0), ("carol", 50.0)]),
    )
    def begin(self, rules: str, now: datetime, opening: tuple[str, float] | None) -> None:
        """Begin with two events and an empty file, sometimes with a rare sequence."""
        self.ruleset, self.mode = rules, "on"
        self.clock = ManualClock(now)
        self.approvals = ApprovalFile(self.folder / "relay.db", _RULES[rules], clock=self.clock)
        self.closing.callback(self.approvals.close)
        self.closing.callback(lambda: verify_journal(self.approvals.connection))
        self.journaled: list[CloudEvent] = []
        self.read_to = 0
        """The position in the journal up to which it holds them."""
        self.azure: dict[str, ScheduledEvent] = {}
        self.model: dict[str, Model] = {}
        self.holds_of_ended: dict[str, dict[tuple[str, bool], datetime]] = {}
        """The holds of events that left the document; they return with the event."""
        self.claims_in_flight: list[ClaimedGrant] = []
        self.restarts, self.posts = 0, list[Post]()
        self.ahead: list[Ahead] = []
        self.azure_says("A", "voted", 400.0)
        self.azure_says("B", "user", 400.0)
        self.poll(crash=False)
        if opening is not None:
            self.vote_wait_and_claim(*opening, late=False)

    # --- Azure

    @rule(
        of=_IDS,
        kind=st.sampled_from([*_KINDS, "user", "voted", "voted"]),
        due=st.sampled_from([None, 45.0, 400.0]),
    )
    def azure_says(self, of: str, kind: str, due: float | None) -> None:
        """Azure's document changes; the relay has not read it yet."""
        self.azure[of] = build_event(of, due=due, at=self.clock.now(), **_KINDS[kind])

    @rule(of=_IDS)
    def azure_forgets(self, of: str) -> None:
        """The event ended, or was canceled."""
        self.azure.pop(of, None)

    @rule(crash=st.sampled_from([False, False, True]))
    def poll(self, crash: bool) -> None:
        """Read the document; perhaps crash before any transition."""
        self._read()
        if crash:
            self.crash()
        self._step()

    def _read(self) -> None:
        self.approvals.record_document(*self.azure.values(), step=False)
        for event_id in {*self.model, *self.azure}:
            newest = self.azure.get(event_id)
            if newest is None:
                self.holds_of_ended[event_id] = self.model.pop(event_id).holds
            elif event_id in self.model:
                self.model[event_id].seen = newest
            else:
                holds = self.holds_of_ended.pop(event_id, {})
                self.model[event_id] = Model(newest, holds=holds, ahead=self.ahead)
        self._void()

    def _void(self) -> None:
        in_flight = {(claim.event_id, claim.grant.revision) for claim in self.claims_in_flight}
        for of, model in self.model.items():
            kept = {
                model.seen.revision,
                *(revision for event_id, revision in in_flight if event_id == of),
            }
            model.votes = {
                voter: vote for voter, vote in model.votes.items() if vote.revision in kept
            }

    def _settle(self, of: str) -> None:
        """Forget what has expired now, so that a clock set back does not revive it."""
        model, now = self.model[of], self.clock.now()
        in_flight = {each.grant.revision for each in self.claims_in_flight if each.event_id == of}
        model.holds = {holder: until for holder, until in model.holds.items() if until > now}
        over = model.seen.not_before_time is not None and now >= model.seen.not_before_time
        model.votes = {
            voter: vote
            for voter, vote in model.votes.items()
            if vote.revision in in_flight
            or (model.counts_until(vote, self.ruleset, now) > now and not over)
        }

    def _settle_all(self) -> None:
        for of in self.model:
            self._settle(of)

    def _settle_with(self, of: str) -> None:
        """Forget what has expired when somebody decides about an event."""
        if any(hold.ends <= self.clock.now() for hold in self.ahead):
            self._settle_all()  # all events are checked at the end of a standing hold
            self._expire_ahead()
        elif of in self.model:
            self._settle(of)

    def _expire_ahead(self) -> None:
        self.ahead[:] = [hold for hold in self.ahead if hold.ends > self.clock.now()]

    def _step(self) -> None:
        self._settle_all()
        self._expire_ahead()
        self.approvals.apply_transitions()
        for of, model in self.model.items():
            grants = self.approvals.status(of).grants
            if (
                self.mode == "on"
                and model.may_start(self.ruleset, self.clock.now())
                and model.seen.revision not in model.refused
            ):
                current = [grant for grant in grants if grant.revision == model.seen.revision]
                being_sent = [grant for grant in grants if grant.state == "sent"]
                assert being_sent or any(
                    grant.state not in ("failed", "refused") for grant in current
                ), "a satisfied rule was forgotten"

    # --- time, operators, crashes

    @rule(seconds=st.sampled_from([1.0, 1.0, 20.0, 61.0, 130.0]), step=st.booleans())
    def time_passes(self, seconds: float, step: bool) -> None:
        """Time passes; the timer of the transitions may be late."""
        self.clock.advance(seconds)
        if step:
            self._step()

    @rule(back=st.sampled_from([30.0, 130.0, 3600.0]))
    def the_clock_is_set_back(self, back: float) -> None:
        self.clock.set_wall_clock(self.clock.now() - timedelta(seconds=back))

    @rule(mode=st.sampled_from(["on", "on", "on", "dry-run", "off"]))
    def switch(self, mode: Mode) -> None:
        self._settle_all()
        self._expire_ahead()
        self.mode = mode
        self.approvals.set_mode(mode)

    @rule()
    def crash(self) -> None:
        """Lose everything that is not on disk, and the answer to what is in flight."""
        self.approvals.crash()
        self.restarts += 1
        self.claims_in_flight = []
        self._void()

    @rule(rules=st.sampled_from(["usual", "usual", "timed", "timed", "lenient", "none"]))
    def restart_with_other_rules(self, rules: str) -> None:
        self.ruleset = rules
        self.approvals.settings = _RULES[rules]
        self.crash()
        self._step()

    @precondition(lambda self: not self.claims_in_flight)
    @rule(rules=st.sampled_from(["usual", "timed", "lenient", "none"]))
    def reload_other_rules(self, rules: str) -> None:
        """Take other rules over while the relay runs. It waits for a StartRequest in flight."""
        self.ruleset = rules
        self.approvals.reload(_RULES[rules])
        self._step()

    # --- people

    def _revision(self, of: str, known: bool) -> str:
        if not known and of in self.azure:
            return self.azure[of].revision
        return self.model[of].seen.revision if of in self.model else "none"

    @precondition(lambda self: self.model)
    @rule(
        who=_PEOPLE,
        of=_IDS,
        known=st.sampled_from([True, True, False]),
        request=st.sampled_from([None, None, "r1", "r2"]),
    )
    def vote(self, who: str, of: str, known: bool, request: str | None) -> None:
        """Vote for the state that the relay has read, or for the one that Azure has."""
        revision, now = self._revision(of, known), self.clock.now()
        before = self._count_events("approval.recorded")
        ids: dict[str, Any] = {"request_id": request, "digest": f"{of}{revision}"}
        answer = self.approvals.submit("approve", who, event_id=of, revision=revision, **ids)
        if not answer.repeat:
            self._settle_with(of)
        if (
            answer.status == 202
            and self.mode == "on"
            and self._count_events("approval.recorded") > before
        ):
            model = self.model[of]
            assert model.seen.revision == revision
            expires = (
                requirement(self.ruleset, now).vote_lifetime
                if model.seen.event_source != "User"
                else None
            )
            model.votes[who] = Vote(revision, now, now + (expires or timedelta(days=1)))

    @precondition(lambda self: self.model)
    @rule(of=_IDS, decision=st.sampled_from(["approve", "hold", "release"]))
    def what_follows_from_a_decision_is_rolled_back(self, of: str, decision: Any) -> None:
        """As on a full disk: nothing of it has happened."""
        now = self.clock.now()
        revision = self._revision(of, known=True)

        def work(tx: Transaction) -> None:
            engine = self.approvals.engine
            engine.decide(
                tx, build_request(decision, "alice", at=now, event_id=of, revision=revision)
            )
            engine.decide(tx, build_creation("alice", {}, at=now))
            engine.apply_due_transitions(tx, now)
            raise _RolledBack

        with suppress(_RolledBack):
            self.approvals.transact(work)

    @precondition(lambda self: self.model)
    @rule(of=_IDS, other=st.sampled_from(["bob", "carol"]))
    def two_vote(self, of: str, other: str) -> None:
        """Two votes at once: of two people, or of one person with two principals."""
        self.vote("alice", of, known=True, request=None)
        self.vote(other, of, known=True, request=None)

    @precondition(lambda self: "A" in self.model and not self.claims_in_flight)
    @rule(
        other=st.sampled_from(["bob", "carol"]),
        seconds=st.sampled_from([20.0, 50.0, 115.0]),
        late=st.booleans(),
    )
    def vote_wait_and_claim(self, other: str, seconds: float, late: bool) -> None:
        """Claim a while after the votes; the timer of the transitions may be late."""
        self.two_vote("A", other)
        self.time_passes(seconds, step=not late)
        self.claim(lost=False)
        if not self.claims_in_flight:
            self.claim(lost=False)

    @precondition(lambda self: self.model)
    @rule(who=st.sampled_from(["alice", "eve"]), of=_IDS)
    def hold(self, who: str, of: str) -> None:
        revision, now = self._revision(of, known=True), self.clock.now()
        before = self._count_events("approval.recorded")
        self._settle_with(of)
        answer = self.approvals.submit("hold", who, event_id=of, revision=revision)
        if answer.status == 202:
            occurrence = self.approvals.status(of).occurrence.id
            assert not any(
                claim.grant.occurrence == occurrence for claim in self.claims_in_flight
            ), "a hold was taken after the claim"
            if self._count_events("approval.recorded") > before:
                if self.mode == "on":
                    self.model[of].holds.pop((who, True), None)
                self.model[of].holds[who, self.mode == "dry-run"] = now + timedelta(seconds=90)

    @precondition(lambda self: any(model.holds for model in self.model.values()))
    @rule(who=st.sampled_from(["alice", "eve"]), of=_IDS, operator=st.booleans())
    def release(self, who: str, of: str, operator: bool) -> None:
        """Release one's own hold, or all holds."""
        by = build_caller(who, "operate") if operator else who
        self._settle_with(of)
        answer = self.approvals.submit(
            "release", by, event_id=of, revision=self._revision(of, known=True)
        )
        if answer.status == 202:
            holds = self.model[of].holds
            for holder, dry in list(holds):
                if (operator or holder == who) and (dry or self.mode == "on"):
                    del holds[holder, dry]
            now, model = self.clock.now(), self.model[of]
            left = any(until > now for until in holds.values())
            if not self.approvals.status(of).is_accepted_by_imds:
                left = left or any(hold.holds(model.seen, now) for hold in self.ahead)
            assert (answer.body["state"] == "held") == left

    @precondition(lambda self: len(self.ahead) < 3)
    @rule(
        conditions=st.sampled_from(list(_CONDITIONS)),
        starts=st.sampled_from([None, None, 20.0]),
        ends=st.sampled_from([50.0, 90.0, 400.0]),
    )
    def hold_ahead(self, conditions: str, starts: float | None, ends: float) -> None:
        self._settle_all()
        now = self.clock.now()
        answer = self.approvals.hold_ahead(
            "alice", _CONDITIONS[conditions], starts=starts, ends=ends
        )
        assert answer.status == 201
        # One that holds at once holds also after the clock was set back.
        begins = _LONG_AGO if starts is None else now + timedelta(seconds=starts)
        ends_at = now + timedelta(seconds=ends)
        self.ahead.append(Ahead(answer.body["holdId"], conditions, begins, ends_at))
        self._expire_ahead()

    @precondition(lambda self: self.ahead)
    @rule(which=st.integers(0, 2))
    def end_ahead(self, which: int) -> None:
        hold = self.ahead[which % len(self.ahead)]
        self._settle_all()
        answer = self.approvals.end_ahead(hold.hold_id)
        assert answer.status == (409 if hold.ends <= self.clock.now() else 200)
        self._expire_ahead()
        if answer.status == 200:
            self.ahead.remove(hold)

    # --- the gate

    @precondition(lambda self: not self.claims_in_flight)
    @rule(lost=st.sampled_from([False, False, False, True]))
    def claim(self, lost: bool) -> None:
        """Read afresh and claim; perhaps crash before the StartRequest is sent."""
        grants = self.approvals.transact(open_grants)
        self._read()
        self.approvals.engine.in_flight = {(grant.id, grant.attempts + 1) for grant in grants}
        self.claims_in_flight = self.approvals.claim(grants)
        assert len({claim.event_id for claim in self.claims_in_flight}) == len(
            self.claims_in_flight
        ), "one event twice in flight"
        for claim in self.claims_in_flight:
            self._check(claim)
            self.posts.append(Post(self.restarts, claim.grant.occurrence, claim.grant.revision))
        if lost:
            self.crash()
        elif not self.claims_in_flight:
            self.approvals.set_in_flight()
        self._step()

    def _check(self, claim: ClaimedGrant) -> None:
        """Check by the model and by the journal that the StartRequest is allowed."""
        model, now = self.model[claim.event_id], self.clock.now()
        assert self.mode == "on"
        assert model.seen == self.azure[claim.event_id]
        assert claim.grant.revision == model.seen.revision
        assert model.may_start(self.ruleset, now)
        assert model.seen.revision not in model.refused
        for post in self.posts:
            if post.occurrence == claim.grant.occurrence:
                assert post.answer is not None or post.restarts < self.restarts, (
                    "two in flight for one event"
                )
                assert post.answer != "200" or post.revision != claim.grant.revision, (
                    "started twice"
                )
        journal = [
            (row.kind, orjson.loads(row.body).get("data", {}))
            for row in read_all_rows(self.approvals.connection)
            if row.event_key == claim.event_id.lower()
        ]
        about_revision = [
            (kind, data)
            for kind, data in journal
            if data.get("revision") == claim.grant.revision and "dryRun" not in data
        ]
        granted_ids = {
            data["approvalId"] for kind, data in about_revision if kind == "approval.granted"
        }
        assert claim.grant.approval_id in granted_ids
        if model.seen.event_source != "User":
            self._check_quorum(about_revision, now)

    def _check_quorum(self, journal: list[tuple[str, dict[str, Any]]], now: datetime) -> None:
        required = requirement(self.ruleset, now)
        voters = {
            data["principal"]
            for kind, data in journal
            if kind == "approval.recorded" and data["decision"] == "approve"
        }
        assert len(people(voters)) >= required.people

    @precondition(lambda self: self.claims_in_flight)
    @rule(answer=st.sampled_from([*ANSWERS, "200"]))
    def imds_answers(self, answer: str) -> None:
        """IMDS accepts or refuses, or fails; with a timeout, Azure has started the events."""
        claims = self.claims_in_flight
        for post in self.posts[-len(claims) :]:
            post.answer = answer
        self.approvals.answer(claims, ANSWERS[answer])
        for claim in claims if answer == "400" else ():
            # An event that came back meanwhile is another occurrence, which nobody refused.
            if (
                claim.event_id in self.model
                and self.approvals.status(claim.event_id).occurrence.id == claim.grant.occurrence
            ):
                self.model[claim.event_id].refused.add(claim.grant.revision)
        if answer == "timeout":
            for claim in claims:
                if claim.event_id in self.azure:
                    self.azure_says(claim.event_id, "started", None)
        self.approvals.set_in_flight()
        self.claims_in_flight = []
        self._void()
        self._step()

    # --- invariants

    def _events(self, *names: str) -> list[CloudEvent]:
        """Return the CloudEvents with these names, oldest first. Each row is read once."""
        rows = self.approvals.connection.execute(
            "SELECT position, kind, body FROM journal WHERE position > ? ORDER BY position",
            (self.read_to,),
        )
        for position, kind, body in rows.fetchall():
            self.read_to = position
            if kind not in NO_EVENTS:
                self.journaled.append(CloudEvent.parse(body))
        return [recorded for recorded in self.journaled if recorded.name in names]

    def _count_events(self, name: str) -> int:
        return len(self._events(name))

    @invariant()
    def every_grant_is_open_or_has_one_answer(self) -> None:
        events = self._events("approval.granted", "startrequest.accepted", "startrequest.failed")
        grants = self.approvals.grants
        assert len(grants) == sum(recorded.name == "approval.granted" for recorded in events)
        for grant in grants:
            answers = [
                each.name for each in events if each.attributes.get("causationid") == grant.cause
            ]
            state = "failed" if grant.state == "refused" else grant.state
            has_answer = state in ("accepted", "failed")
            assert answers == ([f"startrequest.{state}"] if has_answer else [])
        sent = [grant.occurrence for grant in grants if grant.state == "sent"]
        assert len(sent) == len(set(sent)), "two in flight for one event"
        in_flight_ids = {claim.grant.id for claim in self.claims_in_flight}
        assert in_flight_ids <= {grant.id for grant in grants if grant.state == "sent"}

    @invariant()
    def the_standing_holds_are_those_of_the_model(self) -> None:
        holds = self.approvals.transact(lambda tx: tx.standing_holds.list_open())
        assert {hold.hold_id for hold in holds} == {hold.hold_id for hold in self.ahead}

    @invariant()
    def what_is_remembered_is_what_the_file_says(self) -> None:

        def read(tx: Transaction) -> object:
            return (
                [tx.approvals.of_key(of.lower()) for of in self.model],
                tx.standing_holds.list_open(),
                tx.approvals.occurrences_to_check(all_live=False),
            )

        assert self.approvals.transact(read) == self.approvals.transact(read, memory=Memory())

    @invariant()
    def nothing_follows_for_an_event_that_no_check_considers(self) -> None:
        """What `occurrences_to_check` leaves out has no transition.

        It has none now, and none by time alone.
        """

        def check(tx: Transaction) -> None:
            engine, now = self.approvals.engine, self.approvals.clock.now()
            considered = tx.approvals.occurrences_to_check(all_live=engine.acts_unasked)
            occurrences, _ = tx.occurrences.occurrence_page(None, PageLimit(1000))
            for occurrence in occurrences:
                is_considered = occurrence in considered
                of_key = tx.approvals.occurrences_to_check(
                    all_live=engine.acts_unasked, event_keys=[occurrence.key]
                )
                assert is_considered == (occurrence in of_key)
                if not is_considered:
                    status = engine.status(tx, occurrence, now)
                    assert due_transitions(status) == []
                    # The holds of an event that is gone wait until it comes back.
                    assert not occurrence.live or next_change_at(status) is None

        self.approvals.transact(check)

    @invariant()
    def no_vote_vanishes_without_an_event(self) -> None:
        """Each vote counts, was voided or replaced, or was used by an accepted StartRequest."""
        events = self._events("approval.recorded", "approval.voided", "startrequest.accepted")
        keys = {recorded.subject.lower() for recorded in events if recorded.subject}
        counting_ids = {
            decision.approval_id
            for key in keys
            for decision in self.approvals.transact(partial(_decisions_of, key))
        }
        votes = [
            (index, recorded)
            for index, recorded in enumerate(events)
            if recorded.name == "approval.recorded" and recorded.data["decision"] == "approve"
        ]
        voided_count = sum(recorded.name == "approval.voided" for recorded in events)
        assert voided_count <= len(votes)
        accepted_subjects = {
            recorded.subject for recorded in events if recorded.name == "startrequest.accepted"
        }
        for index, vote in votes:
            if vote.data["approvalId"] in counting_ids or vote.subject in accepted_subjects:
                continue
            later = [each for each in events[index + 1 :] if each.subject == vote.subject]
            is_voided = any(recorded.name == "approval.voided" for recorded in later)
            is_replaced = any(
                recorded.name == "approval.recorded"
                and recorded.data["principal"] == vote.data["principal"]
                for recorded in later
            )
            assert is_voided or is_replaced


def _decisions_of(key: str, tx: Transaction) -> Sequence[Decision]:
    return tx.approvals.of_key(key).decisions


TestApprovals = Approvals.TestCase
TestApprovals.settings = settings(max_examples=depth(1000, 20), stateful_step_count=50)
