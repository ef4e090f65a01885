"""The cases that every chat platform must pass, and the `ReceiverControl` that each provides.

`test_conformance` runs every case with every platform. docs/adding-a-sink.md explains how to add
a platform.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import pytest

from relay.approvals.engine import ApprovalEngine
from relay.chat import CallbackRefused, ChatSettings, ChatSink
from relay.chat.context import ChatContext
from relay.clock import SystemClock
from relay.config import load_kinds
from relay.delivery.dispatcher import Dispatcher, matching_sinks
from relay.errors import Deferred, DeliveryError, Failure
from relay.events.build import relay_event
from relay.events.model import ScheduledEvent
from relay.events.timestamps import format_rfc3339
from relay.store import StateFileScopeAndVm, StoreSettings
from relay.store.deliveries import DeliverySummary
from relay.store.sqlite import open_store
from relay.store.transaction import Transaction
from tests.approvals.builders import ORIGIN, SETTINGS, decide_nothing
from tests.approvals.builders import build_event as make_event
from tests.background_tasks import BackgroundTasks
from tests.chat.wall_platform import RecordingRelay
from tests.eventually import eventually
from tests.hostile import NO_OBJECTS
from tests.sinks.conformance import Watched, receiver_tasks

TIMEOUT = 60.0
"""Seconds, generous for a slow machine."""
EVENT_ID = "C7061BAC-AFDC-4513-B24B-AA5F13A16123"
HOSTILE = (
    "<!channel> @all @everyone <at>all</at> <https://evil.example/a|click> "
    "[click](https://evil.example/b) *loud*"
)
"""A description or reason that must mention nobody and link nowhere."""
HOSTILE_BODIES = (
    *NO_OBJECTS,
    b"{}",
    b"payload=%7B%22type%22%3A%22block_actions%22%7D",
    b'{"user_id":"\\ud800"}',
    b'{"type":"dialog_submission","user_id":"a',
)


class ReceiverControl(Protocol):
    """The stand-in of a platform, as a case controls it."""

    kind: str
    edits: bool
    """Whether its messages can be edited; otherwise follow-ups come after them."""
    secrets_in_settings: tuple[str, ...]
    """Secrets in the sink's settings that no error and no log may contain."""
    secret_key: str
    """The key of a secret in the sink's section that can be in a file."""

    def settings(self) -> dict[str, Any]:
        """Return the sink's section of the YAML document. A case sets its kind and name."""

    async def disconnect(self) -> None:
        """Cut all connections and refuse new ones."""

    async def refuse(self) -> None:
        """Refuse every message until somebody mends something.

        Where the platform can, it repeats the message in its answer.
        """

    async def hang(self) -> None:
        """Read everything and answer nothing."""

    async def reconnect(self) -> None:
        """Work normally again, at the same address."""

    def messages(self) -> list[str]:
        """Return the words of every message in the channel now.

        Follow-ups are included, replies in threads are not.
        """

    def replies(self) -> list[str]:
        """Return the words of every message in a thread."""

    def active_markup(self) -> list[str]:
        """Return what in all messages mentions somebody, or links to anything but the relay."""


@dataclass(slots=True, kw_only=True)
class ChatRelay(RecordingRelay):
    chat: ChatSink
    observed: Watched

    async def deliveries(self) -> list[DeliverySummary]:
        return await self.store.read(lambda tx: tx.deliveries.page(limit=500))

    async def logged_reasons(self) -> str:
        def read(tx: Transaction) -> list[str]:
            deliveries = tx.deliveries.page(limit=500)
            return [str(delivery["reason"]) for delivery in deliveries] + [
                f"{attempt['reason']} {attempt['answer']}"
                for delivery in deliveries
                for attempt in tx.deliveries.attempts_of(delivery["id"])
            ]

        return "\n".join(await self.store.read(read))

    async def first_error(self, failure: Failure) -> Deferred:
        """Return why the first message waits for somebody who mends something."""
        error, *_ = await eventually(lambda: self.observed.errors)
        assert isinstance(error, Deferred)
        assert error.failure == failure
        return error

    def reboot(
        self, event_id: str = EVENT_ID, *, due: float = 900.0, **fields: Any
    ) -> ScheduledEvent:
        """Make a reboot whose NotBefore is ``due`` seconds from now."""
        not_before = (self.clock.now() + timedelta(seconds=due)).replace(microsecond=0)
        return replace(make_event(event_id, **fields), not_before=format_rfc3339(not_before))


