"""Deletes old rows of all tables.

Every role runs `prune_forever` beside its other tasks. What one round deletes, `prune_all_tables`
does in one transaction, with the limits of `StoreSettings`.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from datetime import datetime, timedelta
from functools import partial

from relay.clock import Clock
from relay.errors import StoreUnavailable
from relay.events.build import RecordRelayEvent
from relay.store import StoreSettings
from relay.store.sqlite import Store
from relay.store.transaction import Transaction

PRUNE_INTERVAL = 3600.0
"""Seconds between two rounds."""
MIN_ANSWER_RETENTION = timedelta(days=1)
"""First answers are kept at least this long. A signed request is valid for a shorter time, so one
that is sent again later never has its effect twice."""
_log = logging.getLogger(__name__)


def prune_all_tables(
    tx: Transaction, settings: StoreSettings, now: datetime
) -> tuple[int, Counter[str]]:
    """Return how many rows of the journal went, and how many surplus dead letters, by type."""
    delivery_limit = now - timedelta(seconds=settings.retain)
    audit_limit = now - timedelta(seconds=settings.audit_retain)
    dead_letters = tx.deliveries.prune(delivery_limit, settings.dead_letters)
    tx.answers.prune(min(delivery_limit, now - MIN_ANSWER_RETENTION))
    tx.standing_holds.verify()
    keep_from = min((hold.position for hold in tx.standing_holds.list_open()), default=None)
    # A damaged journal is kept whole: without the damage, the next start would trust the rest.
    journal_rows = 0
    if tx.standing_holds.damage is None:
        journal_rows = tx.journal.prune(audit_limit, now, keep_from)
    tx.occurrences.prune_ended_occurrences(audit_limit)
    tx.approvals.forget_pruned(any_row=journal_rows > 0)
    if journal_rows:
        tx.standing_holds.forget_pruned()
    tx.messages.prune()
    tx.fleet.prune_orphaned_sightings()
    return journal_rows, dead_letters


async def prune_forever(store: Store, clock: Clock, report: RecordRelayEvent) -> None:
    """Prune at once and then every `PRUNE_INTERVAL`, until canceled.

    Dead letters that are lost are reported, all those since the start with each report: a later
    report takes the place of one that still waits.
    """
    lost: Counter[str] = Counter()
    while True:
        now, journal_rows, dead_letters = clock.now(), 0, Counter[str]()
        with contextlib.suppress(StoreUnavailable):
            journal_rows, dead_letters = await store.transact(
                partial(prune_all_tables, settings=store.settings, now=now)
            )
        if journal_rows:
            _log.info(
                "deleted %d rows of the journal that were older than store.audit_retain; "
                "a checkpoint remains",
                journal_rows,
            )
        if dead_letters:
            lost += dead_letters
            types = ", ".join(f"{count} {type_}" for type_, count in sorted(lost.items()))
            reason = (
                f"{lost.total()} dead letters were deleted since the relay started, because there "
                f"were more than store.dead_letters: {types}"
            )
            report("relay.dead-lettered", reason, count=lost.total())
        await clock.sleep(PRUNE_INTERVAL)
