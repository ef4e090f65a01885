"""Which certificates the relay accepts on all versions of Python, and why it refuses others."""

from __future__ import annotations

import asyncio
import ssl
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from yarl import URL

from relay.amqp.connection import open_connection
from relay.clock import SystemClock
from relay.errors import Deferred
from relay.net.tls import client_context_trusting_ca_file, explain_refusal
from relay.sinks.webhook import connect
from tests.builders import cloudevent
from tests.certificates import LOCALHOST, SERVER, Authority
from tests.sinks.http_receiver import Connection, good, listening
from tests.sinks.webhook_sink import settings

DAY = timedelta(days=1)


class Files:
    """A CA and a server's certificate that it signed, as files."""

    def __init__(self, folder: Path, authority: Authority, server: bytes | None = None) -> None:
        self.ca, self.server = folder / "ca.pem", folder / "server.pem"
        self.ca.write_bytes(authority.pem)
        self.server.write_bytes(
            authority.issue("localhost", LOCALHOST) if server is None else server
        )


@pytest.fixture
def lax(tmp_path: Path) -> Files:
    """A private CA without key usage and key identifiers."""
    return Files(tmp_path, Authority("lax", strict=False))


async def shake_hands(server: Path, context: ssl.SSLContext) -> None:
    """Agree on TLS with a server that shows this certificate. Raises what the client sees."""
    async with listening(good, tls=True, certificate=server) as receiver:
        _, writer = await asyncio.open_connection("127.0.0.1", receiver.port, ssl=context)
        writer.transport.abort()


async def test_a_private_ca_without_key_usage_and_key_identifiers_is_accepted(lax: Files) -> None:
    context = client_context_trusting_ca_file(lax.ca)
    await shake_hands(lax.server, context)
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # Python's own default from 3.13 on
    with pytest.raises(ssl.SSLCertVerificationError):
        await shake_hands(lax.server, context)


async def test_a_webhook_behind_such_a_ca_is_delivered_to(lax: Files) -> None:
    fields = {"tls": {"ca_file": str(lax.ca)}}
    async with (
        listening(good, tls=True, certificate=lax.server) as receiver,
        connect(settings(url=receiver.url, **fields), SystemClock()) as webhook,
    ):
        assert (await webhook.deliver(cloudevent())).status == 204


async def test_a_broker_behind_such_a_ca_is_spoken_to(lax: Files) -> None:
    heard: list[bytes] = []

    async def broker(connection: Connection) -> None:
        heard.append(await connection.reader.readexactly(8))

    async with listening(broker, tls=True, certificate=lax.server) as receiver:
        with pytest.raises(Deferred):
            async with open_connection(
                URL(f"amqps://guest:guest@localhost:{receiver.port}/?cafile={lax.ca}"), "test"
            ):
                pass
    assert heard == [b"AMQP\x00\x00\x09\x01"]


async def test_the_ca_file_may_hold_the_servers_own_certificate_alone() -> None:
    await shake_hands(SERVER, client_context_trusting_ca_file(SERVER))


OURS, OTHER, NO_CA = Authority("ours"), Authority("other"), Authority("no CA", ca=False)
REFUSED: dict[str, tuple[Authority, bytes]] = {
    "name the CA that signed it in tls.ca_file": (OURS, OTHER.issue("localhost", LOCALHOST)),
    "renew it": (OURS, OURS.issue("localhost", LOCALHOST, begins=-2 * DAY, ends=-DAY)),
    "clocks": (OURS, OURS.issue("localhost", LOCALHOST, begins=DAY)),
    "correct the name": (OURS, OURS.issue("localhost", [x509.DNSName("t0ken.test")])),
    "serverAuth": (OURS, OURS.issue("localhost", LOCALHOST, usage=ExtendedKeyUsageOID.CLIENT_AUTH)),
    "CA:TRUE": (NO_CA, NO_CA.issue("localhost", LOCALHOST)),
}


@pytest.mark.parametrize("remedy", REFUSED)
async def test_a_refused_certificate_is_told_with_a_remedy(tmp_path: Path, remedy: str) -> None:
    files = Files(tmp_path, *REFUSED[remedy])
    with pytest.raises(ssl.SSLCertVerificationError) as refused:
        await shake_hands(files.server, client_context_trusting_ca_file(files.ca))
    problem, remedy_text = explain_refusal(refused.value, "tls.ca_file")
    assert remedy in remedy_text
    assert "127.0.0.1" not in problem + remedy_text
