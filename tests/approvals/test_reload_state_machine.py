"""A reload decides what a stop and a start with the same configuration would decide.

Two relays see and get the same. When the configuration changes, one reloads it, and the other is
stopped and started. Their journals stay the same, except for random ids.
"""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from typing_extensions import override  # in typing from Python 3.12

from relay.approvals import ApprovalsSettings, ClaimedGrant
from relay.approvals.engine import ApprovalEngine
from relay.errors import SourceRefused, SourceUnavailable
from relay.events.model import ScheduledEvent
from relay.events.timestamps import format_rfc3339
from relay.store import Mode
from tests.approvals.builders import (
    CLIENT_RESOURCES,
    ORIGIN,
    ApprovalFile,
    build_event,
    open_grants,
)
from tests.clocks import ManualClock
from tests.depth import depth

_REBOOTS = {"name": "reboots", "match": {"event_type": ["Reboot"]}}
_AUTOMATIC = {"name": "freezes", "match": {"event_type": ["Freeze"]}, "approve": "automatic"}
_BY_TWO = {**_REBOOTS, "approve": {"votes": 2, "from": ["group:team"], "expires": "5m"}}
_BY_CAROL = {**_REBOOTS, "approve": {"votes": 1, "from": ["client:carol"]}}
_SOON = {
    **_REBOOTS,
    "approve": {"votes": 1, "from": ["group:team", "client:carol"]},
}
_TEAM = {"team": ["client:alice", "client:bob"]}
_LIMIT = [{"name": "one", "max": 1, "rest": "20s"}]
_DOCUMENTS: list[dict[str, Any]] = [
    {"rules": [_AUTOMATIC, _BY_TWO], "groups": _TEAM},
    {"rules": [_BY_TWO], "groups": _TEAM},
    {"rules": [_AUTOMATIC, _BY_CAROL]},
    {"rules": [_SOON, _AUTOMATIC], "groups": _TEAM, "limits": _LIMIT},
    {"rules": [{"name": "all", "approve": "automatic"}], "limits": _LIMIT},
    {"rules": [{"name": "all", "approve": "automatic"}]},
    {"rules": [_AUTOMATIC, _BY_TWO], "groups": _TEAM, "people": {"ann": _TEAM["team"]}}
    | {"rules": [_AUTOMATIC, _SOON]},
    {"rules": [_AUTOMATIC, _SOON], "groups": _TEAM, "dry_run": True},
    {"rules": [_AUTOMATIC, _SOON], "groups": _TEAM, "enabled": False},
    {},
]
_SETTINGS = [
    ApprovalsSettings.model_validate({"hold_expires": "90s", **document}) for document in _DOCUMENTS
]
_CLIENTS: list[dict[str, tuple[str, ...] | None]] = [
    CLIENT_RESOURCES,
    {name: patterns for name, patterns in CLIENT_RESOURCES.items() if name != "client:bob"},
    {**CLIENT_RESOURCES, "client:alice": ("web-*",)},
    {},
]
_IDS = st.sampled_from(["A", "B"])
_RANDOM = ("approvalId", "ended")
_MEMORY = Path("/dev/shm")  # noqa: S108  # in memory, because no test cuts the power


