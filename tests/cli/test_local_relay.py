"""How the verbs find the relay of this machine, and what they read of its configuration."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from relay.api.local_socket import STATE_FILE_HEADER, state_file_id
from relay.cli._exit_codes import CommandFailed
from relay.cli._local_relay import find_socket, is_socket_owner_trusted
from relay.config import Config
from relay.config.relay_location import locate_relay_addresses_and_state_file
from relay.errors import ConfigError, RelayError
from tests.cli.command import run_async, run_command
from tests.cli.running_relay import running_relay


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the service and the user of the machine where the tests run."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "nobody"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


async def test_verbs_reach_a_relay_whose_configuration_names_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_relay(tmp_path, api={"socket": "auto"}) as relay:
        assert (await relay.run("events")).out == "no events\n"
        monkeypatch.chdir(tmp_path)
        assert (await run_async("events")).out == "no events\n"


async def test_verbs_need_no_secret_and_no_variable_of_the_relay(tmp_path: Path) -> None:
    """A user of the socket need not have them, and the configuration may be half edited."""
    async with running_relay(tmp_path, api={"socket": "auto"}) as relay:
        (tmp_path / "relay.yaml").write_text(
            f"scope: ${{NOPE}}\nstore: {{path: {relay.store}}}\nunknown: 1\n"
            "sinks: [{kind: nope, secrets_file: /no/such/file}]\napi: {public_url: 5}\n"
        )
        result = await relay.run("events")
        assert (result.code, result.out, result.err) == (0, "no events\n", "")
        assert (await relay.run("audit")).code == 0


async def test_a_relay_started_beside_its_configuration_is_found_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    async with running_relay(tmp_path, api={"socket": "auto"}) as relay:
        # The default is a state file in the current folder.
        (tmp_path / "relay.yaml").write_text("{}")
        assert (await relay.run("events")).code == 0


def test_where_nothing_answers_every_place_is_named(tmp_path: Path) -> None:
    file = tmp_path / "relay.yaml"
    file.write_text(f"store: {{path: {tmp_path}/x.db}}\napi: {{listen: '0.0.0.0:81', tls: {{}}}}")
    result = run_command("events", "-c", str(file))
    assert (result.code, result.out) == (1, "")
    lines = [line.removeprefix("imds-relay: ") for line in result.err.splitlines()]
    assert lines[0] == (
        "no relay answers on this machine. Is it running? These sockets were tried:"
    )
    assert lines[1] == f"  {tmp_path}/x.sock: No such file or directory"
    assert lines[2] == "  /run/imds-relay/relay.sock: No such file or directory"
    assert lines[3] == f"they are the places of a relay with the configuration {file}"
    assert lines[4] == (
        "for a relay elsewhere, give --url and a key: --url https://127.0.0.1:81 --key-file FILE"
    )


def test_a_socket_that_is_configured_is_the_only_place(tmp_path: Path) -> None:
    file = tmp_path / "relay.yaml"
    file.write_text(f"api: {{socket: {tmp_path}/relay.sock}}")
    result = run_command("events", "-c", str(file))
    assert (result.code, result.err) == (
        1,
        (
            f"imds-relay: no relay answers at {tmp_path}/relay.sock: No such file or directory. "
            "Is the relay running?\n"
        ),
    )


def test_a_configuration_without_a_socket_says_what_to_give(tmp_path: Path) -> None:
    file = tmp_path / "relay.yaml"
    file.write_text("api: {socket: null}")
    result = run_command("events", "-c", str(file))
    assert result.code == 2
    assert result.err.startswith(f"imds-relay: {file} has no api.socket. ")
    assert "give --url and a key: --url http://127.0.0.1:8080 --key-file FILE" in result.err


def test_a_configuration_that_was_named_must_be_readable(tmp_path: Path) -> None:
    file = tmp_path / "relay.yaml"
    result = run_command("events", "-c", str(file))
    assert (result.code, "expected a file that can be read" in result.err) == (2, True)
    file.write_text("a: [")
    result = run_command("events", "-c", str(file))
    assert (result.code, f"{file}:1: expected YAML" in result.err) == (2, True)


async def test_the_service_is_asked_by_those_who_cannot_read_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    async with running_relay(tmp_path) as relay:
        socket = Path(relay.config).with_name("relay.sock")
        unreadable = tmp_path / "etc.yaml"
        unreadable.write_text("a: [")
        location = locate_relay_addresses_and_state_file(
            environment={}, default_paths=(Path("relay.yaml"), unreadable)
        )
        found = await find_socket(location, service_socket=socket)
        assert (found.path, found.headers) == (socket, {})
    with pytest.raises(CommandFailed, match=f"not used of it: {unreadable}:1: expected YAML"):
        await find_socket(location, service_socket=socket)
    with pytest.raises(ConfigError, match="expected YAML"):  # it was named: no other will do
        locate_relay_addresses_and_state_file(environment={"IMDS_RELAY_CONFIG": str(unreadable)})


@pytest.mark.parametrize("folder", ["here", "elsewhere"])
@pytest.mark.parametrize(
    "text",
    ["{}", "store: {path: '${NOPE}/relay.db'}", "api: {socket: null}"],
    ids=["relative", "unknown", "no socket"],
)
async def test_a_relay_that_was_named_is_never_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, folder: str
) -> None:
    """Neither the one of the current folder nor the service is asked in its place."""
    for name in ("here", "there", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / folder)
    (tmp_path / "there/relay.yaml").write_text(text)
    (tmp_path / "there/relay.db").touch()
    async with running_relay(tmp_path / "here", api={"socket": "auto"}):
        location = locate_relay_addresses_and_state_file(tmp_path / "there/relay.yaml")
        with pytest.raises(RelayError):
            await find_socket(location, service_socket=tmp_path / "here/relay.sock")


async def test_a_call_for_one_relay_never_reaches_the_service_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "service").mkdir()
    service_socket = tmp_path / "service.sock"
    async with running_relay(tmp_path / "service", api={"socket": str(service_socket)}) as service:
        file = tmp_path / "relay.yaml"
        file.write_text(f"store: {{path: {tmp_path}/mine.db}}")
        with pytest.raises(CommandFailed) as error:
            await find_socket(
                locate_relay_addresses_and_state_file(file), service_socket=service_socket
            )
        assert f"{service_socket}: the relay there has another state file" in str(error.value)
        file.write_text(f"store: {{path: {service.store}}}")
        found = await find_socket(
            locate_relay_addresses_and_state_file(file), service_socket=service_socket
        )
        assert found.headers == {STATE_FILE_HEADER: state_file_id(service.store)}


async def test_a_relay_of_ones_own_comes_before_the_service(tmp_path: Path) -> None:
    for name in ("service", "own"):
        (tmp_path / name).mkdir()
    async with (
        running_relay(tmp_path / "service") as service,
        running_relay(tmp_path / "own", api={"socket": "auto"}) as own,
    ):
        service_socket = Path(service.config).with_name("relay.sock")
        found = await find_socket(
            locate_relay_addresses_and_state_file(Path(own.config)), service_socket=service_socket
        )
        assert found.path == tmp_path / "own/relay.sock"


@pytest.mark.parametrize(
    ("owner", "folder_owner", "user", "trusted"),
    [(5, 0, 5, True), (0, 0, 5, True), (7, 7, 5, True), (7, 0, 5, False), (7, 5, 5, False)],
    ids=["own", "of root", "of the service", "in /tmp", "in a folder of the user"],
)
def test_a_socket_that_somebody_else_put_into_a_folder_is_not_trusted(
    owner: int, folder_owner: int, user: int, *, trusted: bool
) -> None:
    assert is_socket_owner_trusted(owner, folder_owner, user) is trusted


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", ["relay.yaml", "relay.db", "relay.sock"])
async def test_nobody_leads_a_verb_in_a_shared_folder_to_a_relay_of_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A decision would be lost, and the user would be told that it counts."""
    theirs, shared = tmp_path / "theirs", tmp_path / "shared"
    theirs.mkdir()
    shared.mkdir()
    shared.chmod(0o1777)
    async with running_relay(theirs, api={"socket": "auto"}):
        match what:
            case "relay.yaml":
                (shared / what).write_text(f"api: {{socket: {theirs}/relay.sock}}")
            case _:
                (shared / what).symlink_to(theirs / what)
        os.chown(theirs, 65534, 65534)
        if what != "relay.sock":  # that one leads to the socket of this user until it is asked
            os.chown(theirs / "relay.sock", 65534, 65534)
        os.chown(shared / what, 65534, 65534, follow_symlinks=False)
        monkeypatch.chdir(shared)
        result = await run_async("events")
        assert (result.code in (1, 2), result.out) == (True, "")
        assert "another user" in result.err
        shared.chmod(0o755)  # so root has put it there
        assert (await run_async("events")).out == ("" if what == "relay.sock" else "no events\n")


