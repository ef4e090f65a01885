"""Connections to the broker: reconnecting, several hosts, TLS, and reasons for failures."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typing_extensions import override
from yarl import URL

from relay.amqp import connection
from relay.amqp.broker_url import host_port, parse_urls
from relay.amqp.connection import GuardedConnection, keep_connected
from relay.amqp.failures import raise_if_cancelled
from relay.amqp.topology import Exchange, declare_topology
from relay.clock import SystemClock
from relay.errors import Deferred
from tests.certificates import AUTHORITY, CLIENT, IMPOSTOR
from tests.counting_proxy import counting_proxy
from tests.rabbitmq import Broker


class Stop(Exception):
    """The test has seen enough."""


class CountingClock(SystemClock):
    """Notes each pause instead of sleeping, and raises Stop after so many."""

    def __init__(self, enough: int) -> None:
        self.pauses: list[float] = []
        self._enough = enough

    @override
    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if len(self.pauses) == self._enough:
            raise Stop


async def _unused(_: GuardedConnection) -> NoReturn:
    raise AssertionError("there is nothing to connect to")


async def _arrived(broker_connection: GuardedConnection) -> NoReturn:
    raise Deferred(f"arrived at {host_port(broker_connection.url)}")


async def failure_reasons(urls: Sequence[URL], attempts: int = 1) -> list[str]:
    """The reasons of the failures before so many pauses."""
    failures: list[Deferred] = []
    with pytest.raises(Stop):
        await keep_connected(
            lambda: urls, "test", CountingClock(attempts), _arrived, failures.append
        )
    return [failure.reason for failure in failures]


def keep(
    urls: Sequence[URL], serve: Callable[[GuardedConnection], Coroutine[Any, Any, NoReturn]]
) -> asyncio.Task[NoReturn]:
    work = keep_connected(lambda: urls, "test", SystemClock(), serve, lambda _: None)
    return asyncio.create_task(work)


@pytest.fixture
def nobody() -> Iterator[int]:
    """A port that is taken and on which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


# --- for ever


async def test_attempts_to_connect_grow_apart_to_two_seconds_and_a_bit_more(nobody: int) -> None:
    clock = CountingClock(8)
    urls = parse_urls(f"amqp://127.0.0.1:{nobody}/")
    with pytest.raises(Stop):
        await keep_connected(
            lambda: urls, "test", clock, _unused, lambda _: None, chance=lambda: 1.0
        )
    assert clock.pauses == [
        pytest.approx(1.25 * pause) for pause in (0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0)
    ]


async def test_a_broker_that_says_nothing_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SETUP_TIMEOUT", 1.0)
    greeted: list[bytes] = []
    async with _mute(greeted) as url:
        reasons = await failure_reasons(parse_urls(url), 2)
        place = f"127.0.0.1:{URL(url).port}"
        assert reasons == [f"no connection to {place}: the broker did not answer in time"] * 2
    assert greeted == [b"AMQP\x00\x00\x09\x01"] * 2


@asynccontextmanager
async def _mute(greeted: list[bytes]) -> AsyncIterator[str]:
    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeted.append(await reader.readexactly(8))
        await reader.read()
        writer.close()

    async with await asyncio.start_server(listen, "127.0.0.1", 0) as server:
        yield f"amqp://127.0.0.1:{server.sockets[0].getsockname()[1]}/"


async def test_a_cancellation_nobody_asked_for_does_not_end_connecting(broker: Broker) -> None:
    """A task group would not report its end (docs/protocol.md#a-library-cancels-publishers)."""
    failures: list[Deferred] = []

    async def struck(_: GuardedConnection) -> NoReturn:
        raise asyncio.CancelledError

    urls = parse_urls(broker.amqp_url())
    with pytest.raises(Stop):
        await keep_connected(lambda: urls, "test", CountingClock(2), struck, failures.append)
    assert ["heartbeat" in failure.reason for failure in failures] == [True, True]


