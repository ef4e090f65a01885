"""Sets up the log on standard error: text for people, or a JSON object on each line for programs.

Everything that the process writes there goes through it: warnings, messages of libraries and of
asyncio, and the last error. A thread writes the lines, so a reader that stalls holds up nothing.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from logging.handlers import QueueHandler, QueueListener
from queue import Empty, Full, Queue
from typing import Any

import orjson
from typing_extensions import override
from yarl import URL

from relay.telemetry import TelemetrySettings

MAX_WAITING_LINES = 4096
"""Lines that wait for the reader of standard error. Further ones are lost and counted."""
FLUSH_TIMEOUT = 0.5
"""Seconds that the end of the process waits for that reader."""
MAX_TEXT = 2000
"""Characters of a message or of a text in a field."""
_SHORTEST_SECRET = 6
"""Characters. A shorter text is not hidden: it would turn up in words by chance."""
_log = logging.getLogger(__name__)
_PLAIN = re.compile(r"[a-zA-Z0-9_.:/@+*,%-]+")
"""What a value may be without quotes."""


def configure_logging(
    settings: TelemetrySettings, secrets: Callable[[], Iterable[str]] = tuple
) -> None:
    """Log the relay's records from a level on, and those of libraries from WARNING on.

    ``secrets`` returns the current secrets of the configuration. The code of others does not know
    them, so they are removed from what it writes.
    """
    form = JsonFormatter(secrets) if settings.log == "json" else TextFormatter(secrets)
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    root = logging.getLogger()
    kept: StderrHandler | None = None
    for handler in root.handlers[:]:
        if isinstance(handler, StderrHandler) and handler.descriptor == sys.stderr.fileno():
            kept = handler  # lines may wait in it: a second one would write in between
            continue
        root.removeHandler(handler)
        handler.close()
    if kept is None:
        kept = StderrHandler()
        root.addHandler(kept)
    kept.setFormatter(form)
    # Below WARNING, libraries write what they send, which can hold secrets.
    root.setLevel(max(level, logging.WARNING))
    logging.getLogger("relay").setLevel(level)
    # aiohttp prints a traceback for each malformed request (docs/protocol.md#malformed-requests).
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    # The AMQP client logs every failed attempt to connect. The relay logs the first one itself.
    for name in ("aiormq", "aio_pika"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # No line names them, and each record would ask the system for them.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    # What Python itself would print.
    logging.captureWarnings(capture=True)
    threading.excepthook = _log_thread_exception
    sys.unraisablehook = _log_unraisable


def is_logging_json_now() -> bool:
    """Whether the log is JSON now: a reload can change it."""
    return any(isinstance(each.formatter, JsonFormatter) for each in logging.getLogger().handlers)


def flush_log() -> None:
    """Wait until the lines are written, but not for long."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def _log_thread_exception(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
        name = arguments.thread.name if arguments.thread is not None else "?"
        _log.error("the thread %s ended with an error", name, exc_info=arguments.exc_value)


def _log_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    # The object itself is not logged: its text can hold anything.
    _log.error(
        "an error was ignored in a %s: %s",
        type(unraisable.object).__name__,
        unraisable.err_msg or "it could not be raised",
        exc_info=unraisable.exc_value,
    )


