"""The client of the command line: which relay a verb calls, and how.

A verb calls the relay of ``--url`` with a key, or of a local socket: that of ``--socket``, else
that of the configuration (`relay.config`). Every failed call is an error with a sentence and an
exit code. Each async function is a `RelayCommand`, which has the options for this choice.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import quote

import aiohttp
import orjson
import typer
from typer.core import TyperCommand
from typing_extensions import override
from yarl import URL

from relay.api.settings import automatic_socket, supports_local_sockets
from relay.cli._options import AsJson, option, read_named_file
from relay.cli._output import EXIT_DONE, CommandFailed, RefusedByPolicy, Unprocessable, print_json
from relay.config import locate_relay
from relay.errors import ConfigError
from relay.files import describe_os_error, is_planted, may_exist
from relay.net.tls import client_context_trusting_ca_file, default_context, explain_refusal

_option = functools.partial(option, rich_help_panel="Which relay")
SocketFile = Annotated[
    Path | None, _option("--socket", "FILE", "The local socket of a relay on this machine.")
]
SocketConfigFile = Annotated[
    Path | None,
    _option(
        "--config",
        "FILE",
        "The configuration of the relay on this machine: says where its local socket is.",
        "-c",
    ),
]
Url = Annotated[
    str | None,
    _option(
        "--url",
        "URL",
        "The URL of a relay elsewhere. Default: the local socket.",
        envvar="IMDS_RELAY_URL",
    ),
]
KeyFile = Annotated[
    Path | None, _option("--key-file", "FILE", "A file that holds the bearer key for --url.")
]
Key = Annotated[
    str | None,
    _option(
        "--key",
        "KEY",
        "The bearer key itself. Every user of this machine can see a command line.",
        envvar="IMDS_RELAY_KEY",
    ),
]
CaFile = Annotated[
    Path | None,
    _option(
        "--ca-file",
        "FILE",
        "The CA of the certificate behind --url, PEM. Default: those of this machine.",
    ),
]
_URL_ADVICE: Final = "give --url and a key: --url https://HOST:PORT --key-file FILE"
_CONNECTION_ERRORS: Final = (
    aiohttp.ClientConnectionError,
    aiohttp.ClientPayloadError,
    TimeoutError,
)


@dataclass(frozen=True, slots=True)
class Client:
    """Calls one relay. Raises CommandFailed, or RefusedByPolicy if rules or rights forbid the call.

    ``address`` is the relay's address for error messages: a URL, or the path of a socket.
    """

    session: aiohttp.ClientSession
    base_url: str
    address: str

    async def get(self, *path: str, **query: str) -> Any:
        return await self._call("GET", path, query)

    async def pages(self, *path: str, all_pages: bool, **query: str) -> dict[str, Any]:
        """Return the first page of a list, or all pages joined into one."""
        page: dict[str, Any] = await self.get(*path, **query)
        while all_pages and page["next"] is not None:
            after = await self.get(*path, cursor=page["next"], **query)
            page = {"items": page["items"] + after["items"], "next": after["next"]}
        return page

    async def details(self, *path: str, log: str, all_pages: bool, **query: str) -> dict[str, Any]:
        """Return an event or a delivery with the newest rows of its list ``log``, or with all."""
        details: dict[str, Any] = await self.get(*path, **query)
        while all_pages and details["next"] is not None:
            before = await self.get(*path, cursor=details["next"], **query)
            for rows in {log, "said"} & details.keys():
                details[rows] = before[rows] + details[rows]
            details["next"] = before["next"]
        return details

    async def post(self, *path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON of a POST, repeated without an answer, with one Idempotency-Key."""
        headers = {"Idempotency-Key": str(uuid.uuid4())}
        return await self._call("POST", path, attempts=3, json=body, headers=headers)

    async def put(self, *path: str, body: Mapping[str, Any]) -> Any:
        return await self._call("PUT", path, json=body)

    async def stream(self, last: str | None) -> AsyncIterator[Mapping[bytes, bytes]]:
        """Yield the frames of the stream behind a journalhead, without an end.

        Raises ConnectionError when the connection breaks.
        """
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last} if last else {})
        frame: dict[bytes, bytes] = {}
        try:
            async with self.session.get(
                self._url(("stream",), None),
                headers=headers,
                # The relay sends a comment on an idle stream every few seconds.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=90),
                allow_redirects=False,
                read_bufsize=2**24,  # more than an event of the largest document
            ) as response:
                if response.status != HTTPStatus.OK:
                    problem = error_from_response(response.status, await response.read())
                    if response.status == HTTPStatus.SERVICE_UNAVAILABLE:
                        raise ConnectionError(problem)  # the relay is starting or stopping
                    raise problem
                async for line in response.content:
                    name, _, value = line.rstrip(b"\r\n").partition(b":")
                    if name:
                        frame[name] = value.removeprefix(b" ")
                    elif frame and not line.strip(b"\r\n"):  # else it is a comment
                        yield frame
                        frame = {}
        except _CONNECTION_ERRORS as error:
            raise ConnectionError(self._describe_connection_error(error)) from error

    async def _call(
        self,
        method: str,
        path: tuple[str, ...],
        query: Mapping[str, str] | None = None,
        attempts: int = 1,
        **request: Any,
    ) -> Any:
        while True:
            attempts -= 1
            try:
                async with self.session.request(
                    method,
                    self._url(path, query),
                    timeout=aiohttp.ClientTimeout(total=30, sock_connect=10),
                    allow_redirects=False,
                    **request,
                ) as response:
                    return self._decode_answer(response.status, await response.read())
            except _CONNECTION_ERRORS as error:
                if not attempts or isinstance(error, aiohttp.ClientConnectorError):
                    raise CommandFailed(self._describe_connection_error(error)) from error
                await asyncio.sleep(0.5)

    def _decode_answer(self, status: int, body: bytes) -> Any:
        if not 200 <= status < 300:
            raise error_from_response(status, body)
        try:
            answer = orjson.loads(body)
        except orjson.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict):
            raise CommandFailed(f"expected an answer in JSON from {self.address}: is it a relay?")
        return answer

    def _url(self, path: tuple[str, ...], query: Mapping[str, str] | None) -> URL:
        # An EventId may hold any character, so each part is quoted before yarl sees it.
        quoted = (quote(part, safe="") for part in path)
        return URL("/".join((self.base_url, "v1", *quoted)), encoded=True).with_query(query or None)

    def _describe_connection_error(self, error: BaseException) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer came from {self.address} in time"
        if not isinstance(error, aiohttp.ClientConnectorError):
            problem = f"the connection to {self.address} broke: {error}"
            if isinstance(error, aiohttp.ServerDisconnectedError) and "http:" in self.address:
                problem += f". If it expects TLS, try {self.address.replace('http', 'https', 1)}"
            return problem
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            problem, remedy = explain_refusal(error.certificate_error, "--ca-file")
            return f"the certificate of {self.address} was refused: {problem}. Remedy: {remedy}"
        if isinstance(error.os_error, PermissionError):
            return _forbidden(self.address)
        if isinstance(error.os_error, ssl.SSLError):
            problem = f"expected TLS at {self.address}, got {error.os_error.reason}"
            return f"{problem}. If it speaks no TLS, try {self.address.replace('https', 'http', 1)}"
        reason = error.os_error.strerror or error.os_error
        return f"no relay answers at {self.address}: {reason}. Is the relay running?"


