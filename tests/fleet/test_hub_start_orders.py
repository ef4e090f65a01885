"""The hub orders one agent after the other to send a StartRequest, and never two at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from relay.errors import SourceUnavailable
from relay.events.model import ScheduledEvent
from relay.fleet.hub.start_orders import SETTLED_AFTER
from tests.approvals.builders import open_grants
from tests.clocks import ManualClock
from tests.fleet.fleet_of_orders import Fleet, Hub, result_of, running_hub, user_event

EVENT = user_event()


@asynccontextmanager
async def hub_with(folder: Path, *agents: str) -> AsyncIterator[Hub]:
    """Run a hub for long enough with agents that it has heard, and with no event yet."""
    fleet = Fleet(ManualClock(), agents or ["a/vm-1", "a/vm-2"])
    async with running_hub(folder / "hub.db", fleet) as hub:
        fleet.send_pulses()
        await hub.advance(SETTLED_AFTER, step=SETTLED_AFTER)
        yield hub


async def show_event(hub: Hub, scope: str = "a", event: ScheduledEvent = EVENT) -> None:
    """Let every agent of a scope report the event, so that it is granted."""
    hub.fleet.azure_says(scope, event)
    hub.fleet.send_pulses()
    await hub.settle()


def ordered(hub: Hub) -> list[str]:
    return [sent.agent for sent in hub.fleet.orders]


# --- the usual way


async def test_one_agent_carries_out_an_order_that_names_vm_and_claim(tmp_path: Path) -> None:
    async with hub_with(tmp_path, "a/vm-1") as hub:
        await show_event(hub)
        assert [post.event_id for post in hub.fleet.posts] == ["E-1"]
        assert hub.event_names() == ["startrequest.accepted"]
        ((sent, note),) = zip(hub.fleet.orders, hub.claim_notes(), strict=True)
        claim = next(row for row in hub.journal() if row.kind == "claim")
        assert sent.order.vm_id == "id-of-vm-1"
        assert sent.order.journalhead == f"{claim.position}:{claim.hash}"
        assert (sent.order.grant, sent.order.attempt) == (note["granted"], note["attempt"])
        assert (sent.order.deadline - hub.fleet.clock.now()).total_seconds() == 5


async def test_an_agent_that_is_named_comes_after_one_that_said_nothing(tmp_path: Path) -> None:
    async with hub_with(tmp_path, "a/vm-9", "a/vm-a", "a/vm-b") as hub:
        hub.fleet.azure_says("a", EVENT)  # about vm-9
        hub.fleet.send_pulse(hub.fleet.agent("a/vm-9"))
        await hub.settle()
        assert [post.agent for post in hub.fleet.posts] == ["vm-a"]


async def test_if_others_do_not_show_it_the_agent_it_names_follows_at_once(tmp_path: Path) -> None:
    async with hub_with(tmp_path, "a/vm-9", *(f"a/vm-{letter}" for letter in "abc")) as hub:
        for letter in "abc":
            hub.fleet.agent(f"a/vm-{letter}").mode = "blind"
        hub.fleet.azure_says("a", EVENT)
        hub.fleet.send_pulse(hub.fleet.agent("a/vm-9"))
        await hub.settle()
        assert ordered(hub) == ["vm-a", "vm-9"]
        assert [post.agent for post in hub.fleet.posts] == ["vm-9"]


# --- orders that fail


async def test_whom_an_order_did_not_reach_gets_the_next_when_heard_again(tmp_path: Path) -> None:
    async with hub_with(tmp_path, "a/vm-1") as hub:
        agent = hub.fleet.agent("a/vm-1")
        agent.is_bound = False
        await show_event(hub)
        await hub.advance(30, step=0.5)
        assert len(hub.claim_notes()) == 1, "the grant waits"
        agent.is_bound = True
        await hub.advance(10, step=0.5)
        assert hub.fleet.orders == []
        hub.fleet.send_pulse(agent)
        await hub.advance(9, step=0.5)
        assert hub.event_names() == ["startrequest.accepted"]
        assert hub.port.results == {"returned": 1, "accepted": 1}


async def test_after_two_that_send_nothing_the_third_is_asked_after_a_pause(tmp_path: Path) -> None:
    """The reason is another than the agents, such as the clock of the hub."""
    async with hub_with(tmp_path, "a/vm-1", "a/vm-2", "a/vm-3") as hub:
        for agent in hub.fleet.agents.values():
            agent.mode = "stale"
        await show_event(hub)
        await hub.advance(0.75)
        assert ordered(hub) == ["vm-1", "vm-2"]
        await hub.advance(0.5)
        assert ordered(hub) == ["vm-1", "vm-2", "vm-3"]


@pytest.mark.parametrize(
    ("status", "agents", "told"),
    [
        (400, ["vm-1"], ["startrequest.failed"]),
        (503, ["vm-1", "vm-2"], ["startrequest.accepted"]),
        (0, ["vm-1", "vm-2"], ["startrequest.accepted"]),
    ],
    ids=["refused", "unavailable", "no answer"],
)
async def test_a_refusal_of_imds_is_final_and_after_a_failure_another_agent_gets_the_order(
    tmp_path: Path, status: int, agents: list[str], told: list[str]
) -> None:
    async with hub_with(tmp_path) as hub:
        hub.fleet.status = status
        await show_event(hub)
        hub.fleet.status = 200
        await hub.advance(20)
        assert (ordered(hub), hub.event_names()) == (agents, told)


async def test_a_frozen_agent_costs_eight_seconds_and_does_nothing_later(tmp_path: Path) -> None:
    async with hub_with(tmp_path) as hub:
        frozen = hub.fleet.agent("a/vm-1")
        frozen.mode = "frozen"
        await show_event(hub)
        await hub.advance(7.75)
        assert ordered(hub) == ["vm-1"]
        await hub.advance(1.5)
        assert ordered(hub) == ["vm-1", "vm-2"]
        hub.fleet.wake_up(frozen)
        await hub.settle()
        assert [post.agent for post in hub.fleet.posts] == ["vm-2"]


async def test_an_agent_frozen_with_an_order_sends_nothing_after_notbefore(tmp_path: Path) -> None:
    async with hub_with(tmp_path) as hub:
        for agent in hub.fleet.agents.values():
            agent.mode = "frozen"
        await show_event(hub, event=user_event(due=SETTLED_AFTER + 3.0))
        (sent,) = hub.fleet.orders
        await hub.advance(3.25)
        assert (sent.order.deadline - hub.fleet.clock.now()).total_seconds() == -0.25
        for agent in hub.fleet.agents.values():
            hub.fleet.wake_up(agent)
        await hub.advance(10)
        assert hub.fleet.posts == []


async def test_without_link_or_agent_nothing_is_claimed_and_the_grant_waits(tmp_path: Path) -> None:
    async with hub_with(tmp_path) as hub:
        hub.fleet.publish = "down"
        await show_event(hub)
        await hub.advance(5)
        hub.fleet.publish = "works"
        for agent in hub.fleet.agents.values():
            agent.clock_offset = 2.5
        hub.fleet.send_pulses()
        await hub.advance(60, step=1.0)
        assert (hub.claim_notes(), hub.fleet.orders) == ([], [])
        for agent in hub.fleet.agents.values():
            agent.clock_offset = 0.0
        hub.fleet.send_pulses()
        await hub.advance(9, step=1.0)
        assert hub.event_names() == ["startrequest.accepted"]


@pytest.mark.parametrize("is_delivered", [True, False])
async def test_an_order_whose_link_broke_counts_as_sent(tmp_path: Path, is_delivered: bool) -> None:
    async with hub_with(tmp_path) as hub:
        hub.fleet.publish = "unconfirmed" if is_delivered else "lost"
        await show_event(hub)
        hub.fleet.publish = "works"
        if is_delivered:
            assert hub.event_names() == ["startrequest.accepted"]
        await hub.advance(7.75)
        assert len(hub.fleet.orders) == 1
        await hub.advance(3)
        assert len(hub.fleet.posts) == 1
        assert hub.event_names() == ["startrequest.accepted"]


# --- results that are late or wrong


async def test_an_acceptance_that_is_late_is_repeated_and_changes_nothing(tmp_path: Path) -> None:
    """Azure answers 200 to the same StartRequest again (docs/protocol.md)."""
    async with hub_with(tmp_path) as hub:
        mute = hub.fleet.agent("a/vm-1")
        mute.mode, hub.fleet.starts_events = "mute", False
        await show_event(hub)
        await hub.advance(8)
        hub.fleet.send_late_answers(mute)
        await hub.advance(2)
        assert [post.agent for post in hub.fleet.posts] == ["vm-1", "vm-2"]
        assert hub.event_names() == ["startrequest.accepted"]
        assert hub.port.results == {"unanswered": 1, "accepted": 1}


async def test_only_the_agent_that_got_an_order_can_answer_it_and_no_other(tmp_path: Path) -> None:
    async with hub_with(tmp_path, "a/vm-1", "a/vm-2", "b/vm-1") as hub:
        hub.fleet.agent("a/vm-1").mode = "frozen"
        await show_event(hub)
        (sent,) = hub.fleet.orders
        for name in ("a/vm-2", "b/vm-1", "b/vm-1"):
            hub.fleet.answer(hub.fleet.agent(name), result_of(sent.order, "accepted"))
        for change in ({"attempt": 2}, {"grant": sent.order.grant + 1}):
            other = sent.order.model_copy(update=change)
            hub.fleet.answer(hub.fleet.agent("a/vm-1"), result_of(other, "accepted"))
        await hub.settle()
        assert hub.event_names() == []
        hub.fleet.wake_up(hub.fleet.agent("a/vm-1"))
        await hub.settle()
        assert [post.agent for post in hub.fleet.posts] == ["vm-1"]
        assert hub.event_names() == ["startrequest.accepted"]


async def test_of_two_results_of_one_order_the_first_counts(tmp_path: Path) -> None:
    async with hub_with(tmp_path, "a/vm-1") as hub:
        hub.fleet.agent("a/vm-1").mode = "twice"
        await show_event(hub)
        assert hub.event_names() == ["startrequest.accepted"]
        assert hub.port.results == {"accepted": 1}


# --- restarts, disk and scopes


async def test_a_hub_that_connects_late_waits_out_an_order_of_another_hub(tmp_path: Path) -> None:
    """A second hub runs for long before the first is gone."""
    async with hub_with(tmp_path, "a/vm-1") as hub:
        hub.fleet.publish = "down"
        await hub.advance(60, step=5.0)
        hub.fleet.publish, hub.fleet.connected_at = "works", hub.fleet.clock.monotonic()
        await show_event(hub)
        await hub.advance(7.75)
        assert hub.fleet.orders == []
        await hub.advance(0.5)
        assert len(hub.fleet.orders) == 1


async def test_an_order_a_reload_gives_up_is_waited_for_by_the_next_gate(tmp_path: Path) -> None:
    async with hub_with(tmp_path, "a/vm-1") as hub:
        hub.fleet.agent("a/vm-1").mode = "frozen"
        await show_event(hub)
        (grant,) = await hub.store.read(open_grants)
        hub.task.cancel()
        await asyncio.wait({hub.task})
        waiting = asyncio.create_task(hub.port.refresh_event("a", grant))
        await hub.advance(7.75)
        assert not waiting.done()
        await hub.advance(0.5)
        assert waiting.done()


async def test_no_order_is_sent_while_the_state_file_cannot_be_read(tmp_path: Path) -> None:
    async with hub_with(tmp_path, "a/vm-1") as hub:
        hub.fleet.publish = "down"
        await show_event(hub)
        (grant,) = await hub.store.read(open_grants)
        await hub.store.close()
        with pytest.raises(SourceUnavailable, match="state file"):
            await hub.port.refresh_event("a", grant)
        hub.task.cancel()


async def test_a_scope_with_a_frozen_agent_delays_no_other_with_its_event(tmp_path: Path) -> None:
    async with hub_with(tmp_path, "a/vm-1", "b/vm-1") as hub:
        hub.fleet.agent("a/vm-1").mode = "frozen"
        await show_event(hub, "a")
        await show_event(hub, "b")
        assert [post.scope for post in hub.fleet.posts] == ["b"]