@asynccontextmanager
async def relay_with_chat(
    trial: Trial, section: Mapping[str, Any] | None = None
) -> AsyncIterator[ChatRelay]:
    """Run a relay. In the same trial it is the same relay, started again."""
    kind = trial.receiver.kind
    clock, member = SystemClock(), load_kinds().modules[kind]
    settings: ChatSettings = member.Settings.model_validate(
        {**(section or trial.receiver.settings()), "kind": kind, "name": "chat"}
    )
    approvals = ApprovalEngine(
        SETTINGS,
        ORIGIN,
        client_resources=dict.fromkeys(("client:alice", "client:bob", "client:drain")),
    )
    async with open_store(
        StoreSettings(path=trial.directory / "relay.db"),
        StateFileScopeAndVm(ORIGIN.scope, "vm"),
        clock,
        lambda event: tuple(matching_sinks(event, [settings])),
    ) as store:
        url = "https://relay.example.com"
        context = ChatContext(store, approvals, clock, url, decide_nothing, {})
        async with member.connect(settings, clock, context) as chat:
            observed = Watched(chat)
            sinks = {"chat": (settings, observed)}
            dispatcher = Dispatcher(sinks, store, clock, lambda *_, **__: None)
            await dispatcher.begin()
            async with BackgroundTasks(dispatcher.run()):
                yield ChatRelay(
                    store=store, approvals=approvals, clock=clock, chat=chat, observed=observed
                )


@dataclass(frozen=True, slots=True)
class Trial:
    """What a case gets: a platform, an empty folder and the log."""

    receiver: ReceiverControl
    directory: Path
    caplog: pytest.LogCaptureFixture


Case = Callable[[Trial], Awaitable[None]]


async def posts_an_event_once(trial: Trial) -> None:
    """An event is one message with all that readers must know; a redelivery posts nothing."""
    async with relay_with_chat(trial) as relay:
        await relay.deliver_document(
            relay.reboot(description="Host maintenance", resources=("db-1", "web_01"))
        )
        (text,) = trial.receiver.messages()
        facts = "Reboot of db-1, web_01", "Host maintenance", "databases", "0 of 2"
        for words in (*facts, "Azure proceeds at NotBefore regardless"):
            assert words in text
        position = await relay.store.read(lambda tx: tx.journal.last_change_of(EVENT_ID.lower()))
        assert position is not None
        await relay.store.transact(lambda tx: tx.deliver_again(position, "chat", relay.clock.now()))
        await relay.settle()
        assert trial.receiver.messages() == [text]


async def edits_or_follows_up(trial: Trial) -> None:
    """Changes appear in the message and its thread, or in follow-ups that name the event."""
    async with relay_with_chat(trial) as relay:
        reboot = relay.reboot()
        await relay.record_document(reboot)
        await relay.decide("approve", "alice", reboot)
        await relay.decide("hold", "bob", reboot)
        await relay.deliver_document()
        history = "\n".join(
            trial.receiver.replies() if trial.receiver.edits else trial.receiver.messages()[1:]
        )
        for words in ("voted to approve, 1 of 2", "put it on hold", "Azure has taken it back"):
            assert words in history or words in trial.receiver.messages()[0]
        if trial.receiver.edits:
            assert len(trial.receiver.messages()) == 1
            assert "Azure has taken it back" in trial.receiver.messages()[0]
        else:
            assert all("Reboot of db-1" in text for text in trial.receiver.messages())


async def shows_a_new_time(trial: Trial) -> None:
    """When Azure changes the event, the last message in the channel is right."""
    async with relay_with_chat(trial) as relay:
        await relay.deliver_document(relay.reboot(resources=("db-1",)))
        await relay.deliver_document(relay.reboot(due=5400, resources=("db-1", "db-2")))
        assert "Reboot of db-1, db-2" in trial.receiver.messages()[-1]
        assert "Azure proceeds at NotBefore regardless" in trial.receiver.messages()[-1]
        assert len(trial.receiver.messages()) == (1 if trial.receiver.edits else 2)


