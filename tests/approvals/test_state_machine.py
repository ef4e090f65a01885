"""The whole of approvals against a model of a few lines: documents, clock, votes, holds, the switch, crashes, answers of IMDS.

The ledger, the recorder and the file are the real ones; the machine does what the gate does between them. What has to hold
is checked from the outside: from the journal, and from what a StartRequest would be sent for.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import orjson
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from typing_extensions import override  # in typing from Python 3.12

from relay.approvals import ApprovalsSettings
from relay.approvals.service import Claim
from relay.events.model import Event
from relay.events.timestamps import format_rfc3339
from relay.outbox import Mode
from relay.outbox.journal import rows
from tests.approvals.builders import Book, caller, event
from tests.approvals.manual_clock import NOON, HandClock

_VOTERS = ["client:alice", "client:bob", "client:carol"]
_USUAL = [
    {"name": "users", "match": {"event_source": ["User"]}, "approve": "automatic"},
    {
        "name": "reboots",
        "match": {"event_type": ["Reboot"]},
        "approve": {"votes": 2, "from": _VOTERS, "expires": "2m", "close_before": "30s"},
    },
]
_LENIENT = [
    _USUAL[0],
    {
        "name": "reboots",
        "match": {"event_type": ["Reboot"]},
        "approve": {"votes": 1, "from": _VOTERS, "expires": "2m"},
    },
]
_WINDOW = {
    "name": "window",
    "match": {"event_type": ["Reboot"], "time": {"from": "12:02", "to": "12:06"}},
}
_TIMED = [
    _USUAL[0],
    _WINDOW | {"approve": {"votes": 1, "from": ["group:team"], "execution_expires": "45s"}},
    _USUAL[1],
]
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
_MEMORY = Path("/dev/shm")  # noqa: S108  # a directory of its own is made there; what no disk has to keep is read again sooner
_PEOPLE = st.sampled_from(["alice", "bob", "carol", "eve"])


@dataclass(frozen=True)
class Asked:
    """What the rules ask of a Reboot at a moment: so many people, votes good for so long, and sent within so long."""

    people: int
    votes_last: timedelta | None = timedelta(minutes=2)
    sent_within: timedelta | None = None


def asked(rules: str, now: datetime) -> Asked:
    """In the window of `timed` one person is enough, if it is done at once; before and after it, two."""
    if rules == "timed" and _OPENS <= now < _CLOSES:
        return Asked(1, None, timedelta(seconds=45))
    return Asked(1 if rules == "lenient" else 2)


@dataclass
class Model:
    """What is true, in a few lines: who voted for which state when and until when, who holds until when, and what IMDS refused."""

    seen: Event
    votes: dict[str, tuple[str, datetime, datetime]] = field(default_factory=dict)
    holds: dict[tuple[str, bool], datetime] = field(default_factory=dict)
    """By holder, and whether it was said in a dry run alone."""
    refused: set[str] = field(default_factory=set)

    def may_start(self, rules: str, now: datetime) -> bool:
        """A quorum or an automatic rule, in time, under no hold, for what is Scheduled."""
        if self.seen.event_status != "Scheduled" or (
            self.seen.not_before_time is not None and now >= self.seen.not_before_time
        ):
            return False
        if any(until > now for until in self.holds.values()) or rules == "none":
            return False
        if self.seen.event_source == "User":
            return True
        voters = {
            who
            for who, vote in self.votes.items()
            if vote[0] == self.seen.revision and self.counts_until(vote, rules, now) > now
        }
        voters -= {"eve"}
        return self.seen.event_type == "Reboot" and len(people(voters)) >= asked(rules, now).people

    def counts_until(
        self, vote: tuple[str, datetime, datetime], rules: str, now: datetime
    ) -> datetime:
        """Of the rule under which a vote was given and that of now the shorter."""
        _, given, until = vote
        last = (
            asked(rules, now).votes_last
            if self.seen.event_source != "User" and rules != "none"
            else None
        )
        return (
            min(until, given + last)
            if last is not None and self.seen.event_type == "Reboot"
            else until
        )


def people(names: set[str]) -> set[str]:
    """Who they are: alice and carol are one person."""
    return {name.replace("carol", "alice") for name in names}


@dataclass
class Post:
    """A StartRequest that left this machine, in one of its lives; ``answer`` None: none came."""

    life: int
    occurrence: int
    revision: str
    answer: str | None = None


class Approvals(RuleBasedStateMachine):
    """What can happen, in any order."""

    @initialize(
        rules=st.sampled_from(["usual", "timed"]),
        now=st.sampled_from([NOON, _OPENS]),
        opening=st.sampled_from([None, ("bob", 20.0), ("carol", 20.0), ("carol", 50.0)]),
    )
    def begin(self, rules: str, now: datetime, opening: tuple[str, float] | None) -> None:
        """A document of two events, and a file that holds nothing; what is rarely come upon by chance comes first at times."""
        self.folder = tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None)
        self.ruleset, self.mode = rules, "on"
        self.clock = HandClock(now)
        self.book = Book(Path(self.folder.name) / "relay.db", _RULES[rules], clock=self.clock)
        self.azure: dict[str, Event] = {}
        self.model: dict[str, Model] = {}
        self.left: dict[str, dict[tuple[str, bool], datetime]] = {}
        """Holds of what has left the document: they are there again when it is."""
        self.flight: list[Claim] = []
        self.alone: set[int] = set()
        self.life, self.posts = 0, list[Post]()
        self.azure_says("A", "voted", 400.0)
        self.azure_says("B", "user", 400.0)
        self.poll(crash=False)
        if opening is not None:
            self.vote_wait_and_claim(*opening, late=False)

    @override
    def teardown(self) -> None:
        """Let go of the file."""
        if hasattr(self, "book"):
            self.book.close()
            self.folder.cleanup()

    # --- Azure

    @rule(
        of=_IDS,
        kind=st.sampled_from([*_KINDS, "user", "voted", "voted"]),
        due=st.sampled_from([None, 45.0, 400.0]),
    )
    def azure_says(self, of: str, kind: str, due: float | None) -> None:
        """Azure's document changes; nobody has read it yet."""
        not_before = (
            format_rfc3339(self.clock.now() + timedelta(seconds=due)) if due is not None else None
        )
        self.azure[of] = event(of, **{"not_before": not_before} | _KINDS[kind])

    @rule(of=_IDS)
    def azure_forgets(self, of: str) -> None:
        """It ended, or was cancelled."""
        self.azure.pop(of, None)

    @rule(crash=st.sampled_from([False, False, True]))
    def poll(self, crash: bool) -> None:
        """Read the document; perhaps crash before anything follows from it."""
        self._read()
        if crash:
            self.crash()
        self._step()

    def _read(self) -> None:
        self.book.see(*self.azure.values(), step=False)
        for of in {*self.model, *self.azure}:
            now = self.azure.get(of)
            if now is None:
                self.left[of] = self.model.pop(of).holds
            elif of in self.model:
                self.model[of].seen = now
            else:
                self.model[of] = Model(now, holds=self.left.pop(of, {}))
        self._void()

    def _void(self) -> None:
        flying = {(claim.event_id, claim.grant.revision) for claim in self.flight}
        for of, model in self.model.items():
            kept = {
                model.seen.revision,
                *(revision for event_id, revision in flying if event_id == of),
            }
            model.votes = {who: vote for who, vote in model.votes.items() if vote[0] in kept}

    def _settle(self, of: str) -> None:
        """What is over when somebody looks is over, wherever the clock is set to afterwards."""
        model, now = self.model[of], self.clock.now()
        flying = {claim.grant.revision for claim in self.flight if claim.event_id == of}
        model.holds = {who: until for who, until in model.holds.items() if until > now}
        over = model.seen.not_before_time is not None and now >= model.seen.not_before_time
        within = (
            asked(self.ruleset, now).sent_within
            if self.ruleset != "none" and model.seen.event_type == "Reboot"
            else None
        )
        waiting = [
            grant
            for grant in self.book.stands(of).grants
            if grant.state == "granted" and not grant.dry_run
        ]
        automatic = model.seen.event_source == "User"
        lapsed = {
            grant.revision
            for grant in waiting
            if within is not None and not automatic and now >= grant.granted_at + within
        }
        model.votes = {
            who: vote
            for who, vote in model.votes.items()
            if vote[0] in flying
            or (
                model.counts_until(vote, self.ruleset, now) > now
                and not over
                and vote[0] not in lapsed
            )
        }

    def _settle_all(self) -> None:
        for of in self.model:
            self._settle(of)
        for of, holds in self.left.items():
            self.left[of] = {who: until for who, until in holds.items() if until > self.clock.now()}

    def _step(self) -> None:
        self._settle_all()
        self.book.step()
        for of, model in self.model.items():
            grants = self.book.stands(of).grants
            if (
                self.mode == "on"
                and model.may_start(self.ruleset, self.clock.now())
                and model.seen.revision not in model.refused
            ):
                of_now = [
                    grant
                    for grant in grants
                    if grant.revision == model.seen.revision and not grant.dry_run
                ]
                under_way = [grant for grant in grants if grant.state == "sent"]
                assert under_way or any(
                    grant.state not in ("failed", "refused") for grant in of_now
                ), "a satisfied rule was forgotten"

    # --- time, operators, crashes

    @rule(seconds=st.sampled_from([1.0, 1.0, 20.0, 61.0, 130.0]), step=st.booleans())
    def time_passes(self, seconds: float, step: bool) -> None:
        """The timer of the step may be late."""
        self.clock.turn(seconds)
        if step:
            self._step()

    @rule(back=st.sampled_from([30.0, 130.0, 3600.0]))
    def the_clock_is_set_back(self, back: float) -> None:
        """As NTP does; the monotonic clock goes on."""
        self.clock.set(self.clock.now() - timedelta(seconds=back))

    @rule(mode=st.sampled_from(["on", "on", "on", "dry-run", "off"]))
    def switch(self, mode: Mode) -> None:
        """Somebody turns the switch."""
        self._settle_all()
        self.mode = mode
        self.book.switch(mode)

    @rule()
    def crash(self) -> None:
        """Everything that is not on disk is lost; so is the answer to what is in flight."""
        self.book.crash()
        self.life += 1
        self.flight = []
        self.alone = set()
        self._void()

    @rule(rules=st.sampled_from(["usual", "usual", "timed", "timed", "lenient", "none"]))
    def restart_with_other_rules(self, rules: str) -> None:
        """The file of the rules was changed."""
        self.ruleset = rules
        self.book.settings = _RULES[rules]
        self.crash()
        self._step()

    # --- people

    def _revision(self, of: str, known: bool) -> str:
        found = self.azure.get(of) if not known and of in self.azure else None
        return (
            found.revision
            if found is not None
            else self.model[of].seen.revision
            if of in self.model
            else "none"
        )

    @precondition(lambda self: self.model)
    @rule(
        who=_PEOPLE,
        of=_IDS,
        known=st.sampled_from([True, True, False]),
        request=st.sampled_from([None, None, "r1", "r2"]),
    )
    def vote(self, who: str, of: str, known: bool, request: str | None) -> None:
        """Somebody votes for what the relay has seen, or for what Azure already says."""
        revision, now = self._revision(of, known), self.clock.now()
        before = self._said("approval.recorded")
        if of in self.model:
            self._settle(of)
        answer = self.book.submit(
            "approve",
            who,
            event_id=of,
            revision=revision,
            request_id=request,
            digest=f"{of}{revision}",
        )
        if answer.status == 202 and self.mode == "on" and self._said("approval.recorded") > before:
            model = self.model[of]
            assert model.seen.revision == revision
            expires = (
                asked(self.ruleset, now).votes_last if model.seen.event_source != "User" else None
            )
            model.votes[who] = revision, now, now + (expires or timedelta(days=1))

    @precondition(lambda self: self.model)
    @rule(of=_IDS, other=st.sampled_from(["bob", "carol"]))
    def two_vote(self, of: str, other: str) -> None:
        """What makes a quorum, at once; and what would if one person were two."""
        self.vote("alice", of, known=True, request=None)
        self.vote(other, of, known=True, request=None)

    @precondition(lambda self: "A" in self.model and not self.flight)
    @rule(
        other=st.sampled_from(["bob", "carol"]),
        seconds=st.sampled_from([20.0, 50.0, 115.0]),
        late=st.booleans(),
    )
    def vote_wait_and_claim(self, other: str, seconds: float, late: bool) -> None:
        """What was voted lies about for a while, and is then to be sent; the timer of the step may be late."""
        self.two_vote("A", other)
        self.time_passes(seconds, step=not late)
        self.claim(lost=False)
        if not self.flight:
            self.claim(lost=False)

    @precondition(lambda self: self.model)
    @rule(who=st.sampled_from(["alice", "eve"]), of=_IDS)
    def hold(self, who: str, of: str) -> None:
        """Somebody holds."""
        revision, now = self._revision(of, known=True), self.clock.now()
        before = self._said("approval.recorded")
        if of in self.model:
            self._settle(of)
        answer = self.book.submit("hold", who, event_id=of, revision=revision)
        if answer.status == 202:
            occurrence = self.book.stands(of).occurrence.id
            assert not any(claim.grant.occurrence == occurrence for claim in self.flight), (
                "a hold was taken after the claim"
            )
            if self._said("approval.recorded") > before:
                if self.mode == "on":
                    self.model[of].holds.pop((who, True), None)
                self.model[of].holds[who, self.mode == "dry-run"] = now + timedelta(seconds=90)

    @precondition(lambda self: any(model.holds for model in self.model.values()))
    @rule(who=st.sampled_from(["alice", "eve"]), of=_IDS, operator=st.booleans())
    def release(self, who: str, of: str, operator: bool) -> None:
        """Somebody releases: their own, or all."""
        by = caller(who, "operate") if operator else who
        if of in self.model:
            self._settle(of)
        answer = self.book.submit(
            "release", by, event_id=of, revision=self._revision(of, known=True)
        )
        if answer.status == 202:
            holds = self.model[of].holds
            for holder, dry in list(holds):
                if (operator or holder == who) and (dry or self.mode == "on"):
                    del holds[holder, dry]
            left = any(until > self.clock.now() for until in holds.values())
            assert (answer.body["state"] == "held") == left

    # --- the gate

    @precondition(lambda self: not self.flight)
    @rule(lost=st.sampled_from([False, False, False, True]))
    def claim(self, lost: bool) -> None:
        """The fresh read, and the claim; perhaps a crash before the StartRequest is sent."""
        grants = self.book.do(lambda tx: tx.decisions.open_grants())
        grants = [grant for grant in grants if grant.id in self.alone][:1] or grants
        self._read()
        self.book.ledger.in_flight = frozenset(grant.id for grant in grants)
        self.flight = self.book.do(lambda tx: self.book.ledger.claim(tx, grants, self.clock.now()))
        assert len({claim.event_id for claim in self.flight}) == len(self.flight), (
            "one event twice in one StartRequest"
        )
        for claim in self.flight:
            self._check(claim)
            self.posts.append(Post(self.life, claim.grant.occurrence, claim.grant.revision))
        if lost:
            self.crash()
        elif not self.flight:
            self.book.ledger.in_flight = frozenset()
        self._step()

    def _check(self, claim: Claim) -> None:
        """What a StartRequest may be sent for, by the model and by the journal."""
        model, now = self.model[claim.event_id], self.clock.now()
        assert self.mode == "on"
        assert model.seen == self.azure[claim.event_id]
        assert claim.grant.revision == model.seen.revision
        assert model.may_start(self.ruleset, now)
        assert model.seen.revision not in model.refused
        for post in self.posts:
            if post.occurrence == claim.grant.occurrence:
                assert post.answer is not None or post.life < self.life, (
                    "two in flight for one event"
                )
                assert post.answer != "200" or post.revision != claim.grant.revision, (
                    "started twice"
                )
        before = [
            row for row in rows(self.book.connection) if row.event_key == claim.event_id.lower()
        ]
        told = [(row.kind, orjson.loads(row.body).get("data", {})) for row in before]
        of_it = [
            (kind, data)
            for kind, data in told
            if data.get("revision") == claim.grant.revision and "dryRun" not in data
        ]
        assert any(
            kind == "approval.granted" and data["approvalId"] == claim.grant.approval_id
            for kind, data in of_it
        )
        if model.seen.event_source != "User":
            ask = asked(self.ruleset, now)
            assert (
                ask.sent_within is None
                or claim.grant.attempts
                or now < claim.grant.granted_at + ask.sent_within
            )
            who = {
                data["principal"]
                for kind, data in of_it
                if kind == "approval.recorded" and data["decision"] == "approve"
            }
            assert len(people(who)) >= ask.people

    @precondition(lambda self: self.flight)
    @rule(answer=st.sampled_from(["200", "200", "400", "503", "timeout, but processed"]))
    def imds_answers(self, answer: Literal["200", "400", "503", "timeout, but processed"]) -> None:
        """What was in flight is answered, or is not."""
        claims, now, ledger = self.flight, self.clock.now(), self.book.ledger
        for post in self.posts[-len(claims) :]:
            post.answer = answer
        if answer == "200":
            self.book.do(lambda tx: ledger.record_accepted(tx, claims, now))
        elif answer == "400" and len(claims) == 1:
            self.book.do(lambda tx: ledger.record_refused(tx, claims[0], 400, "400", now))
            if claims[0].event_id in self.model:
                self.model[claims[0].event_id].refused.add(claims[0].grant.revision)
        else:
            self.book.do(
                lambda tx: ledger.record_unanswered(
                    tx, claims, {"400": 400, "503": 503}.get(answer)
                )
            )
        if answer == "400" and len(claims) > 1:
            self.alone = {claim.grant.id for claim in claims}
        if answer == "timeout, but processed":
            for claim in claims:
                if claim.event_id in self.azure:
                    self.azure_says(claim.event_id, "started", None)
        ledger.in_flight = frozenset()
        self.flight = []
        self._void()
        self._step()

    # --- what always holds

    def _said(self, name: str) -> int:
        return sum(row.kind == name for row in rows(self.book.connection))

    @invariant()
    def every_grant_is_open_or_has_its_one_answer(self) -> None:
        """The chain is checked by reading it."""
        if not hasattr(self, "book"):
            return
        said = self.book.said("approval.granted", "startrequest.accepted", "startrequest.failed")
        grants = self.book.grants
        assert len(grants) == sum(one.name == "approval.granted" for one in said)
        for grant in grants:
            answers = [one.name for one in said if one.attributes.get("causationid") == grant.cause]
            state = "failed" if grant.state == "refused" else grant.state
            assert answers == (
                [f"startrequest.{state}"]
                if state in ("accepted", "failed") and not grant.dry_run
                else []
            )
        sent = [grant.occurrence for grant in grants if grant.state == "sent"]
        assert len(sent) == len(set(sent)), "two in flight for one event"
        open_ones = {claim.grant.id for claim in self.flight}
        assert open_ones <= {grant.id for grant in grants if grant.state == "sent"}

    @invariant()
    def no_vote_vanishes_without_a_word(self) -> None:
        """A vote counts, was told void, was given anew, or has served."""
        if not hasattr(self, "book"):
            return
        told = self.book.said("approval.recorded", "approval.voided", "startrequest.accepted")
        counting = {
            one
            for (one,) in self.book.connection.execute(
                "SELECT approval_id FROM decision WHERE counts"
            )
        }
        votes = [
            (at, one)
            for at, one in enumerate(told)
            if one.name == "approval.recorded" and one.data["decision"] == "approve"
        ]
        assert sum(one.name == "approval.voided" for one in told) <= len(votes)
        for at, vote in votes:
            later = [one for one in told[at + 1 :] if one.subject == vote.subject]
            assert (
                vote.data["approvalId"] in counting
                or any(one.name == "approval.voided" for one in later)
                or any(
                    one.name == "startrequest.accepted" and one.subject == vote.subject
                    for one in told
                )
                or any(
                    one.name == "approval.recorded"
                    and one.data["principal"] == vote.data["principal"]
                    for one in later
                )
            )


TestApprovals = Approvals.TestCase
TestApprovals.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
