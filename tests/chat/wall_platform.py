"""A chat platform of these tests that can do everything: a wall with messages on it.

`relay_with_wall` runs a store, the approvals and a dispatcher in front of it, without an API.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from relay.approvals import ApprovalsSettings
from relay.approvals.engine import ApprovalEngine
from relay.approvals.request import DecisionAnswer, DecisionKind
from relay.chat import ChatSettings, MessageGone
from relay.chat.cards.card import Card
from relay.chat.context import ChatContext
from relay.chat.live_message import LiveMessageSink
from relay.clock import Clock
from relay.delivery.dispatcher import Dispatcher, matching_sinks
from relay.errors import Deferred
from relay.events.model import Document, ScheduledEvent
from relay.ingest import Recorder, SuccessfulPoll
from relay.sentences import PrincipalRef, Text
from relay.store import StateFileScopeAndVm, StoreSettings
from relay.store.sqlite import Store, open_store
from tests.approvals.builders import (
    BOOT_ID,
    CLIENT_RESOURCES,
    ORIGIN,
    SETTINGS,
    build_request,
    decide_nothing,
)
from tests.background_tasks import BackgroundTasks
from tests.clocks import ManualClock
from tests.eventually import eventually


class WallSettings(ChatSettings):
    kind: Literal["wall"] = "wall"


def plain_text(text: Text) -> str:
    """Return a text as it reads, with hours for times and principals for people."""
    return "".join(map(_plain_piece, text))


def _plain_piece(piece: str | datetime | PrincipalRef) -> str:
    if isinstance(piece, datetime):
        return f"{piece:%H:%M}"
    return piece.principal if isinstance(piece, PrincipalRef) else piece


@dataclass(slots=True)
class Wall:
    """The messages by name, the lines of each thread, and every call in order.

    ``can_edit`` False: the wall gives no names, so nothing on it can be edited. ``error`` is raised
    by every call.
    """

    can_edit: bool = True
    cards: dict[str, Card] = field(default_factory=dict)
    threads: dict[str | None, list[str]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    error: Deferred | None = None

    async def post(self, card: Card) -> str | None:
        self._called("post")
        ref = f"m{len(self.cards) + 1}"
        self.cards[ref] = card
        return ref if self.can_edit else None

    async def edit(self, ref: str, card: Card) -> None:
        self._called("edit")
        if ref not in self.cards:
            raise MessageGone(ref)
        self.cards[ref] = card

    async def reply_in_thread(self, ref: str | None, lines: Sequence[Text]) -> None:
        self._called("reply")
        if ref is not None and ref not in self.cards:
            raise MessageGone(ref)
        self.threads.setdefault(ref, []).extend(map(plain_text, lines))

    def decisions(self, ref: str) -> list[str]:
        """Return the decisions that the buttons of a message offer."""
        return [button.decision for button in self.cards[ref].buttons]

    def _called(self, method: str) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append(method)


@dataclass(slots=True, kw_only=True)
class RecordingRelay:
    """A relay without an API and with one sink. The test says what Azure announces."""

    store: Store
    approvals: ApprovalEngine
    clock: Clock

    async def record_document(self, *events: ScheduledEvent) -> None:
        """Record a document with these events, and what follows from it."""
        recorder = Recorder(ORIGIN, BOOT_ID, frozenset({"db-1"}))
        now = self.clock.now()
        poll = SuccessfulPoll(Document(1, events), now, gap=False)
        await self.store.transact(lambda tx: recorder.record(tx, poll))
        await self.store.transact(lambda tx: self.approvals.apply_due_transitions(tx, now))

    async def deliver_document(self, *events: ScheduledEvent) -> None:
        """Record a document with these events, and return when all about it is delivered."""
        await self.record_document(*events)
        await self.settle()

    async def submit(
        self,
        decision: DecisionKind = "approve",
        client: str = "alice",
        event: ScheduledEvent | None = None,
        *,
        reason: str | None = None,
    ) -> DecisionAnswer:
        """Submit a client's decision, by default about the event E-1."""
        request = build_request(decision, client, event, at=self.clock.now(), reason=reason)
        return await self.store.transact(lambda tx: self.approvals.decide(tx, request))

    async def decide(
        self, decision: DecisionKind, client: str, event: ScheduledEvent | None = None
    ) -> None:
        """Submit a client's decision, and return when all about it is delivered."""
        await self.submit(decision, client, event)
        await self.settle()

    async def settle(self) -> None:
        async def is_idle() -> bool:
            return not await self.store.read(lambda tx: tx.deliveries.waiting_entries())

        await eventually(is_idle)


@dataclass(slots=True, kw_only=True)
class WallRelay(RecordingRelay):
    clock: ManualClock
    wall: Wall
    dispatcher: Dispatcher

    async def pass_time(self, seconds: float) -> None:
        await eventually(lambda: bool(self.clock.remaining_sleeps))
        self.clock.advance(seconds)

    async def wait_for_tone(self, tone: str, *, within: float = 240.0) -> None:
        """Let time pass until the first message has this tone."""
        cards = self.wall.cards
        await self.clock.advance_until(lambda: cards["m1"].tone == tone, step=5, within=within)

    async def calls_by_time(self, seconds: int, *, step: int) -> list[int]:
        """Let time pass in steps. Return after how many seconds the wall was called, each time."""
        moments = []
        for second in range(step, seconds + 1, step):
            before = len(self.wall.calls)
            await self.pass_time(step)
            await eventually(lambda: bool(self.clock.remaining_sleeps))
            await self.settle()
            moments += [second] * (len(self.wall.calls) - before)
        return moments


@asynccontextmanager
async def relay_with_wall(
    directory: Path,
    wall: Wall,
    *,
    clock: ManualClock | None = None,
    public_url: str | None = "https://relay.example.com",
    in_chat: bool = False,
    approvals_settings: ApprovalsSettings = SETTINGS,
    **fields: Any,
) -> AsyncIterator[WallRelay]:
    """Run a relay. Over the same directory it is the same relay, started again.

    ``fields`` are further fields of the sink's section.
    """
    clock = clock or ManualClock()
    settings = WallSettings.model_validate({"name": "wall", **fields})
    async with open_store(
        StoreSettings(path=directory / "relay.db"),
        StateFileScopeAndVm(ORIGIN.scope, "vm"),
        clock,
        lambda event: tuple(matching_sinks(event, [settings])),
    ) as store:
        approvals = ApprovalEngine(approvals_settings, ORIGIN, client_resources=CLIENT_RESOURCES)
        context = ChatContext(store, approvals, clock, public_url, decide_nothing, {})
        sink = LiveMessageSink(settings, context, wall, clock, in_chat=in_chat)
        dispatcher = Dispatcher({"wall": (settings, sink)}, store, clock, lambda *_, **__: None)
        await dispatcher.begin()
        async with sink.refreshing(), BackgroundTasks(dispatcher.run()):
            yield WallRelay(
                store=store, approvals=approvals, clock=clock, wall=wall, dispatcher=dispatcher
            )
