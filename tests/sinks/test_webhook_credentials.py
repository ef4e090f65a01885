"""Credentials for receivers and proxies: sent correctly, read again from files, never shown."""

from __future__ import annotations

import base64
import logging
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from relay.app import start_relay
from relay.clock import SystemClock
from relay.config import load
from relay.errors import Deferred
from relay.simulator import VM, Plan, Setup, Simulator
from relay.sinks.webhook import connect
from tests.builders import cloudevent
from tests.certificates import LOOPBACK
from tests.cli.command import run_async
from tests.eventually import eventually
from tests.journey.relay_process import webhook as section_of
from tests.sinks.http_receiver import Connection, good, listening
from tests.sinks.webhook_sink import SECRET, failure, received_request, settings, sink

PASSWORD = "pass-t0ken-wörd"  # of these tests
BASIC = base64.b64encode(f"relay:{PASSWORD}".encode()).decode()
OTHER_CA = ssl.DER_cert_to_PEM_cert(ssl.create_default_context().get_ca_certs(binary_form=True)[0])
"""Somebody else's, of those that this machine trusts."""


async def test_bearer_and_basic_are_authorization_headers(tmp_path: Path) -> None:
    (tmp_path / "password").write_text(PASSWORD)
    for basic in ({"password": PASSWORD}, {"password_file": str(tmp_path / "password")}):
        sent = await received_request(basic={"user": "relay", **basic})
        assert sent.headers["Authorization"] == f"Basic {BASIC}"
    sent = await received_request(bearer="t0ken")
    assert sent.headers["Authorization"] == "Bearer t0ken"


async def test_a_bearer_is_read_again_when_its_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "bearer"
    file.write_text("first")
    async with (
        listening(good) as receiver,
        sink(url=receiver.url, bearer_file=str(file)) as webhook,
    ):
        await webhook.deliver(cloudevent())
        file.write_text("the-second")
        await webhook.deliver(cloudevent())
    sent = [request.headers["Authorization"] for request in receiver.requests]
    assert sent == ["Bearer first", "Bearer the-second"]


async def test_fixed_headers_are_sent_beside_ours(tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.write_text("X-Tenant: west\nAuthorization: Splunk a: b\n\n")
    fields = {"X-Tenant": "west", "Authorization": "Splunk a: b"}
    for given in ({"headers": fields}, {"headers_file": str(file)}):
        sent = (await received_request(**given)).headers
        assert {name: sent[name] for name in fields} == fields
        assert sent["webhook-id"]


async def test_a_certificate_of_ones_own_is_shown_and_a_ca_of_ones_own_is_trusted() -> None:
    tls = {"ca_file": str(LOOPBACK), "cert_file": str(LOOPBACK)}
    async with listening(good, tls=True, client_ca=LOOPBACK) as receiver:
        async with connect(settings(url=receiver.url, tls=tls), SystemClock()) as webhook:
            assert (await webhook.deliver(cloudevent())).status == 204
        refused = await failure(receiver.url)
        assert refused.reason.startswith("expected a certificate that this machine trusts")
        async with connect(
            settings(url=receiver.url, tls={"ca_file": str(LOOPBACK)}), SystemClock()
        ) as nameless:
            with pytest.raises(Deferred) as caught:
                await nameless.deliver(cloudevent())
    assert caught.value.failure == "transient"
    assert len(receiver.requests) == 1


async def test_certificates_are_read_again_and_the_last_good_ones_hold(tmp_path: Path) -> None:
    trusted = tmp_path / "ca.pem"
    trusted.write_text(OTHER_CA)
    fields = {"tls": {"ca_file": str(trusted)}, "timeout": "30s"}
    async with (
        listening(good, tls=True) as receiver,
        connect(settings(url=receiver.url, **fields), SystemClock()) as webhook,
    ):
        with pytest.raises(Deferred, match="expected a certificate"):
            await webhook.deliver(cloudevent())
        trusted.write_text(LOOPBACK.read_text())
        assert (await webhook.deliver(cloudevent())).status == 204
        trusted.write_text("-----BEGIN CERTIF")
        assert (await webhook.deliver(cloudevent())).status == 204
        trusted.unlink()
        assert (await webhook.deliver(cloudevent())).status == 204


async def test_a_proxy_gets_its_password_and_a_receiver_behind_a_tunnel_does_not() -> None:
    async def proxied(connection: Connection) -> None:
        received = await connection.request()
        await connection.answer(410 if received.line.startswith("CONNECT") else 204)

    async with listening(proxied) as proxy:
        proxy_url = f"http://relay:{PASSWORD.replace('ö', '%C3%B6')}@127.0.0.1:{proxy.port}"
        async with sink(url="http://drain.test/t0ken", proxy=proxy_url) as plain:
            await plain.deliver(cloudevent())
        refused = await failure("https://drain.test/t0ken", proxy=proxy_url)
    sent = [request.headers["Proxy-Authorization"] for request in proxy.requests]
    assert sent == [f"Basic {BASIC}"] * 2
    assert [request.line.split()[0] for request in proxy.requests] == ["POST", "CONNECT"]
    assert (refused.failure, refused.status) == ("transient", None), "the receiver said nothing"
    assert "it answered 410 Gone" in refused.reason
    assert "webhook-signature" not in proxy.requests[1].headers


async def echo(connection: Connection) -> None:
    """Answers with all that it got, as receivers do that are made for debugging, and refuses."""
    while True:
        received = await connection.request()
        texts = f"{received.line} {dict(received.headers)} {received.body!r}".encode("latin-1")
        await connection.answer(connection.receiver.status, {"X-Echo": "1"}, texts)


ALWAYS = ("t0ken-in-path", "t0ken-in-query", SECRET, SECRET[6:])
CREDENTIALS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "bearer, headers and tls": (
        {
            "bearer": "bearer-t0ken-1",
            "headers": {"X-Api-Key": "header-t0ken-2"},
            "tls": {"cert_file": str(LOOPBACK)},
        },
        ("bearer-t0ken-1", "header-t0ken-2", LOOPBACK.read_text().splitlines()[1]),
    ),
    "basic and proxy": (
        {"basic": {"user": "relay", "password": PASSWORD}, "proxy": "{proxy}"},
        (PASSWORD, BASIC, "proxy-t0ken-3", base64.b64encode(b"relay:proxy-t0ken-3").decode()),
    ),
}