async def test_a_url_that_becomes_unusable_is_told_and_read_again(broker: Broker) -> None:
    answers = iter((ValueError("expected a URL"), broker.amqp_url()))
    failures: list[Deferred] = []

    def urls() -> Sequence[URL]:
        answer = next(answers)
        if isinstance(answer, ValueError):
            raise answer
        return parse_urls(answer)

    with pytest.raises(Stop):
        await keep_connected(urls, "test", CountingClock(2), _arrived, failures.append)
    assert [failure.reason.partition(" ")[0] for failure in failures] == ["expected", "arrived"]


async def test_it_can_be_stopped_at_any_moment(broker: Broker) -> None:
    """Up to Python 3.11 the libraries can lose a cancellation while a connection is set up."""
    urls = parse_urls(broker.amqp_url())

    async def serve(broker_connection: GuardedConnection) -> NoReturn:
        await declare_topology(broker_connection, (Exchange("amq.topic", "topic"),) * 4, "passive")
        raise_if_cancelled()
        await asyncio.Event().wait()
        raise AssertionError

    for step in range(80):
        keeping = keep(urls, serve)
        await asyncio.sleep(step * 0.0007)
        keeping.cancel()
        assert await asyncio.wait({keeping}, timeout=60) == ({keeping}, set())
        assert keeping.cancelled()


async def test_a_cancellation_that_became_another_error_stops_it_too(broker: Broker) -> None:
    urls = parse_urls(broker.amqp_url())
    serving = asyncio.Event()

    async def swallow(_: GuardedConnection) -> NoReturn:
        serving.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise Deferred("what a library made of it") from None
        raise AssertionError

    keeping = keep(urls, swallow)
    await serving.wait()
    keeping.cancel()
    done, _ = await asyncio.wait({keeping}, timeout=20)
    keeping.cancel()
    assert done
    assert keeping.cancelled()


# --- several hosts


async def test_after_the_last_host_comes_a_pause(own_broker: Broker, nobody: int) -> None:
    """The order is that of the URL. The failures of all hosts are one stable sentence."""
    urls = parse_urls(f"amqp://guest:guest@127.0.0.1:{nobody},127.0.0.1:{own_broker.port}/")
    refused = f"no connection to 127.0.0.1:{nobody}: Connection refused"
    arrived = f"arrived at 127.0.0.1:{own_broker.port}"
    both = f"{arrived}; {refused}"
    assert await failure_reasons(urls, 2) == [refused, both, both, both]
    assert await failure_reasons(urls[::-1]) == [arrived, both]


async def test_a_host_that_goes_is_left_for_the_next_within_seconds(broker: Broker) -> None:
    """The first is gone while it is used."""
    other = URL(broker.amqp_url())
    used: asyncio.Queue[str] = asyncio.Queue()

    async def serve(broker_connection: GuardedConnection) -> NoReturn:
        used.put_nowait(host_port(broker_connection.url))
        while not broker_connection.is_over:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.01)
        raise Deferred("it was lost")

    async with counting_proxy(str(other)) as (proxy, first):
        urls = parse_urls(f"amqp://guest:guest@{host_port(URL(first))},{host_port(other)}/")
        keeping = keep(urls, serve)
        assert await used.get() == host_port(URL(first))
        proxy.go_away()
        async with asyncio.timeout(20):
            assert await used.get() == host_port(other)
        keeping.cancel()
        await asyncio.wait({keeping})


# --- TLS


@pytest.fixture
def secure(own_broker: Broker) -> str:
    """The URL of a broker that listens with TLS, up to its options."""
    return f"amqps://guest:guest@localhost:{own_broker.tls_port}/"


async def test_a_certificate_is_checked_against_the_file(own_broker: Broker, secure: str) -> None:
    assert await failure_reasons(parse_urls(f"{secure}?cafile={AUTHORITY}")) == [
        f"arrived at localhost:{own_broker.tls_port}"
    ]
    (reason,) = await failure_reasons(parse_urls(secure))
    assert (
        "certificate is not one that we trust (self-signed certificate in certificate chain): "
        "name the CA that signed it in cafile" in reason
    )


