"""Connects a verb to its relay: by a local socket, by ``--url`` and a key, or by a profile.

Without an option, it is the relay of this machine. If no configuration of the user's own is meant,
the profile ``default`` comes first. `with_client` turns an async function into a verb that has the
options for this choice: typer learns them from the signature that it makes.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec

import aiohttp
import typer
from yarl import URL

from relay.cli._client import Client
from relay.cli._connection_profiles import (
    DEFAULT_PROFILE,
    check_file_permissions,
    has_default_profile,
    read_profile,
)
from relay.cli._local_relay import find_socket
from relay.cli._options import lazy_completion_function
from relay.config.relay_location import (
    RelayAddressesAndStateFile,
    locate_relay_addresses_and_state_file,
)
from relay.errors import ConfigError
from relay.files import describe_os_error
from relay.net.tls import client_context_trusting_ca_file, default_context

P = ParamSpec("P")

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
CaFile = Annotated[
    Path | None,
    _option(
        "--ca-file",
        metavar="FILE",
        help="The CA of the certificate behind --url, PEM. Default: those of this machine.",
    ),
]
ProfileName = Annotated[
    str | None,
    _option(
        "--profile",
        metavar="NAME",
        help="A file of yours with url, key_file and ca_file: ~/.config/imds-relay/NAME.yaml.",
        autocompletion=lazy_completion_function("profiles"),
    ),
]
SocketConfigFile = Annotated[
    Path | None,
    _option(
        "--config",
        "-c",
        metavar="FILE",
        help="The configuration of the relay on this machine: says where its local socket is.",
    ),
]


@asynccontextmanager
async def connect(
    *,
    url: Url = None,
    key_file: KeyFile = None,
    key: Key = None,
    ca_file: CaFile = None,
    profile: ProfileName = None,
    config: SocketConfigFile = None,
) -> AsyncIterator[Client]:
    """Yield a client of the chosen relay. Raises ConfigError if the options name none."""
    if profile is None and url is None:
        location = locate_relay_addresses_and_state_file(config)
        if location.is_own or not has_default_profile():
            async with connect_locally(location) as client:
                yield client
            return
        profile = DEFAULT_PROFILE
    if profile is not None:
        # A key of the environment is for the URL of the environment.
        chosen = read_profile(profile)
        url, key = chosen.url, None
        key_file, ca_file = key_file or chosen.key_file, ca_file or chosen.ca_file
    assert url is not None  # noqa: S101  # one of the two is given
    origin = _origin(url)
    bearer_key = _read_key(key, key_file)
    headers = {"Authorization": f"Bearer {bearer_key}"} if bearer_key else {}
    connector = aiohttp.TCPConnector(ssl=_tls_context(ca_file))
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
        yield Client(session, url, origin)


@asynccontextmanager
async def connect_locally(location: RelayAddressesAndStateFile) -> AsyncIterator[Client]:
    """Yield a client of the relay of this machine. Raises ConfigError or CommandFailed."""
    socket = await find_socket(location)
    async with aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(str(socket.path)), headers=socket.headers
    ) as session:
        yield Client(session, "http://relay", str(socket.path))


def with_client(work: Callable[Concatenate[Client, P], Awaitable[None]]) -> Callable[..., None]:
    """Make a verb of an async function whose first parameter is the client.

    The verb has the function's other parameters and the options of `connect`. It connects, and runs
    the function to its end.
    """
    connection_options = inspect.signature(connect, eval_str=True).parameters

    @functools.wraps(work)
    def connect_and_run(**options: Any) -> None:
        connection = {name: options.pop(name) for name in connection_options}

        async def run() -> None:
            async with connect(**connection) as client:
                await work(client, **options)  # type: ignore[call-arg]  # typer read the signature

        asyncio.run(run())

    own_parameters = list(inspect.signature(work, eval_str=True).parameters.values())[1:]
    connect_and_run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # typer reads it
        [*own_parameters, *connection_options.values()]
    )
    return connect_and_run


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


def _tls_context(ca_file: Path | None) -> ssl.SSLContext:
    if ca_file is None:
        return default_context()
    try:
        return client_context_trusting_ca_file(ca_file)
    except OSError as error:
        reason = "no certificate in PEM" if isinstance(error, ssl.SSLError) else None
        raise ConfigError(
            "--ca-file: expected a file of certificates, "
            f"{ca_file}: {reason or describe_os_error(error)}"
        ) from error


def _read_key(key: str | None, file: Path | None) -> str | None:
    if file is not None:
        check_file_permissions(file, "the key in", holds_secret=True)
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