class StderrHandler(QueueHandler):
    """Queues finished lines for a thread that writes them to standard error."""

    queue: Queue[bytes]
    listener: _Writer

    def __init__(self, descriptor: int | None = None) -> None:
        super().__init__(Queue(MAX_WAITING_LINES))
        self.descriptor = sys.stderr.fileno() if descriptor is None else descriptor
        self._lost = 0
        self.listener = _Writer(self.queue, self.descriptor)
        self.listener.start()

    @override
    def prepare(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(errors="backslashreplace")

    @override
    def enqueue(self, record: Any) -> None:  # what `prepare` returned
        try:
            if self._lost:
                self.queue.put_nowait(
                    self._own_line(
                        "%d lines are missing here: nobody read standard error", self._lost
                    )
                )
                self._lost = 0
            self.queue.put_nowait(record)
        except Full:
            self._lost += 1

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        # A wrong call must not end the caller.
        error = type(sys.exception()).__name__
        place = (record.filename, record.lineno, error)
        self.enqueue(self._own_line("a line at %s:%d could not be written: %s", *place))

    def _own_line(self, message: str, *args: object) -> bytes:
        return self.prepare(
            logging.LogRecord(_log.name, logging.WARNING, __file__, 0, message, args, None)
        )

    @override
    def flush(self) -> None:
        with self.queue.all_tasks_done:
            self.queue.all_tasks_done.wait_for(
                lambda: not self.queue.unfinished_tasks, FLUSH_TIMEOUT
            )

    @override
    def close(self) -> None:
        self.flush()
        with suppress(Full):
            self.listener.enqueue_sentinel()  # `stop` would wait for the reader
        super().close()


class _Writer(QueueListener):
    """Writes on a thread, all that wait at once: after each write it needs the interpreter lock."""

    queue: Queue[bytes]

    def __init__(self, lines: Queue[bytes], descriptor: int) -> None:
        super().__init__(lines)
        self._descriptor = descriptor

    @override
    def handle(self, record: Any) -> None:
        """Write a line and those behind it, or drop them if nobody can read them any more."""
        lines = [record]
        with suppress(Empty):
            while len(lines) < 512:
                lines.append(self.dequeue(block=False))
        self._write(b"".join(filter(None, lines)))
        for _ in lines[1:]:
            self.queue.task_done()
        if None in lines:  # it ends the thread
            self.enqueue_sentinel()

    def _write(self, text: bytes) -> None:
        while text:
            try:
                text = text[os.write(self._descriptor, text) :]
            except BlockingIOError:  # another program made the pipe non-blocking
                select.select((), (self._descriptor,), ())
            except OSError:
                return


class _SecretHidingFormatter(logging.Formatter):
    """What both forms share. ``secrets`` are removed from what others write."""

    def __init__(self, secrets: Callable[[], Iterable[str]]) -> None:
        super().__init__()
        self._secrets = secrets

    def message_and_traceback(self, record: logging.LogRecord) -> tuple[str, str | None]:
        message = record.getMessage()
        traceback = self.formatException(record.exc_info) if record.exc_info else None
        if record.stack_info:
            traceback = "\n".join(filter(None, (traceback, record.stack_info)))
        if traceback is not None or not record.name.startswith("relay"):
            # Our own messages hold no secret. The text of an exception, or of a library, can.
            secrets = list(_texts_to_hide(self._secrets))
            message = _hide_secrets(message, secrets)
            traceback = _hide_secrets(traceback, secrets) if traceback is not None else None
        return _shorten(message), traceback


class TextFormatter(_SecretHidingFormatter):
    """``<time> <level> <logger>: <message> <field>=<value> …``, and a traceback with indents."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        message, traceback = self.message_and_traceback(record)
        time, level = _timestamp(int(record.created * 1000)), record.levelname.lower()
        line = f"{time} {level:8} {record.name}: {escape(message)}"
        fields = _fields(record)
        if fields:
            pairs = [f"{name}={_format_value(value)}" for name, value in fields.items()]
            line = f"{line}  {' '.join(pairs)}"
        if traceback is None:
            return line
        # A line that begins with a space continues a record. No other text can look like one.
        return "\n".join([line, *(f"    {escape(each)}" for each in traceback.split("\n"))])


class JsonFormatter(_SecretHidingFormatter):
    """One JSON object."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        message, traceback = self.message_and_traceback(record)
        fields: dict[str, Any] = {
            "time": _timestamp(int(record.created * 1000)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
            **_fields(record),
        }
        if traceback is not None:
            fields["traceback"] = traceback
        try:
            line = orjson.dumps(fields).decode()
        except orjson.JSONEncodeError:  # such as half of a surrogate pair
            line = json.dumps(fields, default=str)
        if line.isprintable():
            return line
        # The same JSON, with escapes instead of characters that are not printable.
        return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in line)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return {
        name: _shorten(value) if isinstance(value, str) else value
        for name, value in fields.items()
        if value is not None
    }


def _format_value(value: object) -> str:
    if isinstance(value, (list, tuple)):
        value = ",".join(map(str, value))
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if _PLAIN.fullmatch(text):
        return text
    return '"' + escape(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def escape(text: str) -> str:
    """Return it on one line, without control characters, separators and direction marks."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


@lru_cache(maxsize=1)  # a document of many events makes many lines in a millisecond
def _timestamp(milliseconds: int) -> str:
    time = datetime.fromtimestamp(milliseconds / 1000, UTC)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"


def _texts_to_hide(secrets: Callable[[], Iterable[str]]) -> Iterable[str]:
    """Yield the secrets, and of secret URLs what follows the host and the password."""
    for secret in secrets():
        if len(secret) < _SHORTEST_SECRET:
            continue
        yield secret
        if "://" in secret:
            try:
                url = URL(secret, encoded=True)
                parts = (url.raw_path_qs, url.raw_password, url.password)
            except ValueError:
                continue
            yield from (part for part in parts if part and len(part) >= _SHORTEST_SECRET)


def _hide_secrets(text: str, secrets: Iterable[str]) -> str:
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "…")
    return text
