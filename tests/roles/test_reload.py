"""What a reload changes, what it leaves, and that nothing is lost or done twice meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import aiohttp
import pytest
from typing_extensions import override  # in typing from Python 3.12

from relay.approvals.request import Caller, DecisionBody, Rights
from relay.clock import SystemClock
from relay.config import LoadedConfig, load_kinds
from relay.delivery.dispatcher import Dispatcher
from relay.simulator.setup import Fault
from relay.sinks import Receipt, SinkSettings
from tests.eventually import eventually
from tests.journey.relay_process import KEY, after_polls, client, inbox, name_of, webhook
from tests.roles.reloadable_relay import reloadable_relay, voter

AUTOMATIC = {"name": "all", "approve": "automatic"}
AT_ONCE = {"tell_first": "0s", "rules": [AUTOMATIC]}
TOLD_FIRST = {"tell_first": "100s", "rules": [AUTOMATIC]}
OPERATOR = client("operator")


def api(*clients: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"listen": "127.0.0.1:0", "clients": [OPERATOR, *clients], **more}


def by_votes(votes: int, *names: str) -> dict[str, Any]:
    voters = [f"client:{name}" for name in names]
    return {"name": "votes", "approve": {"votes": votes, "from": voters}}


class BreakingSettings(SinkSettings):
    kind: Literal["breaking"] = "breaking"


def add_kind(monkeypatch: pytest.MonkeyPatch, connect: Any) -> None:
    """Let a configuration name the kind of sink that ``connect`` makes."""
    module = SimpleNamespace(Settings=BreakingSettings, connect=connect)
    monkeypatch.setitem(load_kinds().modules, "breaking", module)


class Box:
    concurrency = 1
    longest_pause = 1.0
    give_up_after = 1.0
    open_boxes = 0

    async def deliver(self, _event: object) -> Receipt:
        return Receipt()


# --- decisions


async def test_a_grant_of_a_rule_that_is_gone_is_not_sent(tmp_path: Path) -> None:
    async with (
        inbox() as drain,
        reloadable_relay(tmp_path, sinks=[webhook(drain.url)], approvals=TOLD_FIRST) as relay,
    ):
        drain.status = 503  # so the StartRequest waits for the notice
        event = relay.reboot()
        await eventually(lambda: _is(relay.state(event), "granted"))
        changes = await relay.reload(approvals={"tell_first": "0s", "rules": []})
        rule = ("approvals.rules.all", "removed")
        assert changes == [("approvals.tell_first", "changed"), rule]
        await eventually(lambda: _has(relay.told("startrequest.failed"), 1))
        assert await relay.state(event) == "none"
        assert relay.starts(event) == 0

        # With the rule again, the event is granted again, and started once.
        await relay.reload(approvals=AT_ONCE)
        await eventually(lambda: relay.starts(event) == 1)
        assert len(await relay.told("approval.granted")) == 2
        await eventually(lambda: _has(relay.told("startrequest.accepted"), 1))
        assert relay.starts(event) == 1


async def test_a_new_rule_grants_what_waits_once_new_sinks_know_of_it(tmp_path: Path) -> None:
    async with inbox() as late, reloadable_relay(tmp_path) as relay:
        late.status = 503
        event = relay.reboot()
        await eventually(lambda: _is(relay.state(event), "none"))
        await relay.reload(sinks=[webhook(late.url)], approvals=TOLD_FIRST)
        await eventually(lambda: _is(relay.state(event), "granted"))
        await after_polls(relay.azure)
        assert relay.starts(event) == 0, "the new sink was not told first"
        late.status = 204
        await eventually(lambda: relay.starts(event) == 1)
        await eventually(lambda: len(late.types_of(event.event_id)) >= 2)
        assert late.types_of(event.event_id)[:2] == ["event.scheduled", "approval.granted"]


async def test_the_mode_of_the_configuration_holds_at_once(tmp_path: Path) -> None:
    async with reloadable_relay(tmp_path, approvals=AT_ONCE) as relay:
        await relay.reload(approvals={**AT_ONCE, "enabled": False})
        event = relay.reboot()
        await eventually(lambda: _is(relay.state(event), "none"))
        await relay.reload(approvals={**AT_ONCE, "dry_run": True})
        await eventually(lambda: _is(relay.state(event), "granted"))
        await after_polls(relay.azure)
        assert relay.starts(event) == 0
        assert not await relay.told("approval.granted")
        await relay.reload(approvals=AT_ONCE)
        await eventually(lambda: relay.starts(event) == 1)


async def test_a_reload_waits_for_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No second one is sent while the first can be executed, however long sinks may still send."""
    monkeypatch.setattr("relay.roles.inner_half.DRAIN_TIMEOUT", 0.2)
    async with inbox() as drain, reloadable_relay(tmp_path, approvals=AT_ONCE) as relay:
        relay.azure.add_fault(Fault(kind="delay", on="approval", time=1.0))
        event = relay.reboot()
        await eventually(lambda: _has(relay.told("approval.granted"), 1))
        await eventually(lambda: relay.running.relay.gate.engine.in_flight)
        await relay.reload(sinks=[webhook(drain.url)])
        assert len(await relay.told("startrequest.accepted")) == 1
        await after_polls(relay.azure)
        assert relay.starts(event) == 1


