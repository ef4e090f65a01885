"""``audit``: verifies and shows the journal of decisions, read from the state file itself.

It works with and without a running relay, and changes nothing.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import orjson
import typer

from relay.cli._events import cloudevent_row
from relay.cli._exit_codes import CommandFailed
from relay.cli._options import AsJson, ConfigFile, DefaultGroup, EventId, option
from relay.cli._output import format_local_time, pluralize, print_json, print_json_line, print_lines
from relay.cli._tables import print_table
from relay.config.location import locate_relay
from relay.errors import ConfigError, StoreError
from relay.files import may_exist
from relay.store import JournalHead
from relay.store.chain import JournalRow, read_all_rows, read_pruning_checkpoint, verify_journal
from relay.store.claim_audit import audit_claims
from relay.store.file import open_for_reading

audit = typer.Typer(
    cls=DefaultGroup,
    help="Verify and show what was decided, from the journal of the state file. "
    "Without a verb: verify.",
)

ExpectedHead = Annotated[
    str | None,
    option(
        "--expect",
        "HEAD",
        "An earlier journalhead, kept elsewhere: shows whether rows were cut off since.",
    ),
]
StoreFile = Annotated[
    Path | None,
    option(
        "--store", "FILE", "The state file itself, or a copy of it. No configuration is read then."
    ),
]


@audit.command("verify")
def verify_chain_and_claims(
    *,
    expect: ExpectedHead = None,
    store: StoreFile = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Verify the hash chain of the journal, and follow every StartRequest back to its approval.

    Each claim of a StartRequest needs an open grant of the same approval, revision and rule before
    it, and as many recorded votes in force as it says were required. Whether the rules let these
    principals vote was decided at the claim, and is not weighed again.
    """
    expected = _parse_head(expect) if expect is not None else None
    with _open_journal(store, config) as (connection, path):
        head, count = verify_journal(connection, expected)
        claim_audit = audit_claims(connection)
    if claim_audit.problems:
        raise CommandFailed("; ".join(["without a root in the journal", *claim_audit.problems]))
    if as_json:
        print_json(
            {
                "store": str(path),
                "rows": count,
                "position": head.position,
                "hash": head.hash,
                "journalhead": str(head),
                "claims": claim_audit.claims,
                "pruned": claim_audit.pruned,
            }
        )
        return
    print_lines(f"the chain of {path} holds: {pluralize(count, 'row')}, journalhead {head}")
    pruned = claim_audit.pruned
    older = f", {pruned} of them from before the kept journal" if pruned else ""
    print_lines(f"claims that follow from recorded approvals: {claim_audit.claims}{older}")
    if expected == head:
        print_lines("it ends where it was seen to end")
    elif expected is not None:
        print_lines(f"it continues from {expected}")


@audit.command("show")
def show_rows_of_event(
    event: EventId, *, store: StoreFile = None, config: ConfigFile = None, as_json: AsJson = False
) -> None:
    """Show every row about one event, oldest first."""
    with _open_journal(store, config) as (connection, path):
        rows = _rows_of_event(event.lower(), read_all_rows(connection))
    if not rows:
        raise CommandFailed(
            f"the journal in {path} has no row about event {event}; see `imds-relay audit export`"
        )
    if as_json:
        print_json([_exported_row(row) for row in rows])
        return
    print_table(
        ("row", "at", "what", "by", "detail"),
        [
            (row.position, format_local_time(row.at, relative=False), *_describe_row(row))
            for row in rows
        ],
        empty="",
    )


def _rows_of_event(text: str, rows: Iterable[JournalRow]) -> list[JournalRow]:
    """Return the rows about the event that a text names or begins.

    On a hub the key of an event is an EventId and a scope (`relay.store.EventKeyFormat`), and an
    EventId alone names the events of all scopes that have it. Raises CommandFailed if the text
    begins several EventIds.
    """
    rows = [row for row in rows if row.event_key is not None and row.event_key.startswith(text)]
    keys = {row.event_key or "" for row in rows}
    exact = {key for key in keys if text in (key, key.rpartition("@")[0])}
    if len(keys) > 1 and not exact:
        raise CommandFailed(
            f"{text!r} begins the EventIds of {len(keys)} events: {', '.join(sorted(keys))}. "
            "Give more of the one you mean"
        )
    return [row for row in rows if row.event_key in (exact or keys)]


def _describe_row(row: JournalRow) -> tuple[object, object, str]:
    """Return what a row records, by whom, and the details."""
    body = orjson.loads(row.body)
    match row.kind:
        case "claim":
            agent = f" by {body['agent']}" if "agent" in body else ""
            return (
                "claim",
                f"rule:{body['rule']}",
                f"StartRequest, attempt {body['attempt']}{agent}",
            )
        case "answer":  # one that is not final, or the end of a grant of a dry run
            status = body["status"]
            return "answer", None, body["state"] if status is None else f"HTTP {status}"
        case "mode":
            return "mode", body.get("principal"), str(body.get("mode"))
    _, name, principal, details = cloudevent_row(body)
    return name, principal, details


@audit.command("export")
def export(*, store: StoreFile = None, config: ConfigFile = None) -> None:
    """Print the whole journal as JSON lines, with everything that proves it. Keep it elsewhere.

    The first line is the checkpoint from which the hash of the first row continues, the last line
    is the head. docs/operations.md has the program that verifies the lines.
    """
    with _open_journal(store, config) as (connection, _):
        head = read_pruning_checkpoint(connection)
        print_json_line({"kind": "checkpoint", "position": head.position, "hash": head.hash})
        for row in read_all_rows(connection):
            print_json_line(_exported_row(row))
            head = JournalHead(row.position, row.hash)
        print_json_line(
            {"kind": "head", "position": head.position, "hash": head.hash, "journalhead": str(head)}
        )


@contextmanager
def _open_journal(
    store: Path | None, config: Path | None
) -> Iterator[tuple[sqlite3.Connection, Path]]:
    """Yield a consistent snapshot of the journal: of a file, else of the configured one.

    Raises StoreError if the file is no store, and CommandFailed if reading it fails.
    """
    if store is None:
        location = locate_relay(config)
        path = location.state_file()
        if not may_exist(path):
            nor = "".join(f", nor is {other}" for other in location.state_files if other != path)
            raise StoreError(
                f"store.path: expected a relay's state file, {path}: it is not there{nor}. "
                "Name it with --store FILE, or its configuration with --config FILE"
            )
    else:
        path = store
    with closing(open_for_reading(path)) as connection:
        try:
            connection.execute("BEGIN")
            yield connection, path
        # To print bytes as text is a TypeError, and a broken schema a UnicodeDecodeError.
        except (sqlite3.Error, TypeError, UnicodeDecodeError) as error:
            raise CommandFailed(f"the journal in {path} cannot be read: {error}") from error


def _parse_head(text: str) -> JournalHead:
    match = re.fullmatch(r"(\d{1,18}):([0-9a-f]{64})", text.strip().lower())
    if match is None:
        raise ConfigError("--expect: expected a journalhead, <position>:<64 hexadecimal digits>")
    return JournalHead(int(match[1]), match[2])


def _exported_row(row: JournalRow) -> dict[str, object]:
    return {
        "position": row.position,
        "at": row.at,
        "kind": row.kind,
        "eventKey": row.event_key,
        "transition": row.transition,
        "hash": row.hash,
        "body": orjson.Fragment(row.body),  # the hash covers these bytes
    }
