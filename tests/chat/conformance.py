"""What every chat must do, whatever its platform: the cases, and what a member brings along to be put through them.

`test_conformance` runs every case with every member. A new chat adds its far side there; docs/adding-a-sink.md walks through it.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import pytest

from relay.approvals.request import DecisionAnswer, DecisionKind
from relay.approvals.service import ApprovalService
from relay.chat import CallbackRefused, ChatSettings, ChatSink
from relay.chat.context import make_chat_context
from relay.clock import SystemClock
from relay.config import sink_members
from relay.delivery.dispatcher import Dispatcher
from relay.delivery.routing import matching_sinks
from relay.errors import Deferred, DeliveryError
from relay.events.build import relay_event
from relay.events.cloudevent import CloudEvent
from relay.events.model import Document, Event
from relay.events.timestamps import format_rfc3339
from relay.ingest.recorder import PollResult, Recorder
from relay.outbox import Identity, StoreSettings
from relay.outbox.deliveries import Delivery, LoggedAttempt
from relay.outbox.sqlite import Store, open_store
from relay.sinks import Receipt
from tests.approvals.builders import BOOT, ORIGIN, SETTINGS, approval, event
from tests.journey.relay_process import eventually

PATIENCE = 60.0
"""Seconds within which what must happen happens, on a slow machine."""
HOSTILE = "<!channel> @all @everyone <at>all</at> <https://evil.example/a|click> [click](https://evil.example/b) *loud*"
"""What somebody may have written into a description: nobody is called by it, and nothing leads anywhere."""


class FarSide(Protocol):
    """The stand-in of a platform, in the hands of a test."""

    kind: str
    edits: bool
    """Whether its messages are edited; else follow-ups come after them."""
    telltales: tuple[str, ...]
    """Texts in the sink's settings that no error and no log may hold."""

    def settings(self) -> dict[str, Any]:
        """The sink's section of the YAML document, but for kind and name."""

    async def leave(self) -> None:
        """From now on it is gone: connections are cut and refused."""

    async def refuse(self) -> None:
        """From now on it refuses what the sink brings, until somebody mends something; where it can, it repeats what it was sent."""

    async def hang(self) -> None:
        """From now on it hears everything and says nothing."""

    async def come(self) -> None:
        """It is there and well again, at the same place."""

    def messages(self) -> list[str]:
        """The words of every message in the channel as they are now, follow-ups included, those of threads not."""

    def replies(self) -> list[str]:
        """The words of every message in a thread."""

    def slipped_in(self) -> list[str]:
        """What in all of them calls somebody, or leads somewhere that is not the relay's."""


@dataclass(slots=True)
class _Watched:
    """A chat, and every error that came of its deliveries."""

    chat: ChatSink
    concurrency: int = 1
    longest_pause: float = 0.2  # the cases are about the chat, and not about the plan
    give_up_after: float = 3600.0
    under_way: int = 0
    errors: list[BaseException] = field(default_factory=list)

    async def deliver(self, event: CloudEvent) -> Receipt:
        self.under_way += 1
        try:
            return await self.chat.deliver(event)
        except BaseException as error:
            self.errors.append(error)
            raise
        finally:
            self.under_way -= 1


@dataclass(slots=True)
class Room:
    """A relay without an API whose one sink is the chat. Azure is what a case says that it is."""

    store: Store
    chat: ChatSink
    watched: _Watched
    ledger: ApprovalService
    clock: SystemClock

    async def see(self, *events: Event) -> None:
        """The document holds these events; what follows from that is done."""
        recorder, now = Recorder(ORIGIN, BOOT, frozenset({"db-1"})), self.clock.now()
        await self.store.transact(
            lambda tx: recorder.record(tx, PollResult(Document(1, events), now, gap=False))
        )
        await self.store.transact(lambda tx: self.ledger.apply_transitions(tx, now))

    async def submit(self, decision: DecisionKind, by: str, of: Event) -> DecisionAnswer:
        """A client asks for something."""
        now = self.clock.now()
        return await self.store.transact(
            lambda tx: self.ledger.submit(tx, approval(decision, by, of, at=now))
        )

    async def deliveries(self) -> list[Delivery]:
        """How every entry stands."""
        return await self.store.read(lambda tx: tx.deliveries.page(limit=500))

    async def settled(self) -> None:
        """Return when nothing waits any more."""

        async def idle() -> bool:
            return not await self.store.read(lambda tx: tx.deliveries.waiting())

        await eventually(idle, within=PATIENCE)

    def reboot(
        self,
        event_id: str = "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        *,
        due: float = 900.0,
        **changes: Any,
    ) -> Event:
        """A reboot that Azure begins so many seconds from now."""
        moment = format_rfc3339((self.clock.now() + timedelta(seconds=due)).replace(microsecond=0))
        return replace(event(event_id, **changes), not_before=moment)