class ReloadedAndRestarted(RuleBasedStateMachine):
    """What can happen, in any order, to both relays."""

    @initialize(configuration=st.sampled_from(_SETTINGS))
    def begin(self, configuration: ApprovalsSettings) -> None:
        """Begin with two events."""
        self.folder = tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None)
        self.clock = ManualClock()
        folder = Path(self.folder.name)
        self.reloaded = ApprovalFile(folder / "reloaded.db", configuration, clock=self.clock)
        self.restarted = ApprovalFile(folder / "restarted.db", configuration, clock=self.clock)
        self.both = (self.reloaded, self.restarted)
        self.configuration, self.clients = configuration, CLIENT_RESOURCES
        self.azure: dict[str, ScheduledEvent] = {}
        self.in_flight: list[list[ClaimedGrant]] = []
        self.azure_says("A", "Reboot", 400.0)
        self.azure_says("B", "Freeze", None)

    @override
    def teardown(self) -> None:
        """Close the files."""
        if hasattr(self, "both"):
            for each in self.both:
                each.close()
            self.folder.cleanup()

    @rule(of=_IDS, kind=st.sampled_from(["Reboot", "Freeze"]), due=st.sampled_from([None, 400.0]))
    def azure_says(self, of: str, kind: str, due: float | None) -> None:
        """An event appears or changes."""
        at = None if due is None else format_rfc3339(self.clock.now() + timedelta(seconds=due))
        resources = ("db-1",) if of == "A" else ("db-2",)
        self.azure[of] = build_event(of, event_type=kind, not_before=at, resources=resources)
        self._read()

    @rule(of=_IDS)
    def azure_forgets(self, of: str) -> None:
        """An event ends."""
        self.azure.pop(of, None)
        self._read()

    def _read(self) -> None:
        for each in self.both:
            each.record_document(*self.azure.values())

    @rule(seconds=st.sampled_from([1.0, 25.0, 100.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        """Time passes."""
        self.clock.advance(seconds)
        for each in self.both:
            each.apply_transitions()

    @rule(mode=st.sampled_from(["on", "on", "dry-run", "off"]))
    def switch(self, mode: Mode) -> None:
        """An operator sets the mode."""
        for each in self.both:
            each.set_mode(mode)

    @precondition(lambda self: self.azure)
    @rule(
        who=st.sampled_from(["alice", "bob", "carol"]),
        of=_IDS,
        decision=st.sampled_from(["approve", "approve", "approve", "hold", "release"]),
    )
    def decide(self, who: str, of: str, decision: Any) -> None:
        """Somebody votes, takes a hold or releases it."""
        revision = self.azure[of].revision if of in self.azure else "none"
        answers = [each.submit(decision, who, event_id=of, revision=revision) for each in self.both]
        bodies = [{**answer.body, "approvalId": None} for answer in answers]
        assert (answers[0].status, bodies[0]) == (answers[1].status, bodies[1])
        for each in self.both:
            each.apply_transitions()

    @precondition(lambda self: not self.in_flight)
    @rule()
    def claim(self) -> None:
        """StartRequests go out for everything that may go."""
        claims = []
        for each in self.both:
            grants = each.transact(open_grants)
            each.engine.in_flight = {(grant.id, grant.attempts + 1) for grant in grants}
            claims.append(each.claim())
            each.set_in_flight(*claims[-1])
        assert [claim.event_id for claim in claims[0]] == [claim.event_id for claim in claims[1]]
        self.in_flight = claims if claims[0] else []

    @precondition(lambda self: self.in_flight)
    @rule(
        answer=st.sampled_from([None, SourceRefused("400", status=400), SourceUnavailable("503")])
    )
    def azure_answers(self, answer: Any) -> None:
        """IMDS answers."""
        for each, claims in zip(self.both, self.in_flight, strict=True):
            each.answer(claims, answer)
            each.set_in_flight()
            each.apply_transitions()
        self.in_flight = []

    @precondition(lambda self: not self.in_flight)
    @rule(configuration=st.sampled_from(_SETTINGS), clients=st.sampled_from(_CLIENTS))
    def change_the_configuration(self, configuration: Any, clients: Any) -> None:
        """A stop and a reload wait for the answer of a StartRequest."""
        self.reloaded.client_resources = self.restarted.client_resources = clients
        self.reloaded.reload(configuration)
        self.restarted.crash(configuration)
        assert isinstance(self.restarted.engine, ApprovalEngine)
        assert self.restarted.engine.origin == ORIGIN
        for each in self.both:
            each.apply_transitions()

    @precondition(lambda self: not self.in_flight and "A" in self.azure)
    @rule(
        before=st.sampled_from(_SETTINGS),
        after=st.none() | st.sampled_from(_SETTINGS),
        clients=st.sampled_from(_CLIENTS),
    )
    def vote_before_a_change(self, before: Any, after: Any, clients: Any) -> None:
        """What was granted is weighed again before it is claimed."""
        self.change_the_configuration(before, CLIENT_RESOURCES)
        self.decide("alice", "A", "approve")
        self.decide("bob", "A", "approve")
        self.change_the_configuration(after or before, clients)
        self.claim()

    @invariant()
    def their_journals_are_the_same(self) -> None:
        """Everything that was decided, and why."""
        if hasattr(self, "both"):
            told, told_after_restarts = (self._journal(each) for each in self.both)
            assert told == told_after_restarts
            states = [[grant.state for grant in each.grants] for each in self.both]
            assert states[0] == states[1]

    @staticmethod
    def _journal(file: ApprovalFile) -> list[tuple[str, dict[str, Any]]]:
        return [
            (event.name, {key: value for key, value in event.data.items() if key not in _RANDOM})
            for event in file.events()
        ]


TestReloadedAndRestarted = ReloadedAndRestarted.TestCase
TestReloadedAndRestarted.settings = settings(max_examples=depth(600, 15), stateful_step_count=20)
