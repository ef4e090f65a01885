"""Reserves ports for servers that start later, or again on the same port."""

from __future__ import annotations

import contextlib
import random
import socket

_reserved: list[socket.socket] = []


def reserve(count: int) -> list[int]:
    """Choose ports of loopback for TCP; they stay reserved until this process ends.

    They lie below the range of outgoing connections. The UDP port of the same number is held, which
    tells parallel test runs that the port is taken.
    """
    chosen: list[int] = []
    while len(chosen) < count:
        port = random.randint(20_000, 32_000)  # noqa: S311  # a port is no secret
        mark = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with contextlib.suppress(OSError), socket.socket() as probe:
            mark.bind(("127.0.0.1", port))
            probe.bind(("127.0.0.1", port))
            _reserved.append(mark)
            chosen.append(port)
            continue
        mark.close()
    return chosen


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
