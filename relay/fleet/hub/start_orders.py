"""Sends the StartRequests of a hub. Each is an order to one agent, which answers with a result.

At most one order about an event can be carried out at any time:

- An agent sends nothing after the deadline of its order: `ORDER_LIFETIME` after the hub sent it,
  but never later than NotBefore. It judges that by the clock of IMDS.
- The hub waits for the result until `ANSWER_MARGIN` after the deadline. Its clock may be wrong by
  as much.
- An order whose publish failed can have been delivered. It counts as sent.
- After a restart, the hub waits as long for the orders that the journal tells of.

Before an order is repeated, an agent must say afresh what the event is (`order_agents`). Each agent
also reads the document itself before it sends anything. `sent_orders` holds the orders and results.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

import orjson

from relay.approvals import ClaimedGrant
from relay.clock import Clock, wait_for_event
from relay.errors import (
    DeliveryError,
    SourceRefused,
    SourceUnavailable,
    StartRequestNotDelivered,
    StoreUnavailable,
)
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.fleet.hub.order_agents import PULSE_TIMEOUT, AgentsShowing, GrantedEvent, OrderAgents
from relay.fleet.hub.roster import Agent, Roster
from relay.fleet.hub.sent_orders import OrderResult, SentOrder, SentOrders
from relay.fleet.messages import StartOrder, StartResult
from relay.fleet.routing import AuthorizedSender, command_key
from relay.store import Grant
from relay.store.journal import APPROVAL_ROWS
from relay.store.sqlite import Store
from relay.store.transaction import Transaction

ORDER_LIFETIME = 5.0
"""Seconds until the deadline of an order. Agents refuse a longer time."""
ANSWER_MARGIN = 3.0
"""Seconds after the deadline in which the result can still come."""
SETTLED_AFTER = ORDER_LIFETIME + ANSWER_MARGIN
"""Seconds after which nobody can carry out an order any more."""
CONFIRMATION_LIFETIME = 5.0
"""Seconds for which what an agent said suffices, if the order is not sent at once."""

_log = logging.getLogger(__name__)


class CommandPublisher(Protocol):
    """Publishes to the agents, on the command exchange."""

    async def send(self, key: str, event: CloudEvent, is_needed: Callable[[], bool]) -> bool:
        """Publish an event, mandatory and confirmed. Return False if nobody got it.

        Asks ``is_needed`` directly before the event is written, which can be seconds later, and
        writes nothing if it is False. It is asked at most once, and never after the event may have
        been written: an order that is not needed ends. Raises DeliveryError if it is not known
        whether somebody got the event.
        """

    def send_transient(self, key: str, event: CloudEvent) -> None:
        """Publish an event that may be lost."""


class OrderPort:
    """The `StartRequestPort` of a hub.

    For each grant, the approvals call `refresh_events_of_grants`, then `choose_agent`, whose answer
    they record, then `send_start_request`. In a scope they do so for one grant after the other.
    `Hub` calls `on_result` for each result, and `note_pulse_or_report_recorded` for each other
    message once what it says is recorded.
    """

    max_events_per_start_request = 1
    """An order is for one event."""

    def __init__(
        self,
        store: Store,
        roster: Roster,
        publisher: CommandPublisher,
        origin: Origin,
        clock: Clock,
        agents_showing: AgentsShowing,
        *,
        is_connected: Callable[[], bool] = lambda: True,
    ) -> None:
        """Make it when the hub starts. ``origin`` is the hub itself.

        While ``is_connected`` returns False, no grant is claimed.
        """
        self._store = store
        self._publisher = publisher
        self._origin = origin
        self._clock = clock
        self._agents = OrderAgents(roster, publisher.send_transient, origin, clock, agents_showing)
        self._is_connected = is_connected
        self.orders = SentOrders()
        self.results: Counter[OrderResult] = Counter()
        """How orders ended since the start."""
        self._earlier_settled_at = clock.monotonic() + SETTLED_AFTER
        """When nobody can carry out an order any more that an earlier process sent."""
        self._events: dict[str, GrantedEvent] = {}
        """The event in each scope for which `refresh_events_of_grants` was called last."""
        self._read_failures: set[str] = set()
        """The scopes whose last `refresh_events_of_grants` failed."""

    # --- what the intake says

    def on_result(self, sender: AuthorizedSender, result: StartResult) -> None:
        """Take the result of an order. The sender is checked by its routing key and user."""
        self.orders.take_result(sender, result)

    def note_pulse_or_report_recorded(self, scope: str, relay: str) -> None:
        """Note that a pulse or report of an agent came, and that what it says is recorded.

        The roster knows of the message already.
        """
        self._agents.note_heard(scope, relay)

    # --- StartRequestPort

    async def refresh_events_of_grants(self, scope: str, grants: Sequence[Grant], /) -> None:
        """Return once an order may be sent, and what its event is now is recorded.

        The first order for a grant needs no confirmation: the agent reads the document itself. It
        waits a moment if only agents that the event names are known to show it: their VMs may be
        about to stop. Raises SourceUnavailable.
        """
        (grant,) = grants
        try:
            event = await self._load_event_and_restore_orders(scope, grant)
            self._events[scope] = event
            if self.orders.find_order_accepted_by_imds(event.key, grant.id) is None:
                await self._wait_until_no_order_executable(event.key)
            # The result may have come meanwhile.
            if self.orders.find_order_accepted_by_imds(event.key, grant.id) is None:
                if self._must_event_be_confirmed_by_pulse(event):
                    await self._await_pulse_before_next_order(event)
                await self._agents.ask_agents_outside_event_resources(event)
        except SourceUnavailable as error:
            if scope not in self._read_failures:
                self._read_failures.add(scope)
                _log.warning("fleet: no order in scope %s for now: %s", scope, error.reason)
            raise
        self._read_failures.discard(scope)

    def choose_agent(self, scope: str, grants: Sequence[Grant], /) -> str:
        """Return the relay word of the agent that will get the order.

        This is the agent whose StartRequest was accepted, if its answer came late. Raises
        SourceUnavailable.
        """
        (grant,) = grants
        event = self._get_event_refreshed_for_grant(scope, grant)
        accepted = self.orders.find_order_accepted_by_imds(event.key, grant.id)
        if accepted is not None:
            return accepted.agent
        if not self._is_connected():
            raise SourceUnavailable("the hub has no connection to RabbitMQ")
        agent = self._agents.choose(event)
        if agent is None:
            raise SourceUnavailable(self._agents.explain_why_none(event))
        return agent.relay

    async def send_start_request(self, scope: str, claims: Sequence[ClaimedGrant], /) -> None:
        """Order one agent to send the StartRequest; return if IMDS accepted it.

        Raises SourceRefused if IMDS answered 400, StartRequestNotDelivered if the agent sent
        nothing, and SourceUnavailable otherwise.
        """
        (claim,) = claims
        event = self._get_event_refreshed_for_grant(scope, claim.grant)
        if self._has_imds_accepted_earlier_order(event):
            return
        agent = self._require_agent_of_claimed_grant(claim, event)
        began = self._clock.monotonic()
        if self.orders.executable_until_of_event(event.key, began) is not None:
            raise SourceUnavailable("an earlier order about the event can still be carried out")
        order = SentOrder(
            scope=scope,
            agent=agent.relay,
            event_key=event.key,
            grant=claim.grant.id,
            attempt=claim.attempt_number,
            executable_until=began + SETTLED_AFTER,
            is_awaited=True,
        )
        self.orders.add(order, began)
        try:
            await self._send_and_wait(order, claim, agent.vm_id, event.not_before)
        finally:
            order.is_awaited = False
        if not order.is_accepted_by_imds and self._has_imds_accepted_earlier_order(event):
            return
        self._raise_unless_accepted_by_imds(order)

    # --- before an order

    async def _load_event_and_restore_orders(self, scope: str, grant: Grant) -> GrantedEvent:
        """Return the event of a grant, and restore the orders about it that were sent earlier."""
        try:
            event, claims = await self._store.read(
                lambda tx: _read_granted_event_and_claims(tx, scope, grant)
            )
        except StoreUnavailable as error:
            raise SourceUnavailable(str(error)) from None
        if grant.attempts > 0:
            # The journal may have been pruned. A claim that it holds was added first, and counts.
            claims.append(_StartRequestClaimInJournal(grant.id, grant.attempts, agent=""))
        for claim in claims:
            self._restore_order(event, claim)
        return event

    def _restore_order(self, event: GrantedEvent, claim: _StartRequestClaimInJournal) -> None:
        if self.orders.find_by_grant_and_attempt(claim.grant, claim.attempt) is not None:
            return
        order = SentOrder(
            scope=event.scope,
            agent=claim.agent,
            event_key=event.key,
            grant=claim.grant,
            attempt=claim.attempt,
            executable_until=self._earlier_settled_at,
        )
        self.orders.restore_order(order)
        if order.can_be_executed(self._clock.monotonic()):
            self._agents.note_failure(order.scope, order.agent)

    async def _wait_until_no_order_executable(self, event_key: str) -> None:
        """Wait until nobody can carry out an earlier order about an event."""
        while True:
            now = self._clock.monotonic()
            until = self.orders.executable_until_of_event(event_key, now)
            if until is None:
                return
            _log.info(
                "fleet: event %s waits %.1f s, because an earlier order can still be carried out",
                event_key,
                until - now,
            )
            for order in self.orders.orders_of_event(event_key):
                if order.can_be_executed(now):
                    await wait_for_event(order.ended, self._clock, order.executable_until - now)
                    break

    def _must_event_be_confirmed_by_pulse(self, event: GrantedEvent) -> bool:
        """Whether an agent must say what the event is, because an order may have changed it."""
        now = self._clock.monotonic()
        return any(
            not order.was_returned
            and (order.confirmed_at is None or now >= order.confirmed_at + CONFIRMATION_LIFETIME)
            for order in self.orders.orders_of_grant(event.key, event.grant)
        )

    async def _await_pulse_before_next_order(self, event: GrantedEvent) -> None:
        """Return once an agent has said what the event is. Raises SourceUnavailable."""
        if not await self._agents.request_and_await_pulse_showing_event(event):
            raise SourceUnavailable(
                f"within {PULSE_TIMEOUT:g} s no agent said whether the event is still the same"
            )
        for order in self.orders.orders_of_grant(event.key, event.grant):
            order.confirmed_at = self._clock.monotonic()

    # --- an order

    def _require_agent_of_claimed_grant(self, claim: ClaimedGrant, event: GrantedEvent) -> Agent:
        """Return the agent of a claim.

        Raises StartRequestNotDelivered if it cannot get the order any more.
        """
        for agent in self._agents.find_reachable_agents_best_first(event):
            if agent.relay == claim.agent:
                return agent
        raise StartRequestNotDelivered(f"relay {claim.agent} cannot carry out the order any more")

    def _get_event_refreshed_for_grant(self, scope: str, grant: Grant) -> GrantedEvent:
        event = self._events.get(scope)
        if event is None or event.grant != grant.id:
            raise RuntimeError("expected refresh_events_of_grants for the grant before it is sent")
        return event

    def _has_imds_accepted_earlier_order(self, event: GrantedEvent) -> bool:
        """Whether IMDS accepted an earlier StartRequest for the grant."""
        accepted = self.orders.find_order_accepted_by_imds(event.key, event.grant)
        if accepted is None:
            return False
        _log.info("fleet: no order is sent, because IMDS accepted an earlier one (%s)", accepted)
        return True

    async def _send_and_wait(
        self, order: SentOrder, claim: ClaimedGrant, vm_id: str | None, not_before: datetime | None
    ) -> None:
        """Publish an order, and wait until it has ended or nobody can carry it out any more."""
        now = self._clock.now()
        deadline = now + timedelta(seconds=ORDER_LIFETIME)
        message = StartOrder(
            grant=order.grant,
            attempt=order.attempt,
            event_id=claim.event_id,
            revision=claim.grant.revision,
            deadline=min(deadline, not_before or deadline),
            journalhead=str(claim.journal_head),
            vm_id=vm_id,
        )
        _log.info(
            "fleet: order to start %s within %g s (%s)", claim.event_id, ORDER_LIFETIME, order
        )
        began = self._clock.monotonic()
        event = message.to_event(self._origin, now)
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(self._publish(order, event), name="hub: start order")
            await wait_for_event(order.ended, self._clock, order.executable_until - began)
            sending.cancel()
        if not order.was_withdrawn:
            self.results[order.outcome] += 1
            _log_end(order)

    async def _publish(self, order: SentOrder, event: CloudEvent) -> None:
        def is_needed() -> bool:
            # The answer to an earlier order can come while this one waits to be written.
            if self.orders.find_order_accepted_by_imds(order.event_key, order.grant) is None:
                return True
            order.end_unsent_as_no_longer_needed()
            return False

        try:
            is_delivered = await self._publisher.send(
                command_key(order.scope, order.agent), event, is_needed
            )
        except DeliveryError as error:
            _log.warning(
                "fleet: whether an order was delivered is not known: %s (%s)", error.reason, order
            )
            return
        if not is_delivered:
            order.end_returned()

    def _raise_unless_accepted_by_imds(self, order: SentOrder) -> None:
        result = order.result
        if result is not None and result.result in ("accepted", "refused"):
            self._agents.forget_failure(order.scope, order.agent)
        else:
            self._agents.note_failure(order.scope, order.agent)
        if order.was_returned:
            self._agents.note_order_returned_by_broker(order.scope, order.agent)
            raise StartRequestNotDelivered(
                f"RabbitMQ returned the order: relay {order.agent} is not connected"
            )
        if result is None:
            raise SourceUnavailable(
                f"relay {order.agent} did not answer the order within {SETTLED_AFTER:g} s"
            )
        reason = result.reason or "it gave no reason"
        match result.result:
            case "refused":
                raise SourceRefused(f"relay {order.agent}: {reason}", status=400)
            case "failed":
                raise SourceUnavailable(f"relay {order.agent}: {reason}", status=result.status)
            case "changed" | "stale":
                before = self.orders.find_by_grant_and_attempt(order.grant, order.attempt - 1)
                is_repeated = before is not None and before.is_confirmed_unexecuted
                # If agent after agent sends nothing, the reason is another than the agent.
                kind = SourceUnavailable if is_repeated else StartRequestNotDelivered
                raise kind(f"relay {order.agent} sent nothing: {reason}")


@dataclass(frozen=True, slots=True)
class _StartRequestClaimInJournal:
    """A claim in the journal."""

    grant: int
    attempt: int
    agent: str


def _read_granted_event_and_claims(
    tx: Transaction, scope: str, grant: Grant
) -> tuple[GrantedEvent, list[_StartRequestClaimInJournal]]:
    """Return the event of a grant, and the claims of all grants about its EventId."""
    occurrence = tx.occurrences.require_occurrence(grant.occurrence)
    event = GrantedEvent(
        scope=scope,
        grant=grant.id,
        key=occurrence.key,
        resources=occurrence.event.resources,
        not_before=occurrence.event.not_before_time,
    )
    notes = [
        orjson.loads(row.body)
        for row in tx.journal.verified_rows(APPROVAL_ROWS, occurrence.key)
        if row.kind == "claim"
    ]
    return event, [
        _StartRequestClaimInJournal(note["granted"], note["attempt"], note["agent"])
        for note in notes
        if note.get("agent") is not None
    ]


def _log_end(order: SentOrder) -> None:
    """Log how an order ended."""
    result = order.result
    if order.was_returned:
        _log.warning("fleet: the order was returned (%s)", order)
    elif result is None:
        _log.warning("fleet: no answer to the order within %g s (%s)", SETTLED_AFTER, order)
    else:
        _log.log(
            logging.INFO if order.is_accepted_by_imds else logging.WARNING,
            "fleet: answer to the order: %s%s (%s)",
            result.result,
            f", {result.reason}" if result.reason else "",
            order,
        )
