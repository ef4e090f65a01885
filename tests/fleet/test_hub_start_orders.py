"""The hub orders one agent after the other to send a StartRequest, and never two at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from relay.errors import SourceUnavailable
from relay.events.model import ScheduledEvent
from relay.fleet.hub.start_orders import OrderPort
from relay.fleet.messages import StartResult
from relay.fleet.routing import AuthorizedSender
from relay.store import Grant
from tests.approvals.builders import open_grants
from tests.approvals.manual_clock import ManualClock
from tests.fleet.fleet_of_orders import HUB, Fleet, Hub, build_result, running_hub, user_event

EVENT = user_event()


@asynccontextmanager
async def hub_with(
    folder: Path, *agents: str, clock: ManualClock | None = None
) -> AsyncIterator[Hub]:
    """Run a hub with agents that it has heard, and with no event yet."""
    fleet = Fleet(clock or ManualClock(), agents or ["a/vm-1", "a/vm-2"])
    async with running_hub(folder / "hub.db", fleet) as hub:
        fleet.send_pulses()
        await hub.settle()
        yield hub


async def show_event(hub: Hub, scope: str = "a", event: ScheduledEvent = EVENT) -> None:
    """Let every agent of a scope report the event, so that it is granted."""
    hub.fleet.azure_says(scope, event)
    hub.fleet.send_pulses()
    await hub.settle()


# --- the usual way


async def test_one_agent_sends_the_start_request(tmp_path: Path) -> None:
    async with hub_with(tmp_path) as hub:
        await show_event(hub)
        assert [post.event_id for post in hub.fleet.posts] == ["E-1"]
        assert hub.event_names() == ["startrequest.accepted"]
        assert hub.fleet.pulse_requests == [], "a first order needs no fresh word"


async def test_an_order_says_which_vm_is_meant_and_where_the_journal_was(tmp_path: Path) -> None:
    async with hub_with(tmp_path, "a/vm-1") as hub:
        await show_event(hub)
        ((order, note),) = [
            (sent.order, note) for sent in hub.fleet.orders for note in hub.claim_notes()
        ]
        claim = next(row for row in hub.journal() if row.kind == "claim")
        assert order.vm_id == "id-of-vm-1"
        assert order.journalhead == f"{claim.position}:{claim.hash}"
        assert (order.grant, order.attempt) == (note["granted"], note["attempt"])
        assert (order.deadline - hub.fleet.clock.now()).total_seconds() == 5


async def test_an_agent_that_the_event_names_is_the_last_choice(tmp_path: Path) -> None:
    async with hub_with(tmp_path, "a/vm-9", "a/vm-a") as hub:  # the event is about vm-9
        await show_event(hub)
        assert [sent.agent for sent in hub.fleet.orders] == ["vm-a"]


async def test_agents_that_the_event_does_not_name_are_asked_whether_they_show_it(
    tmp_path: Path,
) -> None:
    """Most agents leave it to the one that the event names to report it."""
    async with hub_with(tmp_path, "a/vm-9", *(f"a/vm-{letter}" for letter in "abcd")) as hub:
        hub.fleet.azure_says("a", EVENT)  # about vm-9
        hub.fleet.send_pulse(hub.fleet.agent("a/vm-9"))
        await hub.settle()
        assert [relay for _, relay in hub.fleet.pulse_requests] == ["vm-a", "vm-b", "vm-c"]
        assert [post.agent for post in hub.fleet.posts] == ["vm-a"]


async def test_if_nobody_else_answers_the_agent_that_the_event_names_gets_the_order(
    tmp_path: Path,
) -> None:
    async with hub_with(tmp_path, "a/vm-9", "a/vm-a") as hub:
        hub.fleet.agent("a/vm-a").is_silent = True
        await show_event(hub)
        await hub.advance(1.25)
        assert hub.fleet.orders == []
        await hub.advance(0.5)
        assert [post.agent for post in hub.fleet.posts] == ["vm-9"]


async def test_an_answer_of_the_agent_that_the_event_names_does_not_end_the_look_for_others(
    tmp_path: Path,
) -> None:
    async with hub_with(tmp_path, "a/vm-9", "a/vm-a") as hub:
        named, other = hub.fleet.agent("a/vm-9"), hub.fleet.agent("a/vm-a")
        other.is_silent = True
        await show_event(hub)
        hub.fleet.send_pulse(named)
        await hub.advance(0.75)
        assert hub.fleet.orders == []
        other.is_silent = False
        await hub.advance(0.25)  # it is asked again
        assert [post.agent for post in hub.fleet.posts] == ["vm-a"]


async def test_the_log_tells_of_each_order_and_its_result(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "relay.fleet")
    async with hub_with(tmp_path, "a/vm-1") as hub:
        hub.fleet.status = 503
        await show_event(hub)
        hub.fleet.status = 200
        await hub.advance(2)
        assert hub.event_names() == ["startrequest.accepted"]
    assert [message for message in caplog.messages if message.startswith("fleet: ")] == [
        "fleet: order to start E-1 within 5 s (grant 2, attempt 1, relay vm-1 of a)",
        "fleet: answer to the order: failed, it is failed (grant 2, attempt 1, relay vm-1 of a)",
        "fleet: order to start E-1 within 5 s (grant 2, attempt 2, relay vm-1 of a)",
        "fleet: answer to the order: accepted (grant 2, attempt 2, relay vm-1 of a)",
    ]


# --- orders that fail


async def test_a_returned_order_goes_to_the_next_agent_at_once(tmp_path: Path) -> None:
    async with hub_with(tmp_path) as hub:
        hub.fleet.agent("a/vm-1").is_bound = False
        began = hub.fleet.clock.monotonic()
        await show_event(hub)
        assert [(sent.agent, sent.order.attempt) for sent in hub.fleet.orders] == [("vm-2", 2)]
        assert hub.event_names() == ["startrequest.accepted"]
        assert hub.port.results == {"returned": 1, "accepted": 1}
        assert hub.fleet.clock.monotonic() == began
        assert hub.fleet.pulse_requests == []


async def test_an_agent_that_an_order_did_not_reach_gets_the_next_when_it_is_heard_again(
    tmp_path: Path,
) -> None:
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


async def test_after_two_agents_that_send_nothing_the_third_gets_the_order_after_a_pause(
    tmp_path: Path,
) -> None:
    """The reason is another than the agents, such as the clock of the hub."""
    async with hub_with(tmp_path, "a/vm-1", "a/vm-2", "a/vm-3") as hub:
        for agent in hub.fleet.agents.values():
            agent.mode = "stale"
        await show_event(hub)
        await hub.advance(0.75)
        assert [sent.agent for sent in hub.fleet.orders] == ["vm-1", "vm-2"]
        await hub.advance(0.5)
        assert [sent.agent for sent in hub.fleet.orders] == ["vm-1", "vm-2", "vm-3"]


async def test_a_refusal_of_imds_is_final(tmp_path: Path) -> None:
    async with hub_with(tmp_path) as hub:
        hub.fleet.status = 400
        await show_event(hub)
        await hub.advance(20)
        assert [post.status for post in hub.fleet.posts] == [400]
        assert hub.event_names() == ["startrequest.failed"]


@pytest.mark.parametrize("status", [None, 503])
async def test_after_no_answer_of_imds_another_agent_gets_the_order(
    tmp_path: Path, status: int | None
) -> None:
    async with hub_with(tmp_path) as hub:
        hub.fleet.status = status or 0
        await show_event(hub)
        hub.fleet.status = 200
        await hub.advance(2)
        assert [sent.agent for sent in hub.fleet.orders] == ["vm-1", "vm-2"]
        assert hub.fleet.pulse_requests, "a repeated order needs a fresh word"
        assert hub.event_names() == ["startrequest.accepted"]


async def test_a_frozen_agent_delays_the_order_by_eight_seconds_and_does_nothing_later(
    tmp_path: Path,
) -> None:
    async with hub_with(tmp_path) as hub:
        frozen = hub.fleet.agent("a/vm-1")
        frozen.mode = "frozen"
        await show_event(hub)
        await hub.advance(7.75)
        assert [sent.agent for sent in hub.fleet.orders] == ["vm-1"]
        await hub.advance(1.5)
        assert [sent.agent for sent in hub.fleet.orders] == ["vm-1", "vm-2"]
        hub.fleet.wake_up(frozen)
        await hub.settle()
        assert [post.agent for post in hub.fleet.posts] == ["vm-2"]


async def test_an_agent_that_was_frozen_with_an_order_sends_nothing_after_not_before(
    tmp_path: Path,
) -> None:
    async with hub_with(tmp_path) as hub:
        for agent in hub.fleet.agents.values():
            agent.mode = "frozen"
        await show_event(hub, event=user_event(due=3.0))
        (sent,) = hub.fleet.orders
        await hub.advance(3.25)
        assert (sent.order.deadline - hub.fleet.clock.now()).total_seconds() == -0.25
        for agent in hub.fleet.agents.values():
            hub.fleet.wake_up(agent)
        await hub.advance(10)
        assert hub.fleet.posts == []


async def test_a_changed_event_is_not_started_before_the_hub_knows_it(tmp_path: Path) -> None:
    async with hub_with(tmp_path, "a/vm-1") as hub:
        agent = hub.fleet.agent("a/vm-1")
        agent.mode = "frozen"
        await show_event(hub)
        hub.fleet.azure_says("a", user_event(event_type="Redeploy"))
        hub.fleet.wake_up(agent)
        await hub.advance(1)
        assert hub.event_names() == ["startrequest.failed", "startrequest.accepted"]
        assert [post.revision for post in hub.fleet.posts] == [
            user_event(event_type="Redeploy").revision
        ]


async def test_without_agents_nothing_is_claimed_and_the_grant_waits(tmp_path: Path) -> None:
    async with hub_with(tmp_path) as hub:
        await show_event_while_silent(hub)
        await hub.advance(60, step=1.0)
        assert (hub.claim_notes(), hub.fleet.orders) == ([], [])
        for agent in hub.fleet.agents.values():
            agent.clock_offset = 0.0
        hub.fleet.send_pulses()
        await hub.advance(9, step=1.0)
        assert hub.event_names() == ["startrequest.accepted"]


async def show_event_while_silent(hub: Hub) -> None:
    """Let the event be granted while the clock of each agent is wrong."""
    for agent in hub.fleet.agents.values():
        agent.clock_offset = 2.5
    await show_event(hub)


async def test_without_a_connection_nothing_is_claimed(tmp_path: Path) -> None:
    async with hub_with(tmp_path) as hub:
        hub.fleet.publish = "down"
        await show_event(hub)
        await hub.advance(5)
        assert hub.claim_notes() == []


@pytest.mark.parametrize("is_delivered", [True, False])
async def test_an_order_whose_connection_was_lost_counts_as_sent(
    tmp_path: Path, is_delivered: bool
) -> None:
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


# --- a fresh word


async def test_an_order_is_repeated_only_after_an_agent_has_said_what_the_event_is(
    tmp_path: Path,
) -> None:
    async with hub_with(tmp_path) as hub:
        hub.fleet.status = 503
        await show_event(hub)
        hub.fleet.status = 200
        for agent in hub.fleet.agents.values():
            agent.is_silent = True
        await hub.advance(30, step=0.5)
        assert len(hub.fleet.orders) == 1
        assert {relay for _, relay in hub.fleet.pulse_requests} == {"vm-1", "vm-2"}
        for agent in hub.fleet.agents.values():
            agent.is_silent = False
        hub.fleet.send_pulses()
        await hub.advance(8, step=0.5)
        assert len(hub.fleet.orders) == 2


async def test_what_an_agent_said_before_it_was_asked_is_not_fresh(tmp_path: Path) -> None:
    async with hub_with(tmp_path) as hub:
        hub.fleet.status = 503
        await show_event(hub)
        for agent in hub.fleet.agents.values():
            agent.is_silent = True
        await hub.advance(1)  # the hub asks now
        asked = len(hub.fleet.pulse_requests)
        assert asked == 2
        hub.port.note_pulse_or_report_recorded(
            "a", "vm-1"
        )  # it was recorded now, but the roster knows it from before
        await hub.settle()
        assert len(hub.fleet.orders) == 1


async def test_a_word_that_is_not_followed_by_an_order_is_soon_not_fresh_any_more(
    tmp_path: Path,
) -> None:
    async with hub_with(tmp_path, "a/vm-1") as hub:
        agent = hub.fleet.agent("a/vm-1")
        hub.fleet.status = 503
        await show_event(hub)
        hub.fleet.publish = "down"
        await hub.advance(1.25)
        hub.fleet.send_pulse(agent)  # while the hub waits for one, but cannot send an order
        await hub.advance(6)
        agent.is_silent, hub.fleet.publish = True, "works"
        await hub.advance(20, step=0.5)
        assert len(hub.fleet.orders) == 1
        agent.is_silent = False
        await hub.advance(20, step=0.5)
        assert len(hub.fleet.orders) > 1


async def test_at_most_three_agents_are_asked(tmp_path: Path) -> None:
    async with hub_with(tmp_path, *(f"a/vm-{number}" for number in range(1, 7))) as hub:
        hub.fleet.status = 503
        await show_event(hub)
        await hub.advance(1.25)
        assert len(hub.fleet.orders) == 2
        assert len(hub.fleet.pulse_requests) == 3


# --- results that are late, wrong or repeated


async def test_a_late_acceptance_spares_the_next_order(tmp_path: Path) -> None:
    async with hub_with(tmp_path) as hub:
        mute = hub.fleet.agent("a/vm-1")
        mute.mode, hub.fleet.starts_events = "mute", False
        await show_event(hub)
        await hub.advance(8)
        hub.fleet.send_late_answers(mute)
        await hub.advance(2)
        assert len(hub.fleet.orders) == 1
        assert hub.event_names() == ["startrequest.accepted"]
        assert hub.port.results == {"unanswered": 1}
        assert [note["agent"] for note in hub.claim_notes()] == ["vm-1", "vm-1"]


async def test_a_late_acceptance_spares_an_order_that_waits_to_be_written(tmp_path: Path) -> None:
    """The broker can block publishers while it delivers results."""
    async with hub_with(tmp_path) as hub:
        mute = hub.fleet.agent("a/vm-1")
        mute.mode, hub.fleet.starts_events = "mute", False
        await show_event(hub)
        hub.fleet.may_write.clear()
        await hub.advance(10)
        assert [note["agent"] for note in hub.claim_notes()] == ["vm-1", "vm-2"]
        hub.fleet.send_late_answers(mute)
        await hub.settle()
        hub.fleet.may_write.set()
        await hub.advance(2)
        assert len(hub.fleet.orders) == 1
        assert hub.event_names() == ["startrequest.accepted"]
        assert hub.port.results == {"unanswered": 1}


async def test_an_order_that_is_returned_after_a_late_acceptance_counts_as_returned(
    tmp_path: Path,
) -> None:
    async with hub_with(tmp_path) as hub:
        mute = hub.fleet.agent("a/vm-1")
        mute.mode, hub.fleet.starts_events = "mute", False
        await show_event(hub)
        hub.fleet.agent("a/vm-2").is_bound = False
        hub.fleet.may_return.clear()
        await hub.advance(10)
        hub.fleet.send_late_answers(mute)
        await hub.settle()
        hub.fleet.may_return.set()
        await hub.advance(2)
        assert hub.event_names() == ["startrequest.accepted"]
        assert hub.port.results == {"unanswered": 1, "returned": 1}


async def test_a_late_acceptance_during_the_next_order_counts_after_that_has_ended(
    tmp_path: Path,
) -> None:
    async with hub_with(tmp_path) as hub:
        mute, frozen = hub.fleet.agent("a/vm-1"), hub.fleet.agent("a/vm-2")
        mute.mode, hub.fleet.starts_events = "mute", False
        await show_event(hub)
        frozen.mode = "frozen"
        await hub.advance(10)
        assert [sent.agent for sent in hub.fleet.orders] == ["vm-1", "vm-2"]
        hub.fleet.send_late_answers(mute)
        await hub.settle()
        assert hub.event_names() == [], "the other agent can still send one"
        await hub.advance(8)
        assert hub.event_names() == ["startrequest.accepted"]
        assert len(hub.fleet.orders) == 2


async def test_a_late_acceptance_does_not_count_for_the_changed_event(tmp_path: Path) -> None:
    async with hub_with(tmp_path) as hub:
        mute = hub.fleet.agent("a/vm-1")
        mute.mode, hub.fleet.starts_events = "mute", False
        await show_event(hub)
        hub.fleet.azure_says("a", user_event(event_type="Redeploy"))
        await hub.advance(7.5)
        hub.fleet.send_pulses()
        await hub.advance(0.5)
        hub.fleet.send_late_answers(mute)
        await hub.advance(2)
        assert [sent.order.revision for sent in hub.fleet.orders] == [
            EVENT.revision,
            user_event(event_type="Redeploy").revision,
        ]
        assert hub.event_names() == ["startrequest.failed", "startrequest.accepted"]


async def test_only_the_agent_that_got_the_order_can_answer_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with hub_with(tmp_path, "a/vm-1", "a/vm-2", "b/vm-1") as hub:
        hub.fleet.agent("a/vm-1").mode = "frozen"
        await show_event(hub)
        (sent,) = hub.fleet.orders
        for name in ("a/vm-2", "b/vm-1", "b/vm-1"):
            hub.fleet.answer(hub.fleet.agent(name), build_result(sent.order, "accepted"))
        await hub.settle()
        assert hub.event_names() == []
        assert hub.port.orders.ignored == {"other-agent": 3}
        assert caplog.text.count("that order went to another relay") == 2, (
            "it is logged once for each"
        )


async def test_a_second_answer_changes_nothing(tmp_path: Path) -> None:
    async with hub_with(tmp_path, "a/vm-1") as hub:
        hub.fleet.agent("a/vm-1").mode = "twice"
        await show_event(hub)
        assert hub.event_names() == ["startrequest.accepted"]
        assert hub.port.orders.ignored == {"repeated": 1}


async def test_results_of_unknown_orders_are_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with hub_with(tmp_path, "a/vm-1") as hub:
        for attempt in range(500):
            result = StartResult(
                grant=7, attempt=attempt, result="accepted", status=200, reason=None
            )
            hub.port.on_result(AuthorizedSender("a", "vm-1", "user-a"), result)
        assert hub.port.orders.ignored == {"unknown": 500}
    assert caplog.text.count("the hub knows no such order") == 1


# --- after a restart


async def test_after_a_restart_an_order_is_repeated_only_when_the_lost_one_is_over(
    tmp_path: Path,
) -> None:
    async with hub_with(tmp_path) as hub:
        hub.fleet.agent("a/vm-1").mode = "frozen"
        await show_event(hub)
        assert len(hub.fleet.orders) == 1
        fleet = hub.fleet
    async with running_hub(tmp_path / "hub.db", fleet, earlier=hub) as hub:
        fleet.send_pulses()
        await hub.advance(7.75)
        assert len(fleet.orders) == 1
        await hub.advance(1)
        assert [sent.agent for sent in fleet.orders] == ["vm-1", "vm-2"]


async def test_a_result_that_came_while_the_hub_was_down_counts(tmp_path: Path) -> None:
    async with hub_with(tmp_path) as hub:
        hub.fleet.agent("a/vm-1").mode = "mute"
        hub.fleet.starts_events = False
        await show_event(hub)
        fleet = hub.fleet
    fleet.send_late_answers(fleet.agent("a/vm-1"))
    async with running_hub(tmp_path / "hub.db", fleet, earlier=hub) as hub:
        await hub.settle()
        assert len(fleet.orders) == 1
        assert hub.event_names() == ["startrequest.accepted"]


async def test_after_a_restart_a_new_grant_for_the_event_waits_for_the_order_of_the_old_grant(
    tmp_path: Path,
) -> None:
    async with hub_with(tmp_path) as hub:
        hub.fleet.agent("a/vm-1").mode = "frozen"
        await show_event(hub)
        fleet = hub.fleet
    async with running_hub(tmp_path / "hub.db", fleet, earlier=hub) as hub:
        fleet.azure_says("a", user_event(event_type="Redeploy"))
        fleet.send_pulses()
        await hub.advance(7.75)
        assert [state for _, state, _ in hub.grant_states()] == ["failed", "granted"]
        assert len(fleet.orders) == 1
        await hub.advance(1)
        assert hub.event_names() == ["startrequest.failed", "startrequest.accepted"]


async def test_a_grant_whose_claim_is_not_in_the_journal_waits_as_long_after_a_restart(
    tmp_path: Path,
) -> None:
    async with hub_with(tmp_path, "a/vm-1") as hub:
        (grant,) = await wait_for_grant(hub)
        port = OrderPort(hub.store, hub.roster, hub.fleet, HUB, hub.fleet.clock, hub.agents_showing)
        hub.fleet.agent("a/vm-1").is_silent = True
        read = asyncio.create_task(port.refresh_events_of_grants("a", [replace(grant, attempts=1)]))
        await hub.advance(7.75)
        assert hub.fleet.pulse_requests == []
        await hub.advance(0.5)
        assert hub.fleet.pulse_requests == [("a", "vm-1")]
        await hub.advance(5)
        with pytest.raises(SourceUnavailable):
            await read


async def test_no_order_is_sent_while_the_state_file_cannot_be_read(tmp_path: Path) -> None:
    async with hub_with(tmp_path, "a/vm-1") as hub:
        grants = await wait_for_grant(hub)
        await hub.store.close()
        with pytest.raises(SourceUnavailable, match="state file"):
            await hub.port.refresh_events_of_grants("a", grants)
        hub.task.cancel()


async def wait_for_grant(hub: Hub) -> list[Grant]:
    """Let the event be granted while nobody can carry out an order; then everybody can."""
    await show_event_while_silent(hub)
    for agent in hub.fleet.agents.values():
        agent.clock_offset = 0.0
    return await hub.store.read(open_grants)


# --- scopes


async def test_the_same_event_id_in_two_scopes_is_two_events(tmp_path: Path) -> None:
    async with hub_with(tmp_path, "a/vm-1", "b/vm-1") as hub:
        hub.fleet.azure_says("a", EVENT)
        hub.fleet.azure_says("b", EVENT)
        hub.fleet.send_pulses()
        await hub.settle()
        assert sorted(post.scope for post in hub.fleet.posts) == ["a", "b"]


async def test_a_scope_whose_agent_is_frozen_delays_no_other(tmp_path: Path) -> None:
    async with hub_with(tmp_path, "a/vm-1", "b/vm-1") as hub:
        hub.fleet.agent("a/vm-1").mode = "frozen"
        await show_event(hub, "a")
        await show_event(hub, "b")
        assert [post.scope for post in hub.fleet.posts] == ["b"]
