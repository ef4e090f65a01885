"""``audit``: verifies and exports the journal of decisions, read from the state file itself.

It works with and without a running relay, and changes nothing.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import orjson
import typer

from relay.cli._options import AsJson, ConfigFile, DefaultGroup, option
from relay.cli._output import CommandFailed, pluralize, print_json, print_json_line, print_lines
from relay.config import locate_relay
from relay.errors import ConfigError, StoreError
from relay.files import may_exist
from relay.store import JournalHead
from relay.store.audit import audit_claims, verify_journal
from relay.store.file import open_for_reading
from relay.store.journal import read_all_rows, read_pruning_checkpoint

audit = typer.Typer(
    cls=DefaultGroup,
    help="Verify and export what was decided, from the journal of the state file. "
    "Without a verb: verify.",
)

StoreFile = Annotated[
    Path | None,
    option(
        "--store", "FILE", "The state file itself, or a copy of it. No configuration is read then."
    ),
]


@audit.command("verify")
def verify(
    *,
    expect: Annotated[
        str | None,
        option(
            "--expect",
            "HEAD",
            "An earlier journalhead, kept elsewhere: shows whether rows were cut off since.",
        ),
    ] = None,
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
            print_json_line(
                {
                    "position": row.position,
                    "at": row.at,
                    "kind": row.kind,
                    "eventKey": row.event_key,
                    "transition": row.transition,
                    "hash": row.hash,
                    "body": orjson.Fragment(row.body),  # the hash covers these bytes
                }
            )
            head = JournalHead(row.position, row.hash)
        print_json_line(
            {"kind": "head", "position": head.position, "hash": head.hash, "journalhead": str(head)}
        )


@contextmanager
def _open_journal(
    store: Path | None, config: Path | None
) -> Iterator[tuple[sqlite3.Connection, Path]]:
    """Yield a snapshot of a file's journal. Raises StoreError if it is none, CommandFailed."""
    path = store or locate_relay(config).state_file()
    if store is None and not may_exist(path):
        raise StoreError(
            f"store.path: expected a relay's state file, {path}: it is not there. "
            "Name it with --store FILE, or its configuration with --config FILE"
        )
    option_name = "store.path" if store is None else "--store"
    with closing(open_for_reading(path, option_name)) as connection:
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
