"""Apprise: which URLs are taken, what becomes of a text on its way, and what a thread of the library may not do."""

from __future__ import annotations

import asyncio
import importlib
import logging
import socket
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from relay.chat import CallbackRefused
from relay.chat.cards.card import Card
from relay.chat.cards.grouped_card import grouped_card
from relay.chat.cards.rendering import event_card
from relay.chat.platforms import apprise
from relay.chat.platforms.apprise.fanout import ServiceFanout
from relay.chat.platforms.apprise.plugin import NEEDED, plugin_for
from relay.chat.platforms.apprise.serial_thread import SerialThread
from relay.chat.platforms.apprise.settings import Settings
from relay.chat.platforms.apprise.text import card_text
from relay.clock import SystemClock
from relay.errors import Deferred
from relay.net.egress import REFUSED, AddressRefused
from tests.approvals.builders import build_decision, build_event, build_status
from tests.approvals.manual_clock import NOON
from tests.chat.apprise_server import PASSWORD, PATH, TOKEN, Service, service, url_of
from tests.chat.conformance import HOSTILE, logged
from tests.chat.running_relay import ALICE, BOB, rule, stage
from tests.journey.relay_process import eventually

DUE = NOON + timedelta(seconds=900)
TWO: dict[str, Any] = {"rules": [rule(2, "client:alice", "client:bob")]}


def settings(*urls: str, **more: Any) -> Settings:
    return Settings.model_validate(
        {"kind": "apprise", "name": "pager", "urls": urls, "allow_http": True, **more}
    )


def card(**changes: Any) -> Card:
    """The card of an event that waits for votes."""
    return event_card(build_status(build_event(**changes)), "prod", link=lambda *_: None, code=None)


async def refusal(posts: ServiceFanout) -> Deferred:
    """How a post fails."""
    with pytest.raises(Deferred) as caught:
        await posts.post(card())
    return caught.value


# --- words


def test_it_says_everything_as_plain_text_with_the_command_that_answers() -> None:
    made = event_card(
        build_status(build_event(), build_decision(by="bob")),
        "prod",
        link=lambda *_: None,
        code=None,
    )
    assert card_text(made) == (
        f"Azure begins at {DUE:%Y-%m-%d %H:%M} UTC or soon after, whether or not anybody answers; earlier only when it is approved.\n\n"
        "Machines: db-1\n"
        "What happens: The machine is rebooted: what is in memory is lost.\n"
        "Who started it: Azure itself\n"
        "Rule: databases: 2 votes from group:oncall, client:drain\n"
        f"Votes: 1 of 2: client:bob; 1 missing, from client:alice, client:drain, until {DUE - timedelta(seconds=60):%Y-%m-%d %H:%M} UTC\n\n"
        "Azure proceeds at NotBefore regardless.\n\n"
        "To answer, on a machine of this scope: imds-relay approve | hold E-1\n\n"
        "E-1 · prod"
    )


def test_a_burst_has_a_line_for_each() -> None:
    standings = [build_status(build_event(f"E-{number}")) for number in range(12)]
    text = card_text(grouped_card(standings, "prod", link=lambda *_: None, code=None))
    assert text.count("\n- Reboot of db-1") + text.count("\n\n- Reboot of db-1") >= 10
    assert "imds-relay approve | hold EVENT" in text


@given(st.text(max_size=300))
def test_no_text_makes_lines_of_its_own(words: str) -> None:
    lines = card_text(card(description=f"x{words}")).splitlines()
    assert len(lines) == len(card_text(card(description="x")).splitlines())


def test_what_somebody_slipped_in_calls_nobody() -> None:
    text = card_text(card(description=HOSTILE))
    for alive in ("<!channel", "@all", "@everyone", "<at>", "https://", "](http"):
        assert alive not in text
        assert alive in HOSTILE


