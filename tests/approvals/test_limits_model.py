"""Random sequences with limits, compared with a model that knows what Azure does.

The engine, the recorder and the file are real. The model counts the machines that go because of
this relay, and remembers who waits since when.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from relay.approvals import ClaimedGrant
from relay.approvals.status import approval_state
from relay.events.model import ScheduledEvent
from relay.store import TrackedEvent
from tests.approvals.builders import ApprovalFile, build_event, one_rule, open_grants, started
from tests.approvals.running_gate import ANSWERS, MachineOnFile
from tests.clocks import NOON, ManualClock
from tests.depth import depth

_IDS = ["A", "B", "C", "D"]
_MACHINES = [("db-1",), ("db-2",), ("db-1", "db-2"), ("db-3", "web-1"), ("web-1", "web-2"), ()]
_REST = timedelta(seconds=30)
_LIMITS: dict[str, list[dict[str, Any]]] = {
    "one database": [{"name": "db", "match": {"resources": ["db-*"]}, "max": 1, "rest": "30s"}],
    "two, and two of all": [
        {"name": "db", "match": {"resources": ["db-*"]}, "max": 1, "rest": "30s"},
        {"name": "all", "max": 2},
    ],
    "three of all": [{"name": "all", "max": 3, "rest": "30s"}],
}
_APPROVE: dict[str, Any] = {
    "votes": {"votes": 1, "from": ["client:alice", "client:bob"]},
    "automatic": "automatic",
}


@dataclass
class AzureEvent:
    seen: ScheduledEvent
    may_be_started: bool = False
    """Whether Azure may have taken a StartRequest without telling."""


def machines_of(event: ScheduledEvent) -> frozenset[str]:
    """The machines as the relay counts them."""
    return frozenset(event.resources or (f"event {event.event_id}",))


def counted(limit: dict[str, Any], machines: frozenset[str]) -> frozenset[str]:
    """The machines that a limit counts; written in another way than in the relay."""
    if "match" not in limit:
        return machines
    return frozenset(name for name in machines if name.startswith(("db-", "event ")))


def _is_repeat(claim: ClaimedGrant) -> bool:
    """Whether a StartRequest was sent for the grant before. Its slots are given first."""
    return claim.grant.state == "sent"


class Limits(MachineOnFile):
    """What can happen, in any order."""

    @initialize(limits=st.sampled_from(sorted(_LIMITS)), approve=st.sampled_from(sorted(_APPROVE)))
    def begin(self, limits: str, approve: str) -> None:
        self.limits = _LIMITS[limits]
        self.clock = ManualClock()
        section = one_rule(_APPROVE[approve], limits=self.limits, hold_expires="90s")
        self.approvals = ApprovalFile(self.folder / "relay.db", section, clock=self.clock)
        self.closing.callback(self.approvals.close)
        self.closing.callback(self._run_dry)
        self.azure: dict[str, AzureEvent] = {}
        self.rests: list[tuple[datetime, frozenset[str]]] = []
        """When events ended that may have happened, and their machines."""
        self.claims: list[ClaimedGrant] = []
        for event_id in _IDS[:2]:
            self.appears(event_id, ("db-1",) if event_id == "A" else ("db-2",), 400.0)
        self.poll()

    # --- Azure

    @rule(
        of=st.sampled_from(_IDS),
        machines=st.sampled_from(_MACHINES),
        due=st.sampled_from([None, 60.0, 200.0, 4000.0, 4000.0]),
    )
    def appears(self, of: str, machines: tuple[str, ...], due: float | None) -> None:
        """An event appears, or a Scheduled one changes."""
        known = self.azure.get(of)
        if known is not None and (known.seen.is_started or known.may_be_started):
            return
        event = build_event(of, due=due, at=self.clock.now(), resources=machines)
        self.azure[of] = AzureEvent(event)

    @precondition(lambda self: self.azure)
    @rule(of=st.sampled_from(_IDS))
    def starts(self, of: str) -> None:
        if of in self.azure:
            self._start(of)

    def _start(self, of: str) -> None:
        self.azure[of].seen = started(self.azure[of].seen)

    @precondition(lambda self: self.azure)
    @rule(of=st.sampled_from(_IDS), read=st.booleans())
    def ends(self, of: str, read: bool) -> None:
        if of in self.azure:
            del self.azure[of]
            if read:
                self.poll()

    @precondition(lambda self: len(self.azure) > 1 and not self.claims)
    @rule(of=st.sampled_from(_IDS), other=st.sampled_from(_IDS), wait=st.sampled_from([0.0, 20.0]))
    def begins_and_ends_before_another(self, of: str, other: str, wait: float) -> None:
        """An event begins and ends, and another one that is approved follows soon."""
        if of in self.azure and other in self.azure and of != other:
            self._start(of)
            self.poll()
            self.vote(other, "bob")
            del self.azure[of]
            self.poll()
            self.time_passes(wait, step=True)
            self.claim(fresh=False)

    @rule()
    def poll(self) -> None:
        self._read()
        self._step()

    def _read(self) -> None:
        known = {event.subject for event in self.approvals.events("event.ended")}
        count = len(self.approvals.events("event.ended"))
        self.approvals.record_document(*(one.seen for one in self.azure.values()), step=False)
        for ended in self.approvals.events("event.ended")[count:]:
            if ended.data["outcome"] != "canceled":
                names = ended.data["resources"] or [f"event {ended.data['eventId']}"]
                self.rests.append((self.clock.now(), frozenset(names)))
        assert known <= {event.subject for event in self.approvals.events("event.ended")}

    def _step(self) -> None:
        self.approvals.apply_transitions()
        self._check_order()

    @rule(seconds=st.sampled_from([1.0, 10.0, 30.0, 100.0]), step=st.booleans())
    def time_passes(self, seconds: float, step: bool) -> None:
        """Time passes; the timer of the transitions may be late."""
        self.clock.advance(seconds)
        if step:
            self._step()

    @rule()
    def crash(self) -> None:
        """Lose what is not on disk, and the answer to what is in flight."""
        self.approvals.crash()
        self.claims = []

    # --- people

    @rule(of=st.sampled_from(_IDS), who=st.sampled_from(["alice", "bob"]))
    def vote(self, of: str, who: str) -> None:
        revision = self._revision(of)
        if revision is not None:
            self.approvals.submit("approve", who, event_id=of, revision=revision)

    @rule(of=st.sampled_from(_IDS), decision=st.sampled_from(["hold", "release"]))
    def hold(self, of: str, decision: Any) -> None:
        revision = self._revision(of)
        if revision is not None:
            self.approvals.submit(decision, "alice", event_id=of, revision=revision)

    def _revision(self, of: str) -> str | None:
        found = self._find(of)
        return found.revision if found is not None else None

    def _find(self, of: str) -> TrackedEvent | None:
        return self.approvals.transact(lambda tx: tx.occurrences.find_newest_occurrence(of.lower()))

    # --- the gate

    @precondition(lambda self: not self.claims)
    @rule(fresh=st.booleans())
    def claim(self, fresh: bool) -> None:
        """Claim what may go now, as the gate does after a fresh read."""
        if fresh:
            self._read()
        grants = self.approvals.transact(open_grants)
        self.approvals.engine.in_flight = {(grant.id, grant.attempts + 1) for grant in grants}
        self.claims = self.approvals.claim()
        in_order = sorted(self.claims, key=lambda claim: (not _is_repeat(claim), claim.grant.id))
        for number, claim in enumerate(in_order, start=1):
            event = self.azure.get(claim.event_id)
            if event is not None:
                event.may_be_started = True
            later = {after.event_id for after in in_order[number:]}
            if _is_repeat(claim):
                later |= {of for of, _, _ in self._facts() if self._was_sent_after(of, claim)}
            self._check_room(claim.event_id, later)
        if not self.claims:
            self.approvals.set_in_flight()

    def _was_sent_after(self, of: str, claim: ClaimedGrant) -> bool:
        """Whether only StartRequests that were sent after this one can make an event start."""
        status = self.approvals.status(of)
        sent = [grant for grant in status.grants if grant.may_have_been_accepted]
        return not status.occurrence.event.is_started and all(
            grant.state == "sent" and grant.id > claim.grant.id for grant in sent
        )

    def _check_room(self, of: str, later: set[str]) -> None:
        """Together with what goes already, the machines of an event are within every limit.

        Events that are claimed ``later`` are not there yet, and those that were sent after the
        first try of this one are checked against it. Such an event may be about machines of this
        one, and needs no slots of its own then.
        """
        now = self.clock.now()
        status = self.approvals.status(of)
        own = machines_of(status.occurrence.event)
        for limit in self.limits:
            others: set[str] = set()
            for other_id, names, is_taking in self._facts():
                if other_id not in {of, *later} and is_taking:
                    others |= counted(limit, names)
            rest = _REST if "rest" in limit else timedelta(0)
            for ended_at, names in self.rests:
                if now < ended_at + rest:
                    others |= counted(limit, names)
            needed = counted(limit, own)
            if needed <= others:
                continue
            is_alone = len(needed) > limit["max"] and not others
            assert is_alone or len(others | needed) <= limit["max"], (of, limit, others, needed)

    def _facts(self) -> list[tuple[str, frozenset[str], bool]]:
        """Each live event that the relay knows, its machines, and whether it may be under way."""
        rows = self.approvals.transact(lambda tx: tx.occurrences.live_occurrences())
        facts = []
        for row in rows:
            grants = self.approvals.status(row.key).grants
            names = machines_of(row.event)
            is_taking = row.event.is_started or any(each.may_have_been_accepted for each in grants)
            facts.append((row.event.event_id, names, is_taking))
        return facts

    @precondition(lambda self: self.claims)
    @rule(answer=st.sampled_from([*ANSWERS, "200"]))
    def imds_answers(self, answer: str) -> None:
        """IMDS accepts or refuses, or fails; with a timeout, Azure has started the events."""
        self.approvals.answer(self.claims, ANSWERS[answer])
        if answer in ("200", "timeout"):
            for claim in self.claims:
                if claim.event_id in self.azure:
                    self._start(claim.event_id)
        self.approvals.set_in_flight()
        self.claims = []
        self._step()

    # --- order

    def _check_order(self) -> None:
        """Nobody waits while every slot that it needs is free, and no earlier event waits."""
        waiting = []
        for of in _IDS:
            found = self._find(of)
            if found is not None and found.live:
                status = self.approvals.status(of)
                if status.waiting_for:
                    due = status.not_before
                    grant = status.active_grant
                    is_sent = any(each.state == "sent" for each in status.grants)
                    rank = (not is_sent, grant is None, grant.id if grant is not None else 0)
                    key = (*rank, due is None, due or NOON, found.first_seen, found.id)
                    waiting.append((key, of, status))
        now = self.clock.now()
        for _, of, status in sorted(waiting)[:1]:
            taken, certain = self._taken_by_others(of, now)
            names = machines_of(status.occurrence.event)
            is_blocked = []
            for limit in self.limits:
                needed, others = counted(limit, names), taken[limit["name"]]
                fits = len(needed | others) <= limit["max"] or (
                    len(needed) > limit["max"] and not others
                )
                is_blocked.append(not needed <= certain[limit["name"]] and not fits)
            assert any(is_blocked), f"{of} is first in line and waits for nothing"
            named = {wait["limit"] for wait in status.waiting_for}
            assert named <= {limit["name"] for limit in self.limits}

    def _taken_by_others(
        self, of: str, now: datetime
    ) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
        """Return the machines that others take, and those of them that go whatever happens.

        A StartRequest that may not have been accepted, and waits to be sent again, takes slots, but
        lets no other event go along: two could do so mutually.
        """
        taken: dict[str, set[str]] = {limit["name"]: set() for limit in self.limits}
        certain: dict[str, set[str]] = {limit["name"]: set() for limit in self.limits}
        for other in _IDS:
            found = self._find(other)
            if other == of or found is None or not found.live:
                continue
            status = self.approvals.status(other)
            names = machines_of(found.event)
            is_granted = status.active_grant is not None and not status.active_holds
            may_go = any(grant.may_have_been_accepted for grant in status.grants)
            # A grant that waits takes no slot of a limit for which it waits. It may keep those of
            # the others.
            waits_for = {wait["limit"] for wait in status.waiting_for}
            for limit in self.limits:
                keeps_slot = is_granted and limit["name"] not in waits_for
                if found.event.is_started or may_go or keeps_slot:
                    taken[limit["name"]] |= counted(limit, names)
                    if not waits_for:
                        certain[limit["name"]] |= counted(limit, names)
        for ended_at, names in self.rests:
            for limit in self.limits:
                if "rest" in limit and now < ended_at + _REST:
                    taken[limit["name"]] |= counted(limit, names)
                    certain[limit["name"]] |= counted(limit, names)
        return taken, certain

    # --- the end

    def _run_dry(self) -> None:
        """Everything that may go has gone in the end: nobody starves, and nothing is stuck."""
        self.approvals.crash()
        self.claims = []
        for one in list(self.azure):
            self.approvals.record_document(*(event.seen for event in self.azure.values()))
            revision = self._revision(one)
            if revision is not None:
                self.approvals.submit("release", "alice", event_id=one, revision=revision)
        for _ in range(4 * len(_IDS)):
            self._read()
            self.approvals.apply_transitions()
            claims = self.approvals.claim()
            if claims:
                self.approvals.accept(claims)
            # Azure goes on with what it may have accepted, also if the event changed meanwhile.
            going = {of for of, _, is_taking in self._facts() if is_taking}
            for of, event in list(self.azure.items()):
                if event.may_be_started or of in going:
                    del self.azure[of]
            self.clock.advance(31)
        self._read()
        self.approvals.apply_transitions()
        for of in self.azure:
            assert approval_state(self.approvals.status(of)) != "waiting", f"{of} waits for ever"

    @invariant()
    def what_waits_says_for_what(self) -> None:
        """Nothing waits without a reason, and nothing is granted that waits."""
        for of in _IDS:
            found = self._find(of)
            if found is not None:
                status = self.approvals.status(of)
                assert (approval_state(status) == "waiting") <= bool(status.waiting_for)
                for wait in status.waiting_for:
                    assert wait["machines"] or wait["behind"]


TestLimits = Limits.TestCase
TestLimits.settings = settings(max_examples=depth(400, 12), stateful_step_count=40)
