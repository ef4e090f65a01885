"""Apprise: which URLs are accepted, how texts are sent, and what its threads cannot do."""

from __future__ import annotations

import asyncio
import importlib
import logging
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from relay.chat.cards.card import Card
from relay.chat.cards.event_card import event_card
from relay.chat.cards.grouped_card import grouped_card
from relay.chat.cards.wording import WHAT_HOLD_DOES
from relay.chat.platforms import apprise
from relay.chat.platforms.apprise import guarded_thread
from relay.chat.platforms.apprise import service as service_module
from relay.chat.platforms.apprise.fanout import ServiceFanout
from relay.chat.platforms.apprise.guarded_thread import SerialCaller
from relay.chat.platforms.apprise.service import REQUIREMENT, load_service
from relay.chat.platforms.apprise.settings import Settings
from relay.chat.platforms.apprise.text import card_text
from relay.clock import SystemClock
from relay.errors import Deferred
from relay.net.egress import REFUSED, AddressRefused
from tests.approvals.builders import build_decision, build_event, build_status
from tests.approvals.manual_clock import NOON
from tests.chat.apprise_server import (
    PASSWORD,
    PATH,
    TOKEN,
    AppriseService,
    apprise_url,
    running_service,
)
from tests.chat.conformance import HOSTILE, logged
from tests.chat.running_relay import ALICE, BOB, rule, stage
from tests.eventually import eventually

NOT_BEFORE = NOON + timedelta(seconds=900)
TWO_CLIENTS: dict[str, Any] = {"rules": [rule(2, "client:alice", "client:bob")]}


def make_settings(*urls: str, **changes: Any) -> Settings:
    return Settings.model_validate(
        {"kind": "apprise", "name": "pager", "urls": urls, "allow_http": True, **changes}
    )


def make_card(**event_changes: Any) -> Card:
    """Return the card of an event that waits for votes."""
    status = build_status(build_event(**event_changes))
    return event_card(status, link=lambda *_: None, code=None)


async def post_error(fanout: ServiceFanout) -> Deferred:
    """Return why a post failed."""
    with pytest.raises(Deferred) as caught:
        await fanout.post(make_card())
    return caught.value


# --- texts


def test_a_card_is_plain_text_and_names_the_command_that_decides() -> None:
    status = build_status(build_event(), build_decision(by="bob"))
    card = event_card(status, link=lambda *_: None, code=None)
    voting_closes_at = NOT_BEFORE - timedelta(seconds=60)
    assert card_text(card) == (
        f"Azure begins at {NOT_BEFORE:%Y-%m-%d %H:%M} UTC or soon after, whether or not anybody "
        "answers; earlier only when it is approved. There are at most 16 min left.\n\n"
        "Machines: db-1\n"
        "What happens: The machine is rebooted: what is in memory is lost.\n"
        "Who started it: Azure itself\n"
        "Rule: databases: 2 votes from group:oncall, client:drain\n"
        "Votes: 1 of 2: client:bob; 1 missing, from client:alice, client:drain, "
        f"until {voting_closes_at:%Y-%m-%d %H:%M} UTC (at most 15 min left)\n\n"
        f"{WHAT_HOLD_DOES}\n\n"
        "Azure proceeds at NotBefore regardless.\n\n"
        "To answer, on a machine of this scope: imds-relay approve | hold E-1\n\n"
        "E-1 · prod"
    )


def test_a_grouped_card_has_a_line_for_each_event() -> None:
    statuses = [build_status(build_event(f"E-{number}")) for number in range(12)]
    text = card_text(grouped_card(statuses, link=lambda *_: None, code=None))
    assert text.count("\n- Reboot of db-1") + text.count("\n\n- Reboot of db-1") >= 10
    assert "imds-relay approve | hold EVENT" in text


@given(st.text(max_size=300))
def test_a_description_cannot_add_lines(description: str) -> None:
    lines = card_text(make_card(description=f"x{description}")).splitlines()
    assert len(lines) == len(card_text(make_card(description="x")).splitlines())