@pytest.mark.parametrize(("credentials", "status"), list(zip(CREDENTIALS, (422, 200), strict=True)))
async def test_no_credential_is_in_a_log_an_error_or_an_answer_of_the_api(
    tmp_path: Path, credentials: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The receiver repeats all that it gets. Nothing that the relay writes may contain a secret."""
    caplog.set_level(logging.DEBUG)
    section, telltales = CREDENTIALS[credentials]
    async with Simulator(Setup(vms=(VM("vm-0"),))) as azure, listening(echo) as receiver:
        receiver.status = status
        if "proxy" in section:
            section = section | {"proxy": f"http://relay:proxy-t0ken-3@127.0.0.1:{receiver.port}"}
        document = {
            "scope": "west",
            "source": {"url": azure.url, "interval": "500ms"},
            "store": {"path": str(tmp_path / "relay.db")},
            "sinks": [section_of(receiver.url, secrets=[SECRET], **section)],
            "api": {"listen": "127.0.0.1:0", "socket": str(tmp_path / "relay.sock")},
        }
        file = tmp_path / "relay.yaml"
        file.write_bytes(orjson.dumps(document))
        async with start_relay(load(file, {}).config, SystemClock()) as running:
            event = azure.schedule(Plan(type="Reboot", started=True, lasts=None))
            await eventually(lambda: bool(receiver.requests))
            texts: list[str] = []

            async def tried() -> bool:
                told = await run_async("deliveries", "1", "-c", str(file), "--json")
                texts.append(told.out)
                return told.code == 0 and bool(told.json["log"])

            await eventually(tried)
            for words in (
                ("deliveries", "1"),
                ("deliveries", "--dead"),
                ("show", event.event_id),
                ("explain", event.event_id),
                ("sink", "pause", "drain"),
                ("check",),
            ):
                ended = await run_async(*words, "-c", str(file))
                assert ended.code != 2, ended.err  # such as a verb that is called otherwise now
                texts += [ended.out, ended.err]
            async with aiohttp.ClientSession() as anyone:
                for path in ("metrics", "readyz", "healthz"):
                    url = f"http://127.0.0.1:{running.server.port}/{path}"
                    async with anyone.get(url) as answer:
                        texts.append(f"{answer.headers}{await answer.text()}")
            assert "drain" in texts[-3]
    wire = "".join(f"{request.line}{dict(request.headers)}" for request in receiver.requests)
    assert "t0ken-in-path" in wire
    assert any(telltale in wire for telltale in telltales)
    stored = (tmp_path / "relay.db").read_bytes().decode("latin-1")
    for telltale in (*ALWAYS, *telltales):
        assert not any(telltale in text for text in (*texts, caplog.text, stored)), telltale
    assert "…" in "".join(texts)


def test_the_settings_do_not_print_what_is_secret() -> None:
    fields = settings(
        url="http://127.0.0.1/t0ken",
        bearer=None,
        basic={"user": "relay", "password": "t0ken"},
        headers={"X": "t0ken"},
        proxy="http://u:t0ken@proxy:3128",
    )
    for text in (repr(fields), str(fields), str(fields.model_dump()), fields.model_dump_json()):
        assert "t0ken" not in text


async def test_of_an_answer_a_kibibyte_is_kept_and_of_a_secret_at_the_cut_no_half() -> None:
    async def long(connection: Connection) -> None:
        await connection.request()
        await connection.answer(500, {}, b"x" * 1015 + b"t0ken-that-is-long" + b"y" * 5000)

    async with listening(long) as receiver:
        refused = await failure(receiver.url, bearer="t0ken-that-is-long")
    assert refused.answer == "x" * 1015 + "…" + "y" * 6
