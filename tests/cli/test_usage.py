"""All verbs: help, exit codes, one sentence for an error, and how times and names are printed."""

from __future__ import annotations

import asyncio
import io
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from typing_extensions import override

from relay import __version__
from relay.cli import VERBS
from relay.cli._output import (
    CommandFailed,
    RefusedByPolicy,
    error_text,
    exit_code,
    format_duration,
    format_local_time,
    pluralize,
    strip_control,
)
from relay.cli._tables import print_table
from relay.errors import ConfigError, StoreError
from tests.cli.command import (
    ROOT,
    environment,
    run_command,
    run_process,
    run_program,
    serve_handler,
    start_process,
)


def test_every_verb_is_there_and_says_what_it_does() -> None:
    page = (ROOT / "docs/cli.md").read_text()
    documented = set(re.findall(r"^- `(\w+)", page, re.MULTILINE))
    assert documented == {verb for verbs in VERBS.values() for verb in verbs}
    for verb in documented:
        result = run_command(verb, "--help")
        assert result.code == 0
        assert "Usage: imds-relay" in result.out
    overview = run_command("--help").out
    assert overview.index("─ Watch") < overview.index("│ explain") < overview.index("─ Decide")


def test_run_loads_no_other_verb_and_no_library_that_it_may_never_use() -> None:
    program = (
        "import sys, relay.app, relay.roles.plain; from relay.cli import make_app; "
        "from relay.api.routes import ROUTES; "
        "make_app(['run']); print(*sys.modules)"
    )
    loaded = run_program(sys.executable, "-c", program).out.split()
    modules = {f"relay.cli.{file.stem}" for file in (ROOT / "relay/cli").glob("[a-z]*.py")}
    others = modules - {"relay.cli.run"}
    assert "relay.cli.run" in loaded
    unused = {"rich", "prometheus_client", "relay.simulator", "apprise"}
    unused |= {"aio_pika", "aiormq", "pamqp", "jwt", "relay.api.sign_in"}
    assert sorted({*others, *unused} & {*loaded}) == []


def test_without_a_verb_there_is_help_and_exit_code_2() -> None:
    result = run_process()
    assert result.code == 2
    assert "redeliver" in result.out


def test_the_version_is_printed() -> None:
    assert run_command("--version").out == f"imds-relay {__version__}\n"


ELSEWHERE = "--url http://127.0.0.1:9 --key k"
HOLD = f"holds add {ELSEWHERE} --reason r"
KEYS_THAT_NO_HEADER_CAN_CARRY = ("a\nb", "ключ", "a\x00b")
WRONG = [
    ("fly", "No such command 'fly'. See imds-relay --help\n"),
    ("events --1234567890", "No such option: --1234567890. See imds-relay events --help\n"),
    ("show", "Missing argument 'EVENT'. See imds-relay show --help\n"),
    ("approvals maybe", "'MODE': 'maybe' is not one of 'on', 'dry-run', 'off'. See imds-relay app"),
    ("holds fly", "No such command 'fly'. See imds-relay holds --help\n"),
    ("keys extra", "(extra). See imds-relay keys --help\n"),
    ("keys --name 'a b'", "got 'a b'. See imds-relay keys --help\n"),
    *(
        (f"redeliver {ELSEWHERE} {each}", "expected an id, --sink or --all")
        for each in ("", "7 --all", "7 --sink x")
    ),
    (
        "schema event.new",
        "`imds-relay schema --list`, got 'event.new'; did you mean event.ended?\n",
    ),
    ("events -c /absent/relay.yaml", "/absent/relay.yaml: expected a file that can be read"),
    (f"{HOLD} --for 1h", "expected conditions, such as"),
    (f"{HOLD} --for 1h", "or --every-event, got neither"),
    (f"{HOLD} --type Reboot --every-event --for 1h", "or --every-event, got both"),
    (f"{HOLD} --type Reboot", "expected one of --for and --ends, got neither"),
    (f"{HOLD} --type Reboot --for 1h --ends 2026-01-01", "--ends, got both"),
    (f"{HOLD} --type Reboot --for soon", "--for: expected a duration"),
    (f"{HOLD} --type Reboot --for 999999999999d", "--for: expected a time that"),
    (f"{HOLD} --type Reboot --ends soon", "--ends: expected a time"),
    ("simulate nope", "expected a YAML file or the name of a playbook, got 'nope'"),
    ("simulate preemt", "did you mean preempt"),
    ("simulate absent.yaml", "absent.yaml: expected a readable file"),
    ("simulate --scale 0", "expected more than 0"),
    ("simulate --scale x", "--scale"),
    ("simulate --port 99999", "--port"),
    ("simulate --once", "expected a playbook that can end"),
    *(
        (f"audit verify --expect '{head}'", "--expect: expected a journalhead, <position>:<64 hex")
        for head in ("5", "x:y", "1:abc", "-1:" + "0" * 64)
    ),
    *(
        (f"events --url {url}", "--url: expected http:// or https:// and a host")
        for url in ("relay.example.com:8443", "ftp://x", "http://", "http://[x", "http://x:y")
    ),
    *(
        (f"events --url {url}", "without user and query")
        for url in ("http://a:b@x", "http://x?a=b")
    ),
    *(
        (f"events {ELSEWHERE} --key '{key}'", "expected a bearer key as `imds-relay keys` prints")
        for key in KEYS_THAT_NO_HEADER_CAN_CARRY
    ),
]


