"""Sends the StartRequests of a hub. Each is an order to one agent, which answers with a result.

An order is a claim with a deadline, and at most one in a scope can be carried out at any time:

- An agent reads the document, compares the revision, and sends nothing after the deadline:
  `ORDER_LIFETIME` after the hub sent the order, but never later than NotBefore. It judges that by
  the clock of IMDS.
- The hub waits for the result until `ANSWER_MARGIN` after the deadline. Its clock may be wrong by
  as much. Until then the scope is not free for another order.
- An order whose publish failed can have been delivered. It counts as sent.
- For as long after it has connected a hub sends no order: the process before, or another hub, may
  have sent one.

A result that comes later is not waited for. The next agent then finds the event Started, or sends a
second StartRequest, to which Azure answers 200 and which changes nothing
(docs/protocol.md#startrequests).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Literal, TypeAlias

from relay.approvals import ClaimedGrant
from relay.clock import Clock
from relay.errors import (
    DeliveryError,
    SourceRefused,
    SourceUnavailable,
    StartRequestNotDelivered,
    StoreUnavailable,
)
from relay.events.build import Origin
from relay.events.cloudevent import CloudEvent
from relay.fleet.hub.link import HubLink
from relay.fleet.hub.merger import EventMerger
from relay.fleet.hub.roster import Agent, Roster
from relay.fleet.messages import (
    ANSWER_MARGIN,
    ORDER_LIFETIME,
    StartOrder,
    StartOutcome,
    StartResult,
)
from relay.fleet.routing import AuthorizedSender, command_key
from relay.store import Grant, TrackedEvent
from relay.store.sqlite import Store

SETTLED_AFTER = ORDER_LIFETIME + ANSWER_MARGIN
"""Seconds after which nobody can carry out an order any more."""
FAILURE_MEMORY = 600.0
"""Seconds in which an agent that did not carry out an order comes after all others."""
_NEVER = datetime.min.replace(tzinfo=UTC)
_log = logging.getLogger(__name__)

OrderResult: TypeAlias = Literal[StartOutcome, "returned", "unanswered"]
"""How an order ended.

