"""Limits that protect the server from slow, broken and hostile callers. Times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass

MAX_BODY_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """The limits of one server. Tests set lower ones."""

    max_connections: int = 256
    """Open connections over TCP."""
    max_local_connections: int = 64
    """Open connections on the local socket."""
    max_connections_per_principal: int = 16
    """Connections that one principal keeps between its calls, and when room is needed."""
    handshake_timeout: float = 5.0
    """Time for a TLS handshake."""
    idle_timeout: float = 15.0
    """Time that a connection may be idle, and time for the head of a request."""
    body_timeout: float = 10.0
    """Time for the body of a request."""
    linger_timeout: float = 1.0
    """Time for reading the rest of a refused body."""
    send_timeout: float = 15.0
    """Time in which a caller must receive its response."""
    max_large_answers: int = 32
    """Pages that are built or sent at once."""
    max_large_answers_of_caller: int = 4
    """Of them, pages of one caller."""
    max_long_reads: int = 4
    """Pages and batches of streams that the thread of the store reads between two writes."""
    max_streams: int = 64
    """Open event streams."""
    max_streams_per_principal: int = 8
    """Open event streams of one principal."""
    stream_keep_alive_interval: float = 15.0
    """Silence after which a stream sends a comment, so that proxies keep the connection."""
    stream_send_timeout: float = 10.0
    """Time in which the reader of a stream must make room for more."""
