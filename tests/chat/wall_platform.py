"""A platform of these tests that can do everything: a wall with messages on it; and a relay's store, ledger and recorder before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from relay.approvals.request import DecisionAnswer, DecisionKind
from relay.approvals.service import ApprovalService
from relay.chat import ChatSettings, MessageGone
from relay.chat.board import ChatBoard
from relay.chat.cards.card import Card, PrincipalRef, Text
from relay.chat.live_message import LiveMessageSink
from relay.clock import Clock
from relay.delivery.dispatcher import Dispatcher
from relay.delivery.routing import matching_sinks
from relay.errors import Deferred
from relay.events.model import Document, Event
from relay.ingest.recorder import PollResult, Recorder
from relay.outbox import Identity, StoreSettings
from relay.outbox.sqlite import Store, open_store
from tests.approvals.builders import BOOT, ORIGIN, SETTINGS, SPEAKS, approval
from tests.approvals.manual_clock import HandClock


class WallSettings(ChatSettings):
    """A sink of these tests."""

    kind: Literal["wall"] = "wall"


def flat(text: Text) -> str:
    """A text as it reads, with moments as hours and people as they are."""
    return "".join(
        f"{part:%H:%M}"
        if isinstance(part, datetime)
        else part.principal
        if isinstance(part, PrincipalRef)
        else part
        for part in text
    )


@dataclass(slots=True)
class Wall:
    """What hangs there by name, what each thread says, and everything that was done, in order."""

    edits: bool = True
    cards: dict[str, Card] = field(default_factory=dict)
    threads: dict[str | None, list[str]] = field(default_factory=dict)
    did: list[str] = field(default_factory=list)
    trouble: Deferred | None = None

    async def post(self, card: Card) -> str | None:
        """Hang it up."""
        self._do("post")
        ref = f"m{len(self.cards) + 1}"
        self.cards[ref] = card
        return ref if self.edits else None

    async def edit(self, ref: str, card: Card) -> None:
        """Change what hangs there."""
        self._do("edit")
        if ref not in self.cards:
            raise MessageGone(ref)
        self.cards[ref] = card

    async def reply_in_thread(self, ref: str | None, lines: Sequence[Text]) -> None:
        """Write below it."""
        self._do("tell")
        if ref is not None and ref not in self.cards:
            raise MessageGone(ref)
        self.threads.setdefault(ref, []).extend(map(flat, lines))

    def _do(self, what: str) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.did.append(what)


@dataclass(slots=True)
class Room:
    """A relay without an API whose one sink is a wall. Azure is what a test says that it is."""

    wall: Wall
    store: Store
    board: ChatBoard
    ledger: ApprovalService
    clock: Clock
    dispatcher: Dispatcher

    async def see(self, *events: Event) -> None:
        """The document holds these events; what follows from that is done."""
        recorder, now = Recorder(ORIGIN, BOOT, frozenset({"db-1"})), self.clock.now()
        await self.store.transact(
            lambda tx: recorder.record(tx, PollResult(Document(1, events), now, gap=False))
        )
        await self.step()

    async def step(self) -> None:
        """What follows from how things are is done, and told."""
        now = self.clock.now()
        await self.store.transact(lambda tx: self.ledger.apply_transitions(tx, now))

    async def submit(
        self,
        decision: DecisionKind = "approve",
        by: str = "alice",
        of: Event | None = None,
        **changes: Any,
    ) -> DecisionAnswer:
        """A client asks for something."""
        now = self.clock.now()
        return await self.store.transact(
            lambda tx: self.ledger.submit(tx, approval(decision, by, of, at=now, **changes))
        )

    async def idle(self) -> bool:
        """Whether nothing waits for the wall."""
        return not await self.store.read(lambda tx: tx.deliveries.waiting())


@asynccontextmanager
async def room(
    directory: Path,
    wall: Wall,
    *,
    clock: Clock | None = None,
    public_url: str | None = "https://relay.example.com",
    in_chat: bool = False,
    **settings: Any,
) -> AsyncIterator[Room]:
    """A relay that runs; over the same directory it is the same one, started again. ``settings``: more of the sink's."""
    clock = clock or HandClock()
    given = WallSettings.model_validate({"name": "wall", **settings})
    async with open_store(
        StoreSettings(path=directory / "relay.db"),
        Identity(ORIGIN.scope, "vm"),
        clock,
        lambda event: tuple(matching_sinks(event, [given])),
    ) as store:
        ledger = ApprovalService(SETTINGS, ORIGIN, client_resources=SPEAKS)
        board = ChatBoard(store, ledger, clock, public_url)
        current = LiveMessageSink(given, board, wall, clock, in_chat=in_chat)
        dispatcher = Dispatcher({"wall": (given, current)}, store, clock, lambda *_: None)
        await dispatcher.start()
        async with current.refreshing(), running(dispatcher):
            yield Room(wall, store, board, ledger, clock, dispatcher)


@asynccontextmanager
async def running(dispatcher: Dispatcher) -> AsyncIterator[None]:
    """Its workers deliver."""
    task = asyncio.create_task(dispatcher.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