- ``accepted``, ``refused``, ``failed``: what came of the StartRequest that the agent sent.
- ``changed``, ``stale``: the agent sent none, as the event has changed or the order came too late.
- ``returned``: the order reached nobody.
- ``unanswered``: no answer came in time.
"""


@dataclass(slots=True, eq=False)
class _AwaitedOrder:
    """The order of a scope that was sent last, while the hub waits for its result."""

    agent: str
    grant: int
    attempt: int
    result: StartResult | None = None
    answered: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class OrderPort:
    """The `StartRequestPort` of a hub. `Hub` calls `on_result` for each result."""

    store: Store
    roster: Roster
    merger: EventMerger
    link: HubLink
    origin: Origin
    clock: Clock

    def __post_init__(self) -> None:
        self.results: Counter[OrderResult] = Counter()
        self._free_at: dict[str, float] = {}
        """Until when an order of a scope can be carried out that nobody answered."""
        self._awaited: dict[str, _AwaitedOrder] = {}
        self._events: dict[str, TrackedEvent] = {}
        """The event in each scope for which `refresh_event` was called last."""
        self._failed_at: dict[tuple[str, str], float] = {}
        """When agents did not carry out an order, by the monotonic clock."""
        self._returned_at: dict[tuple[str, str], datetime] = {}
        """When an order did not reach an agent: it gets none before it is heard again."""

    def on_result(self, sender: AuthorizedSender, result: StartResult) -> None:
        """Take the result of an order. Only that of the agent that got the order counts."""
        order = self._awaited.get(sender.scope)
        if order is not None and (order.agent, order.grant, order.attempt) == (
            sender.relay,
            result.grant,
            result.attempt,
        ):
            order.result = order.result or result  # the first counts
            order.answered.set()
        else:
            _log.debug("fleet: nobody waits for %s of %s", result, sender)

    # --- StartRequestPort

    async def refresh_event(self, scope: str, grant: Grant, /) -> None:
        """Return once no earlier order can be carried out. The agent reads the document itself."""
        while (wait := self._seconds_until_free(scope)) > 0:
            reason = "because an earlier order can still be carried out"
            _log.info("fleet: scope %s waits %.1f s, %s", scope, wait, reason)
            await self.clock.sleep(wait)
        try:
            self._events[scope] = await self.store.read(
                lambda tx: tx.occurrences.require_occurrence(grant.occurrence)
            )
        except StoreUnavailable as error:
            _log.warning("fleet: no order in scope %s for now: %s", scope, error)
            raise SourceUnavailable(str(error)) from None

    def choose_agent(self, scope: str, grant: Grant, /) -> str:
        """Return the relay word of the agent that gets the order. Raises SourceUnavailable."""
        event = self._events[scope]
        if self.link.connected_since is None:
            raise SourceUnavailable("the hub has no connection to RabbitMQ")
        if self._seconds_until_free(scope) > 0:  # it has connected again
            raise SourceUnavailable("an earlier order can still be carried out")
        now, since = self.clock.now(), self.clock.monotonic() - FAILURE_MEMORY
        agents = self.roster.agents_of_scope(scope)
        able = [agent for agent in agents if self.roster.can_agent_execute_order(agent, now)]
        reachable = [
            agent
            for agent in able
            if agent.last_heard > self._returned_at.get((scope, agent.relay), _NEVER)
        ]
        if not reachable:
            raise SourceUnavailable(
                f"no agent can carry out the order: of {len(agents)} agents of the scope, "
                f"{len(able)} were heard lately, read their document and have a right clock, "
                "and orders do not reach those"
            )
        showing = self.merger.agents_showing(scope, event.event.lowercase_event_id)

        def rank(agent: Agent) -> tuple[object, ...]:
            failed_at = self._failed_at.get((scope, agent.relay), since)
            is_named = agent.is_named_in(event.event.resources)
            shows = agent.relay in showing
            # The VMs that an event names may be about to stop, so they come last. Others may see it
            # without having said so; if the first of them does not, those come that do.
            first, second = (is_named, not shows) if grant.attempts == 0 else (not shows, is_named)
            return max(failed_at, since), first, second, agent.candidate_rank

        return min(reachable, key=rank).relay

    async def send_start_request(self, scope: str, claim: ClaimedGrant, /) -> None:
        """Order one agent to send the StartRequest; return if IMDS accepted it.

        Raises SourceRefused if IMDS answered 400, StartRequestNotDelivered if the agent sent
        nothing, and SourceUnavailable otherwise.
        """
        agent = self.roster.agent(scope, claim.agent or "")
        if agent is None:
            raise StartRequestNotDelivered(f"relay {claim.agent} is forgotten")
        order = _AwaitedOrder(agent.relay, claim.grant.id, claim.attempt_number)
        now = self.clock.now()
        deadline = now + timedelta(seconds=ORDER_LIFETIME)
        event = self._events[scope].event
        message = StartOrder(
            grant=order.grant,
            attempt=order.attempt,
            event_id=claim.event_id,
            revision=claim.grant.revision,
            deadline=min(deadline, event.not_before_time or deadline),
            journalhead=str(claim.journal_head),
            vm_id=agent.vm_id,
        )
        name = f"grant {order.grant}, attempt {order.attempt}, relay {agent.relay} of {scope}"
        _log.info("fleet: order to start %s within %g s (%s)", claim.event_id, ORDER_LIFETIME, name)
        free_at = self._free_at[scope] = self.clock.monotonic() + SETTLED_AFTER
        self._awaited[scope] = order
        try:
            is_delivered = await self._publish(
                command_key(scope, agent.relay), message.to_event(self.origin, now), name
            )
            if is_delivered:
                await self.clock.wait(order.answered, free_at - self.clock.monotonic())
        finally:
            del self._awaited[scope]
        del self._free_at[scope]  # it was answered, or its time is over
        self._conclude(scope, order, "unanswered" if is_delivered else "returned", name)

    def _seconds_until_free(self, scope: str) -> float:
        """Return how long an order can still be carried out, of this hub or of one before it."""
        connected_since = self.link.connected_since
        connected = -math.inf if connected_since is None else connected_since + SETTLED_AFTER
        return max(connected, self._free_at.get(scope, -math.inf)) - self.clock.monotonic()

    async def _publish(self, key: str, event: CloudEvent, name: str) -> bool:
        try:
            return await self.link.send(key, event)
        except DeliveryError as error:
            _log.warning(
                "fleet: whether an order was delivered is not known: %s (%s)", error.reason, name
            )
            return True

    def _conclude(self, scope: str, order: _AwaitedOrder, outcome: OrderResult, name: str) -> None:
        """Return if IMDS accepted; ``outcome`` is that of an order without a result."""
        agent, relay = (scope, order.agent), f"relay {order.agent}"
        status, reason = None, None
        if order.result is not None:
            outcome, status, reason = order.result.result, order.result.status, order.result.reason
        self.results[outcome] += 1
        level = logging.INFO if outcome == "accepted" else logging.WARNING
        _log.log(
            level, "fleet: the order was %s%s (%s)", outcome, f", {reason}" if reason else "", name
        )
        if outcome in ("accepted", "refused"):
            self._failed_at.pop(agent, None)
            self._returned_at.pop(agent, None)
        else:
            self._failed_at[agent] = self.clock.monotonic()
        reason = reason or "it gave no reason"
        match outcome:
            case "refused":
                raise SourceRefused(f"{relay}: {reason}", status=400)
            case "failed":
                raise SourceUnavailable(f"{relay}: {reason}", status=status)
            case "changed" | "stale":
                # If agent after agent sends nothing, the reason is another than the agent.
                kind = StartRequestNotDelivered if order.attempt == 1 else SourceUnavailable
                raise kind(f"{relay} sent nothing: {reason}")
            case "returned":
                self._returned_at[agent] = self.clock.now()
                problem = f"RabbitMQ returned the order: {relay} is not connected"
                raise StartRequestNotDelivered(problem)
            case "unanswered":
                problem = f"{relay} did not answer the order within {SETTLED_AFTER:g} s"
                raise SourceUnavailable(problem)
