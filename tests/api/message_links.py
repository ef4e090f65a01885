"""The messages of chats about the events of a relay, and the links that they show."""

from __future__ import annotations

from relay.chat.cards.card import Card
from relay.chat.context import ChatContext
from relay.events.cloudevent import CloudEvent
from relay.store.transaction import Transaction
from tests.api.running_relay import EVENT_ID, RecordingSinkSettings, RunningRelay


def chat_of(relay: RunningRelay) -> ChatContext:
    url = f"http://127.0.0.1:{relay.server.port}"
    return ChatContext(relay.store, relay.gate.engine, relay.clock, url, relay.gate.submit, {})


async def shown_card(relay: RunningRelay, event_id: str, *, in_chat: bool = False) -> Card:
    """Update a message about the event; `event_id` is its key in the store, in any case."""
    messages = chat_of(relay).messages

    def read_last_change(tx: Transaction) -> CloudEvent:
        position = tx.journal.last_change_of(event_id.lower())
        assert position is not None
        return tx.journal.require_event_at_position(position)

    sink = RecordingSinkSettings(name="ops", kind="box")
    event = await relay.store.read(read_last_change)
    update = await messages.plan_update(sink, event, in_chat=in_chat)
    assert update is not None
    assert update.card is not None
    await messages.mark_shown(update, "ref")
    return update.card


async def message_links(relay: RunningRelay, *, event_id: str = EVENT_ID) -> dict[str, str]:
    """Update a message about the event, and return the URLs of its buttons by decision."""
    card = await shown_card(relay, event_id)
    return {button.decision: button.url or "" for button in card.buttons}
