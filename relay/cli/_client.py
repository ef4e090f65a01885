"""Talks to a running relay: over its local socket, or with a URL and a key from elsewhere."""

from __future__ import annotations

import asyncio
import functools
import inspect
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Concatenate, Final, ParamSpec
from urllib.parse import quote

import aiohttp
import orjson
import typer
from yarl import URL

from relay.cli._exit_codes import CommandFailed, RefusedByPolicy
from relay.config import load
from relay.errors import ConfigError
from relay.files import may_exist
from relay.net.tls_context import default_context

P = ParamSpec("P")

USUAL_SOCKET = Path("/run/imds-relay/relay.sock")
"""Where the unit file has it."""
_TIMEOUT: Final = aiohttp.ClientTimeout(total=30, sock_connect=10)
_SILENCE: Final = 90.0
_TRIES: Final = 3
_PAUSE: Final = 0.5


class Client:
    """The calls of the HTTP API. Each raises CommandFailed, or RefusedByPolicy where rules or rights forbid it."""

    def __init__(self, session: aiohttp.ClientSession, base: str, place: str) -> None:
        self._session = session
        self._base = base.rstrip("/")
        self._place = place

    async def get(self, *path: str, **query: str) -> Any:
        """GET, and the JSON that came."""
        return await self._call("GET", path, query=query)

    async def pages(self, *path: str, every: bool) -> dict[str, Any]:
        """A list: its first page, or every one."""
        found: dict[str, Any] = await self.get(*path)
        while every and found["next"] is not None:
            more = await self.get(*path, cursor=found["next"])
            found = {"items": found["items"] + more["items"], "next": more["next"]}
        return found

    async def post(self, *path: str, body: Mapping[str, Any] | None = None) -> Any:
        """POST, under an id by which the relay knows a repeat: where no answer came, it is tried again."""
        return await self._call(
            "POST", path, body=body, headers={"Idempotency-Key": str(uuid.uuid4())}, tries=_TRIES
        )

    async def put(self, *path: str, body: Mapping[str, Any]) -> Any:
        """PUT, and the JSON that came."""
        return await self._call("PUT", path, body=body)

    @asynccontextmanager
    async def stream(
        self, *path: str, headers: Mapping[str, str]
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The bytes of an answer without end. Raises ConnectionError where there is none, or no more of it."""
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_TIMEOUT.sock_connect, sock_read=_SILENCE
        )
        try:
            async with self._session.get(
                self._url(path), headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status != HTTPStatus.OK:
                    raise refusal(response.status, await response.read())
                yield response.content.iter_any()
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            raise ConnectionError(self._no_answer(error)) from error

    async def _call(
        self,
        method: str,
        path: tuple[str, ...],
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        tries: int = 1,
    ) -> Any:
        sent = {
            **(headers or {}),
            **({"Content-Type": "application/json"} if body is not None else {}),
        }
        data = orjson.dumps(body) if body is not None else None
        for left in reversed(range(tries)):
            try:
                async with self._session.request(
                    method,
                    self._url(path, query),
                    data=data,
                    headers=sent,
                    timeout=_TIMEOUT,
                    allow_redirects=False,
                ) as response:
                    return self._read(response.status, await response.read())
            except (
                aiohttp.ClientConnectionError,
                aiohttp.ClientPayloadError,
                TimeoutError,
            ) as error:
                if not left or isinstance(error, aiohttp.ClientConnectorError):
                    raise CommandFailed(self._no_answer(error)) from error
                await asyncio.sleep(_PAUSE)
        raise AssertionError

    def _read(self, status: int, answer: bytes) -> Any:
        if not 200 <= status < 300:
            raise refusal(status, answer)
        try:
            found = orjson.loads(answer)
        except orjson.JSONDecodeError:
            found = None
        if not isinstance(found, dict):
            raise CommandFailed(f"expected an answer in JSON from {self._place}: is a relay there?")
        return found

    def _url(self, path: tuple[str, ...], query: Mapping[str, str] | None = None) -> URL:
        # Quoted by hand, as an EventId may hold anything.
        return URL(
            "/".join((self._base, "v1", *(quote(part, safe="") for part in path))), encoded=True
        ).with_query(query or None)

    def _no_answer(self, error: BaseException) -> str:
        if isinstance(error, aiohttp.ClientConnectorError):
            if isinstance(error.os_error, PermissionError):
                return f"you may not open {self._place}: its file rights are the authority. Join its group, or use --url and a key"
            return f"no relay answers at {self._place}: {error.os_error.strerror or error.os_error}. Is it running there?"
        if isinstance(error, TimeoutError):
            return f"no answer came from {self._place} in time"
        return f"the connection to {self._place} broke: {error}"


def refusal(status: int, answer: bytes) -> CommandFailed | RefusedByPolicy:
    """What an answer that is not 2xx comes to. Every one is a problem with a sentence in ``detail``."""
    try:
        detail = str(orjson.loads(answer)["detail"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        detail = f"expected a relay's answer, got HTTP {status}"
    if status == HTTPStatus.UNAUTHORIZED:
        return CommandFailed(
            f"{detail} (401): give a key of api.clients in IMDS_RELAY_KEY or with --key-file"
        )
    if status in (HTTPStatus.FORBIDDEN, HTTPStatus.CONFLICT):
        return RefusedByPolicy(f"refused: {detail}")
    return CommandFailed(detail)


@asynccontextmanager
async def connected(
    config: Path | None, url: str | None, key: str | None, key_file: Path | None
) -> AsyncIterator[Client]:
    """A client of the relay that is meant. Raises ConfigError where none can be made out."""
    if url is not None:
        place = _origin(url)
        headers = {"Authorization": f"Bearer {secret}"} if (secret := _key(key, key_file)) else {}
        async with aiohttp.ClientSession(
            headers=headers, connector=aiohttp.TCPConnector(ssl=default_context())
        ) as session:
            yield Client(session, url, place)
        return
    socket = _socket(config)
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket))) as session:
        yield Client(session, "http://relay", str(socket))


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


def _socket(config: Path | None) -> Path:
    try:
        loaded = load(config)
    except ConfigError:
        # Whoever may use the socket need not have the relay's variables and secret files.
        if config is None and may_exist(USUAL_SOCKET):
            return USUAL_SOCKET
        raise
    if loaded.config.api.socket is not None:
        return loaded.config.api.socket
    if may_exist(USUAL_SOCKET):
        return USUAL_SOCKET
    raise ConfigError(
        f"which relay? {loaded.file or 'The configuration'} has no api.socket, and there is no {USUAL_SOCKET}. "
        "Set api.socket, or name a relay with --url and a key"
    )


def _key(key: str | None, file: Path | None) -> str | None:
    if file is not None:
        try:
            key = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--key-file: expected a file that can be read, {file}: {getattr(error, 'strerror', error)}"
            ) from error
    key = key.strip() if key is not None else None
    if key and not (key.isascii() and key.isprintable()):
        raise ConfigError("expected a bearer key such as `imds-relay keys` makes, on one line")
    return key


def with_client(work: Callable[Concatenate[Client, P], Awaitable[None]]) -> Callable[..., None]:
    """Make a verb of work that talks to a running relay: adds the options that say which one, and connects."""

    @functools.wraps(work)
    def verb(**options: Any) -> None:
        which = {one.name: options.pop(one.name) for one in _WHICH_RELAY}

        async def talk() -> None:
            async with connected(**which) as client:
                await work(client, **options)  # type: ignore[call-arg]  # the options are those of its signature

        asyncio.run(talk())

    own = list(inspect.signature(work, eval_str=True).parameters.values())[1:]
    verb.__signature__ = inspect.Signature([*own, *_WHICH_RELAY])  # type: ignore[attr-defined]  # what typer reads
    return verb


def _option(name: str, kind: object, *declared: str, **told: Any) -> inspect.Parameter:
    annotation = Annotated[
        kind, typer.Option(*declared, show_default=False, rich_help_panel="Which relay", **told)  # type: ignore[valid-type]  # made here
    ]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


_WHICH_RELAY: Final = (
    _option(
        "url",
        str | None,
        "--url",
        envvar="IMDS_RELAY_URL",
        metavar="URL",
        help="A relay elsewhere. Without it, the local socket of the one here.",
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
        help="The bearer key itself. On the command line others on this machine can see it.",
    ),
    _option(
        "config",
        Path | None,
        "--config",
        "-c",
        metavar="FILE",
        help="The configuration that names the local socket.",
    ),
)