async def posts_the_latest_state_after_an_outage(trial: Trial) -> None:
    """It defers while connections are refused; afterwards it posts the latest state, no flood."""
    await trial.receiver.disconnect()
    async with relay_with_chat(trial) as relay:
        reboot = relay.reboot()
        await relay.record_document(reboot)
        for _turn in range(5):
            await relay.submit("hold", "bob", reboot)
            await relay.submit("release", "bob", reboot)
        await relay.submit("approve", "alice", reboot)
        await eventually(lambda: len(relay.observed.errors) >= 2)
        assert all(
            isinstance(error, Deferred) and error.failure == "transient"
            for error in relay.observed.errors
        )
        await trial.receiver.reconnect()
        await relay.settle()
        assert "parked" not in [delivery["state"] for delivery in await relay.deliveries()]
        assert "1 of 2" in trial.receiver.messages()[0]
        assert len(trial.receiver.messages()) + len(trial.receiver.replies()) <= 2
        assert "voted to approve" in "\n".join(trial.receiver.messages() + trial.receiver.replies())


async def tries_slowly_until_somebody_corrects_something(trial: Trial) -> None:
    """It retries slowly, with a reason that helps, and delivers once somebody mended it."""
    await trial.receiver.refuse()
    async with relay_with_chat(trial) as relay:
        await relay.record_document(relay.reboot())
        error = await relay.first_error("slow")
        assert len(error.reason) > 40
        await trial.receiver.reconnect()
        await relay.settle()
        assert len(trial.receiver.messages()) == 1


async def reads_its_secret_file_again(trial: Trial) -> None:
    """A secret that somebody replaces in its file counts from the next message on."""
    section, file = trial.receiver.settings(), trial.directory / "secret"
    secret = section.pop(trial.receiver.secret_key)
    secret = secret if isinstance(secret, str) else "\n".join(secret)
    file.write_text(secret, encoding="utf-8")
    section[f"{trial.receiver.secret_key}_file"] = str(file)
    async with relay_with_chat(trial, section) as relay:
        file.write_text("no such secret", encoding="utf-8")
        await relay.record_document(relay.reboot())
        error = await relay.first_error("transient")
        assert f"the {trial.receiver.secret_key} of this sink" in error.reason
        assert "no longer usable" in error.reason
        file.write_text(secret, encoding="utf-8")
        await relay.settle()
        assert len(trial.receiver.messages()) == 1


async def shows_hostile_texts_as_text(trial: Trial) -> None:
    """Descriptions, names and reasons are shown as text: no mention, no link, and readable."""
    async with relay_with_chat(trial) as relay:
        reboot = relay.reboot(description=HOSTILE, resources=("db-1", "@here"))
        await relay.record_document(reboot)
        await relay.submit("approve", "alice", reboot, reason=HOSTILE)
        await relay.settle()
        assert "click" in "\n".join(trial.receiver.messages())
        assert trial.receiver.active_markup() == []


async def cuts_long_texts(trial: Trial) -> None:
    """A hundred long names and a text of thousands of characters are cut, never refused."""
    async with relay_with_chat(trial) as relay:
        names = tuple(f"{'m' * 60}-{number}" for number in range(100))
        await relay.deliver_document(
            relay.reboot(resources=names, description="\N{PILE OF POO}<&>\"'\\*_" * 400)
        )
        (text,) = trial.receiver.messages()
        assert "90 more" in text
        assert "parked" not in [delivery["state"] for delivery in await relay.deliveries()]


async def makes_one_message_of_many_events(trial: Trial) -> None:
    """Fifty events of one document are one message, and their end is no flood."""
    async with relay_with_chat(trial) as relay:
        await relay.record_document(
            *(relay.reboot(f"E-{number}", resources=(f"db-{number}",)) for number in range(50))
        )
        await relay.settle()
        (text,) = trial.receiver.messages()
        assert "50 maintenance events at once" in text
        await relay.deliver_document()
        assert len(trial.receiver.messages()) <= (1 if trial.receiver.edits else 4)
        assert len(trial.receiver.replies()) <= 3


async def updates_its_message_after_a_restart(trial: Trial) -> None:
    async with relay_with_chat(trial) as relay:
        reboot = relay.reboot()
        await relay.deliver_document(reboot)
    async with relay_with_chat(trial) as relay:
        await relay.decide("approve", "alice", reboot)
    if trial.receiver.edits:
        (text,) = trial.receiver.messages()
        assert "1 of 2" in text
    else:
        assert ["0 of 2" in text for text in trial.receiver.messages()] == [True, False]


async def posts_anew_what_another_kind_had_posted(trial: Trial) -> None:
    """The sink was of another kind before, whose names of messages mean nothing here."""
    async with relay_with_chat(trial) as relay:
        reboot = relay.reboot()
        await relay.deliver_document(reboot)
        await relay.store.transact(
            lambda tx: tx.connection.execute(
                "UPDATE message SET ref = 'another/kind''s:name', content_hash = 'other'"
            )
        )
        await relay.decide("approve", "alice", reboot)
        # Where messages have no threads, a follow-up repeats the vote.
        assert len([text for text in trial.receiver.messages() if "1 of 2" in text]) == (
            1 if trial.receiver.edits else 2
        )
        assert relay.observed.errors == []


