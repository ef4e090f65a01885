"""How many machines a share is taken of: the agents that the hub knows."""

from __future__ import annotations

from datetime import UTC, datetime

from relay.approvals.limits import Limit
from relay.fleet.hub.roster import Agent, Roster
from relay.fleet.hub.roster_keeper import COUNT_INTERVAL, SelectedMachineCounter
from tests.clocks import ManualClock


def agent(scope: str, name: str, *names: str) -> Agent:
    """An agent with the names that its pulse said."""
    heard = datetime(2026, 1, 1, tzinfo=UTC)
    return Agent(
        scope=scope, relay=name.lower(), user="u", name=name, first_heard=heard, names=names
    )


def limit(**match: list[str]) -> Limit:
    return Limit.model_validate({"name": "tenth", "match": match, "max": "10%"})


AGENTS = [
    agent("west", "db_0", "db_0", "db000000"),
    agent("west", "db_1"),
    agent("east", "db_0", "db_0"),
    agent("east", "web_0", "web_0"),
]


def test_each_agent_is_one_machine_with_all_its_names() -> None:
    assert SelectedMachineCounter(Roster(AGENTS), ManualClock()).machines_of_limit(limit()) == 4


def test_only_machines_whose_names_and_scopes_match_are_counted() -> None:
    roster, clock = Roster(AGENTS), ManualClock()
    assert SelectedMachineCounter(roster, clock).machines_of_limit(limit(resources=["db*"])) == 3
    assert SelectedMachineCounter(roster, clock).machines_of_limit(limit(resources=["DB0*"])) == 1
    assert SelectedMachineCounter(roster, clock).machines_of_limit(limit(scope=["w*"])) == 2


def test_the_machines_are_counted_again_after_a_while() -> None:
    roster, clock = Roster(AGENTS), ManualClock()
    counts = SelectedMachineCounter(roster, clock)
    assert counts.machines_of_limit(limit()) == 4
    roster.forget(AGENTS[0])
    clock.advance(COUNT_INTERVAL - 1)
    assert counts.machines_of_limit(limit()) == 4
    clock.advance(1)
    assert counts.machines_of_limit(limit()) == 3


def test_another_limit_of_the_same_name_is_counted_at_once() -> None:
    """A reload can change what a limit selects."""
    counts = SelectedMachineCounter(Roster(AGENTS), ManualClock())
    assert counts.machines_of_limit(limit()) == 4
    assert counts.machines_of_limit(limit(scope=["w*"])) == 2