@pytest.mark.parametrize(
    ("variables", "socket", "url"),
    [
        ({}, "auto", "http://127.0.0.1:8080"),
        ({"API__SOCKET": "/run/x"}, Path("/run/x"), "http://127.0.0.1:8080"),
        ({"API__SOCKET": "null"}, None, "http://127.0.0.1:8080"),
        ({"API": '{"listen": "[::]:9", "tls": {}}'}, "auto", "https://[::1]:9"),
        ({"API": "5", "STORE": "5"}, "auto", "http://127.0.0.1:8080"),
        ({"API": "[", "SINKS": "["}, "auto", "http://127.0.0.1:8080"),
        ({"API__CLIENTS": "["}, "auto", "http://127.0.0.1:8080"),
    ],
    ids=["none", "socket", "no socket", "section", "no section", "no JSON", "another key"],
)
def test_variables_say_where_the_relay_is_too(
    variables: dict[str, str], socket: object, url: str
) -> None:
    environment = {f"IMDS_RELAY_{name}": value for name, value in variables.items()}
    location = locate_relay_addresses_and_state_file(environment=environment, default_paths=())
    assert (location.socket, location.url) == (socket, url)


def test_what_is_not_written_is_the_default(tmp_path: Path) -> None:
    file = tmp_path / "relay.yaml"
    file.write_text("")
    settings = Config()
    location = locate_relay_addresses_and_state_file(file, {})
    assert location.state_files == (settings.store.path, tmp_path / settings.store.path)
    assert location.socket == settings.api.socket
    assert location.url == f"http://{settings.api.listen}"