# --- URLs


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        ((), "urls: expected at least one URL"),
        (("gopher://t0ken",), "number 1: expected a URL that Apprise knows"),
        (
            ("jsons://127.0.0.1/x", "syslog://"),
            "number 2: expected a service on the network, got syslog://",
        ),
        (("dbus://",), "expected a service on the network"),
        (("macosx://",), "expected a service on the network"),
        (("windows://",), "expected a service on the network"),
        (("file:///etc/passwd",), "expected a URL that Apprise knows"),
        (
            ("slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/?template=/etc/passwd",),
            "names no file of this machine, got one with template=",
        ),
        (("fcm://project/token?mode=oauth2&keyfile=/etc/t0ken",), "got one with keyfile="),
        (("jsons://127.0.0.1/t0ken?redirect=yes",), "without redirect=yes"),
        (("jsons://127.0.0.1/t0ken?verify=no",), "without verify=no"),
        (("jsons://127.0.0.1/t0ken?optional=yes",), "without optional=yes"),
        (("jsons://127.0.0.1/t0ken?retry=3",), "without retry="),
        (("jsons://169.254.169.254/metadata",), "metadata or host address"),
        (("jsons://2852039166/metadata",), "metadata or host address"),
        (("jsons://[::ffff:168.63.129.16]/t0ken",), "metadata or host address"),
        (("discord://t0ken",), "expected all that discord:// needs"),
    ],
)
def test_a_wrong_url_says_what_was_expected_and_nothing_of_itself(
    urls: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({"kind": "apprise", "name": "pager", "urls": urls})
    assert expected in str(caught.value)
    assert "t0ken" not in str(caught.value)
    assert "passwd" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["json://127.0.0.1/x", "gotify://example.com/token", "mailto://user:pass@example.com"]
)
def test_what_can_be_read_on_the_way_must_be_asked_for(url: str) -> None:
    with pytest.raises(ValueError, match=r"expected (jsons|gotifys|mailtos)://, got .*allow_http"):
        plugin_for(url, allow_http=False)
    assert plugin_for(url, allow_http=True).name


@pytest.mark.parametrize(
    "url",
    [
        "tgram://123456789:AAE-xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx/12315544/",
        "pover://uuuuuuuuuuuuuuuuuuuuuuuuuuuuuu@aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "ntfys://ntfy.example.com/topic",
        "https://discord.com/api/webhooks/4174216298/JHMHI8qBe7bk2ZwO5U711o3dV_js",
        "rsyslog://logs.example.com",
    ],
)
def test_services_on_the_network_are_taken(url: str) -> None:
    assert plugin_for(url, allow_http=False).name


@given(
    st.builds(
        "{}://{}".format,
        st.sampled_from(
            [
                "json",
                "jsons",
                "slack",
                "mailto",
                "tgram",
                "https",
                "discord",
                "sns",
                "fcm",
                "workflows",
                "matrix",
                "x",
                "",
            ]
        ),
        st.text("abcT0129:/@?&=%[]#.-_ \\\x00é", max_size=60),
    )
)
def test_whatever_stands_there_is_a_service_or_an_error_that_says_nothing_of_it(url: str) -> None:
    said = "expected nothing"
    try:
        plugin_for(url, allow_http=True)
    except ValueError as error:
        said = str(error)
    assert said.startswith("expected ")