@pytest.mark.parametrize(("command", "sentence"), WRONG, ids=[repr(each) for each, _ in WRONG])
def test_wrong_usage_is_one_sentence_and_code_2(command: str, sentence: str) -> None:
    result = run_command(*shlex.split(command))
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("imds-relay: ")
    assert sentence in result.err
    assert len(result.err.splitlines()) == 1
    assert not any(key in result.err for key in KEYS_THAT_NO_HEADER_CAN_CARRY)


async def test_ctrl_c_is_no_traceback() -> None:
    called = asyncio.Event()

    async def silent(_: web.Request) -> web.Response:
        called.set()
        await asyncio.sleep(3600)
        return web.Response()

    async with serve_handler(silent) as url, start_process("events", "--url", url) as command:
        async with asyncio.timeout(60):
            await called.wait()
        command.send_signal(signal.SIGINT)
        out, err = await command.communicate()
    assert (command.returncode, out, err) == (1, b"", b"")


_SIGINT_DURING_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "relay.cli.demo":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored in the background
from relay.__main__ import main
main()
"""


def test_ctrl_c_while_it_still_loads_is_no_traceback() -> None:
    """Loading takes seconds on a busy machine."""
    result = run_program(sys.executable, "-c", _SIGINT_DURING_IMPORT)
    assert (result.code, result.out, result.err) == (1, "", "")


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command, said = (sys.executable, "-m", "relay", "schema"), subprocess.PIPE
    result = subprocess.run(
        command, env=environment(), stdout=writer, stderr=said, check=False, timeout=120
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (ConfigError("a: expected b"), 2, "a: expected b"),
        (RefusedByPolicy("refused: no"), 3, "refused: no"),
        (CommandFailed("no"), 1, "no"),
        (StoreError("held"), 1, "held"),
        (FileNotFoundError(2, "No such file", "x"), 1, "x: No such file"),
        (TimeoutError(), 1, "it took too long"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_every_error_has_a_code_and_a_sentence(error: Exception, code: int, sentence: str) -> None:
    assert (exit_code(error), error_text(error)) == (code, sentence)


def test_a_bug_names_its_file_and_line() -> None:
    with pytest.raises(TypeError) as error:
        strip_control(None)  # type: ignore[arg-type]  # the bug
    assert error_text(error.value).startswith("this is a bug in imds-relay, please report it: ")
    assert "(_output.py:" in error_text(error.value)


# --- what a person reads


@given(st.text())
def test_printed_text_never_moves_the_cursor(text: str) -> None:
    assert all(char.isprintable() or char == "\n" for char in strip_control(text))
    assert len(strip_control(text)) == len(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.15, "150 ms"),
        (1, "1 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (147, "2 min 27 s"),
        (722, "12 min"),
        (3600, "1 h"),
        (11_100, "3 h 5 min"),
        (86_400, "1 d"),
        (187_200, "2 d 4 h"),
        (34_560_000, "400 d"),
    ],
)
def test_lengths_of_time_are_spoken(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_moments_are_local_and_say_how_far_away_they_are() -> None:
    now = datetime(2026, 4, 11, 12, 0, tzinfo=UTC)
    today, tomorrow = now + timedelta(minutes=12), now + timedelta(days=1)
    local = f"{today.astimezone():%H:%M:%S}"
    assert format_local_time(today.isoformat(), now) == f"{local} (in 12 min)"
    later = today + timedelta(minutes=12)
    assert format_local_time(today.isoformat(), later) == f"{local} (12 min ago)"
    assert format_local_time(today.isoformat(), now, relative=False) == local
    in_a_day = f"{tomorrow.astimezone():%Y-%m-%d %H:%M:%S} (in 1 d)"
    assert format_local_time(tomorrow.isoformat(), now) == in_a_day
    assert format_local_time(None) is None
    assert format_local_time("soon") == "soon"


def test_numbers_are_spoken() -> None:
    assert (pluralize(1, "vote"), pluralize(2, "vote")) == ("1 vote", "2 votes")
    assert pluralize(0, "try") == "0 tries"


# --- tables fit the terminal


EVENT_ID = "C7061BAC-AFDC-4513-B24B-AA5F13A16123"
SETS = "aks-nodepool1-12345678-vmss_0, aks-nodepool1-12345678-vmss_1 and 97 more"


class Terminal(io.StringIO):
    @override
    def isatty(self) -> bool:
        return True


def printed(columns: tuple[str, ...], rows: list[tuple[object, ...]]) -> list[str]:
    """Return the lines of a table on a terminal of 80 columns."""
    with pytest.MonkeyPatch.context() as patch:
        terminal = Terminal()
        patch.setattr(sys, "stdout", terminal)
        patch.setenv("COLUMNS", "80")
        print_table(columns, rows, empty="nothing")
    return re.sub(r"\x1b\[\d+m", "", terminal.getvalue()).splitlines()


CELLS = st.one_of(st.none(), st.integers(), st.text(max_size=90), st.just(SETS), st.just(EVENT_ID))


@given(st.lists(st.tuples(CELLS, CELLS, CELLS, CELLS, CELLS), min_size=1, max_size=4))
def test_tables_fit_the_terminal_and_nothing_is_cut(rows: list[tuple[object, ...]]) -> None:
    columns = ("one", "two", "three", "four", "five")
    lines = printed(columns, rows)
    assert max(map(cell_len, lines)) <= 80
    shown = Counter("".join("".join(lines).split()))
    cells = [strip_control("–" if cell is None else str(cell)) for row in rows for cell in row]
    assert shown == Counter("".join("".join([*columns, *cells]).split()))


# --- completion


def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    """The whole way: the script that the command prints, in a real bash."""
    command = tmp_path / "imds-relay"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m relay "$@"\n')
    command.chmod(0o755)
    program = (
        'eval "$(imds-relay --show-completion)"\n'
        "COMP_WORDS=(imds-relay expl); COMP_CWORD=1\n"
        '_imds_relay_completion imds-relay; echo "${COMPREPLY[@]}"\n'
    )
    path = f"{tmp_path}:{os.environ['PATH']}"
    result = run_program("bash", "--norc", "-c", program, PATH=path, SHELL="/bin/bash")
    assert (result.out, result.err) == ("explain\n", "")
