"""The first answer to a request stays stored longer than any signature is valid."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from relay.clock import SystemClock
from relay.outbox import FirstAnswer, StateFileOwner, StoreSettings
from relay.outbox.retention import prune
from relay.outbox.sqlite import open_store

NOW = datetime(2026, 4, 11, 12, 0, tzinfo=UTC)


async def test_a_first_answer_is_kept_for_a_day_though_deliveries_are_kept_for_a_minute(
    tmp_path: Path,
) -> None:
    """Otherwise a callback could be replayed during the 300 s that its signature is valid."""
    settings = StoreSettings(path=tmp_path / "relay.db", retain=60.0)
    async with open_store(
        settings, StateFileOwner("scope", None), SystemClock(), lambda _: ()
    ) as store:
        await store.transact(
            lambda tx: tx.decisions.remember_answer(
                "client:a", "old", "d", 202, {}, NOW - timedelta(hours=25)
            )
        )
        await store.transact(
            lambda tx: tx.decisions.remember_answer(
                "client:a", "new", "d", 202, {}, NOW - timedelta(minutes=10)
            )
        )
        await store.transact(lambda tx: prune(tx, settings, NOW))
        assert await store.read(
            lambda tx: tx.decisions.first_answer("client:a", "new")
        ) == FirstAnswer("d", 202, {})
        assert await store.read(lambda tx: tx.decisions.first_answer("client:a", "old")) is None
