"""Sets up the log on standard error: one line for each record, for people or for programs."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Literal

import orjson
from typing_extensions import override


def configure_logging(form: Literal["text", "json"]) -> None:
    """Log the relay's records from INFO on, and those of libraries from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("relay").setLevel(logging.INFO)
    # aiohttp prints a traceback for each malformed request (docs/protocol.md#malformed-requests).
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    # The AMQP client logs every failed attempt to connect. The relay logs the first one itself.
    for name in ("aiormq", "aio_pika"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _timestamp(record: logging.LogRecord) -> str:
    time = datetime.fromtimestamp(record.created, UTC)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _TextFormatter(logging.Formatter):
    @override
    def format(self, record: logging.LogRecord) -> str:
        # Line breaks from outside must not look like further records.
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        level = record.levelname.lower()
        line = f"{_timestamp(record)} {level:8} {record.name}: {message}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonFormatter(logging.Formatter):
    @override
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(fields).decode()