async def test_a_decision_during_a_reload_waits_for_the_new_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier gate decides nothing more, whoever still comes to it."""
    may_close = asyncio.Event()

    @asynccontextmanager
    async def connect_slowly(_settings: object, _clock: object) -> AsyncIterator[Box]:
        yield Box()
        await may_close.wait()

    add_kind(monkeypatch, connect_slowly)
    rules = {"tell_first": "0s", "rules": [by_votes(2, "alice", "bob")]}
    async with reloadable_relay(
        tmp_path, approvals=rules, api=api(voter("alice"), voter("bob"))
    ) as relay:
        await relay.running.change(relay.with_sinks(BreakingSettings(name="slow")))
        event = relay.reboot()
        await eventually(lambda: _is(relay.state(event), "pending"))
        earlier = relay.running.relay
        rules = {"tell_first": "0s", "rules": [by_votes(2, "bob", "operator")]}
        reload = asyncio.create_task(relay.reload(api=api(voter("bob")), approvals=rules))
        await eventually(lambda: not relay.running.server.state.settled.is_set())
        votes = [asyncio.create_task(relay.vote(event, name)) for name in ("alice", "bob")]
        revision = (await relay.event(event))["revision"]
        body = DecisionBody(eventId=event.event_id, decision="approve", revision=revision)
        caller = Caller("client:alice", "http", Rights(frozenset({"approve"})))
        late = body.to_request(caller, SystemClock().now(), b"")
        assert (await earlier.gate.submit(late)).status == 503
        assert not any(vote.done() for vote in votes)
        may_close.set()
        await reload
        (alice, _), (bob, answer) = await asyncio.gather(*votes)
        assert (alice, bob, answer["votes"]) == (401, 202, 1)


# --- sinks


async def test_what_cannot_be_sent_at_once_goes_to_where_the_new_settings_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delivery that is cut off is repeated, with the same id."""
    monkeypatch.setattr("relay.roles.parts.DRAIN_TIMEOUT", 0.2)
    async with (
        inbox() as old,
        inbox() as new,
        reloadable_relay(tmp_path, sinks=[webhook(old.url)]) as relay,
    ):
        old.may_answer.clear()
        first = relay.reboot()
        await eventually(lambda: len(old.events) == 1)
        relay.azure.start(first)  # waits behind the delivery that is in flight
        await eventually(lambda: _has(relay.told("event.started"), 1))
        reload = asyncio.create_task(relay.reload(sinks=[webhook(new.url)]))
        await eventually(lambda: len(relay.loads) == 1)
        second = relay.reboot()  # is recorded while the half is left
        await reload
        await eventually(lambda: len(new.events) == 3)
        assert new.types_of(first.event_id) == ["event.scheduled", "event.started"]
        assert new.types_of(second.event_id) == ["event.scheduled"]
        assert old.events[0]["id"] in [event["id"] for event in new.events]
        assert old.types_of(first.event_id) == ["event.scheduled"]


