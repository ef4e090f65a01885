"""The log: one line for each record, whatever strangers write into it, and never a wait."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import pytest

from relay.logs import log_extra
from relay.telemetry.log import (
    FLUSH_TIMEOUT,
    MAX_TEXT,
    MAX_WAITING_LINES,
    JsonFormatter,
    StderrHandler,
    TextFormatter,
)

HOSTILE = (
    "x\n2026-01-01T00:00:00.000Z info     relay.app: forged\r\x1b[31mred\x9b2J"
    "\u2028line\u202egnirts\x00"
)
SECRETS = (
    "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
    "https://u:pa55word@hooks.example.com/T0/tok3n",
)


def record(message: str, *arguments: object, name: str = "relay.app", **more: Any) -> Any:
    """Return a record as a logger makes it."""
    fields = more.pop("extra", {})
    made = logging.LogRecord(
        name, logging.WARNING, "file.py", 1, message, arguments, more.pop("exc_info", None), **more
    )
    made.__dict__.update(fields)
    return made


def raised(text: str) -> tuple[type[BaseException], BaseException, Any]:
    try:
        raise ValueError(text)  # noqa: TRY301  # the traceback is what matters
    except ValueError:
        information = sys.exc_info()
    assert information[0] is not None
    return information


def text(made: Any) -> str:
    return TextFormatter(lambda: SECRETS).format(made)


def json(made: Any) -> Any:
    """Return the object for programs; it must be on one line."""
    line = JsonFormatter(lambda: SECRETS).format(made)
    assert line.isprintable()
    return orjson.loads(line)


def test_a_text_line_has_the_sentence_first_and_the_fields_behind_it() -> None:
    made = record(
        "sink %s is failing",
        "drain",
        extra=log_extra(
            sink="drain",
            reason='it said "no", twice',
            count=2,
            dryRun=True,
            resources=["db-0", "db-1"],
            seconds=0.5,
            principal=None,
            outcome="",
        ),
    )
    made.created = 1.25
    assert text(made) == (
        "1970-01-01T00:00:01.250Z warning  relay.app: sink drain is failing  "
        'sink=drain reason="it said \\"no\\", twice" count=2 dryRun=true resources=db-0,db-1 '
        'seconds=0.5 outcome=""'
    )


def test_a_json_line_has_the_same_fields_beside_the_fixed_ones() -> None:
    made = record("hello", extra=log_extra(sink="drain", resources=["db-0"], principal=None))
    made.created = 1.25
    assert json(made) == {
        "time": "1970-01-01T00:00:01.250Z",
        "level": "warning",
        "logger": "relay.app",
        "message": "hello",
        "sink": "drain",
        "resources": ["db-0"],
    }


def test_foreign_text_cannot_begin_a_line_or_move_the_cursor() -> None:
    made = record("%s", HOSTILE, extra=log_extra(reason=HOSTILE, resources=[HOSTILE]))
    line = text(made)
    assert line.isprintable()  # one line
    assert "\\n2026-01-01" in line
    parsed = json(made)
    told = (parsed["message"], parsed["reason"], parsed["resources"])
    assert told == (HOSTILE, HOSTILE, [HOSTILE])


def test_a_field_cannot_be_forged_by_the_value_of_another() -> None:
    line = text(record("x", extra=log_extra(reason='a" principal=client:root b="', sink="s")))
    assert line.endswith('reason="a\\" principal=client:root b=\\"" sink=s')


def test_every_line_of_a_traceback_is_indented_so_that_none_looks_like_a_record() -> None:
    lines = text(record("it failed", exc_info=raised(HOSTILE))).split("\n")
    assert len(lines) > 3
    assert not lines[0].startswith(" ")
    assert all(line.startswith("    ") and line.isprintable() for line in lines[1:])
    assert "forged" in "".join(lines[1:])


def test_half_of_a_surrogate_pair_breaks_no_line() -> None:
    made = record("odd \ud800", extra=log_extra(reason="\udfff"))
    assert text(made).endswith('odd \\ud800  reason="\\udfff"')
    assert "\\ud800" in JsonFormatter(tuple).format(made)


@pytest.mark.parametrize("write", [text, lambda made: orjson.dumps(json(made)).decode()])
def test_secrets_are_hidden_in_what_others_write(write: Any) -> None:
    secret, url = SECRETS
    lines = [
        write(record("it failed", exc_info=raised(f"cannot sign with {secret}"))),
        write(record(f"Task exception was never retrieved: POST {url}", name="asyncio")),
        write(record("cannot reach /T0/tok3n of u:pa55word", name="py.warnings")),
    ]
    for line in lines:
        for hidden in (secret, "tok3n", "pa55word"):
            assert hidden not in line
        assert "…" in line


def test_a_long_text_is_cut() -> None:
    made = record("x" * 100_000, extra=log_extra(reason="y" * 100_000))
    assert len(text(made)) < 2 * MAX_TEXT + 200
    assert json(made)["reason"] == "y" * MAX_TEXT + "…"


# --- the thread that writes


@contextmanager
def piped() -> Iterator[tuple[logging.Logger, StderrHandler, int]]:
    """A logger whose lines go into a pipe, and the end from which they are read."""
    reader, writer = os.pipe()
    handler = StderrHandler(writer)
    handler.setFormatter(JsonFormatter(tuple))
    logger = logging.getLogger("relay.piped")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield logger, handler, reader
    finally:
        logger.removeHandler(handler)
        os.close(reader)  # a write that waits ends with an error
        handler.close()
        os.close(writer)


def read_lines(reader: int, until: str) -> list[Any]:
    content = b""
    while until.encode() not in content or not content.endswith(b"\n"):
        content += os.read(reader, 65536)
    return [orjson.loads(line) for line in content.splitlines()]


def test_lines_are_written_in_their_order() -> None:
    with piped() as (logger, _, reader):
        for number in range(500):
            logger.info("line %d", number)
        lines = read_lines(reader, "line 499")
    assert [line["message"] for line in lines] == [f"line {number}" for number in range(500)]


def test_a_reader_that_stalls_holds_nobody_up_and_what_is_lost_is_counted() -> None:
    with piped() as (logger, handler, reader):
        count = 3 * MAX_WAITING_LINES
        for _ in range(count):
            logger.info("%s", "x" * 1000)  # this test would hang here
        handler.flush()  # and here for more than its timeout
        lines = read_lines(reader, "x" * 1000)
        while sum(line["message"][0] == "x" for line in lines) < MAX_WAITING_LINES:
            lines += read_lines(reader, "}")
        logger.info("the reader is back")
        lines += read_lines(reader, "the reader is back")
    lost = [line for line in lines if "are missing here" in line["message"]]
    written = [line for line in lines if line["message"].startswith("x")]
    assert {line["level"] for line in lost} == {"warning"}
    assert sum(int(line["message"].split()[0]) for line in lost) == count - len(written)
    assert 0 < len(written) < count


_RELOADS = """
import logging, time
from relay.telemetry import TelemetrySettings
from relay.telemetry.log import FLUSH_TIMEOUT, configure_logging