def test_a_hostile_description_mentions_nobody_and_links_nowhere() -> None:
    text = card_text(make_card(description=HOSTILE))
    for markup in ("<!channel", "@all", "@everyone", "<at>", "https://", "](http"):
        assert markup not in text
        assert markup in HOSTILE


# --- URLs


@pytest.mark.parametrize(
    ("urls", "problem"),
    [
        pytest.param((), "urls: expected at least one URL", id="no URL"),
        pytest.param(
            ("gopher://t0ken",), "number 1: expected a URL that Apprise knows", id="unknown scheme"
        ),
        pytest.param(
            ("jsons://127.0.0.1/x", "syslog://"),
            "number 2: expected a service on the network, got syslog://",
            id="syslog",
        ),
        pytest.param(("dbus://",), "expected a service on the network", id="dbus"),
        pytest.param(("macosx://",), "expected a service on the network", id="macOS"),
        pytest.param(("windows://",), "expected a service on the network", id="Windows"),
        pytest.param(("file:///etc/passwd",), "expected a URL that Apprise knows", id="file"),
        pytest.param(
            ("slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/?template=/etc/passwd",),
            "names no file of this machine, got one with template=",
            id="template file",
        ),
        pytest.param(
            ("fcm://project/token?mode=oauth2&keyfile=/etc/t0ken",),
            "got one with keyfile=",
            id="key file",
        ),
        pytest.param(
            ("jsons://127.0.0.1/t0ken?redirect=yes",), "without redirect=yes", id="redirects"
        ),
        pytest.param(
            ("jsons://127.0.0.1/t0ken?verify=no",), "without verify=no", id="any certificate"
        ),
        pytest.param(
            ("jsons://127.0.0.1/t0ken?optional=yes",), "without optional=yes", id="hidden failures"
        ),
        pytest.param(("jsons://127.0.0.1/t0ken?retry=3",), "without retry=", id="retries"),
        pytest.param(
            ("jsons://169.254.169.254/metadata",), "metadata or host address", id="metadata"
        ),
        pytest.param(
            ("jsons://2852039166/metadata",), "metadata or host address", id="metadata as a number"
        ),
        pytest.param(
            ("jsons://[::ffff:168.63.129.16]/t0ken",),
            "metadata or host address",
            id="host address in IPv6",
        ),
        pytest.param(
            ("discord://t0ken",), "expected all parts that discord:// needs", id="incomplete"
        ),
    ],
)
def test_an_unusable_url_is_refused_without_repeating_it(
    urls: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({"kind": "apprise", "name": "pager", "urls": urls})
    assert problem in str(caught.value)
    assert "t0ken" not in str(caught.value)
    assert "passwd" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["json://127.0.0.1/x", "gotify://example.com/token", "mailto://user:pass@example.com"]
)
def test_a_url_without_tls_needs_allow_http(url: str) -> None:
    with pytest.raises(ValueError, match=r"expected (jsons|gotifys|mailtos)://, got .*allow_http"):
        load_service(url, allow_http=False)
    assert load_service(url, allow_http=True).name


@pytest.mark.parametrize(
    "url",
    [
        pytest.param(
            "tgram://123456789:AAE-xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx/12315544/", id="Telegram"
        ),
        pytest.param(
            "pover://uuuuuuuuuuuuuuuuuuuuuuuuuuuuuu@aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", id="Pushover"
        ),
        pytest.param("ntfys://ntfy.example.com/topic", id="ntfy"),
        pytest.param(
            "https://discord.com/api/webhooks/4174216298/JHMHI8qBe7bk2ZwO5U711o3dV_js", id="Discord"
        ),
        pytest.param("rsyslog://logs.example.com", id="remote syslog"),
    ],
)
def test_services_on_the_network_are_accepted(url: str) -> None:
    assert load_service(url, allow_http=False).name


SCHEMES = (
    "json jsons slack mailto tgram https discord sns fcm workflows matrix x".split()  # noqa: SIM905  # readable
)