async def test_a_certificate_of_another_host_is_refused(own_broker: Broker, secure: str) -> None:
    """The same listener by a name that the certificate does not have."""
    (reason,) = await failure_reasons(
        parse_urls(f"{secure.replace('localhost', '127.1')}?cafile={AUTHORITY}")
    )
    assert (
        f"no connection to 127.1:{own_broker.tls_port}: "
        "the broker's certificate is not one that we trust (it is for another name)" in reason
    )


async def test_a_client_certificate_stands_for_the_user(
    own_broker: Broker, secure: str, tmp_path: Path
) -> None:
    """EXTERNAL has no password. The files are read for each connection, so they can be renewed."""
    mine = tmp_path / "client.pem"
    shutil.copy(IMPOSTOR, mine)
    urls = parse_urls(
        f"{secure.replace('guest:guest@', '')}?cafile={AUTHORITY}&certfile={mine}&auth=external"
    )
    (reason,) = await failure_reasons(urls)
    # TLS 1.3: the broker's alert may come too late, after its reset of the connection.
    assert "UNKNOWN_CA" in reason or "reset" in reason.lower()
    shutil.copy(CLIENT, mine)
    (reason,) = await failure_reasons(urls)
    users = await asyncio.to_thread(own_broker.ctl, "list_users")
    if "drain" not in {line.split()[0] for line in users.splitlines() if line}:
        assert "refused user, password or certificate" in reason
        await asyncio.to_thread(own_broker.add_user, "drain", "another way in")
        (reason,) = await failure_reasons(urls)
    assert reason == f"arrived at localhost:{own_broker.tls_port}"


async def test_what_the_broker_does_not_take_is_named(own_broker: Broker) -> None:
    """A broker without the plugin for EXTERNAL, here one whose plain listener is asked for it."""
    (reason,) = await failure_reasons([URL(f"{own_broker.amqp_url()}?auth=gssapi")])
    assert "the broker accepts only PLAIN" in reason
    assert "rabbitmq_auth_mechanism_ssl" in reason


async def test_tls_with_a_listener_that_has_none_is_told_as_that(own_broker: Broker) -> None:
    (reason,) = await failure_reasons(
        parse_urls(f"amqps://guest:guest@localhost:{own_broker.port}/")
    )
    assert f"no connection to localhost:{own_broker.port}: no TLS with the broker" in reason


async def test_a_limit_of_connections_is_among_what_is_to_be_looked_at(own_broker: Broker) -> None:
    """The library keeps it to itself which of the three it is."""
    await asyncio.to_thread(own_broker.add_user, "limited", "hunter2")
    await asyncio.to_thread(own_broker.ctl, "set_user_limits", "limited", '{"max-connections": 0}')
    (reason,) = await failure_reasons(parse_urls(own_broker.amqp_url("limited")))
    assert "the broker did not open the virtual host" in reason
    assert "no limit of connections is reached" in reason
    assert "hunter2" not in reason


@pytest.mark.parametrize("option", ["cafile", "certfile", "keyfile"])
async def test_a_missing_file_is_named(own_broker: Broker, secure: str, option: str) -> None:
    del own_broker
    files = {"cafile": AUTHORITY, "certfile": CLIENT, "keyfile": CLIENT, option: "/no/such.pem"}
    (reason,) = await failure_reasons(
        parse_urls(f"{secure}?{'&'.join(f'{name}={file}' for name, file in files.items())}")
    )
    assert reason.endswith(": /no/such.pem: No such file or directory")


# --- where it never leads


@pytest.mark.parametrize("host", ["169.254.169.254", "168.63.129.16", "[::ffff:169.254.169.254]"])
async def test_a_metadata_address_is_never_dialled(host: str) -> None:
    """This is where a name leads (docs/guarantees.md#metadata-addresses-are-never-dialed)."""
    (reason,) = await failure_reasons((URL(f"amqp://guest:guest@{host}/"),))
    assert "metadata or host address" in reason