configure_logging(TelemetrySettings(log="json"))
log = logging.getLogger("relay.test")
for number in range(1000):
    log.info("%d %s", number, "x" * 500)
began = time.monotonic()
for level in ("debug", "info", "debug"):
    configure_logging(TelemetrySettings(log="json", level=level))
    log.info("reloaded")
print(time.monotonic() - began < FLUSH_TIMEOUT, flush=True)
input()
"""


def test_a_reload_waits_for_no_reader_and_tears_no_line() -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", _RELOADS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stderr is not None
        at_once = program.stdout.readline()  # nobody reads the log until here
        lines = read_lines(program.stderr.fileno(), '"message":"999 ')
        while sum(line["message"] == "reloaded" for line in lines) < 3:
            lines += read_lines(program.stderr.fileno(), "reloaded")
        program.stdin.write(b"\n")
    assert at_once == b"True\n"
    numbers = [int(line["message"].split()[0]) for line in lines if line["message"][0].isdigit()]
    assert numbers == list(range(1000))


def test_a_reader_that_has_gone_away_ends_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    handler = StderrHandler(writer)
    logger = logging.getLogger("relay.gone")
    logger.addHandler(handler)
    for _ in range(3):
        logger.warning("nobody reads this")
        handler.flush()
    assert not handler.queue.unfinished_tasks  # the thread goes on
    logger.removeHandler(handler)
    handler.close()
    os.close(writer)


def test_a_wrong_call_of_the_log_is_a_line_and_no_error() -> None:
    with piped() as (_, handler, reader):
        handler.handle(record("%d machines", "many"))
        (line,) = read_lines(reader, "could not be written")
    assert line["message"].startswith("a line at file.py:1 ")
    assert FLUSH_TIMEOUT < 1