async def test_no_event_misses_a_sink_or_reaches_it_twice_during_reloads(tmp_path: Path) -> None:
    """The sink `keeper` stays, `changing` has another address each time, `guest` comes and goes."""
    async with (
        inbox() as keeper,
        inbox() as one,
        inbox() as other,
        inbox() as guest,
        reloadable_relay(tmp_path, sinks=[webhook(keeper.url, "keeper")]) as relay,
    ):
        addresses = itertools.cycle((one.url, other.url))
        event_ids = []
        for number in range(12):
            event_ids += [relay.reboot().event_id for _ in range(3)]
            sinks = [webhook(keeper.url, "keeper"), webhook(next(addresses), "changing")]
            if number % 2 or number == 11:
                sinks.append(webhook(guest.url, "guest"))
            await relay.reload(sinks=sinks)
        await eventually(lambda: _ids(keeper) == sorted(event_ids))
        await eventually(lambda: _ids(one, other) == sorted(event_ids))
        # A guest that is back gets everything that is live again, each once per visit.
        await eventually(lambda: set(event_ids) == set(_ids(guest)))
        assert all(name_of(event) == "event.scheduled" for event in keeper.events)


@asynccontextmanager
async def connect(settings: BreakingSettings, _clock: object) -> AsyncIterator[Box]:
    """Make a box, unless its name says otherwise."""
    if settings.name == "broken":
        raise LookupError("it cannot be made")
    if settings.name == "hanging":
        await asyncio.Event().wait()
    if settings.name == "canceling":
        raise asyncio.CancelledError
    Box.open_boxes += 1
    try:
        yield Box()
    finally:
        Box.open_boxes -= 1
    if settings.name == "ending-badly":
        raise LookupError("it cannot be ended")


async def test_a_bad_sink_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_kind(monkeypatch, connect)
    monkeypatch.setattr("relay.roles.inner_half.CONNECT_TIMEOUT", 0.2)
    async with inbox() as drain, reloadable_relay(tmp_path, sinks=[webhook(drain.url)]) as relay:
        config = relay.running.config
        good = BreakingSettings(name="good")
        errors = {"broken": LookupError, "hanging": TimeoutError, "canceling": RuntimeError}
        for name, error in errors.items():
            bad = relay.with_sinks(good, BreakingSettings(name=name))
            with pytest.raises(error):
                await relay.running.change(bad)
            assert Box.open_boxes == 0
            assert relay.running.config is config
            assert [sink.name for sink in relay.running.relay.dispatcher.workers] == ["drain"]
        _, page = await relay.call("GET", "/v1/dead-letters")
        assert page["items"] == []
        event = relay.reboot()
        await eventually(lambda: drain.types_of(event.event_id) == ["event.scheduled"])

        await relay.running.change(relay.with_sinks(*config.sinks, good))
        assert Box.open_boxes == 1
        await relay.running.change(config)
        assert Box.open_boxes == 0


async def test_a_sink_that_raises_while_it_disconnects_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add_kind(monkeypatch, connect)
    async with inbox() as drain, reloadable_relay(tmp_path) as relay:
        config = relay.with_sinks(BreakingSettings(name="ending-badly"))
        await relay.running.change(config)
        await relay.reload(sinks=[webhook(drain.url)])
        assert "it cannot be ended" in caplog.text
        event = relay.reboot()
        await eventually(lambda: drain.types_of(event.event_id) == ["event.scheduled"])
        await relay.running.change(config)  # and at the end of the relay


