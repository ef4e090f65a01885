"""``init --system``: the configuration of the service, with its places and its rights."""

from __future__ import annotations

import grp
import os
import stat
from pathlib import Path

import pytest

from relay.api.settings import SERVICE_SOCKET
from relay.cli import init
from relay.cli.init import initial_configuration, set_service_paths
from relay.config import load
from relay.config.location import SERVICE_STORE, locate_relay
from tests.cli.command import file_names, run_command


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the service, in another folder and for the group of whoever runs the tests."""
    file = tmp_path / "etc/relay.yaml"
    monkeypatch.setattr(init, "SYSTEM_FILE", file)
    monkeypatch.setattr(init, "SERVICE_GROUP", grp.getgrgid(os.getegid()).gr_name)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return file


def test_the_file_names_the_places_of_the_service_and_its_group_can_read_it(file: Path) -> None:
    umask = os.umask(0o077)
    try:
        result = run_command("init", "--system")
    finally:
        os.umask(umask)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"{file} is written. ")
    for path, mode in ((file, 0o640), (file.parent, 0o750)):
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert path.stat().st_gid == os.getegid()
    assert file_names(file.parent) == ["relay.yaml"]
    config = load(file, {}).config
    assert (config.store.path, config.api.socket) == (SERVICE_STORE, SERVICE_SOCKET)
    location = locate_relay(file, {})
    assert (location.state_file(), location.socket) == (SERVICE_STORE, str(SERVICE_SOCKET))
    assert not config.has_no_rule_for_user_events


def test_a_file_that_exists_is_left_as_it_is(file: Path) -> None:
    file.parent.mkdir(0o700)
    file.write_text("scope: mine")
    result = run_command("init", "--system")
    assert (result.code, result.out) == (1, "")
    assert result.err == f"imds-relay: {file} exists, and is left as it is\n"
    assert file.read_text() == "scope: mine"
    assert file_names(file.parent) == ["relay.yaml"]
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_that_of_an_agent_is_written_too(file: Path) -> None:
    assert run_command("init", "--system", "--agent").code == 0
    assert "role: agent" in file.read_text()
    assert locate_relay(file, {}).socket == str(SERVICE_SOCKET)


def test_without_the_group_or_root_it_is_said_what_to_do(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "SERVICE_GROUP", "no-such-group")
    result = run_command("init", "--system")
    assert (result.code, "run systemd-sysusers" in result.err) == (1, True)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    result = run_command("init", "--system")
    assert (result.code, f"expected root, who may write {file}" in result.err) == (2, True)
    assert not file.parent.exists()


def test_only_the_places_differ_from_what_is_printed() -> None:
    printed = initial_configuration().splitlines()
    written = set_service_paths(initial_configuration()).splitlines()
    changed = [line for line in written if line not in printed]
    assert len(written) == len(printed)
    assert [line.split()[:2] for line in changed] == [
        ["path:", str(SERVICE_STORE)],
        ["socket:", str(SERVICE_SOCKET)],
    ]
