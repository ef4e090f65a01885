"""Where the local socket of a relay is with ``api.socket: auto``.

The relay takes the first place where it can make a socket. The command line looks in the same
places. A relay of the service has its socket in `SERVICE_SOCKET`; any other relay has it beside its
state file, so that two relays on one machine have two sockets.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SERVICE_SOCKET = Path("/run/imds-relay/relay.sock")
"""The socket of the service. Its folder is the RuntimeDirectory of the unit file."""
MAX_PATH_BYTES = 107
"""Bytes of a socket's path: the size of sun_path without the final null byte, see unix(7)."""
STATE_FILE_HEADER = "Imds-Relay-State-File"
"""The header with which the command line says of which relay it read the configuration.

Its value is `state_file_id`. A relay with another state file answers 421 on its local socket.
"""
_GROUP_MODE, _USER_MODE = 0o660, 0o600


@dataclass(frozen=True, slots=True)
class SocketPathAndMode:
    """A place for a local socket, and the mode of its file."""

    path: Path
    mode: int = _GROUP_MODE


def supports_local_sockets() -> bool:
    """Return whether this system has local sockets. On Windows, Python has none."""
    return hasattr(socket, "AF_UNIX")


def automatic_places(
    state_file: Path, environment: Mapping[str, str], *, service_socket: Path = SERVICE_SOCKET
) -> list[SocketPathAndMode]:
    """Return where a relay with this state file may make its socket, the best place first.

    The folder of the service decides by its own rights who can reach the socket in it. Elsewhere
    the socket is for the user of the relay alone: the group of a user may have many members.
    """
    places = [
        SocketPathAndMode(path, _USER_MODE)
        for path in socket_paths_of_state_file(state_file, environment)
    ]
    if _can_create_socket_in_folder(service_socket.parent):
        places.insert(0, SocketPathAndMode(service_socket))
    return places


def socket_paths_of_state_file(state_file: Path, environment: Mapping[str, str]) -> list[Path]:
    """Return where only a relay with this state file makes its socket."""
    state_file = Path(os.path.realpath(state_file))
    places = [state_file.with_name(f"{state_file.stem}.sock")]
    runtime_folder = environment.get("XDG_RUNTIME_DIR")
    if runtime_folder and Path(runtime_folder).is_absolute():
        name = f"imds-relay-{state_file_id(state_file)[:16]}.sock"
        places.append(Path(runtime_folder) / name)
    return [place for place in places if fits(place)]


def fits(path: Path) -> bool:
    """Return whether a path is short enough for a socket."""
    return len(os.fsencode(path)) <= MAX_PATH_BYTES


def state_file_id(state_file: Path) -> str:
    """Return a text that is the same for all names of a state file, and tells nothing about it."""
    return hashlib.sha256(os.fsencode(os.path.realpath(state_file))).hexdigest()


def _can_create_socket_in_folder(folder: Path) -> bool:
    """Return whether this process can make files in the folder.

    Root can do so everywhere. It uses a folder of its own only: in that of another user, it would
    take the place of a service that is about to start.
    """
    if not os.access(folder, os.W_OK | os.X_OK):
        return False
    return os.geteuid() != 0 or folder.stat().st_uid == 0