async def test_a_sink_that_refuses_to_be_canceled_does_not_hold_up_reloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    may_end = asyncio.Event()
    tries = 0

    class Stubborn(Box):
        """A sink whose tries go on when they are canceled."""

        @override
        async def deliver(self, event: object) -> Receipt:
            nonlocal tries
            tries += 1
            while not may_end.is_set():
                with suppress(asyncio.CancelledError):
                    await may_end.wait()
            return Receipt()

    @asynccontextmanager
    async def connect_stubborn(_settings: object, _clock: object) -> AsyncIterator[Box]:
        yield Stubborn()

    add_kind(monkeypatch, connect_stubborn)
    monkeypatch.setattr("relay.roles.parts.DRAIN_TIMEOUT", 0.2)
    monkeypatch.setattr("relay.roles.inner_half.LEAVE_TIMEOUT", 1.0)
    async with inbox() as drain, reloadable_relay(tmp_path) as relay:
        config = relay.running.config
        await relay.running.change(relay.with_sinks(BreakingSettings(name="drain")))
        event = relay.reboot()
        try:
            await eventually(lambda: tries == 1)
            async with asyncio.timeout(10):
                await relay.running.change(config)
                await relay.reload(sinks=[webhook(drain.url)])
            assert "the tries of a sink do not end" in caplog.text
            await eventually(lambda: drain.types_of(event.event_id) == ["event.scheduled"])
        finally:
            may_end.set()


async def test_a_reload_is_refused_while_the_state_file_cannot_be_written(tmp_path: Path) -> None:
    """Otherwise what is sent from memory could be recorded by another configuration."""
    async with inbox() as drain, reloadable_relay(tmp_path) as relay:
        store = relay.running.store
        connection = store._state_file.connection  # noqa: SLF001  # no other way to break the disk
        connection.execute("PRAGMA query_only = ON")
        event = relay.reboot()
        await eventually(lambda: store.write_error is not None)
        assert "readonly" in await relay.refuse(sinks=[webhook(drain.url)])
        assert relay.running.relay.dispatcher.workers == []
        connection.execute("PRAGMA query_only = OFF")
        await eventually(lambda: store.write_error is None)
        await relay.reload(sinks=[webhook(drain.url)])
        await eventually(lambda: drain.types_of(event.event_id) == ["event.scheduled"])


# --- all or nothing


async def test_reloads_at_once_run_one_after_the_other(tmp_path: Path) -> None:
    async with inbox() as drain, reloadable_relay(tmp_path) as relay:
        relay.document["sinks"] = [webhook(drain.url)]
        results = await asyncio.gather(*(relay.reload() for _ in range(4)))
        assert sorted(map(len, results)) == [0, 0, 0, 1]
        assert len(relay.loads) == 4


async def test_a_key_that_needs_a_restart_changes_nothing_else(tmp_path: Path) -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"scope": "east"}, "scope"),
        ({"relay": "vm-1"}, "relay"),
        ({"source": {"url": "http://127.0.0.1:1"}}, "source.url"),
        ({"store": {"path": "other.db"}}, "store.path"),
        ({"api": api(socket=str(tmp_path / "s"))}, "api.socket"),
        ({"api": {**api(), "listen": "127.0.0.1:1"}}, "api.listen"),
        ({"scope": "east", "relay": "vm-1"}, "scope, relay"),
    ]
    async with inbox() as drain, reloadable_relay(tmp_path) as relay:
        for change, keys in changes:
            reason = await relay.refuse(**change, sinks=[webhook(drain.url)])
            assert reason == f"restart required for: {keys}. Nothing was changed"
        assert relay.running.relay.dispatcher.workers == []
        assert relay.reloader.problem is not None
        assert await relay.reload() == []
        assert relay.reloader.problem is None


async def test_a_certificate_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    tls = {"cert_file": str(tmp_path / "no.pem"), "key_file": str(tmp_path / "no.key")}
    async with inbox() as drain, reloadable_relay(tmp_path) as relay:
        reason = await relay.refuse(api=api(tls=tls), sinks=[webhook(drain.url)])
        assert reason.startswith("api.tls: expected a certificate in PEM in ")
        assert relay.running.relay.dispatcher.workers == []
        assert (await relay.call("GET", "/readyz"))[1]["configuration"] == "refused"


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_relay_that_can_enter_neither_half_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """It is never half of each: the service manager starts it with the new configuration."""
    is_broken = False

    @asynccontextmanager
    async def connect_once(_settings: object, _clock: object) -> AsyncIterator[Box]:
        if is_broken and hangs:
            await asyncio.Event().wait()
        if is_broken:
            raise TimeoutError
        yield Box()

    add_kind(monkeypatch, connect_once)
    monkeypatch.setattr("relay.roles.inner_half.CONNECT_TIMEOUT", 0.2)
    has_ended = False
    with pytest.RaisesGroup(TimeoutError, flatten_subgroups=True, allow_unwrapped=True):
        async with reloadable_relay(tmp_path) as relay:
            config = relay.with_sinks(BreakingSettings(name="once"))
            await relay.running.change(config)
            is_broken = True
            try:
                with pytest.raises(TimeoutError):
                    await relay.running.change(config)
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                has_ended = True
                raise
    assert has_ended


