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
from typing import Annotated, Any, Concatenate, Final, ParamSpec

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


@asynccontextmanager
async def connect(
    config: Path | None, url: str | None, key: str | None, key_file: Path | None
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
    """Make a verb of a function that needs a client: add the options that choose the relay."""

    @functools.wraps(work)
    def verb(**options: Any) -> None:
        connection = {option.name: options.pop(option.name) for option in _CONNECTION_OPTIONS}

        async def run() -> None:
            async with connect(**connection) as client:
                await work(client, **options)  # type: ignore[call-arg]  # typer read the signature

        asyncio.run(run())

    own_parameters = list(inspect.signature(work, eval_str=True).parameters.values())[1:]
    verb.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # typer reads it
        [*own_parameters, *_CONNECTION_OPTIONS]
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


def _option(name: str, kind: object, *flags: str, **settings: Any) -> inspect.Parameter:
    declaration = typer.Option(
        *flags, show_default=False, rich_help_panel="Which relay", **settings
    )
    annotation = Annotated[kind, declaration]  # type: ignore[valid-type]  # made at run time
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


_CONNECTION_OPTIONS: Final = (
    _option(
        "url",
        str | None,
        "--url",
        envvar="IMDS_RELAY_URL",
        metavar="URL",
        help="The URL of a relay elsewhere. Default: the local socket.",
    ),
    _option(
        "key_file",
        Path | None,
        "--key-file",
        metavar="FILE",
        help="A file that holds the bearer key for --url.",
    ),
    _option(
        "key",
        str | None,
        "--key",
        envvar="IMDS_RELAY_KEY",
        metavar="KEY",
        help="The bearer key itself. Every user of this machine can see a command line.",
    ),
    _option(
        "config",
        Path | None,
        "--config",
        "-c",
        metavar="FILE",
        help="The configuration file that names the local socket.",
    ),
)