@given(st.sampled_from([*SCHEMES, ""]), st.text("abcT0129:/@?&=%[]#.-_ \\\x00é", max_size=60))
def test_any_text_is_a_service_or_an_error_of_the_usual_form(scheme: str, rest: str) -> None:
    try:
        load_service(f"{scheme}://{rest}", allow_http=True)
    except ValueError as error:
        assert str(error).startswith("expected ")  # noqa: PT017  # not every text raises


def test_only_local_services_of_the_library_are_not_remote() -> None:
    """A new kind of service that names neither host nor account would show up here."""
    library = importlib.import_module("apprise.plugins")
    local_kinds = [
        kind
        for kind in library.N_MGR.plugins(include_disabled=True)
        if not service_module._is_remote(kind)  # noqa: SLF001  # tests the rule itself
    ]
    schemes = set()
    for kind in local_kinds:
        for protocols in (kind.protocol, kind.secure_protocol):
            schemes.update(service_module._as_list(protocols))  # noqa: SLF001  # as above
    assert schemes == {
        "blink1",
        "dbus",
        "gio",
        "glib",
        "gnome",
        "kde",
        "macosx",
        "qt",
        "syslog",
        "windows",
    }


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relay.chat.platforms.apprise.service.find_spec", lambda _: None)
    with pytest.raises(ValidationError) as caught:
        make_settings(apprise_url(9))
    assert f"{REQUIREMENT}; it is not installed" in str(caught.value)


def test_a_library_that_cannot_turn_redirects_off_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(importlib.import_module("apprise").AppriseAsset, "http_redirects")
    with pytest.raises(ValidationError, match="an older one is installed"):
        make_settings(apprise_url(9))