@asynccontextmanager
async def room(directory: Path, far: FarSide) -> AsyncIterator[Room]:
    """A relay that runs; over the same directory it is the same one, started again."""
    clock, member = SystemClock(), sink_members()[far.kind]
    given: ChatSettings = member.Settings.model_validate(
        {"kind": far.kind, "name": "chat", **far.settings()}
    )
    async with open_store(
        StoreSettings(path=directory / "relay.db"),
        Identity(ORIGIN.scope, "vm"),
        clock,
        lambda event: tuple(matching_sinks(event, [given])),
    ) as store:
        ledger = ApprovalService(
            SETTINGS,
            ORIGIN,
            client_resources=dict.fromkeys(("client:alice", "client:bob", "client:drain")),
        )
        async with member.connect(
            given, clock, make_chat_context(store, ledger, clock, "https://relay.example.com")
        ) as chat:
            watched = _Watched(chat)
            dispatcher = Dispatcher({"chat": (given, watched)}, store, clock, lambda *_: None)
            await dispatcher.start()
            task = asyncio.create_task(dispatcher.run())
            try:
                yield Room(store, chat, watched, ledger, clock)
            finally:
                task.cancel()
                await asyncio.wait({task})


Case = Callable[[FarSide, Path, pytest.LogCaptureFixture], Awaitable[None]]


async def posts_once(far: FarSide, folder: Path, _: pytest.LogCaptureFixture) -> None:
    """An event is one message, with everything that its readers must know; what was delivered before posts nothing."""
    async with room(folder, far) as here:
        await here.see(here.reboot(description="Host maintenance", resources=("db-1", "web_01")))
        await here.settled()
        (text,) = far.messages()
        for words in (
            "Reboot of db-1, web_01",
            "Host maintenance",
            "databases",
            "0 of 2",
            "Azure proceeds at NotBefore regardless",
        ):
            assert words in text
        position = await here.store.read(
            lambda tx: tx.journal.last_change_position("c7061bac-afdc-4513-b24b-aa5f13a16123")
        )
        assert position is not None
        await here.store.transact(lambda tx: tx.redeliver(position, "chat", here.clock.now()))
        await here.settled()
        assert far.messages() == [text]


async def edits_or_follows_up(far: FarSide, folder: Path, _: pytest.LogCaptureFixture) -> None:
    """What happens is seen: in the message and its thread; or where nothing can be edited in a short message that says which."""
    async with room(folder, far) as here:
        reboot = here.reboot()
        await here.see(reboot)
        await here.submit("approve", "alice", reboot)
        await here.settled()
        await here.submit("hold", "bob", reboot)
        await here.settled()
        await here.see()
        await here.settled()
        told = "\n".join(far.replies() if far.edits else far.messages()[1:])
        for words in ("voted to approve, 1 of 2", "put it on hold", "Azure has taken it back"):
            assert words in told or words in far.messages()[0]
        if far.edits:
            assert len(far.messages()) == 1
            assert "Azure has taken it back" in far.messages()[0]
        else:
            assert all("Reboot of db-1" in text for text in far.messages())


async def says_a_new_time(far: FarSide, folder: Path, _: pytest.LogCaptureFixture) -> None:
    """When Azure changes the event, what the channel says last is true."""
    async with room(folder, far) as here:
        await here.see(here.reboot(resources=("db-1",)))
        await here.settled()
        await here.see(here.reboot(due=5400, resources=("db-1", "db-2")))
        await here.settled()
        assert "Reboot of db-1, db-2" in far.messages()[-1]
        assert "Azure proceeds at NotBefore regardless" in far.messages()[-1]
        assert len(far.messages()) == (1 if far.edits else 2)


async def shows_that_the_time_has_come(
    far: FarSide, folder: Path, _: pytest.LogCaptureFixture
) -> None:
    """What time alone changes is edited, and is no news: where nothing can be edited, nothing is said."""
    async with room(folder, far) as here:
        await here.see(here.reboot(due=3))
        await here.settled()
        assert len(far.messages()) == 1

        async def passed() -> bool:
            return await here.store.read(lambda tx: tx.messages.next_refresh("chat") is None)

        await eventually(passed, within=PATIENCE)
        await here.settled()
        if far.edits:
            await eventually(lambda: "NotBefore was" in far.messages()[0], within=PATIENCE)
        assert (len(far.messages()), far.replies()) == (1, [])


