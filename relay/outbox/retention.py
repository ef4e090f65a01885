"""Forgets what is old: deliveries after ``retain``, the journal and ended events after ``audit_retain``; and dead letters over a number."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta

from relay.clock import Clock
from relay.errors import StoreUnavailable
from relay.outbox import StoreSettings
from relay.outbox.sqlite import Store
from relay.outbox.transaction import Transaction

PRUNE_INTERVAL = 3600.0
"""Seconds between two rounds."""
ANSWER_RETENTION = timedelta(days=1)
"""First answers are kept for this long at least: a repeat must be known for longer than its signature is good."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PruneResult:
    """How many rows of the journal were too old, and how many dead letters too many."""

    rows: int = 0
    dead_letters: int = 0


def prune(tx: Transaction, settings: StoreSettings, now: datetime) -> PruneResult:
    """Work for the store: forget what is old, or too much."""
    deliveries, audit = (
        now - timedelta(seconds=settings.retain),
        now - timedelta(seconds=settings.audit_retain),
    )
    dead_letters = tx.deliveries.prune(deliveries, settings.dead_letters)
    tx.decisions.prune_answers(min(deliveries, now - ANSWER_RETENTION))
    tx.snapshot.prune(audit)
    tx.messages.prune()
    return PruneResult(tx.journal.prune(audit, now), dead_letters)


async def prune_forever(store: Store, clock: Clock) -> None:
    """A round at once and then every hour, until cancelled."""
    while True:
        now = clock.now()
        try:
            gone = await store.transact(lambda tx, now=now: prune(tx, store.settings, now))  # type: ignore[misc]  # mypy cannot infer a lambda with a default
        except StoreUnavailable:
            gone = PruneResult()
        if gone.rows:
            _log.info(
                "%d rows of the journal were older than store.audit_retain and are gone; a checkpoint stays",
                gone.rows,
            )
        if gone.dead_letters:
            _log.warning(
                "%d dead letters were over store.dead_letters and are gone, the oldest first",
                gone.dead_letters,
            )
        await clock.sleep(PRUNE_INTERVAL)
