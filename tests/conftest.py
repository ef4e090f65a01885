"""Fixtures for every test: a RabbitMQ, an unused exchange, and a browser.

It also gives the files that share a costly fixture to the same worker of pytest-xdist.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import gc
import math
import os
import re
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import aio_pika
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings
from playwright.async_api import Browser, Page
from typing_extensions import override
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]  # it has no types

import relay.config  # noqa: F401  # declares the principals of the chat platforms
from tests import forked_relay
from tests.chromium import STEP_MILLISECONDS, running_chromium
from tests.depth import CHAOS, depth
from tests.rabbitmq import Broker

# A slow example on a shared core is no sign of a defect. `make test` tries the same cases each
# time: it tells of the change at hand. `make chaos-tests` searches for new ones.
settings.register_profile(
    "relay",
    max_examples=depth(200, 30),
    deadline=None,
    derandomize=not CHAOS,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("relay")

TEARDOWN_SECONDS = 120.0

_BROKER = re.compile(r"\b(_node|own_broker|broker): Broker\b")
GROUPS = {
    "RabbitMQ of agents": (_BROKER, "fleet/test_agent"),
    "RabbitMQ of journeys": (_BROKER, "journey/"),
    "RabbitMQ": (_BROKER, ""),
    "browser": (re.compile(r"\b(browser: Browser|page: Page)\b"), ""),
}
"""Groups of files that share a costly fixture, the slowest group first.

Each has a pattern for the parameters of its tests, and a part of the paths of its files.
"""
_stderr = pytest.StashKey[int]()

RECORDS_TRACEBACKS = "PYTHONASYNCIODEBUG" in os.environ
"""Asyncio asks a loop several times for each callback: it is read once."""


class DebugLoop(asyncio.SelectorEventLoop):
    """An event loop in debug mode that records no traceback for each future and task.

    The tracebacks took a third of the CPU time of an API test. `PYTHONASYNCIODEBUG=1` turns them
    on. The message about an unhandled error of a task then says where the task was created.
    """

    def __init__(self) -> None:
        super().__init__()
        # A busy machine makes every callback slow, and tests look at what is logged.
        self.slow_callback_duration = math.inf

    @override
    def get_debug(self) -> bool:
        """Return whether asyncio records tracebacks.

        The checks of debug mode read the attribute that `set_debug` sets instead.
        """
        return RECORDS_TRACEBACKS

    # A client, such as a browser, may connect at the moment when a server stops. asyncio then makes
    # a transport that nobody closes (github.com/python/cpython/issues/109564), and the warning of
    # the garbage collector would fail a later test. These three methods close such connections.

    def _make_socket_transport(self, sock: socket.socket, *arguments: Any, **more: Any) -> Any:
        _refuse_if_stopped(sock, more.get("server"))
        return super()._make_socket_transport(sock, *arguments, **more)  # type: ignore[misc]  # typeshed leaves it out

    def _make_ssl_transport(self, rawsock: socket.socket, *arguments: Any, **more: Any) -> Any:
        _refuse_if_stopped(rawsock, more.get("server"))
        return super()._make_ssl_transport(rawsock, *arguments, **more)  # type: ignore[misc]  # as above

    @override
    def close(self) -> None:
        """Close the loop, and accepted connections whose handler was cancelled before it began.

        Only servers of the tests have such handlers (`asyncio.start_server`), not the relay.
        """
        if not self.is_closed():
            accepted = [
                transport
                for transport in self._transports.values()  # type: ignore[attr-defined]  # as above
                if transport._server  # noqa: SLF001  # nothing public tells
                and isinstance(transport.get_protocol(), asyncio.StreamReaderProtocol)
            ]
            for transport in accepted:
                transport.abort()
            if accepted:
                self.run_until_complete(asyncio.sleep(0))
        super().close()


def _refuse_if_stopped(accepted: socket.socket, server: asyncio.Server | None) -> None:
    if server is not None and not server.sockets:
        accepted.close()
        raise ConnectionAbortedError("the server has stopped")


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every test on a `DebugLoop`."""
    return {"debug": DebugLoop}