async def is_quiet_after_an_outage(far: FarSide, folder: Path, _: pytest.LogCaptureFixture) -> None:
    """It defers while connections are refused; at its return there is the latest state, and no flood."""
    await far.leave()
    async with room(folder, far) as here:
        reboot = here.reboot()
        await here.see(reboot)
        for _turn in range(5):
            await here.submit("hold", "bob", reboot)
            await here.submit("release", "bob", reboot)
        await here.submit("approve", "alice", reboot)
        await eventually(lambda: len(here.watched.errors) >= 2, within=PATIENCE)
        assert all(
            isinstance(error, Deferred) and error.failure == "transient"
            for error in here.watched.errors
        )
        await far.come()
        await here.settled()
        assert not [one for one in await here.deliveries() if one.state == "parked"]
        assert "1 of 2" in far.messages()[0]
        assert len(far.messages()) + len(far.replies()) <= 2
        assert "voted to approve" in "\n".join(far.messages() + far.replies())


async def asks_for_help_where_somebody_must_mend_something(
    far: FarSide, folder: Path, _: pytest.LogCaptureFixture
) -> None:
    """It is tried slowly, with a sentence that a person can use, and goes out once it was mended."""
    await far.refuse()
    async with room(folder, far) as here:
        await here.see(here.reboot())
        await eventually(lambda: bool(here.watched.errors), within=PATIENCE)
        error = here.watched.errors[0]
        assert isinstance(error, Deferred)
        assert error.failure == "slow"
        assert len(error.reason) > 40
        await far.come()
        await here.settled()
        assert len(far.messages()) == 1


async def lets_nobody_slip_anything_in(
    far: FarSide, folder: Path, _: pytest.LogCaptureFixture
) -> None:
    """Texts of others are shown as texts: no mention, no link; and they are readable."""
    async with room(folder, far) as here:
        reboot = here.reboot(description=HOSTILE, resources=("db-1", "@here"))
        await here.see(reboot)
        now = here.clock.now()
        vote = approval("approve", "alice", reboot, at=now, reason=HOSTILE)
        await here.store.transact(lambda tx: here.ledger.submit(tx, vote))
        await here.settled()
        assert "click" in "\n".join(far.messages())
        assert far.slipped_in() == []


async def holds_what_is_long(far: FarSide, folder: Path, _: pytest.LogCaptureFixture) -> None:
    """A hundred machines with long names and a text of thousands of characters are cut, and never refused."""
    async with room(folder, far) as here:
        names = tuple(f"{'m' * 60}-{number}" for number in range(100))
        await here.see(here.reboot(resources=names, description="\N{PILE OF POO}<&>\"'\\*_" * 400))
        await here.settled()
        (text,) = far.messages()
        assert "90 more" in text
        assert not [one for one in await here.deliveries() if one.state == "parked"]


async def makes_one_message_of_a_burst(
    far: FarSide, folder: Path, _: pytest.LogCaptureFixture
) -> None:
    """Fifty events of one document are one message, and their end is no flood."""
    async with room(folder, far) as here:
        await here.see(
            *(here.reboot(f"E-{number}", resources=(f"db-{number}",)) for number in range(50))
        )
        await here.settled()
        (text,) = far.messages()
        assert "50 maintenance events at once" in text
        await here.see()
        await here.settled()
        assert len(far.messages()) <= (1 if far.edits else 4)
        assert len(far.replies()) <= 3


async def knows_its_message_after_a_restart(
    far: FarSide, folder: Path, _: pytest.LogCaptureFixture
) -> None:
    """The same message goes on; nothing is posted anew."""
    async with room(folder, far) as here:
        reboot = here.reboot()
        await here.see(reboot)
        await here.settled()
    async with room(folder, far) as here:
        await here.submit("approve", "alice", reboot)
        await here.settled()
    if far.edits:
        (text,) = far.messages()
        assert "1 of 2" in text
    else:
        assert ["0 of 2" in text for text in far.messages()] == [True, False]


async def posts_anew_what_another_kind_had_posted(
    far: FarSide, folder: Path, _: pytest.LogCaptureFixture
) -> None:
    """The sink of this name was of another kind before: what its messages were called there means nothing here."""
    async with room(folder, far) as here:
        reboot = here.reboot()
        await here.see(reboot)
        await here.settled()
        await here.store.transact(
            lambda tx: tx.messages.mark_shown(1, "another/kind's:name", "looked otherwise")
        )
        await here.submit("approve", "alice", reboot)
        await here.settled()
        # Where nothing has a thread, the vote is told beside it.
        assert len([text for text in far.messages() if "1 of 2" in text]) == (1 if far.edits else 2)
        assert here.watched.errors == []


