"""Sets up the log: one line each on standard error, for people or for programs. Called once, by the command line."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Literal

import orjson
from typing_extensions import override


def set_up(form: Literal["text", "json"]) -> None:
    """Log everything from INFO on; other libraries only from WARNING."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("relay").setLevel(logging.INFO)
    # aiohttp prints a traceback for each malformed request (docs/protocol.md#malformed-requests).
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    # The AMQP client logs every failed attempt to connect; the sink says it once.
    for name in ("aiormq", "aio_pika"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _stamp(record: logging.LogRecord) -> str:
    return (
        datetime.fromtimestamp(record.created, UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


class _Text(logging.Formatter):
    @override
    def format(self, record: logging.LogRecord) -> str:
        # Line feeds in what strangers sent must not make lines of their own.
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        line = f"{_stamp(record)} {record.levelname.lower():8} {record.name}: {message}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(logging.Formatter):
    @override
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _stamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(fields).decode()
