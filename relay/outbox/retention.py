"""Forgets what is old: deliveries after ``retain``, the journal and ended events after ``audit_retain``."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

from relay.clock import Clock
from relay.errors import StoreUnavailable
from relay.outbox import StoreSettings
from relay.outbox.sqlite import Store
from relay.outbox.transaction import Transaction

EVERY = 3600.0
"""Seconds between two rounds."""
_log = logging.getLogger(__name__)


def prune(tx: Transaction, settings: StoreSettings, now: datetime) -> int:
    """Work for the store: forget what is old; returns how many rows of the journal went."""
    deliveries, audit = now - timedelta(seconds=settings.retain), now - timedelta(seconds=settings.audit_retain)
    tx.deliveries.prune(deliveries)
    tx.decisions.prune_answers(deliveries)
    tx.snapshot.prune(audit)
    return tx.journal.prune(audit, now)


async def keep(store: Store, clock: Clock) -> None:
    """A round at once and then every hour, until cancelled."""
    while True:
        now = clock.now()
        try:
            gone = await store.transact(lambda tx, now=now: prune(tx, store.settings, now))  # type: ignore[misc]  # mypy cannot infer a lambda with a default
        except StoreUnavailable:
            gone = 0
        if gone:
            _log.info("%d rows of the journal were older than store.audit_retain and are gone; a checkpoint stays", gone)
        await clock.sleep(EVERY)
