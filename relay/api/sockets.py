"""Opens the sockets of the API: TCP with or without TLS, and the local socket.

Failures are configuration errors. A certificate is read again when its files change.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from relay.api.settings import ServerTlsSettings, automatic_socket, supports_local_sockets
from relay.errors import ConfigError
from relay.files import FileBackedValue, create_private_folder, require_small_regular_file

BACKLOG = 128
_SEND_BUFFER = 2**16
_log = logging.getLogger(__name__)


async def open_tcp_sockets(host: str, port: int) -> list[socket.socket]:
    """Return a socket for each address; port 0: one free port for all. Raises ConfigError."""
    sockets: list[socket.socket] = []
    try:
        results = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        addresses = dict.fromkeys((family, address[0]) for family, _, _, _, address in results)
        for family, address in addresses:
            sock = socket.create_server((str(address), port), family=family, backlog=BACKLOG)
            # Accepted connections inherit it. The kernel would take megabytes for a slow reader.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            sockets.append(sock)
            port = sock.getsockname()[1]
    except OSError as error:
        for sock in sockets:
            sock.close()
        expected = f"an address that is free, {host}:{port}: {error.strerror or error}"
        if error.errno == errno.EADDRNOTAVAIL:
            expected = f"an address of this machine, no interface has that of {host}:{port}"
        raise ConfigError(f"api.listen: expected {expected}") from error
    return sockets


def open_local_socket(
    stack: contextlib.ExitStack | contextlib.AsyncExitStack,
    path: Path | Literal["auto"] | None,
    state_file: Path | None,
) -> tuple[socket.socket, Path] | None:
    """Listen on the socket of ``api.socket`` until the stack is left; return it and its path.

    Return None if there is none. If that beside the state file cannot be made, log what to do:
    without it, the relay works and the command line needs a key. It is for the user of the relay
    alone: the group of a user may have many members. Raises ConfigError about another path.
    """
    if path != "auto":
        return None if path is None else (stack.enter_context(local_socket(path)), path)
    if state_file is None or not supports_local_sockets():
        return None
    with contextlib.suppress(OSError):  # the store needs it too, and says why it cannot be made
        create_private_folder(state_file.parent)
    try:
        path = automatic_socket(state_file)
        return stack.enter_context(local_socket(path, mode=0o600)), path
    except ConfigError as error:
        _log.warning(
            "there is no local socket, so the command line needs --url and a key: %s. Set "
            "api.socket to a path in a folder where this user may write, or to null",
            str(error).removeprefix("api.socket: "),
        )
        return None


@contextlib.contextmanager
def local_socket(path: Path, *, mode: int = 0o660) -> Iterator[socket.socket]:
    """Listen on a local socket for those whom its mode admits, and remove it at the end.

    Replaces the socket of a relay that has ended, but not one that accepts connections. Raises
    ConfigError.
    """
    if not supports_local_sockets():
        raise ConfigError(
            "api.socket: this system has no local sockets that say who calls; "
            "remove it, and use api.listen with clients"
        )
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            _remove_stale_socket(path)
            # Linux derives the mode of the file from that of the socket and the umask. So the file
            # never has a wider mode.
            os.fchmod(sock.fileno(), mode)
            sock.bind(str(path))
            own_file = path.stat()
            path.chmod(mode)
            sock.listen(BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"api.socket: expected a path where a socket can be made, {path}: "
                f"{error.strerror or error}"
            ) from error
        try:
            yield sock
        finally:
            sock.close()
            with contextlib.suppress(OSError):
                if os.path.samestat(path.stat(), own_file):
                    path.unlink()


def _remove_stale_socket(path: Path) -> None:
    """Remove a socket that accepts no connections. Raises ConfigError for any other file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(
            f"api.socket: expected a socket or nothing at {path}, got another file; "
            "remove it or choose another path"
        )
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # the listener's queue is full
    raise ConfigError(
        f"api.socket: another relay listens on {path}; stop it, or choose another path"
    )


def file_backed_server_context(settings: ServerTlsSettings) -> FileBackedValue[ssl.SSLContext]:
    """Return the TLS context for new connections. Raises ConfigError if the files are unusable."""
    return FileBackedValue(
        (settings.cert_file, settings.key_file, settings.client_ca_file),
        partial(make_server_context, settings),
        on_failure=lambda error: _log.warning("%s. The previous certificate stays in use", error),
    )


def make_server_context(settings: ServerTlsSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # OpenSSL 1.1 lets clients renegotiate, with another certificate and at the server's cost.
    context.options |= ssl.OP_NO_RENEGOTIATION
    expected = (
        f"api.tls: expected a certificate in PEM in {settings.cert_file} and its key, "
        f"not encrypted, in {settings.key_file}"
    )
    try:
        require_small_regular_file(settings.cert_file)
        require_small_regular_file(settings.key_file)
        # The empty password keeps OpenSSL from asking for one on the terminal.
        context.load_cert_chain(settings.cert_file, settings.key_file, password="")
        if settings.client_ca_file is not None:
            expected = (
                f"api.tls.client_ca_file: expected certificates in PEM in {settings.client_ca_file}"
            )
            context.verify_mode = ssl.CERT_REQUIRED
            require_small_regular_file(settings.client_ca_file)
            context.load_verify_locations(settings.client_ca_file)
    except OSError as error:
        reason = getattr(error, "reason", None) or error.strerror or type(error).__name__
        raise ConfigError(f"{expected}: {reason}") from error
    return context
