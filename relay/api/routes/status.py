"""`/v1/status`: who this relay is, who the caller is, and whether the parts of the relay work."""

from __future__ import annotations

import contextlib

from typing_extensions import TypedDict

from relay import __version__
from relay.api import AmqpApprovalsLink
from relay.api.schema.route import Call, Route
from relay.approvals.request import Right
from relay.errors import StoreUnavailable
from relay.events.timestamps import format_rfc3339
from relay.store import Mode


class PartHealth(TypedDict):
    """Whether a part of the relay works."""

    ok: bool
    reason: str | None
    """What it means that it does not work."""


class SourceStatus(PartHealth):
    """Whether the relay hears of events."""

    polls: int
    """Polls so far; on a hub messages of agents."""
    failures: int
    """Polls in a row without a usable response; on a hub failed connections in a row."""
    readAgeSeconds: float | None
    """The age of the document that was read last; null: none was read, or this is a hub."""
    clockOffsetSeconds: float | None
    """How far this relay's clock is ahead of that of the metadata service; null: not known."""


class CallerStatus(TypedDict):
    """Who calls."""

    principal: str
    can: list[Right]


class RelayStatus(TypedDict):
    """The state of the relay."""

    now: str
    """RFC 3339: the relay's clock."""
    version: str
    scope: str
    relay: str
    hub: bool
    """Whether this relay is the hub of a fleet."""
    caller: CallerStatus
    mode: Mode | None
    """The mode of approvals; null: the state file cannot be read now."""
    position: int | None
    """The end of the journal: an id of `/v1/stream`; null: the state file cannot be read now."""
    source: SourceStatus
    store: PartHealth
    approvalsLink: PartHealth | None
    """The connection over which approvals come from RabbitMQ; null: it is not configured."""


async def _show_status(call: Call) -> RelayStatus:
    relay, caller = call.relay, call.caller
    source, polling, link = relay.source, relay.polling, relay.approvals_link
    mode: Mode | None = None
    position: int | None = None
    with contextlib.suppress(StoreUnavailable):
        mode, position = await relay.store.read(
            lambda tx: (relay.gate.engine.effective_approval_mode(tx), tx.head().position)
        )
    return RelayStatus(
        now=format_rfc3339(relay.clock.now()),
        version=__version__,
        scope=relay.origin.scope,
        relay=relay.origin.relay,
        hub=relay.roster is not None,
        caller=CallerStatus(principal=caller.principal, can=sorted(caller.rights.can)),
        mode=mode,
        position=position,
        source=SourceStatus(
            ok=not source.lost,
            reason=source.lost_reason if source.lost else None,
            polls=source.polls,
            failures=source.failures,
            readAgeSeconds=None if polling is None else polling.read_age,
            clockOffsetSeconds=None if polling is None else polling.clock_offset,
        ),
        store=PartHealth(ok=relay.store.write_error is None, reason=relay.store.write_error),
        approvalsLink=None if link is None else _amqp_approvals_link_health(link),
    )


def _amqp_approvals_link_health(link: AmqpApprovalsLink) -> PartHealth:
    if link.is_connected:
        return PartHealth(ok=True, reason=None)
    return PartHealth(ok=False, reason="no connection to RabbitMQ: approvals on the queue wait")


ROUTES = (
    Route(
        method="GET",
        path="/v1/status",
        summary="the state of the relay: source, state file, approvals, and who the caller is",
        handler=_show_status,
        needs="read",
    ),
)