def _forbidden(socket: Path | str) -> str:
    return (
        f"you may not open {socket}: the rights of its file and folders decide who may. Join its "
        "group (docs/operations.md), run this as the relay's user, or use --url and a key"
    )


def error_from_response(status: int, body: bytes) -> CommandFailed | RefusedByPolicy:
    """Return the error for a response that is not 2xx, with the ``detail`` of its problem body."""
    problem: Any = {}
    try:
        problem = orjson.loads(body)
        detail = str(problem["detail"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        detail = f"expected a relay's answer, got HTTP {status}"
    if status == HTTPStatus.UNAUTHORIZED:
        return CommandFailed(
            f"{detail} (401): give a key of api.clients in IMDS_RELAY_KEY or with --key-file"
        )
    if status == HTTPStatus.UNPROCESSABLE_ENTITY and isinstance(problem, dict):
        return Unprocessable(detail, problem)
    if status in (HTTPStatus.FORBIDDEN, HTTPStatus.CONFLICT):
        return RefusedByPolicy(f"refused: {detail}")
    return CommandFailed(detail)


@asynccontextmanager
async def connect(
    *,
    socket: SocketFile = None,
    config: SocketConfigFile = None,
    url: Url = None,
    key_file: KeyFile = None,
    key: Key = None,
    ca_file: CaFile = None,
) -> AsyncIterator[Client]:
    """Yield a client of the chosen relay. Raises ConfigError if the options name none."""
    connector: aiohttp.BaseConnector
    if url is None or socket is not None:
        headers: dict[str, str] = {}
        url, address = "http://relay", str(find_socket(socket, config))
        connector = aiohttp.UnixConnector(address)
    else:
        address = _origin(url)
        key = (read_named_file("--key-file", key_file) if key_file else key or "").strip()
        if not (key.isascii() and key.isprintable()):
            raise ConfigError("expected a bearer key as `imds-relay keys` prints it, on one line")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            tls = client_context_trusting_ca_file(ca_file) if ca_file else default_context()
        except OSError as error:
            is_readable = isinstance(error, ssl.SSLError)
            reason = "no certificate in PEM" if is_readable else describe_os_error(error)
            raise ConfigError(
                f"--ca-file: expected a file of certificates, {ca_file}: {reason}"
            ) from error
        connector = aiohttp.TCPConnector(ssl=tls)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
        yield Client(session, url, address)


def find_socket(named: Path | None, config: Path | None) -> Path:
    """Return the local socket of the relay that an option or a configuration names.

    With ``api.socket: auto`` it is beside the state file, so that a decision that is meant for one
    relay never reaches another. Raises ConfigError or CommandFailed if there is none to call.
    """
    if not supports_local_sockets():
        raise ConfigError(f"this system has no local sockets: {_URL_ADVICE}")
    if named is not None:
        return named
    where = locate_relay(config)
    if where.socket is None:
        raise ConfigError(
            f"{where.file or 'the environment'} has no api.socket. Remove `socket: null`, or "
            f"{_URL_ADVICE}"
        )
    if where.socket != "auto":
        return Path(where.socket)
    state_file = where.state_file()
    path = automatic_socket(state_file)
    # A stranger may have put a socket, or a link to another relay, into a shared folder.
    for place in (state_file.parent, state_file, path):
        try:
            is_used = not may_exist(place) or not is_planted(place)
        except PermissionError:  # of a folder above it
            raise CommandFailed(_forbidden(path)) from None
        if not is_used:
            raise ConfigError(
                f"{place} is of another user, in a folder that others can write, so it is not "
                "used; to use a socket all the same: --socket FILE"
            )
    if not may_exist(path):
        raise CommandFailed(
            f"no relay answers at {path}: No such file or directory. Is the relay running? "
            f"That is the socket of a relay with {where.file or 'the defaults'}; name another with "
            f"--socket, or {_URL_ADVICE}"
        )
    return path


class RelayCall(typer.Context):
    relay: Client
    as_json = False

    def for_people(self, answer: Any) -> Any:
        """Return an answer that the verb shows. With --json print it, and end the verb here."""
        if self.as_json:
            print_json(answer)
            raise typer.Exit(EXIT_DONE)
        return answer


class RelayCommand(TyperCommand):
    """A verb that calls a relay: an async function with its options, --json and `connect`'s."""

    context_class = RelayCall

    def __init__(self, *, params: Sequence[Any] = (), **settings: Any) -> None:
        super().__init__(params=[*params, *_parameters(_form), *_parameters(connect)], **settings)

    @override
    def invoke(self, ctx: Any) -> None:
        options = {each.name: ctx.params.pop(each.name) for each in _parameters(connect)}
        ctx.as_json = ctx.params.pop("as_json")

        async def call() -> None:
            async with connect(**options) as ctx.relay:
                await super(RelayCommand, self).invoke(ctx)

        asyncio.run(call())


def _form(*, as_json: AsJson = False) -> None:
    """Have the option that says in which form an answer is printed."""


def _parameters(function: Callable[..., object]) -> Sequence[Any]:
    verb = typer.Typer(add_completion=False)
    verb.command()(function)
    return typer.main.get_command(verb).params


def _origin(url: str) -> str:
    try:
        parsed = URL(url)
        is_place = not (parsed.raw_user or parsed.raw_password or parsed.raw_query_string)
        if parsed.scheme in ("http", "https") and parsed.host and is_place:
            return str(parsed.origin())
    except ValueError:
        pass
    raise ConfigError(
        "--url: expected http:// or https:// and a host, such as https://relay.example.com:8443, "
        "without user and query"
    )
