"""Deletes old rows: deliveries, the journal, ended events, and dead letters over a limit."""

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
MIN_ANSWER_RETENTION = timedelta(days=1)
"""First answers are kept at least this long, which is longer than a signature is valid."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PruneResult:
    """How many rows of the journal and how many dead letters over the limit were deleted."""

    journal_rows: int = 0
    dead_letters: int = 0


def prune(tx: Transaction, settings: StoreSettings, now: datetime) -> PruneResult:
    """Work for the store: delete what is older than the settings allow."""
    delivery_limit = now - timedelta(seconds=settings.retain)
    audit_limit = now - timedelta(seconds=settings.audit_retain)
    dead_letters = tx.deliveries.prune(delivery_limit, settings.dead_letters)
    tx.decisions.prune_answers(min(delivery_limit, now - MIN_ANSWER_RETENTION))
    tx.snapshot.prune(audit_limit)
    tx.messages.prune()
    return PruneResult(tx.journal.prune(audit_limit, now), dead_letters)


async def prune_forever(store: Store, clock: Clock) -> None:
    """Prune at once and then every `PRUNE_INTERVAL`, until canceled."""
    while True:
        await _prune_once(store, clock.now())
        await clock.sleep(PRUNE_INTERVAL)


async def _prune_once(store: Store, now: datetime) -> None:
    try:
        result = await store.transact(lambda tx: prune(tx, store.settings, now))
    except StoreUnavailable:
        return
    if result.journal_rows:
        _log.info(
            "deleted %d rows of the journal that were older than store.audit_retain; "
            "a checkpoint remains",
            result.journal_rows,
        )
    if result.dead_letters:
        _log.warning(
            "deleted the %d oldest dead letters: there were more than store.dead_letters",
            result.dead_letters,
        )