async def test_no_failed_begin_listens_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Dispatcher._reconcile  # noqa: SLF001  # no other way to make the store refuse it

    def fail_with_sinks(dispatcher: Dispatcher, *given: Any) -> Any:
        if dispatcher.workers:
            raise LookupError("a row that cannot be read")
        return begin(dispatcher, *given)

    monkeypatch.setattr(Dispatcher, "_reconcile", fail_with_sinks)
    async with inbox() as drain, reloadable_relay(tmp_path) as relay:
        listeners = relay.running.store.listeners
        before = len(listeners.recorded), len(listeners.redelivered)
        await relay.refuse(sinks=[webhook(drain.url)])
        assert (len(listeners.recorded), len(listeners.redelivered)) == before


async def test_reloads_leave_no_listener_task_or_file_open(tmp_path: Path) -> None:
    async with inbox() as drain, reloadable_relay(tmp_path) as relay:

        async def reload_and_count(number: int) -> tuple[int, ...]:
            await relay.reload(sinks=[webhook(drain.url, f"drain{number}")])
            listeners = relay.running.store.listeners
            return (
                len(listeners.recorded),
                len(listeners.redelivered),
                len(listeners.write_error_changed),
                len(asyncio.all_tasks()),
                len(os.listdir("/proc/self/fd")),  # noqa: PTH208  # only how many
            )

        counts = [await reload_and_count(number) for number in range(12)]
        assert max(counts[6:]) <= max(counts[:6])


async def _is(state: Any, wanted: str) -> bool:
    return bool(await state == wanted)


async def _has(found: Any, count: int) -> bool:
    return len(await found) == count


def _ids(*boxes: Any) -> list[str]:
    return sorted(event["subject"] for box in boxes for event in box.events)


async def test_settings_that_fail_in_their_own_code_refuse_the_reload_and_not_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with inbox() as drain, reloadable_relay(tmp_path) as relay:

        def fail() -> LoadedConfig:
            raise LookupError("a bug in an installed sink")

        with monkeypatch.context() as patched:
            patched.setattr(relay.reloader, "load", fail)
            assert "LookupError" in await relay.refuse()
            status, problem = await relay.call("POST", "/v1/reload")
            assert (status, "LookupError" in problem["detail"]) == (422, True)
        await relay.reload(sinks=[webhook(drain.url)])
        assert relay.reloader.problem is None


async def test_a_reload_resets_no_counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To Prometheus a counter that goes back has begun anew, and all of it would be new."""
    monkeypatch.setattr("relay.approvals.engine.MAX_REFUSALS", 1)
    async with inbox() as drain, reloadable_relay(tmp_path, api=api(voter("alice"))) as relay:

        async def refusals() -> str:
            headers = {"Authorization": f"Bearer {KEY}"}
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"{relay.url}/metrics", headers=headers) as response,
            ):
                lines = (await response.text()).splitlines()
            return next(line for line in lines if line.startswith("imds_relay_refusals_total{"))

        event = relay.reboot()
        await eventually(lambda: _is(relay.state(event), "none"))
        await relay.reload(sinks=[webhook(drain.url)])  # its engine records one refusal
        for _ in range(3):
            assert (await relay.vote(event, "alice"))[0] == 403
        before = await refusals()
        assert before.endswith(" 3.0")
        await relay.reload(sinks=[])
        assert await refusals() == before