def test_the_state_file_is_where_the_relay_that_is_meant_may_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, other, service = (tmp_path / name for name in ("here", "other", "service"))
    for folder in (here, other, service):
        folder.mkdir()
        (folder / "relay.yaml").write_text("{}")
    monkeypatch.chdir(here)

    def state_files(
        named: str = "", own: str = "absent.yaml", variable: str = ""
    ) -> tuple[str, ...]:
        location = locate_relay_addresses_and_state_file(
            Path(named) if named else None,
            environment={"IMDS_RELAY_CONFIG": variable},
            default_paths=(Path(own), service / "relay.yaml"),
            service_folder=service,
        )
        assert location.is_own is bool(named or variable or own == "relay.yaml")
        return tuple(map(str, location.state_files))

    assert state_files() == ("relay.db", f"{service}/relay.db")
    assert state_files(own="relay.yaml") == ("relay.db",)
    assert state_files("../other/relay.yaml") == ("relay.db", "../other/relay.db")
    assert state_files(variable="../other/relay.yaml") == ("relay.db", "../other/relay.db")
    (service / "relay.yaml").write_text("store: {path: /x.db}")
    assert state_files() == ("/x.db",)


def test_of_several_state_files_none_is_guessed_if_a_configuration_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    for file in ("relay.db", "other/relay.db", "other/relay.yaml"):
        (tmp_path / file).touch()
    location = locate_relay_addresses_and_state_file(Path("other/relay.yaml"), {})
    with pytest.raises(ConfigError, match="make it an absolute path"):
        location.state_file()
    (tmp_path / "relay.db").unlink()
    assert location.state_file() == Path("other/relay.db")
    unnamed = locate_relay_addresses_and_state_file(
        environment={}, default_paths=(), service_folder=tmp_path / "other"
    )
    assert unnamed.state_file() == tmp_path / "other/relay.db"
    (tmp_path / "relay.db").touch()
    assert unnamed.state_file() == Path("relay.db")


def test_a_variable_in_a_place_that_is_read_is_filled_in_or_named(tmp_path: Path) -> None:
    file = tmp_path / "relay.yaml"
    file.write_text("api:\n  socket: ${WHERE}/relay.sock\n")
    assert locate_relay_addresses_and_state_file(file, {"WHERE": "/x"}).socket == Path(
        "/x/relay.sock"
    )
    location = locate_relay_addresses_and_state_file(file, {})
    assert location.socket == "auto"
    (problem,) = location.problems
    assert problem.endswith("api.socket: expected the environment variable WHERE to be set")