def pytest_configure(config: pytest.Config) -> None:
    """Keep the real stderr, before pytest captures it, and let tests fork relays."""
    config.stash[_stderr] = os.dup(2)
    forked_relay.may_fork = True


class GroupScheduling(LoadFileScheduling):  # type: ignore[misc]  # it has no types
    """Gives each worker whole files, and all files of a group to the same worker.

    Fewer workers start a RabbitMQ or a browser then. The own groups of pytest-xdist do not
    work with pytest 9.2.
    """

    @override
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return _group(self.config.rootpath / file) or file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> GroupScheduling | None:
    """Distribute tests by file as `GroupScheduling` does."""
    return GroupScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest groups first, then other files with slow tests, then the rest.

    A slow file that begins last would leave all workers but one idle.
    """

    def position(item: pytest.Item) -> int:
        group = _group(item.path)
        if group:
            return [*GROUPS].index(group)
        return len(GROUPS) + (item.path.parent.name not in {"journey", "tests"})

    items.sort(key=position)


def pytest_collection_finish() -> None:
    """Leave the modules and the tests out of garbage collections: all of them stay to the end."""
    gc.collect()
    gc.freeze()


@functools.cache
def _group(file: Path) -> str | None:
    """Return the group of a test file by the fixtures that it names, or None."""
    text = file.read_text(encoding="utf-8")
    for group, (fixtures, path) in GROUPS.items():
        if fixtures.search(text) and path in file.as_posix():
            return group
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Abort the run with a traceback if the teardown of a test hangs.

    It can hang after a timeout, when the test leaves a task that does not end.
    """
    stderr = item.config.stash[_stderr]
    faulthandler.dump_traceback_later(TEARDOWN_SECONDS, exit=True, file=stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def _node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("rabbitmq")) as node:
        yield node


@pytest.fixture
def own_broker(_node: Broker) -> Iterator[Broker]:
    """The RabbitMQ of this worker, which a test may stop, kill, freeze or fill.

    It is healed before each test, but keeps its queues and messages.
    """
    _node.heal()
    yield _node
    _node.thaw()  # the clients that still wait get a response


@pytest.fixture
def broker(own_broker: Broker) -> Broker:
    """The same, for a test that leaves it as it was. It uses its own names: see `exchange`."""
    return own_broker


@pytest.fixture
async def exchange(broker: Broker) -> AsyncIterator[str]:
    """An unused exchange name on `broker`.

    The teardown removes the exchange and the exchanges and queues that are named after it.
    """
    name = f"relay.test.{secrets.token_hex(6)}"
    yield name
    connection = await aio_pika.connect(broker.amqp_url())
    async with connection, connection.channel() as channel:
        for suffix in (".unrouted", ".dead", ".service"):
            await channel.queue_delete(name + suffix)
        for suffix in ("", ".unrouted", ".approvals", ".dlx"):
            await channel.exchange_delete(name + suffix)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _driven_browser() -> AsyncIterator[Browser]:
    """The browser of a worker. Its driver is bound to one event loop: that of the session."""
    async with running_chromium() as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="session")
async def browser(_driven_browser: Browser) -> AsyncIterator[Browser]:
    """A browser without a page, for a file with `pytestmark = IN_SESSION_LOOP`.

    `await browser.new_context(color_scheme="dark", viewport={…})` makes a visitor without cookies.
    """
    yield _driven_browser
    for context in _driven_browser.contexts:
        await context.close()


@pytest_asyncio.fixture(loop_scope="session")
async def page(browser: Browser, request: pytest.FixtureRequest) -> AsyncIterator[Page]:
    """An empty page of a visitor without cookies.

    `@pytest.mark.parametrize("page", [{"color_scheme": "dark"}], indirect=True)` passes
    arguments to `new_context`.
    """
    context = await browser.new_context(**getattr(request, "param", {}))
    context.set_default_timeout(STEP_MILLISECONDS)
    yield await context.new_page()
    await context.close()
