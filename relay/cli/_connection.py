"""Connects a verb to its relay: by the local socket, or by ``--url`` and a key.

`with_client` turns an async function into a verb that has the options for this choice.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec

import aiohttp
import typer
from yarl import URL

from relay.cli._client import Client
from relay.config import load
from relay.errors import ConfigError
from relay.files import may_exist
from relay.net.tls_context import default_context

P = ParamSpec("P")

SERVICE_SOCKET = Path("/run/imds-relay/relay.sock")
"""The socket that the unit file sets."""

_option = functools.partial(typer.Option, rich_help_panel="Which relay")
Url = Annotated[
    str | None,
    _option(
        "--url",
        envvar="IMDS_RELAY_URL",
        metavar="URL",
        help="The URL of a relay elsewhere. Default: the local socket.",
    ),
]
KeyFile = Annotated[
    Path | None,
    _option("--key-file", metavar="FILE", help="A file that holds the bearer key for --url."),
]
Key = Annotated[
    str | None,
    _option(
        "--key",
        envvar="IMDS_RELAY_KEY",
        metavar="KEY",
        help="The bearer key itself. Every user of this machine can see a command line.",
    ),
]
SocketConfigFile = Annotated[
    Path | None,
    _option(
        "--config",
        "-c",
        metavar="FILE",
        help="The configuration file that names the local socket.",
    ),
]


@asynccontextmanager
async def connect(
    *, url: Url = None, key_file: KeyFile = None, key: Key = None, config: SocketConfigFile = None
) -> AsyncIterator[Client]:
    """Yield a client of the chosen relay. Raises ConfigError if the options name none."""
    if url is None:
        socket = find_socket(config)
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket))) as session:
            yield Client(session, "http://relay", str(socket))
        return
    origin = _origin(url)
    bearer_key = _read_key(key, key_file)
    headers = {"Authorization": f"Bearer {bearer_key}"} if bearer_key else {}
    connector = aiohttp.TCPConnector(ssl=default_context())
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
        yield Client(session, url, origin)


def with_client(work: Callable[Concatenate[Client, P], Awaitable[None]]) -> Callable[..., None]:
    """Make a verb of a function that needs a client: add the options of `connect`."""
    connection_options = inspect.signature(connect, eval_str=True).parameters

    @functools.wraps(work)
    def verb(**options: Any) -> None:
        connection = {name: options.pop(name) for name in connection_options}

        async def run() -> None:
            async with connect(**connection) as client:
                await work(client, **options)  # type: ignore[call-arg]  # typer read the signature

        asyncio.run(run())

    own_parameters = list(inspect.signature(work, eval_str=True).parameters.values())[1:]
    verb.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # typer reads it
        [*own_parameters, *connection_options.values()]
    )
    return verb


def _origin(url: str) -> str:
    try:
        parsed = URL(url)
        if parsed.scheme in ("http", "https") and parsed.host:
            return str(parsed.origin())
    except ValueError:
        pass
    raise ConfigError(
        "--url: expected http:// or https:// and a host, such as https://relay.example.com:8443"
    )


def find_socket(config: Path | None, *, service_socket: Path = SERVICE_SOCKET) -> Path:
    """Return the socket of the configuration, or else that of the service. Raises ConfigError."""
    try:
        loaded = load(config)
    except ConfigError:
        # A user of the socket need not have the variables and secret files of the relay.
        if config is None and may_exist(service_socket):
            return service_socket
        raise
    if loaded.config.api.socket is not None:
        return loaded.config.api.socket
    if may_exist(service_socket):
        return service_socket
    raise ConfigError(
        f"{loaded.file or 'the configuration'} has no api.socket, and {service_socket} does not "
        "exist. Set api.socket, or name a relay with --url and a key"
    )


def _read_key(key: str | None, file: Path | None) -> str | None:
    if file is not None:
        try:
            key = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", error)
            raise ConfigError(
                f"--key-file: expected a file that can be read, {file}: {reason}"
            ) from error
    key = key.strip() if key is not None else None
    if key and not (key.isascii() and key.isprintable()):
        raise ConfigError("expected a bearer key as `imds-relay keys` prints it, on one line")
    return key
