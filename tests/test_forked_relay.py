"""A forked relay is a process like one with an interpreter of its own."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from relay import __version__
from tests.cli.command import environment, read_until
from tests.forked_relay import ForkedProcess, start_relay


@pytest.mark.parametrize(
    ("arguments", "code", "output", "error"),
    [
        (["--version"], 0, f"imds-relay {__version__}\n", ""),
        (["check", "-c", "absent.yaml"], 2, "", "absent.yaml"),
    ],
    ids=["a command that succeeds", "a command that fails"],
)
async def test_it_has_arguments_output_and_an_exit_code(
    arguments: list[str], code: int, output: str, error: str, tmp_path: Path
) -> None:
    process = await start_relay(*arguments, environment=environment(), cwd=tmp_path)
    assert isinstance(process, ForkedProcess)
    out, err = await process.communicate()
    assert (process.returncode, out.decode()) == (code, output)
    assert error in err.decode()


async def test_it_has_a_folder_and_variables(tmp_path: Path) -> None:
    (tmp_path / "relay.yaml").write_text("scope: of-the-file\n")
    own = environment(IMDS_RELAY_SCOPE="of-the-variable")
    process = await start_relay("check", "-c", "relay.yaml", environment=own, cwd=tmp_path)
    out, _ = await process.communicate()
    assert b"of-the-variable" in out


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 0)], ids=["killed", "stopped"]
)
async def test_a_signal_ends_it(number: signal.Signals, code: int) -> None:
    process = await start_relay("simulate", "--port", "0", environment=environment())
    await read_until(process.stdout, "finds its IMDS at")
    process.send_signal(number)
    await process.communicate()
    assert process.returncode == code
    process.send_signal(number)  # it has ended: nothing happens


async def test_other_variables_get_an_interpreter_of_their_own() -> None:
    process = await start_relay("--version", environment=environment(COLUMNS="40"))
    assert not isinstance(process, ForkedProcess)
    out, _ = await process.communicate()
    assert (process.returncode, out.decode()) == (0, f"imds-relay {__version__}\n")
