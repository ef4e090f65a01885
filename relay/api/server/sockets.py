"""Opens the sockets that the API listens on. What cannot be opened is told as a wrong configuration, before anything starts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relay.api.server.connection import Peer
from relay.errors import ConfigError

_BACKLOG = 128
_RIGHTS = 0o660


async def open_tcp(host: str, port: int) -> list[socket.socket]:
    """One socket for each address that the host's name stands for; port 0 takes a free one. Raises ConfigError."""
    opened: list[socket.socket] = []
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, address in dict.fromkeys(
            (family, address[0]) for family, _, _, _, address in found
        ):
            sock = socket.create_server((str(address), port), family=family, backlog=_BACKLOG)
            sock.settimeout(0)
            opened.append(sock)
            port = sock.getsockname()[1]
    except OSError as error:
        for sock in opened:
            sock.close()
        raise ConfigError(
            f"api.listen: expected an address that is free, {host}:{port}: {error.strerror or error}"
        ) from error
    return opened


def tcp_peer(_sock: socket.socket, address: Any) -> Peer:
    """Who is at the other end of a connection over TCP."""
    return Peer(address[0])


@contextlib.contextmanager
def local_socket(path: Path) -> Iterator[socket.socket]:
    """The local socket, for its user and group alone; it is gone afterwards.

    One that a relay left behind is replaced; one on which somebody listens is not. Raises ConfigError.
    """
    try:
        with _alone_in(path.parent):
            _clear(path)
            sock = _bound(path)
            mine = path.stat()
    except OSError as error:
        raise ConfigError(
            f"api.socket: expected a path where a socket can be made, {path}: {error.strerror or error}"
        ) from error
    try:
        yield sock
    finally:
        sock.close()
        with contextlib.suppress(OSError), _alone_in(path.parent):
            if os.path.samestat(path.stat(), mine):
                path.unlink()


def local_peer(sock: socket.socket, _address: Any) -> Peer:
    """Who is at the other end of a local connection: the kernel says which user (Linux, unix(7), SO_PEERCRED)."""
    _, uid, _ = struct.unpack(
        "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return Peer("the local socket", uid)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other relays from looking and binding in this folder at the same time."""
    import fcntl  # noqa: PLC0415  # POSIX alone has it, and local sockets whose users are known

    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _clear(path: Path) -> None:
    """Remove a socket on which nobody listens. Raises ConfigError for anything else that is there."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(
            f"api.socket: expected a socket or nothing at {path}, something else is there; remove it or name another path"
        )
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # somebody listens, and is busy
    raise ConfigError(
        f"api.socket: another relay listens on {path}: stop it, or give this one a path of its own"
    )


def _bound(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        # On Linux the file gets the rights that its socket has, less the umask: never more than these, for no moment.
        os.fchmod(sock.fileno(), _RIGHTS)
        sock.bind(str(path))
        path.chmod(_RIGHTS)
        sock.listen(_BACKLOG)
        sock.settimeout(0)
    except BaseException:
        sock.close()
        raise
    return sock
