"""The roster of a hub: who is fresh, silent or forgotten, and who can execute an order."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pytest

from relay.approvals.limits import Limit
from relay.fleet.hub.hub import UPKEEP_INTERVAL
from relay.fleet.hub.roster import COUNT_INTERVAL, FORGOTTEN_AFTER, Agent, Roster
from relay.fleet.messages import Pulse
from relay.fleet.routing import AuthorizedSender
from tests.clocks import NOON
from tests.events.strategies import make_event

SCOPE = "prod-vmss-1f0c33ab"


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def make_pulse(**fields: Any) -> Pulse:
    usual: dict[str, Any] = {"vm_id": "b1c8", "version": "2.0.0", "zone": "1", "names": ()}
    return Pulse(**usual | {"live": (), "poll_age": 0.5, "clock_offset": 0.1} | fields)


def sender(relay: str, scope: str = SCOPE) -> AuthorizedSender:
    return AuthorizedSender(scope=scope, relay=relay, user="vmss")


def listening(roster: Roster, until: float, since: float = 0.0) -> None:
    """Have the hub listen without a pause."""
    moment = since
    while moment < until:
        roster.note_listening(at(moment))
        moment += 30.0
    roster.note_listening(at(until))


def pulse(roster: Roster, relay: str, now: float, **fields: Any) -> Agent:
    return roster.note_message(sender(relay), relay.upper(), at(now), make_pulse(**fields))


def chosen(roster: Roster, now: float) -> list[str]:
    able = [agent for agent in roster if roster.can_agent_execute_order(agent, at(now))]
    return [agent.relay for agent in sorted(able, key=lambda agent: agent.candidate_rank)]


def speakers(roster: Roster, now: float) -> list[str]:
    return [it for it in ("web_1", "web_2", "unknown") if roster.may_speak(SCOPE, at(now), it)]


def test_a_pulse_says_who_an_agent_is_and_a_report_only_that_it_is_there() -> None:
    roster = Roster()
    agent = pulse(roster, "web_1", 0, names=("Web_1", "WEB000001"))
    assert agent == Agent(
        scope=SCOPE,
        relay="web_1",
        user="vmss",
        name="WEB_1",
        first_heard=NOON,
        last_pulse=NOON,
        vm_id="b1c8",
        version="2.0.0",
        zone="1",
        names=("web000001", "web_1"),
        poll_age=0.5,
        clock_offset=0.1,
    )
    agent = roster.note_message(sender("web_1"), "WEB_1", at(9))
    assert (agent.last_report, agent.last_pulse, agent.vm_id) == (at(9), NOON, "b1c8")
    assert roster.agents_of_scope(SCOPE) == [agent]
    moved = AuthorizedSender(scope=SCOPE, relay="web_1", user="other-user")
    agent = roster.note_message(moved, "Web_1", at(10))
    assert (agent.user, agent.name, agent.first_heard) == ("other-user", "Web_1", NOON)


def test_silence_counts_only_while_the_hub_listens() -> None:
    roster = Roster()
    agent = pulse(roster, "web_1", 0)
    assert roster.freshness(agent, at(10_000)) == "unknown", "the hub has not listened"
    roster.note_listening(at(10_000))
    assert roster.freshness(agent, at(10_000)) != "silent"
    listening(roster, 10_150, since=10_000)
    assert roster.freshness(agent, at(10_150)) != "silent"
    assert roster.freshness(agent, at(150)) == "fresh"
    assert roster.freshness(agent, at(150.001)) == "unknown"
    roster.note_listening(at(10_151))
    assert roster.freshness(agent, at(10_151)) == "silent"
    assert roster.has_listened(at(10_151 + 60))
    assert not any(roster.has_listened(at(10_151 + more)) for more in (60.001, -1))
    roster.note_connection_lost()
    assert roster.freshness(agent, at(10_151)) != "silent"
    assert not roster.has_listened(at(10_151))


def test_a_hub_that_stood_still_knows_nothing_about_silence() -> None:
    roster = Roster()
    agent = pulse(roster, "web_1", 0)
    assert roster.note_listening(at(0))
    assert not roster.note_listening(at(60))
    # The machine of the hub was frozen for two days. What is asked first must not be wrong either.
    assert roster.freshness(agent, at(200_000)) != "silent"
    assert roster.agents_to_forget(at(200_000)) == []
    assert roster.note_listening(at(200_000))
    assert roster.agents_to_forget(at(200_000)) == []


def test_after_a_lost_connection_agents_are_unheard_until_they_are_heard_or_silent() -> None:
    roster = Roster()
    roster.note_listening(at(0))
    pulse(roster, "web_1", 0)
    assert not roster.may_yet_connect(SCOPE, at(1), "web_1")
    roster.note_connection_lost()
    roster.note_listening(at(10))
    assert roster.may_yet_connect(SCOPE, at(10), "web_1")
    listening(roster, 161, since=10)
    assert not roster.may_yet_connect(SCOPE, at(161), "web_1")
    pulse(roster, "web_1", 161)
    assert not roster.may_yet_connect(SCOPE, at(161), "web_1")


def test_a_hub_that_connects_again_each_day_forgets_a_silent_agent_too() -> None:
    roster = Roster()
    agent, day = pulse(roster, "web_1", 0), int(FORGOTTEN_AFTER.total_seconds())
    for begin in range(0, day + 1, day // 2):
        roster.note_connection_lost()
        assert roster.agents_to_forget(at(begin)) == []
        listening(roster, begin + 151, since=begin)
    assert roster.agents_to_forget(at(day + 151)) == [agent]


def test_a_clock_of_the_hub_that_is_set_back_makes_no_agent_fresh_for_longer() -> None:
    roster = Roster()
    roster.note_listening(at(10_000))
    pulse(roster, "web_1", 10_000)
    assert roster.note_listening(at(0))
    agent = roster.agent(SCOPE, "web_1")
    assert agent is not None
    assert agent.last_heard == at(0)
    listening(roster, 151)
    assert roster.freshness(agent, at(151)) == "silent"


def test_a_scope_is_silent_when_all_of_its_agents_are() -> None:
    roster = Roster()
    roster.note_listening(at(0))
    for name in ("web_1", "web_2"):
        pulse(roster, name, 0)
    roster.note_message(sender("db", "other"), "db", at(0))
    listening(roster, 100)
    pulse(roster, "web_2", 100)
    listening(roster, 200, since=100)
    assert roster.silent_scopes(at(200)) == {"other"}
    listening(roster, 260, since=200)
    assert roster.silent_scopes(at(260)) == {SCOPE, "other"}
    pulse(roster, "web_1", 260)
    assert roster.silent_scopes(at(260)) == {"other"}


def test_an_agent_that_is_silent_for_a_day_is_to_be_forgotten() -> None:
    roster = Roster()
    roster.note_listening(at(0))
    agent = pulse(roster, "web_1", 0)
    day = FORGOTTEN_AFTER.total_seconds()
    listening(roster, day - 1)
    assert roster.agents_to_forget(at(day - 1)) == []
    roster.note_listening(at(day))
    assert roster.agents_to_forget(at(day)) == [agent]
    roster.forget(agent)
    assert list(roster) == []
    assert roster.scopes == frozenset()


def test_the_end_of_a_terminate_event_names_the_agents_to_forget() -> None:
    roster = Roster()
    agents = [pulse(roster, f"web_{number}", 0) for number in range(3)]
    event = make_event(event_type="Terminate", resources=("WEB_1", "web000002"))
    assert roster.agents_terminated_by(SCOPE, event) == agents[1:]
    assert roster.agents_terminated_by("other", event) == []
    reboot = make_event(event_type="Reboot", resources=("WEB_1",))
    assert roster.agents_terminated_by(SCOPE, reboot) == []


@pytest.mark.parametrize(
    "resource", ["Prod.VMSS_18", "_prod.vmss_18", "prod.vmss00000I", "_PROD.vmss00000i"]
)
@pytest.mark.parametrize("relay", ["prod_vmss_18", "prod_vmss00000i"])
def test_without_a_pulse_the_relay_names_it_in_both_notations(relay: str, resource: str) -> None:
    roster = Roster()
    agent = roster.note_message(sender(relay), relay, at(0))
    assert agent.is_named_in(["x", resource])
    assert not agent.is_named_in(["prod.vmss_19", "prod_vmss_1", "vmss_18"])


@pytest.mark.parametrize(
    "fields",
    [
        {"clock_offset": 2.1},
        {"clock_offset": -2.1},
        {"clock_offset": None},
        {"poll_age": 60.1},
        {"poll_age": None},
    ],
    ids=str,
)
def test_who_cannot_keep_a_deadline_or_read_documents_is_not_chosen(fields: dict[str, Any]) -> None:
    roster = Roster()
    roster.note_message(sender("without-pulse"), "without-pulse", at(0))
    pulse(roster, "bad", 0, **fields)
    pulse(roster, "good", 0, clock_offset=-2.0, poll_age=60.0)
    assert chosen(roster, 1) == ["good"]


def test_agents_with_recent_polls_come_first_then_those_heard_of_last() -> None:
    roster = Roster()
    pulse(roster, "slow", 9, poll_age=20.0)
    pulse(roster, "slower", 9, poll_age=30.0)
    pulse(roster, "earlier", 1, poll_age=0.1)
    pulse(roster, "later", 2, poll_age=4.9)
    assert chosen(roster, 10) == ["later", "earlier", "slow", "slower"]


def test_after_a_restart_the_merge_waits_for_agents_that_were_not_heard_of_yet() -> None:
    before = Roster()
    agents = [pulse(before, name, 0) for name in ("web_1", "web_2")]
    roster = Roster(agents)
    roster.note_listening(at(10_000))
    pulse(roster, "web_1", 10_010)
    assert [
        roster.may_speak(SCOPE, at(10_010), name) for name in ("web_1", "web_2", "unknown")
    ] == [True, True, False]
    listening(roster, 10_151, since=10_000)
    assert [roster.may_speak(SCOPE, at(10_151), name) for name in ("web_1", "web_2")] == [
        True,
        False,
    ]
    assert chosen(roster, 10_151) == ["web_1"]


def limit(**match: list[str]) -> Limit:
    return Limit.model_validate({"name": "tenth", "match": match, "max": "10%"})


def test_each_agent_that_a_limit_selects_by_its_names_and_scope_is_one_machine() -> None:
    roster = Roster()
    db_0 = pulse(roster, "db_0", 0, names=("db_0", "db000000"))
    roster.note_message(sender("db_1"), "db_1", NOON)
    roster.note_message(sender("db_0", "east"), "db_0", NOON)
    pulse(roster, "web_0", 0, names=("web_0",))
    for match, count in (
        ({}, 4),
        ({"resources": ["db*"]}, 3),
        ({"resources": ["DB0*"]}, 1),
        ({"scope": ["p*"]}, 3),
        ({}, 4),
    ):
        # A reload can change what a limit selects. Then it is counted at once.
        assert roster.machines_of_limit(limit(**match), 0) == count
    roster.forget(db_0)
    assert roster.machines_of_limit(limit(), COUNT_INTERVAL - 1) == 4
    assert roster.machines_of_limit(limit(), COUNT_INTERVAL) == 3


# --- what the hub reports about its agents


@dataclass
class Hub:
    """A roster of a hub that listens, has heard an agent, and looks at it at an interval."""

    roster: Roster = field(default_factory=Roster)
    now: float = 0.0
    is_connected: bool = True
    told: list[str] = field(default_factory=list)
    """The names of what it told."""
    lost: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._look()
        self.hear()

    def hear(self, clock_offset: float = 0.0) -> None:
        pulse(self.roster, "vm-0", self.now, clock_offset=clock_offset)

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds / UPKEEP_INTERVAL)):
            self.now += UPKEEP_INTERVAL
            self._look()

    def _look(self) -> None:
        if self.is_connected:
            self.roster.note_listening(at(self.now))
        else:
            self.roster.note_connection_lost()
        self.told += [name for name, *_ in self.roster.news(at(self.now))]
        for agent in self.roster.agents_to_forget(at(self.now)):
            self.lost.append(agent.relay)
            self.roster.forget(agent)


def test_a_silent_scope_is_told_once_and_comes_back_when_the_hub_hears_it() -> None:
    hub = Hub()
    for hub.is_connected in (True, False, True):
        hub.pass_time(400)
        assert hub.told == ["relay.silent"]
    hub.hear()
    hub.pass_time(20)
    assert hub.told == ["relay.silent", "relay.source-recovered"]


def test_a_scope_does_not_come_back_because_its_agents_are_forgotten() -> None:
    hub = Hub()
    hub.pass_time(24 * 3600 + 60)
    assert hub.lost == ["vm-0"]
    assert hub.told == ["relay.silent"]


def test_a_wrong_clock_is_told_once_until_it_is_right_again() -> None:
    hub = Hub()
    for clock_offset, told in ((9.0, 1), (8.0, 1), (0.1, 1), (9.0, 2)):
        hub.hear(clock_offset)
        hub.pass_time(10)
        assert hub.told == ["relay.clock-skewed"] * told
