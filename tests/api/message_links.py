"""The links that a chat message shows."""

from __future__ import annotations

from typing import Any

from relay.chat.context import make_chat_context
from relay.store.transaction import Transaction
from tests.api.running_relay import EVENT_ID, RecordingSinkSettings, RunningRelay


async def message_links(
    relay: RunningRelay, sink: str = "ops", *, event_id: str = EVENT_ID
) -> dict[str, str]:
    """Update a sink's message about the event, and return the URLs of its buttons by decision.

    `event_id` is the key of the event in the store, in any case.
    """
    chat = make_chat_context(
        relay.store,
        relay.gate.engine,
        relay.clock,
        f"http://127.0.0.1:{relay.server.port}",
        relay.gate.submit,
        {},
    )

    def read_last_change(tx: Transaction) -> Any:
        position = tx.journal.last_change_of(event_id.lower())
        assert position is not None
        return tx.journal.require_event_at_position(position)

    update = await chat.messages.plan_update(
        RecordingSinkSettings(name=sink, kind="box"),
        await relay.store.read(read_last_change),
        in_chat=False,
    )
    assert update is not None
    assert update.card is not None
    await chat.messages.mark_shown(update, "ref")
    return {button.decision: button.url or "" for button in update.card.buttons}
