"""``audit``: the journal, read from the state file with and without a running relay."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import orjson
import pytest

from relay.store.journal import Journal, read_all_rows
from tests.approvals.builders import REDEPLOY, ApprovalFile
from tests.cli.command import run_async, run_command
from tests.cli.running_relay import LOCAL_PRINCIPAL, running_relay
from tests.documented import block
from tests.store.open_store import NOW, append_row, open_file_in

Left = tuple[str, Path]


@pytest.fixture
async def left(tmp_path: Path) -> Left:
    """Return the configuration and state file of a relay that was stopped after a decision."""
    async with running_relay(tmp_path) as relay:
        event = await relay.announce()
        await relay.run("hold", event.event_id, "--reason", "backup runs")
        await relay.run("approvals", "dry-run")
    return relay.config, relay.store


@pytest.fixture
def approvals(tmp_path: Path) -> Iterator[ApprovalFile]:
    file = ApprovalFile(tmp_path / "relay.db")
    yield file
    file.close()


def tamper(store: Path, statement: str) -> None:
    """Change the file as an attacker could: remove the triggers that protect the journal first."""
    with closing(sqlite3.connect(store)) as connection, connection:
        for (name,) in connection.execute(
            "SELECT name FROM sqlite_schema WHERE type = 'trigger'"
        ).fetchall():
            connection.execute(f"DROP TRIGGER {name}")
        connection.execute(statement)


async def test_audit_follows_each_claim_back_to_its_approval(tmp_path: Path) -> None:
    rule = {"name": "one", "approve": {"votes": 1, "from": [LOCAL_PRINCIPAL]}}
    async with running_relay(tmp_path, rules=[rule]) as relay:
        event = await relay.announce()
        await run_async("approve", event.event_id, "-c", relay.config, "--yes")
        await relay.wait_for_webhook("startrequest.accepted", event.event_id)
    good = await run_async("audit", "verify", "-c", relay.config)
    assert good.code == 0
    assert "claims that follow from recorded approvals: 1\n" in good.out


def test_a_claim_without_a_root_is_named(approvals: ApprovalFile) -> None:
    """The chain is whole: somebody wrote the claim who could continue it."""
    approvals.record_document(REDEPLOY)
    approvals.submit(of=REDEPLOY)
    approvals.claim()
    *_, row = read_all_rows(approvals.connection)
    note = {**orjson.loads(row.body), "granted": 1}
    approvals.transact(
        lambda tx: tx.journal.append_non_event_row(NOW, "claim", note, event_key=row.event_key)
    )
    result = run_command("audit", "verify", "--store", str(approvals.path))
    assert (result.code, result.out) == (1, "")
    message = " ".join(result.err.split())
    where = f"the claim at position {row.position + 1} (e-1)"
    assert f"{where} follows from no approval.granted" in message


def test_a_claim_whose_votes_were_pruned_is_counted(approvals: ApprovalFile) -> None:
    approvals.record_document(REDEPLOY)
    approvals.submit(of=REDEPLOY)
    claims = approvals.claim()
    approvals.accept(claims)
    claimed = next(row for row in read_all_rows(approvals.connection) if row.kind == "claim")
    approvals.connection.execute(
        "INSERT INTO checkpoint SELECT position, hash, at FROM journal WHERE position = ?",
        (claimed.position - 1,),
    )
    approvals.connection.execute("DELETE FROM journal WHERE position < ?", (claimed.position,))
    approvals.record_document()  # a live event would keep its rows
    result = run_command("audit", "verify", "--store", str(approvals.path))
    assert (result.code, "approvals: 1, 1 of them from before the kept" in result.out) == (0, True)


async def test_a_head_that_was_seen_elsewhere_shows_a_tail_that_was_cut(left: Left) -> None:
    config, store = left
    head = (await run_async("audit", "verify", "-c", config, "--json")).json["journalhead"]
    assert (await run_async("audit", "verify", "-c", config, "--expect", head)).code == 0
    tamper(store, "DELETE FROM journal WHERE position = 3")
    assert (await run_async("audit", "-c", config)).code == 0
    result = await run_async("audit", "verify", "-c", config, "--expect", head)
    cut = "it ends at position 2, 3 was seen before: its tail was cut"
    assert (result.code, result.err) == (1, f"imds-relay: journal: {cut}\n")


def documented_verifier() -> str:
    """The program of the page that says how to run it, which needs nothing of ours."""
    return block("docs/operations.md", "python", "Proving the journal elsewhere")


def verify_export(export: str) -> str:
    command = [sys.executable, "-I", "-c", documented_verifier()]
    result = subprocess.run(
        command, input=export, capture_output=True, text=True, check=False, timeout=30
    )
    return result.stdout if result.returncode == 0 else result.stderr.strip().splitlines()[-1]


async def test_what_is_exported_proves_itself(left: Left) -> None:
    """The chain is computed again from the lines alone, by the program of the documentation."""
    config, _ = left
    exported = (await run_async("audit", "export", "-c", config)).out
    kinds = [orjson.loads(line)["kind"] for line in exported.splitlines()]
    assert kinds == ["checkpoint", "event.scheduled", "approval.recorded", "mode", "head"]
    head = (await run_async("audit", "verify", "-c", config, "--json")).json["journalhead"]
    assert verify_export(exported) == f"it holds: {head}\n"


async def test_an_export_proves_itself_across_pruning_and_with_any_text(tmp_path: Path) -> None:
    path, path_text = tmp_path / "relay.db", str(tmp_path / "relay.db")
    with open_file_in(path) as file:
        journal = Journal(file.connection)
        for number, key in enumerate(("e", "é\u2028", '"body":{}', "\x01\x7f\\", None, "last")):
            at, body = NOW + timedelta(minutes=number), orjson.dumps({"body": key})
            append_row(journal, at, "event.scheduled", body, event_key=key)
    first = (await run_async("audit", "export", "--store", path_text)).out
    assert verify_export(first).startswith("it holds: 6:")
    with open_file_in(path) as file:
        assert Journal(file.connection).prune(NOW + timedelta(minutes=3), NOW) == 3
    later = (await run_async("audit", "export", "--store", path_text)).out
    assert verify_export(later) == verify_export(first)
    checkpoint = orjson.loads(later.split("\n")[0])
    assert checkpoint["hash"] == orjson.loads(first.split("\n")[3])["hash"]
    with open_file_in(path) as file:
        assert Journal(file.connection).prune(NOW + timedelta(minutes=9), NOW) == 3
    emptied = (await run_async("audit", "export", "--store", path_text)).out
    assert verify_export(emptied) == verify_export(first)
    assert len(emptied.splitlines()) == 2


async def test_a_touched_export_proves_it(left: Left) -> None:
    config, _ = left
    begin, *lines, end = (await run_async("audit", "export", "-c", config)).out.splitlines()
    for touched, problem in (
        ([begin, lines[0], lines[1].replace("backup", "nobody"), lines[2], end], "row 2 is not"),
        ([begin, lines[0], lines[2], end], "row 2 is not"),
        ([begin.replace("00", "01", 1), *lines, end], "row 1 is not"),
    ):
        said = verify_export("\n".join(touched))
        assert said.endswith(f"{problem} the one that was written")
    assert verify_export("\n".join([begin, *lines[:2], end])).endswith("the end is missing")


async def test_a_copy_is_audited_where_it_lies_without_a_configuration(
    left: Left, tmp_path: Path
) -> None:
    _, store = left
    copy = tmp_path / "old.db"
    shutil.copy(store, copy)
    result = await run_async("audit", "--store", str(copy), "--config", "absent.yaml")
    assert result.code == 0
    assert f"the chain of {copy} holds: 3 rows" in result.out
    exported = await run_async("audit", "export", "--store", str(copy), "--config", "absent.yaml")
    assert exported.code == 0
    wrong = await run_async("audit", "--store", str(tmp_path))
    problem = f"--store: expected a relay's state file, {tmp_path}: Is a directory"
    assert (wrong.code, wrong.err) == (1, f"imds-relay: {problem}\n")


@pytest.mark.parametrize(
    "content", [None, b"", b"no database at all" * 100], ids=["absent", "empty", "no database"]
)
def test_a_state_file_that_is_none_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    monkeypatch.chdir(tmp_path)
    store = tmp_path / "relay.db"
    if content is not None:
        store.write_bytes(content)
    for verb in ("verify", "export"):
        result = run_command("audit", verb)
        assert (result.code, result.out) == (1, "")
        assert result.err.startswith(
            "imds-relay: store.path: expected a relay's state file, relay.db: "
        )
        assert len(result.err.splitlines()) == 1
        assert ("Name it with --store FILE" in result.err) is (content is None)
    assert store.exists() is (content is not None)


@pytest.mark.parametrize(
    ("statement", "said", "verb"),
    [
        (
            "UPDATE journal SET body = replace(body, 'backup', 'nobody') WHERE position = 2",
            "imds-relay: journal: the row at position 2 is not the one that was written\n",
            "verify",
        ),
        ("UPDATE journal SET at = CAST(at AS BLOB)", "is not the one that was written", "verify"),
        ("UPDATE journal SET at = CAST(at AS BLOB)", "cannot be read: ", "export"),
        ("UPDATE journal SET body = CAST(body AS TEXT)", "is not the one that was", "verify"),
    ],
)
async def test_a_row_that_was_changed_is_a_sentence(
    left: Left, statement: str, said: str, verb: str
) -> None:
    """The relay sets a file with damaged values aside; whoever examines it runs the audit."""
    _, store = left
    tamper(store, statement)
    result = await run_async("audit", verb, "--store", str(store))
    assert (result.code, result.out if verb == "verify" else "") == (1, "")
    assert said in result.err
    assert len(result.err.splitlines()) == 1


async def test_a_store_named_before_the_verb_is_wrong_usage_and_never_another_file(
    left: Left,
) -> None:
    """Else a damaged copy would be said to hold because the configured file does."""
    config, store = left
    result = await run_async("audit", "--store", str(store), "verify", "-c", config)
    assert (result.code, "behind the verb" in result.err) == (2, True)
