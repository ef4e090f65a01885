"""Takes away what Python lacks on Windows, from a process that has this folder on PYTHONPATH.

Sources: the pages of `pwd`, `fcntl`, `resource`, `os`, `socket` and "asyncio: Platform Support" in
Python's documentation.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import sys
from typing import Any, NoReturn

MODULES = ("fcntl", "grp", "pwd", "resource", "termios")
ATTRIBUTES: dict[Any, tuple[str, ...]] = {
    os: ("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "chown", "fchmod", "fork", "geteuid", "getuid"),
    socket: ("AF_UNIX", "SO_PEERCRED", "SO_REUSEPORT"),
}
METHODS = (
    "add_signal_handler",
    "create_unix_connection",
    "create_unix_server",
    "remove_signal_handler",
)


def _not_implemented(*_: object, **__: object) -> NoReturn:
    raise NotImplementedError


# The event loop has a pair of sockets for itself: on Windows of another family.
socket.socketpair = functools.partial(socket.socketpair, socket.AF_UNIX)
for name in METHODS:
    setattr(asyncio.SelectorEventLoop, name, _not_implemented)
for module, names in ATTRIBUTES.items():
    for name in names:
        delattr(module, name)
sys.modules |= dict.fromkeys(MODULES)  # type: ignore[arg-type]  # None: the import fails
