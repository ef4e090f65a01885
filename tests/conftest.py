"""What every test may ask for: a RabbitMQ to use, one to mistreat, names that no other test has, and a browser."""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import os
import re
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from pathlib import Path

import aio_pika
import pytest
from hypothesis import HealthCheck, settings
from playwright.async_api import Browser, Page
from typing_extensions import override
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]  # it has no types

import relay.config  # noqa: F401  # declares the principals of the chat platforms
from tests.chromium import STEP_MILLISECONDS, connected, executable, serving
from tests.rabbitmq import Broker, NamedBroker, Reachable

# On a shared core a slow example says nothing.
settings.register_profile("relay", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("relay")

TEARDOWN_SECONDS = 120.0

GROUPS = {
    "private RabbitMQ of journeys": (re.compile(r"\b(own_broker|_private_node): "), "journey"),
    "private RabbitMQ": (re.compile(r"\b(own_broker|_private_node): "), None),
    "RabbitMQ": (re.compile(r"\bbroker: Reachable"), None),
    "browser": (re.compile(r"\b(browser: Browser|page: Page)\b"), None),
}
"""Groups of files that share a costly fixture, the longest first: the parameters of their tests, and their folder where it counts."""
_stderr = pytest.StashKey[int]()


class DebugLoop(asyncio.SelectorEventLoop):
    """An event loop whose debug mode makes every check, and records no traceback for each future and task.

    Recording them took a third of the CPU time of a test of the API. `PYTHONASYNCIODEBUG=1` brings them back: the message about a
    task whose error nobody looked at then says where the task was made.
    """

    @override
    def get_debug(self) -> bool:
        """Whether tracebacks are recorded: whoever records them asks this. The checks ask the attribute that `set_debug` sets."""
        return "PYTHONASYNCIODEBUG" in os.environ


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Give every test this event loop."""
    return {"debug": DebugLoop}


def pytest_configure(config: pytest.Config) -> None:
    """Keep the real stderr, before pytest captures it."""
    config.stash[_stderr] = os.dup(2)


class Grouped(LoadFileScheduling):  # type: ignore[misc]  # the same
    """Gives each worker whole files, and all files of a group to the same worker.

    A RabbitMQ or a browser is started by few workers then. The groups of pytest-xdist's own do not work with pytest 9.2.
    """

    @override
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return _group(self.config.rootpath / file) or file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Grouped | None:
    """Distribute tests by file as `Grouped` does."""
    return Grouped(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what waits longest."""

    def place(item: pytest.Item) -> int:
        group = _group(item.path)
        return (
            [*GROUPS].index(group) if group else len(GROUPS) + (item.path.parent.name != "journey")
        )

    items.sort(key=place)


@functools.cache
def _group(file: Path) -> str | None:
    """The group of a file of tests, by the fixtures that it names."""
    text = file.read_text(encoding="utf-8")
    for group, (fixtures, folder) in GROUPS.items():
        if fixtures.search(text) and (folder is None or file.parent.name == folder):
            return group
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """End the run, saying where, when a test that its timeout has ended leaves a task behind that does not end."""

    def give_up() -> None:
        said = f"\n{item.nodeid}: the teardown has not ended within {TEARDOWN_SECONDS:.0f} s; the run ends here\n"
        os.write(item.config.stash[_stderr], said.encode())
        faulthandler.dump_traceback(item.config.stash[_stderr])
        os._exit(1)

    timer = threading.Timer(TEARDOWN_SECONDS, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reachable]:
    """A RabbitMQ that runs all the time: leave it as it was, and use names of your own (`exchange`)."""
    if url := os.environ.get("RELAY_TEST_AMQP_URL"):
        yield NamedBroker(url)
        return
    with Broker(tmp_path_factory.mktemp("rabbitmq")) as node:
        node.start()
        yield node


@pytest.fixture(scope="session")
def _private_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("own-rabbitmq")) as node:
        yield node


@pytest.fixture
def own_broker(_private_node: Broker) -> Iterator[Broker]:
    """A private RabbitMQ, running and well, to stop, kill, freeze or fill; the next test gets it healed, with what it then holds."""
    _private_node.heal()
    yield _private_node
    _private_node.thaw()  # whoever still waits for it gets an answer


@pytest.fixture
async def exchange(broker: Reachable) -> AsyncIterator[str]:
    """An exchange name of this test's own on `broker`; it and what is derived from it are removed afterwards."""
    name = f"relay.test.{secrets.token_hex(6)}"
    yield name
    connection = await aio_pika.connect(broker.amqp_url())
    async with connection, connection.channel() as channel:
        for queue in (".unrouted", ".dead"):
            await channel.queue_delete(name + queue)
        for part in ("", ".unrouted", ".approvals", ".dlx"):
            await channel.exchange_delete(name + part)


@pytest.fixture(scope="session")
def chromium() -> Path:
    """The program of Chromium, which `make test` sees to."""
    found = executable()
    if found is None:
        raise FileNotFoundError(
            "expected an installed Chromium, found none: `make test` sees to one, or install the package chromium"
        )
    return found


@pytest.fixture(scope="session")
def _browser_address(chromium: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(chromium, tmp_path_factory.mktemp("browser")) as address:
        yield address


@pytest.fixture
async def browser(_browser_address: str) -> AsyncIterator[Browser]:
    """A browser without a page; `await browser.new_context(color_scheme="dark", viewport={…})` is a visitor without cookies."""
    async with connected(_browser_address) as browser:
        yield browser


@pytest.fixture
async def page(browser: Browser, request: pytest.FixtureRequest) -> AsyncIterator[Page]:
    """An empty page of a visitor without cookies.

    The visitor can be told by `@pytest.mark.parametrize("page", [{"color_scheme": "dark"}], indirect=True)`, in words of `new_context`.
    """
    context = await browser.new_context(**getattr(request, "param", {}))
    context.set_default_timeout(STEP_MILLISECONDS)
    yield await context.new_page()
    await context.close()