def test_a_configuration_without_apprise_does_not_load_the_library() -> None:
    """The library takes half a second and 40 MB."""
    code = (
        "import sys; from relay.config import Config; Config(); sys.exit('apprise' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- sending


async def test_a_message_has_title_text_type_and_sender() -> None:
    async with running_service() as service:
        fanout = ServiceFanout(make_settings(service.url))
        await fanout.post(make_card())
        await fanout.reply_in_thread(None, [("Reboot of db-1 (E-1)",), (NOON, ": it began")])
        await fanout.reply_in_thread(None, [("ping",)])
        card, *replies = service.messages
        assert card.startswith(f"Reboot of db-1\nAzure begins at {NOT_BEFORE:%Y-%m-%d %H:%M} UTC")
        assert replies == [
            f"Reboot of db-1 (E-1)\n{NOON:%Y-%m-%d %H:%M} UTC: it began",
            "imds-relay\nping",
        ]
        assert service.message_types == ["warning", "info", "info"]
        assert set(service.user_agents) == {"imds-relay"}


@pytest.mark.parametrize(
    ("status", "failure", "reason"),
    [
        (302, "slow", "redirects are not followed"),
        (307, "slow", "redirects are not followed"),
        (401, "slow", "check its URL"),
        (404, "slow", "check its URL"),
        (410, "slow", "check its URL"),
        (429, "transient", "it answered 429"),
        (500, "transient", "it answered 500"),
        (503, "transient", "it answered 503"),
    ],
)
async def test_the_status_of_a_refusal_decides_how_it_is_retried(
    status: int, failure: str, reason: str
) -> None:
    async with running_service() as service:
        service.status = status
        error = await post_error(ServiceFanout(make_settings(service.url)))
        assert (error.failure, error.status) == (failure, status)
        assert reason in error.reason
        assert service.calls == [PATH]  # no redirect was followed


async def test_no_error_and_no_log_contains_a_url(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    async with running_service() as service:
        service.status = 500
        refused = await post_error(ServiceFanout(make_settings(service.url)))
    unreachable = await post_error(ServiceFanout(make_settings(service.url)))
    output = (
        f"{refused} {refused.response} {unreachable} {unreachable.response} "
        f"{logged(caplog)} {capfd.readouterr()}"
    )
    assert PASSWORD not in output
    assert TOKEN not in output


async def test_a_failing_service_does_not_stop_others_and_nobody_gets_a_message_twice() -> None:
    async with running_service() as healthy, running_service() as failing:
        fanout = ServiceFanout(make_settings(healthy.url, failing.url))
        failing.status = 503
        for _ in range(3):
            assert (await post_error(fanout)).failure == "transient"
        failing.status = 200
        await fanout.post(make_card())
        assert (len(healthy.messages), len(failing.messages)) == (1, 1)
        await fanout.post(make_card())  # every service has the first message: this is a new one
        assert len(healthy.messages) == 2


async def test_a_service_whose_thread_cannot_start_does_not_stop_others_and_is_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine has a limited number of threads."""
    start = threading.Thread.start
    failures_left = [1]

    def start_or_fail(thread: threading.Thread) -> None:
        if failures_left[0] and thread.name.startswith("pager: "):
            failures_left[0] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    async with running_service() as first, running_service() as second:
        fanout = ServiceFanout(make_settings(first.url, second.url, timeout="2s"))
        monkeypatch.setattr(threading.Thread, "start", start_or_fail)
        assert "own code" in (await post_error(fanout)).reason
        assert sorted(len(service.calls) for service in (first, second)) == [0, 1]
        await fanout.post(make_card())
        assert [len(service.calls) for service in (first, second)] == [1, 1]


async def test_the_recipients_of_old_partial_messages_are_forgotten() -> None:
    async with running_service() as healthy, running_service() as failing:
        settings = make_settings(healthy.url, failing.url)
        fanout = ServiceFanout(settings, max_partial_messages=2)
        failing.status = 503
        for text in ("one", "two", "three", "three", "one"):
            with pytest.raises(Deferred):
                await fanout.reply_in_thread(None, [(text,)])
        assert [message.removeprefix("imds-relay\n") for message in healthy.messages] == [
            "one",
            "two",
            "three",
            "one",
        ]


async def test_a_permanent_failure_does_not_slow_the_retry_of_a_transient_failure() -> None:
    async with running_service() as forbidding, running_service() as failing:
        forbidding.status, failing.status = 403, 503
        error = await post_error(ServiceFanout(make_settings(forbidding.url, failing.url)))
        assert error.failure == "transient"
        assert "403" in error.reason
        assert "503" in error.reason


async def test_changes_of_the_file_with_the_urls_take_effect(tmp_path: Path) -> None:
    urls_file = tmp_path / "urls"
    async with running_service() as first, running_service() as second:
        urls_file.write_text(f"{first.url}\n")
        section = {"kind": "apprise", "name": "p", "urls_file": urls_file, "allow_http": True}
        fanout = ServiceFanout(Settings.model_validate(section))
        await fanout.post(make_card())
        urls_file.write_text(f"{first.url}\n{second.url}\n")
        await fanout.post(make_card())
        assert (len(first.messages), len(second.messages)) == (2, 1)
        urls_file.write_text("nonsense\n")
        assert (await post_error(fanout)).failure == "slow"
        urls_file.write_text(f"{second.url}\n")
        await fanout.post(make_card())
        assert (len(first.messages), len(second.messages)) == (2, 2)


async def test_a_hanging_service_is_abandoned_and_threads_do_not_pile_up() -> None:
    async with running_service() as service:
        release = service.release = asyncio.Event()
        fanout = ServiceFanout(make_settings(service.url, timeout="1s"))
        for _ in range(3):
            error = await post_error(fanout)
            assert (error.failure, "within 1 s" in error.reason) == ("transient", True)
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "pager: JSON"]
        assert thread.daemon  # the process does not wait for it
        release.set()
        service.release = None
        await eventually(lambda: not thread.is_alive())
        await ServiceFanout(make_settings(service.url)).post(make_card())


async def test_a_text_that_is_too_long_for_a_service_is_cut() -> None:
    async with running_service() as service:
        card = make_card(description="x" * 40_000)
        await ServiceFanout(make_settings(service.url)).post(card)
        (message,) = service.messages
        assert len(message) <= 33_100


async def test_proxies_of_the_environment_are_logged_without_their_passwords(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://user:t0ken@proxy.example:3128")

    class NoMessages:
        async def next_refresh_at(self, _sink: str) -> None:
            return None

    context = SimpleNamespace(messages=NoMessages())
    async with apprise.connect(
        make_settings(apprise_url(9)),
        SystemClock(),
        context,  # type: ignore[arg-type]  # the sink uses nothing else
    ):
        pass
    assert "uses the proxies of the environment (https)" in caplog.text
    assert "t0ken" not in caplog.text


# --- threads


@pytest.mark.parametrize(
    "address",
    [
        *("169.254.169.254", "168.63.129.16", "fe80::1", "fd00:ec2::254"),
        *("::ffff:169.254.169.254", "64:ff9b:1::a9fe:a9fe", "2002:a9fe:a9fe::1"),
    ],
)
async def test_a_thread_of_a_sink_cannot_connect_to_a_refused_address(address: str) -> None:
    """The guard covers every library, and no other threads."""

    def connect() -> str:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as sock:  # its connect sends nothing
            try:
                sock.connect((address, 9))
            except AddressRefused:
                return "refused"
            except OSError:
                return "no route"
            return "connected"

    assert await SerialCaller[str]("t").call(connect, 10) == ("refused", True)
    assert await asyncio.to_thread(connect) != "refused"


async def test_a_thread_of_a_sink_cannot_send_datagrams_to_a_refused_address() -> None:
    def send() -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            try:
                sock.sendto(b"x", ("168.63.129.16", 514))
            except AddressRefused:
                return True
            return False

    assert await SerialCaller[bool]("t").call(send, 10) == (True, True)


async def test_a_name_that_resolves_to_a_refused_address_is_a_permanent_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolve = socket.getaddrinfo

    def rebind(host: Any, *args: Any, **kwargs: Any) -> Any:
        address = "169.254.169.254" if host == "rebound.example" else host
        return resolve(address, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", rebind)
    error = await post_error(ServiceFanout(make_settings(f"json://rebound.example{PATH}")))
    assert error.failure == "slow"
    assert "its name resolves to a metadata or host address" in error.reason


@pytest.mark.parametrize("network", REFUSED, ids=str)
async def test_the_guard_covers_every_refused_network(network: Any) -> None:
    def raise_audit_event() -> None:
        guarded_thread._check_connection("socket.connect", (None, (str(network[0]), 9)))  # noqa: SLF001  # tests the rule itself

    with pytest.raises(AddressRefused):
        await SerialCaller[None]("t").call(raise_audit_event, 10)


async def test_an_error_in_a_thread_is_raised_by_the_caller() -> None:
    def fail() -> None:
        raise ValueError("of its own")

    with pytest.raises(ValueError, match="of its own"):
        await SerialCaller[None]("t").call(fail, 10)


# --- calls and stories


def make_section(service: AppriseService) -> dict[str, Any]:
    """Return the sink's section of the YAML document."""
    return {"kind": "apprise", "name": "pager", "urls": [service.url], "allow_http": True}


async def test_a_story_from_the_first_notice_to_the_end(tmp_path: Path) -> None:
    """Two votes over HTTP, the StartRequest, start and end: each is told once, without links."""
    async with (
        running_service() as service,
        stage(tmp_path, [make_section(service)], approvals=TWO_CLIENTS) as relay,
    ):
        reboot = relay.reboot("vm-0")
        await eventually(lambda: len(service.messages) == 1)
        assert f"imds-relay approve | hold {reboot.event_id}" in service.messages[0]
        assert await relay.approve(reboot, client=ALICE) == 202
        await eventually(lambda: "1 of 2" in service.messages[-1])
        assert await relay.approve(reboot, client=BOB) == 202
        await eventually(lambda: "Azure began" in service.messages[-1])
        relay.azure.end(reboot)
        await eventually(lambda: "It is over" in service.messages[-1])
        follow_ups = service.messages[1:]
        subject = f"Reboot of vm-0 ({reboot.event_id[:8]})\n"
        assert all(message.startswith(subject) for message in follow_ups)
        history = "\n".join(follow_ups)
        for text in (
            "client:alice voted",
            "Approved by rule reboots",
            "Azure accepted",
            "Azure began",
            "Azure has completed it",
        ):
            assert history.count(text) == 1
        assert "relay.example.com" not in "\n".join(service.messages)
        assert relay.starts(reboot) == 1
