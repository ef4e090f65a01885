"""Which relay a verb calls: that of a socket, of a URL with a key, or of the configuration."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from aiohttp import web

from relay.cli.client import find_socket
from relay.config import locate_relay
from relay.errors import ConfigError
from tests.certificates import LOOPBACK
from tests.cli.command import run_async, run_command, serve_handler
from tests.cli.running_relay import running_relay
from tests.sinks.http_receiver import good, listening


async def test_a_relay_whose_configuration_names_no_socket_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    async with running_relay(tmp_path, api={"socket": "auto"}) as relay:
        assert (await relay.run("events")).out == "no events\n"
        monkeypatch.chdir(tmp_path)
        assert (await run_async("events")).out == "no events\n"
        # The default is a state file in the folder in which the relay runs.
        (tmp_path / "relay.yaml").write_text("{}")
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert (await relay.run("events")).code == 0
        assert (await run_async("events", "--socket", str(tmp_path / "relay.sock"))).code == 0


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


@pytest.mark.parametrize(
    ("text", "code", "error"),
    [
        ("store: {path: FOLDER/x.db}", 1, "no relay answers at FOLDER/x.sock: No such file or"),
        ("api: {socket: FOLDER/none.sock}", 1, "no relay answers at FOLDER/none.sock: No such"),
        ("api: {socket: null}", 2, "relay.yaml has no api.socket. Remove `socket: null`, or give"),
        ("api: {socket: '${NOPE}/x'}", 2, "expected the environment variable NOPE to be set"),
        ("a: [", 2, "relay.yaml:1: expected YAML"),
    ],
)
def test_where_no_relay_can_be_called_it_is_said_what_to_do(
    tmp_path: Path, text: str, code: int, error: str
) -> None:
    file = tmp_path / "relay.yaml"
    file.write_text(text.replace("FOLDER", str(tmp_path)))
    result = run_command("events", "-c", str(file))
    assert (result.code, result.out) == (code, "")
    assert error.replace("FOLDER", str(tmp_path)) in result.err


@pytest.mark.parametrize("folder", ["here", "elsewhere"])
@pytest.mark.parametrize("text", ["{}", "api: {socket: null}"], ids=["relative", "no socket"])
async def test_a_relay_that_was_named_is_never_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, folder: str
) -> None:
    """Neither the one of the current folder nor the service answers in its place."""
    for name in ("here", "there", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / folder)
    (tmp_path / "there/relay.yaml").write_text(text)
    (tmp_path / "there/relay.db").touch()
    async with running_relay(tmp_path / "here", api={"socket": "auto"}):
        result = await run_async("events", "-c", str(tmp_path / "there/relay.yaml"))
        assert (result.code in (1, 2), result.out) == (True, "")


async def test_a_key_goes_to_the_url_that_was_given_with_it_and_to_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMDS_RELAY_KEY", "imdsr_of-an-operator")
    keys: list[str | None] = []

    async def handler(request: web.Request) -> web.Response:
        keys.append(request.headers.get("Authorization"))
        return web.json_response({"items": [], "next": None})

    application = web.Application()
    application.router.add_get("/v1/events", handler)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(tmp_path / "x.sock")).start()
        async with serve_handler(handler) as url:
            assert (await run_async("events", "--url", url)).code == 0
            monkeypatch.setenv("IMDS_RELAY_URL", url)
            assert (await run_async("events", "--socket", str(tmp_path / "x.sock"))).code == 0
    finally:
        await runner.cleanup()
    assert keys == ["Bearer imdsr_of-an-operator", None]


def test_the_socket_is_that_of_the_state_file_whatever_else_runs(tmp_path: Path) -> None:
    file = tmp_path / "relay.yaml"
    file.write_text("store: {path: mine.db}")
    for name in ("mine.db", "relay.sock", "mine.sock"):
        (tmp_path / name).touch()
    assert find_socket(None, file) == tmp_path / "mine.sock"


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
        os.chown(shared / what, 65534, 65534, follow_symlinks=False)
        monkeypatch.chdir(shared)
        result = await run_async("events")
        assert (result.code, result.out, "another user" in result.err) == (2, "", True)


@pytest.mark.parametrize(
    ("variables", "socket"),
    [
        ({}, "auto"),
        ({"API__SOCKET": "/run/x"}, "/run/x"),
        ({"API__SOCKET": "null"}, None),
        ({"API": '{"socket": "/run/y"}'}, "/run/y"),
        ({"API": "5", "STORE": "5"}, "auto"),
        ({"API__CLIENTS": "[", "SINKS": "["}, "auto"),
    ],
    ids=["none", "socket", "no socket", "section", "no section", "another key"],
)
def test_variables_tell_where_the_relay_is(variables: dict[str, str], socket: str | None) -> None:
    environment = {f"IMDS_RELAY_{name}": value for name, value in variables.items()}
    assert locate_relay(environment=environment).socket == socket


def test_of_several_state_files_none_is_guessed_if_a_configuration_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    for file in ("relay.db", "other/relay.db", "other/relay.yaml"):
        (tmp_path / file).touch()
    location = locate_relay(Path("other/relay.yaml"), {})
    with pytest.raises(ConfigError, match="make it an absolute path"):
        location.state_file()
    (tmp_path / "relay.db").unlink()
    assert location.state_file() == Path("other/relay.db")


async def test_the_other_scheme_is_proposed_where_only_one_side_speaks_tls() -> None:
    async def no_relay(_: web.Request) -> web.Response:
        return web.Response()

    async with listening(good, tls=True) as tls, serve_handler(no_relay) as plain:
        for right, wrong in (
            (plain, plain.replace("http", "https")),
            (f"https://127.0.0.1:{tls.port}", f"http://127.0.0.1:{tls.port}"),
        ):
            result = await run_async("events", "--url", wrong)
            assert (result.code, wrong in result.err, "[SSL" in result.err) == (1, True, False)
            assert result.err.endswith(f"TLS, try {right}\n")


def test_a_socket_that_this_user_may_not_look_at_has_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "relay.yaml"
    file.write_text(f"store: {{path: {tmp_path}/relay.db}}")
    monkeypatch.setattr("relay.cli.client.is_planted", Mock(side_effect=PermissionError(13, "no")))
    result = run_command("events", "-c", str(file))
    assert (result.code, f"you may not open {tmp_path}/relay.sock: " in result.err) == (1, True)
    assert "run this as the relay's user, or use --url and a key" in result.err


async def test_a_ca_file_says_which_certificate_is_trusted(tmp_path: Path) -> None:
    async with listening(good, tls=True) as server:
        call = ("events", "--url", f"https://127.0.0.1:{server.port}")
        for ca_file, code, told in (
            (None, 1, f"certificate of https://127.0.0.1:{server.port} was refused: self-signed"),
            (LOOPBACK, 1, "expected an answer in JSON"),  # of this receiver, which is no relay
            (tmp_path / "none", 2, "--ca-file: expected a file of certificates"),
            (Path(__file__), 2, "no certificate in PEM"),
        ):
            result = await run_async(*call, *(("--ca-file", str(ca_file)) if ca_file else ()))
            assert (result.code, told in " ".join(result.err.split())) == (code, True), result.err
