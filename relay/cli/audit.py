"""``audit``: who decided what, from the state file itself; it works with and without a running relay."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import orjson
import typer

from relay.cli._exit_codes import CommandFailed
from relay.cli._output import (
    format_local_time,
    pluralize,
    print_json,
    print_json_line,
    print_output,
    print_table,
)
from relay.cli.events import AsJson, EventId, told
from relay.cli.run import ConfigFile
from relay.config import load
from relay.errors import ConfigError
from relay.files import may_exist
from relay.outbox import Head
from relay.outbox.file import open_for_reading
from relay.outbox.journal import JournalRow, read_checkpoint, read_rows, verify_journal

verbs = typer.Typer(
    invoke_without_command=True,
    help="Prove and show what was decided, from the journal of the state file.",
)

Expect = Annotated[
    str | None,
    typer.Option(
        "--expect",
        metavar="HEAD",
        show_default=False,
        help="A journalhead that was seen before, elsewhere: shows whether the journal was cut since.",
    ),
]
StoreFile = Annotated[
    Path | None,
    typer.Option(
        "--store",
        metavar="FILE",
        show_default=False,
        help="The state file itself, or a copy of it; no configuration is read then.",
    ),
]
USUAL_STORE = Path("/var/lib/imds-relay/relay.db")
"""Where unit file and image have it."""


@verbs.callback()
def audit_all(context: typer.Context, store: StoreFile = None, config: ConfigFile = None) -> None:
    """Prove and show what was decided, from the journal of the state file. Without a verb: verify."""
    if context.invoked_subcommand is None:
        verify_chain(store=store, config=config)
    elif store is not None or config is not None:
        # Passing over it would prove another file than the one that was meant.
        verb = context.invoked_subcommand
        raise typer.BadParameter(
            f"expected --store and --config behind the verb: imds-relay audit {verb} --store FILE"
        )


@verbs.command("verify")
def verify_chain(
    *,
    expect: Expect = None,
    store: StoreFile = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Verify the hash chain of the journal, row by row."""
    expected = _head(expect) if expect is not None else None
    with _journal(store, config) as (connection, path):
        head, count = verify_journal(connection, expected)
    if as_json:
        print_json(
            {
                "store": str(path),
                "rows": count,
                "position": head.position,
                "hash": head.hash,
                "journalhead": str(head),
            }
        )
        return
    print_output(f"the chain of {path} holds: {pluralize(count, 'row')}, journalhead {head}")
    if expected is not None:
        print_output(
            f"it goes on from {expected}"
            if expected != head
            else "it ends where it was seen to end"
        )


@verbs.command("show")
def show_rows(
    event: EventId, *, store: StoreFile = None, config: ConfigFile = None, as_json: AsJson = False
) -> None:
    """Show every row about one event, oldest first."""
    with _journal(store, config) as (connection, path):
        found = [row for row in read_rows(connection) if row.event_key == event.lower()]
    if not found:
        raise CommandFailed(
            f"the journal in {path} has no row about event {event}; see `imds-relay audit export`"
        )
    if as_json:
        print_json([_exported(row) for row in found])
        return
    print_table(
        ("row", "at", "what", "by", "detail"),
        [
            (row.position, format_local_time(row.at, relative=False), *_summary(row))
            for row in found
        ],
        empty="",
    )


@verbs.command("export")
def export(*, store: StoreFile = None, config: ConfigFile = None) -> None:
    """Print the whole journal as JSON lines, with all that proves it: what was written, to be kept elsewhere.

    The first line is the checkpoint that the first row's hash goes on from, the last one the head. docs/operations.md has
    the program that verifies them.
    """
    with _journal(store, config) as (connection, _):
        head = read_checkpoint(connection)
        print_json_line({"kind": "checkpoint", "position": head.position, "hash": head.hash})
        for row in read_rows(connection):
            print_json_line(_exported(row))
            head = Head(row.position, row.hash)
        print_json_line(
            {"kind": "head", "position": head.position, "hash": head.hash, "journalhead": str(head)}
        )


@contextmanager
def _journal(store: Path | None, config: Path | None) -> Iterator[tuple[sqlite3.Connection, Path]]:
    """One consistent look at the journal. Raises StoreError where there is none, CommandFailed where it cannot be read on."""
    path = store or _configured(config)
    connection = open_for_reading(path)
    try:
        connection.execute("BEGIN")
        yield connection, path
    except sqlite3.Error as error:
        raise CommandFailed(f"the journal in {path} cannot be read: {error}") from error
    finally:
        connection.close()


def _configured(config: Path | None) -> Path:
    path = load(config).config.store.path
    return USUAL_STORE if not may_exist(path) and may_exist(USUAL_STORE) else path


def _head(text: str) -> Head:
    match = re.fullmatch(r"(\d{1,18}):([0-9a-f]{64})", text.strip().lower())
    if match is None:
        raise ConfigError("--expect: expected a journalhead, <position>:<64 hexadecimal digits>")
    return Head(int(match[1]), match[2])


def _exported(row: JournalRow) -> dict[str, object]:
    # The body goes in as the bytes that were written: the hash covers them.
    return {
        "position": row.position,
        "at": row.at,
        "kind": row.kind,
        "eventKey": row.event_key,
        "transition": row.transition,
        "hash": row.hash,
        "body": orjson.Fragment(row.body),
    }


def _summary(row: JournalRow) -> tuple[str, object, str]:
    body = orjson.loads(row.body)
    if row.kind == "claim":
        return "claim", f"rule:{body['rule']}", f"StartRequest, attempt {body['attempt']}"
    if row.kind == "mode":
        return "mode", body.get("principal"), str(body.get("mode"))
    _, name, by, detail = told(body)
    return str(name), by, detail