async def posts_a_ping(trial: Trial) -> None:
    """A ping is a message, and so is an event of the relay itself."""
    async with relay_with_chat(trial) as relay:
        for name in ("relay.ping", "relay.source-lost"):
            said: dict[str, Any] = {"sink": None, "reason": f"said of {name}", "count": 1}
            event = relay_event(name, ORIGIN, relay.clock.now(), **said, head="0:0")
            await relay.chat.deliver(event)
        ping, source_lost = trial.receiver.messages()
        assert "ping" in ping
        assert "source-lost" in source_lost


async def closes_during_delivery(trial: Trial) -> None:
    """A relay stops without waiting for a platform that hangs; no task and no event is lost."""
    before = asyncio.all_tasks()
    async with asyncio.timeout(TIMEOUT):
        async with relay_with_chat(trial) as relay:
            await trial.receiver.hang()
            await relay.record_document(relay.reboot())
            await eventually(lambda: relay.observed.under_way == 1)
        assert relay.observed.under_way == 0
    await trial.receiver.reconnect()
    await eventually(lambda: asyncio.all_tasks() <= before | receiver_tasks())
    async with relay_with_chat(trial) as relay:
        await relay.settle()
    assert "Reboot of db-1" in trial.receiver.messages()[0]


async def shows_no_secret_in_any_error(trial: Trial) -> None:
    """Neither when the platform is gone, nor when it refuses and repeats the message."""
    trial.caplog.set_level(logging.DEBUG)
    async with relay_with_chat(trial) as relay:
        await trial.receiver.disconnect()
        reboot = relay.reboot()
        await relay.record_document(reboot)
        await eventually(lambda: len(relay.observed.errors) >= 2)
        await trial.receiver.reconnect()
        await relay.settle()
        await trial.receiver.refuse()
        errors_before = len(relay.observed.errors)
        await relay.submit("hold", "bob", reboot)
        await eventually(lambda: len(relay.observed.errors) > errors_before)
        await trial.receiver.reconnect()
        await relay.settle()
        texts = [logged(trial.caplog), await relay.logged_reasons()]
    for error in relay.observed.errors:
        assert isinstance(error, (DeliveryError, asyncio.CancelledError))
        texts += traceback.format_exception(error)
        texts.append(str(getattr(error, "response", "")))
    assert trial.receiver.secrets_in_settings
    secrets, text = trial.receiver.secrets_in_settings, "\n".join(texts)
    assert [secret for secret in secrets if secret in text] == []


async def refuses_calls_that_prove_nothing(trial: Trial) -> None:
    """A call without a proof gets a status, and has no effect."""
    async with relay_with_chat(trial) as relay:
        await relay.record_document(relay.reboot())
        head = await relay.store.read(lambda tx: tx.head())
        for body in HOSTILE_BODIES:
            with pytest.raises(CallbackRefused) as caught:
                await relay.chat.handle_callback({}, body)
            assert caught.value.status in {400, 401}
        assert await relay.store.read(lambda tx: tx.head()) == head
    assert "Traceback" not in trial.caplog.text


CASES: tuple[Case, ...] = (
    posts_an_event_once,
    edits_or_follows_up,
    shows_a_new_time,
    posts_the_latest_state_after_an_outage,
    tries_slowly_until_somebody_corrects_something,
    reads_its_secret_file_again,
    shows_hostile_texts_as_text,
    cuts_long_texts,
    makes_one_message_of_many_events,
    updates_its_message_after_a_restart,
    posts_anew_what_another_kind_had_posted,
    posts_a_ping,
    closes_during_delivery,
    shows_no_secret_in_any_error,
    refuses_calls_that_prove_nothing,
)


def logged(caplog: pytest.LogCaptureFixture) -> str:
    """Return what a relay would have logged: pytest also captures what nobody reads."""

    def passes(log: logging.Logger | None) -> bool:
        return log is None or log.parent is None or (log.propagate and passes(log.parent))

    return "\n".join(
        record.getMessage()
        for record in caplog.records
        if record.name not in {"asyncio", "aiohttp.access"}
        and passes(logging.getLogger(record.name))
    )
