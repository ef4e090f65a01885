"""Finds the local socket of the relay that a configuration means.

With ``api.socket: auto`` the relay chooses the path when it starts, so every possible path is
tried: first those that follow from the state file, last that of the service. If the user named the
configuration, each call to the service's socket names the state file in a header, and a relay with
another one refuses the call: a decision that is meant for one relay never reaches another. Sockets
and links that a stranger may have put there are not used.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

import aiohttp

from relay.api.local_socket import (
    SERVICE_SOCKET,
    STATE_FILE_HEADER,
    socket_paths_of_state_file,
    state_file_id,
    supports_local_sockets,
)
from relay.cli._exit_codes import CommandFailed
from relay.config.relay_location import RelayAddressesAndStateFile
from relay.errors import ConfigError
from relay.files import describe_os_error, is_planted, may_exist, symlinks_leading_to

_CONNECT_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class LocalSocket:
    """A local socket, and the headers of each call to it."""

    path: Path
    headers: Mapping[str, str] = field(default_factory=dict)


async def find_socket(
    location: RelayAddressesAndStateFile, *, service_socket: Path = SERVICE_SOCKET
) -> LocalSocket:
    """Return the local socket of a relay.

    Raises ConfigError if there is none to ask, and CommandFailed if none answers.
    """
    if isinstance(location.socket, Path):
        return LocalSocket(location.socket)
    if location.socket is None:
        # The environment of the service may set a socket that its configuration does not have.
        if not location.is_own and may_exist(service_socket):
            return LocalSocket(service_socket)
        raise ConfigError(
            f"{location.file or 'the environment'} has no api.socket. "
            f"Remove `socket: null`, or {_url_and_key_advice(location)}"
        )
    if not supports_local_sockets():
        raise ConfigError(f"this system has no local sockets: {_url_and_key_advice(location)}")
    problems: list[tuple[Path, str]] = []
    for place in _candidate_sockets(location, service_socket):
        problem = await _probe_socket_for_problem(place)
        if problem is None:
            return place
        problems.append((place.path, problem))
    raise CommandFailed("\n".join(_describe_failure(location, problems)))


def _candidate_sockets(
    location: RelayAddressesAndStateFile, service_socket: Path
) -> Iterator[LocalSocket]:
    headers = {}
    if location.state_files or location.is_own:
        state_file = location.state_file()
        _refuse_planted_links(state_file)
        for path in socket_paths_of_state_file(state_file, os.environ):
            yield LocalSocket(path)
        if location.is_own or len(location.state_files) == 1:
            headers[STATE_FILE_HEADER] = state_file_id(state_file)
    yield LocalSocket(service_socket, headers)


def _refuse_planted_links(state_file: Path) -> None:
    """Raise ConfigError if a link of a stranger decides whose socket is asked."""
    for link in symlinks_leading_to(state_file):
        try:
            planted = is_planted(link)
        except OSError:
            continue  # it is gone, or the way to it is closed
        if planted:
            raise ConfigError(
                f"store.path: {link} is a link of another user, in a folder that others can "
                "write, so the socket beside its target is not used. Remove the link, or go to "
                "another folder"
            )


async def _probe_socket_for_problem(place: LocalSocket) -> str | None:
    """Return why the relay that is meant cannot be called at a socket; None if it can."""
    try:
        # lstat: of a link, its own owner counts, who can change where it leads.
        owner, folder_owner = place.path.lstat().st_uid, place.path.parent.stat().st_uid
        if not is_socket_owner_trusted(owner, folder_owner, os.geteuid()):
            return "it belongs to another user; to use it all the same, set api.socket to its path"
        connection = socket.socket(socket.AF_UNIX)
        with connection:
            connection.setblocking(False)  # noqa: FBT003  # its only parameter
            async with asyncio.timeout(_CONNECT_TIMEOUT):
                await asyncio.get_running_loop().sock_connect(connection, str(place.path))
    except PermissionError as error:
        return f"{describe_os_error(error)}; its group may, see docs/operations.md"
    except (TimeoutError, BlockingIOError):
        return "it does not answer"
    except OSError as error:
        return describe_os_error(error)
    return await _wrong_or_silent_relay_reason(place) if place.headers else None


def is_socket_owner_trusted(owner: int, folder_owner: int, user: int) -> bool:
    """Return whether a socket belongs to this user, to root, or to the owner of its folder.

    Anybody can put a socket into a folder that all can write.
    """
    return owner in (user, 0, folder_owner)


async def _wrong_or_silent_relay_reason(place: LocalSocket) -> str | None:
    """Return why no relay with the state file of the headers answers; None if it does."""
    connector = aiohttp.UnixConnector(str(place.path))
    timeout = aiohttp.ClientTimeout(total=_CONNECT_TIMEOUT)
    try:
        async with (
            aiohttp.ClientSession(
                connector=connector, headers=place.headers, timeout=timeout
            ) as session,
            session.get("http://relay/healthz") as response,
        ):
            if response.status == HTTPStatus.MISDIRECTED_REQUEST:
                return "the relay there has another state file"
    except (aiohttp.ClientError, TimeoutError):
        return "it does not answer"
    return None


def _describe_failure(
    location: RelayAddressesAndStateFile, problems: list[tuple[Path, str]]
) -> Iterator[str]:
    yield "no relay answers on this machine. Is it running? These sockets were tried:"
    for path, problem in problems:
        yield f"  {path}: {problem}"
    if location.file is None:
        yield "there is no relay.yaml here or in /etc/imds-relay, so these are the usual places"
    else:
        yield f"they are the places of a relay with the configuration {location.file}"
    yield from (f"not used of it: {problem}" for problem in location.problems)
    yield f"for a relay elsewhere, {_url_and_key_advice(location)}"


def _url_and_key_advice(location: RelayAddressesAndStateFile) -> str:
    return f"give --url and a key: --url {location.url} --key-file FILE"