def test_of_all_that_the_library_has_only_what_is_local_is_refused() -> None:
    """A new one that names neither place nor account shows itself here."""
    library = importlib.import_module("apprise.plugins")
    module = importlib.import_module("relay.chat.platforms.apprise.plugin")
    local = {
        name
        for kind in library.N_MGR.plugins(include_disabled=True)
        if not module._is_out_there(kind)  # noqa: SLF001  # the rule by itself
        for name in [*module._listed(kind.protocol), *module._listed(kind.secure_protocol)]  # noqa: SLF001  # as above
    }
    assert local == {
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


def test_without_the_library_the_section_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relay.chat.platforms.apprise.plugin.find_spec", lambda _: None)
    with pytest.raises(ValidationError) as caught:
        settings(url_of(9))
    assert f"{NEEDED}; it is not installed" in str(caught.value)


def test_a_library_that_follows_redirects_whatever_it_is_told_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(importlib.import_module("apprise").AppriseAsset, "http_redirects")
    with pytest.raises(ValidationError, match="an older one is installed"):
        settings(url_of(9))


def test_no_other_kind_of_sink_waits_for_the_library() -> None:
    """It takes half a second and 40 MB."""
    code = (
        "import sys; from relay.config import Config; Config(); sys.exit('apprise' in sys.modules)"
    )
    import subprocess  # noqa: PLC0415  # for this test alone

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- on the way


async def test_a_text_arrives_with_its_title_and_how_urgent_it_is() -> None:
    async with service() as there:
        posts = ServiceFanout(settings(there.url))
        assert await posts.post(card()) is None
        await posts.reply_in_thread(None, [("Reboot of db-1 (E-1)",), (NOON, ": it began")])
        await posts.reply_in_thread(None, [("ping",)])
        assert there.messages[0].startswith(
            f"Reboot of db-1\nAzure begins at {DUE:%Y-%m-%d %H:%M} UTC"
        )
        assert there.messages[1:] == [
            f"Reboot of db-1 (E-1)\n{NOON:%Y-%m-%d %H:%M} UTC: it began",
            "imds-relay\nping",
        ]
        assert there.kinds == ["warning", "info", "info"]
        assert set(there.agents) == {"imds-relay"}


@pytest.mark.parametrize(
    ("status", "failure", "said"),
    [
        (302, "slow", "redirects are not followed"),
        (307, "slow", "redirects are not followed"),
        (401, "slow", "see to its URL"),
        (404, "slow", "see to its URL"),
        (410, "slow", "see to its URL"),
        (429, "transient", "it answered 429"),
        (500, "transient", "it answered 500"),
        (503, "transient", "it answered 503"),
    ],
)
async def test_a_refusal_says_how_it_was_meant(status: int, failure: str, said: str) -> None:
    async with service() as there:
        there.status = status
        error = await refusal(ServiceFanout(settings(there.url)))
        assert (error.failure, error.status) == (failure, status)
        assert said in error.reason
        assert there.calls == [PATH]  # and nowhere else


async def test_nothing_of_a_url_is_said_anywhere(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    async with service() as there:
        there.status = 500
        error = await refusal(ServiceFanout(settings(there.url)))
    gone = await refusal(ServiceFanout(settings(there.url)))
    said = f"{error} {error.response} {gone} {gone.response} {logged(caplog)} {capfd.readouterr()}"
    assert PASSWORD not in said
    assert TOKEN not in said


async def test_one_that_fails_keeps_no_other_from_hearing_and_nobody_hears_twice() -> None:
    async with service() as well, service() as sick:
        posts = ServiceFanout(settings(well.url, sick.url))
        sick.status = 503
        for _ in range(3):
            assert (await refusal(posts)).failure == "transient"
        sick.status = 200
        await posts.post(card())
        assert (len(well.messages), len(sick.messages)) == (1, 1)
        await posts.post(card())  # it was told to all, so this is another time
        assert len(well.messages) == 2


async def test_one_that_gets_no_thread_keeps_no_other_from_hearing_and_hears_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine has only so many threads; what could not be begun must not keep the next from being begun."""
    start, none_left = threading.Thread.start, [True]

    def begin(thread: threading.Thread) -> None:
        if none_left and thread.name.startswith("pager: "):
            none_left.clear()
            raise RuntimeError("can't start new thread")
        start(thread)

    async with service() as first, service() as second:
        posts = ServiceFanout(settings(first.url, second.url, timeout="2s"))
        monkeypatch.setattr(threading.Thread, "start", begin)
        assert "own code" in (await refusal(posts)).reason
        assert sorted(len(there.calls) for there in (first, second)) == [0, 1]
        await posts.post(card())
        assert [len(there.calls) for there in (first, second)] == [1, 1]


async def test_who_has_it_is_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relay.chat.platforms.apprise.fanout._MOST_HALF_TOLD", 2)
    async with service() as well, service() as sick:
        posts = ServiceFanout(settings(well.url, sick.url))
        sick.status = 503
        for words in ("one", "two", "three", "three", "one"):
            with pytest.raises(Deferred):
                await posts.reply_in_thread(None, [(words,)])
        assert [text.removeprefix("imds-relay\n") for text in well.messages] == [
            "one",
            "two",
            "three",
            "one",
        ]


async def test_one_that_must_be_mended_does_not_slow_one_that_passes() -> None:
    async with service() as forbids, service() as sick:
        forbids.status, sick.status = 403, 503
        error = await refusal(ServiceFanout(settings(forbids.url, sick.url)))
        assert error.failure == "transient"
        assert "403" in error.reason
        assert "503" in error.reason


async def test_urls_from_a_file_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "urls"
    async with service() as one, service() as two:
        file.write_text(f"{one.url}\n")
        posts = ServiceFanout(
            Settings.model_validate(
                {"kind": "apprise", "name": "p", "urls_file": file, "allow_http": True}
            )
        )
        await posts.post(card())
        file.write_text(f"{one.url}\n{two.url}\n")
        await posts.post(card())
        assert (len(one.messages), len(two.messages)) == (2, 1)
        file.write_text("nonsense\n")
        assert (await refusal(posts)).failure == "slow"
        file.write_text(f"{two.url}\n")
        await posts.post(card())
        assert (len(one.messages), len(two.messages)) == (2, 2)


async def test_a_service_that_hangs_is_left_and_threads_do_not_pile_up() -> None:
    async with service() as there:
        there.hung = asyncio.Event()
        posts = ServiceFanout(settings(there.url, timeout="1s"))
        for _ in range(3):
            error = await refusal(posts)
            assert (error.failure, "within 1 s" in error.reason) == ("transient", True)
        ours = [thread for thread in threading.enumerate() if thread.name == "pager: JSON"]
        assert len(ours) == 1
        assert ours[0].daemon  # the process does not wait for it
        there.hung.set()
        there.hung = None
        await eventually(lambda: not ours[0].is_alive())
        await posts.post(card())


async def test_a_long_text_is_cut_by_the_service_it_is_too_long_for() -> None:
    async with service() as there:
        await ServiceFanout(settings(there.url)).post(card(description="x" * 40_000))
        assert len(there.messages[0]) <= 33_100


async def test_proxies_of_the_environment_are_spoken_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://user:t0ken@proxy.example:3128")

    class NoMessages:
        async def next_refresh(self, _sink: str) -> None:
            return None

    context = SimpleNamespace(messages=NoMessages())
    async with apprise.connect(settings(url_of(9)), SystemClock(), context):  # type: ignore[arg-type]  # it uses nothing else
        pass
    assert "goes through the proxies of the environment (https)" in caplog.text
    assert "t0ken" not in caplog.text


# --- threads


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "168.63.129.16", "fe80::1", "fd00:ec2::254", "::ffff:169.254.169.254"],
)
async def test_no_thread_connects_where_no_sink_may(address: str) -> None:
    """Whatever the library dials with; a thread that is not of a sink is left alone."""

    def connect() -> str:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(
            family, socket.SOCK_DGRAM
        ) as sock:  # a datagram socket sends nothing to connect
            try:
                sock.connect((address, 9))
            except AddressRefused:
                return "refused"
            except OSError:
                return "no route"
            return "connected"

    assert await SerialThread[str]("t").run(connect, 10) == ("refused", True)
    assert await asyncio.to_thread(connect) != "refused"


async def test_no_datagram_is_sent_there_either() -> None:
    def send() -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            try:
                sock.sendto(b"x", ("168.63.129.16", 514))
            except AddressRefused:
                return True
            return False

    assert await SerialThread[bool]("t").run(send, 10) == (True, True)


async def test_a_name_that_stands_for_such_an_address_must_be_mended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = socket.getaddrinfo

    def look_up(host: Any, *rest: Any, **more: Any) -> Any:
        return real("169.254.169.254" if host == "rebound.example" else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    error = await refusal(ServiceFanout(settings(f"json://rebound.example{PATH}")))
    assert error.failure == "slow"
    assert "its name stands for a metadata or host address" in error.reason


def test_the_guard_knows_every_network_that_is_refused() -> None:
    module = importlib.import_module("relay.chat.platforms.apprise.serial_thread")
    assert all(module._is_refused(str(network[0])) for network in REFUSED)  # noqa: SLF001  # the rule by itself


async def test_what_a_thread_raises_is_raised() -> None:
    def fail() -> None:
        raise ValueError("of its own")

    with pytest.raises(ValueError, match="of its own"):
        await SerialThread[None]("t").run(fail, 10)


# --- calls and stories


@given(
    st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=3), st.binary(max_size=200)
)
async def test_whoever_calls_is_refused(headers: Mapping[str, str], body: bytes) -> None:
    chat = apprise.Apprise.__new__(apprise.Apprise)
    with pytest.raises(CallbackRefused):
        await chat.handle_callback(headers, body)


def section(there: Service, **more: Any) -> dict[str, Any]:
    """The sink's section of the YAML document."""
    return {"kind": "apprise", "name": "pager", "urls": [there.url], "allow_http": True, **more}


async def test_a_story_from_the_first_notice_to_the_end(tmp_path: Path) -> None:
    """Scheduled, two votes over HTTP, the StartRequest, started, ended: each told once, and no link in any of it."""
    async with service() as there, stage(tmp_path, [section(there)], approvals=TWO) as on:
        reboot = on.reboot("vm-0")
        await eventually(lambda: len(there.messages) == 1)
        assert f"imds-relay approve | hold {reboot.event_id}" in there.messages[0]
        assert await on.approve(reboot, client=ALICE) == 202
        await eventually(lambda: "1 of 2" in there.messages[-1])
        assert await on.approve(reboot, client=BOB) == 202
        await eventually(lambda: "Azure began" in there.messages[-1])
        on.azure.end(reboot)
        await eventually(lambda: "It is over" in there.messages[-1])
        assert all(
            text.startswith(f"Reboot of vm-0 ({reboot.event_id[:8]})\n")
            for text in there.messages[1:]
        )
        told = "\n".join(there.messages[1:])
        for words in (
            "client:alice voted",
            "Approved by rule reboots",
            "Azure accepted",
            "Azure began",
            "Azure has completed it",
        ):
            assert told.count(words) == 1
        assert "relay.example.com" not in "\n".join(there.messages)
        assert on.starts(reboot) == 1


async def test_fifty_events_at_once_are_one_message(tmp_path: Path) -> None:
    async with service() as there, stage(tmp_path, [section(there)], approvals=TWO) as on:
        for number in range(50):
            on.reboot(f"vm-{number}")
        await eventually(lambda: len(there.messages) == 1)
        assert there.messages[0].startswith("50 maintenance events at once")