async def says_that_it_is_there(far: FarSide, folder: Path, _: pytest.LogCaptureFixture) -> None:
    """A ping is a message, and so is what the relay says of itself."""
    async with room(folder, far) as here:
        for name in ("relay.ping", "relay.source-lost"):
            told = relay_event(
                name,
                ORIGIN,
                here.clock.now(),
                sink=None,
                reason=f"said of {name}",
                count=1,
                head="0:0",
            )
            await here.chat.deliver(told)
        assert [
            words in text
            for words, text in zip(("ping", "source-lost"), far.messages(), strict=True)
        ] == [True, True]


async def closes_during_delivery(far: FarSide, folder: Path, _: pytest.LogCaptureFixture) -> None:
    """A relay that stops does not wait for a platform that hangs; nothing is left behind, and nothing was lost."""
    before = asyncio.all_tasks()
    async with asyncio.timeout(PATIENCE):
        async with room(folder, far) as here:
            await far.hang()
            await here.see(here.reboot())
            await eventually(lambda: here.watched.under_way == 1, within=PATIENCE)
        assert here.watched.under_way == 0
    await far.come()
    await eventually(lambda: asyncio.all_tasks() <= before | _far_tasks(), within=PATIENCE)
    async with room(folder, far) as here:
        await here.settled()
    assert "Reboot of db-1" in far.messages()[0]


async def shows_no_secret_in_any_error(
    far: FarSide, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever goes wrong: gone, and refusing while it repeats what it was sent."""
    caplog.set_level(logging.DEBUG)
    async with room(folder, far) as here:
        await far.leave()
        await here.see(here.reboot())
        await eventually(lambda: len(here.watched.errors) >= 2, within=PATIENCE)
        await far.come()
        await far.refuse()
        seen = len(here.watched.errors)
        await eventually(lambda: len(here.watched.errors) > seen, within=PATIENCE)
        await far.come()
        await here.settled()
        kept = [
            f"{one.reason} {attempt.reason} {attempt.response}"
            for one in await here.deliveries()
            for attempt in await _attempts(here, one)
        ]
    errors = here.watched.errors
    assert all(isinstance(error, (DeliveryError, asyncio.CancelledError)) for error in errors)
    said = "".join(
        "".join(traceback.format_exception(error)) + str(getattr(error, "answer", ""))
        for error in errors
    )
    assert [
        telltale for telltale in far.telltales if telltale in said + logged(caplog) + "".join(kept)
    ] == []
    assert far.telltales


async def refuses_calls_that_prove_nothing(
    far: FarSide, folder: Path, _: pytest.LogCaptureFixture
) -> None:
    """Whoever calls without a proof learns nothing but the status, and nothing happens."""
    async with room(folder, far) as here:
        await here.see(here.reboot())
        for body in (b"", b"{}", b"payload=%7B%7D", b"\xff\xfe", b"[" * 10_000):
            with pytest.raises(CallbackRefused) as caught:
                await here.chat.handle_callback({}, body)
            assert caught.value.status in {400, 401}


CASES: tuple[Case, ...] = (
    posts_once,
    edits_or_follows_up,
    says_a_new_time,
    shows_that_the_time_has_come,
    is_quiet_after_an_outage,
    asks_for_help_where_somebody_must_mend_something,
    lets_nobody_slip_anything_in,
    holds_what_is_long,
    makes_one_message_of_a_burst,
    knows_its_message_after_a_restart,
    posts_anew_what_another_kind_had_posted,
    says_that_it_is_there,
    closes_during_delivery,
    shows_no_secret_in_any_error,
    refuses_calls_that_prove_nothing,
)


def logged(caplog: pytest.LogCaptureFixture) -> str:
    """What a relay would have logged: pytest hears loggers too that pass nothing on."""

    def passes(log: logging.Logger | None) -> bool:
        return log is None or log.parent is None or (log.propagate and passes(log.parent))

    return "\n".join(
        one.getMessage()
        for one in caplog.records
        if one.name != "asyncio" and passes(logging.getLogger(one.name))
    )


async def _attempts(here: Room, delivery: Delivery) -> list[LoggedAttempt]:
    return await here.store.read(lambda tx: tx.deliveries.attempts(delivery.id))


def _far_tasks() -> set[asyncio.Task[Any]]:
    """Tasks of the test's own far side, of which one may begin at any time."""
    return {task for task in asyncio.all_tasks() if task.get_name().startswith("far side")}
