"""Profiles: a user's own files that name a relay elsewhere."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from relay.cli._connection_profiles import Profile, cli_profiles_folder, read_profile
from tests.certificates import AUTHORITY, SERVER
from tests.cli.command import CommandResult, run_async, run_command
from tests.cli.running_relay import ALICE_KEY, RunningRelay, running_relay
from tests.documented import block


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the profiles; the current folder has no configuration."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "config/imds-relay"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
async def relay(folder: Path, tmp_path: Path) -> AsyncIterator[RunningRelay]:
    """A relay, and the profile that names it with a key."""
    async with running_relay(tmp_path) as relay:
        write_private(folder / "key", ALICE_KEY)
        (folder / "default.yaml").write_text(f"url: {relay.url}\nkey_file: key\n")
        yield relay


def write_private(file: Path, text: str) -> None:
    """Write a file for its user alone."""
    file.touch(0o600)
    file.write_text(text)


async def test_the_default_profile_is_used_where_nothing_else_names_a_relay(
    relay: RunningRelay, folder: Path, tmp_path: Path
) -> None:
    assert (await run_async("events")).out == "no events\n"
    here = tmp_path / "empty/relay.yaml"
    here.write_text("api: {socket: /no/such/socket}")
    assert "no relay answers at /no/such/socket" in (await run_async("events")).err
    here.unlink()
    (folder / "default.yaml").unlink()
    assert "these are the usual places" in (await run_async("events")).err
    assert relay.url not in (await run_async("events")).err


async def test_a_profile_is_named_and_wins_over_the_environment(
    relay: RunningRelay, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "default.yaml").rename(folder / "west.yaml")
    monkeypatch.setenv("IMDS_RELAY_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("IMDS_RELAY_KEY", "imdsr_key-of-another-relay")
    assert (await run_async("events", "--profile", "west")).out == "no events\n"
    assert (await run_async("events")).code == 1
    assert relay.url not in (await run_async("events")).err


async def test_a_key_goes_to_no_other_url_than_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({"items": [], "next": None})

    async with serving(answer) as url:
        write_private(folder / "key", "imdsr_key-of-the-profile")
        (folder / "default.yaml").write_text("url: http://127.0.0.1:1\nkey_file: key\n")
        assert (await run_async("events", "--url", url)).code == 0
        (folder / "default.yaml").write_text(f"url: {url}\nkey_file: key\n")
        assert (await run_async("events")).code == 0
        (folder / "default.yaml").write_text(f"url: {url}\n")
        monkeypatch.setenv("IMDS_RELAY_KEY", "imdsr_key-of-the-environment")
        assert (await run_async("events")).code == 0
    assert seen == [None, "Bearer imdsr_key-of-the-profile", None]


async def test_the_ca_of_a_profile_replaces_those_of_the_machine(folder: Path) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"items": [], "next": None})

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(SERVER)
    async with serving(answer, context) as url:
        (folder / "default.yaml").write_text(f"url: {url}\n")
        refused = await run_async("events")
        assert refused.code == 1
        assert "certificate of https://127.0.0.1" in refused.err
        assert "name the CA that signed it in --ca-file or ca_file" in refused.err
        (folder / "default.yaml").write_text(f"url: {url}\nca_file: {AUTHORITY}\n")
        assert (await run_async("events")).code == 0
        assert (await run_async("events", "--url", url, "--ca-file", str(AUTHORITY))).code == 0


@asynccontextmanager
async def serving(handler: object, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Yield the URL of a server that answers every GET with the handler."""
    application = web.Application()
    application.router.add_get("/{path:.*}", handler)  # type: ignore[arg-type]
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        scheme = "http" if context is None else "https"
        yield f"{scheme}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def events(folder: Path, text: str) -> CommandResult:
    """Call with a profile of this text."""
    (folder / "default.yaml").write_text(text)
    return run_command("events")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("urls: x", "default.yaml:1: urls: unknown key; did you mean url? There are url, "),
        ("key_file: x", "default.yaml: url: expected this key, but it is missing"),
        ("url: 5", "default.yaml:1: url: expected text"),
        ("url: x", "--url: expected http:// or https:// and a host"),
        ("url: http://127.0.0.1:1\nkey_file: no", "config/imds-relay/no: No such file"),
        ("url: http://127.0.0.1:1\nca_file: no", "--ca-file: expected a file of certificates"),
        ("- url", "expected a mapping of keys"),
    ],
)
def test_a_wrong_profile_says_what_is_wrong(folder: Path, text: str, message: str) -> None:
    result = events(folder, text)
    assert (result.code, message in result.err) == (2, True), result.err


def test_an_unknown_profile_lists_those_that_are_there(folder: Path) -> None:
    (folder / "west.yaml").touch()
    result = run_command("events", "--profile", "wets")
    assert result.code == 2
    assert "did you mean west? There is west" in result.err
    result = run_command("events", "--profile", "../x")
    assert "expected the name of a profile such as prod, got '../x'" in result.err


def test_files_that_all_can_write_are_not_used_and_keys_that_all_can_read_are_warned_of(
    folder: Path,
) -> None:
    write_private(folder / "key", ALICE_KEY)
    text = "url: http://127.0.0.1:1\nkey_file: key\n"
    for mode, warned in ((0o600, False), (0o640, False), (0o644, True)):
        (folder / "key").chmod(mode)
        assert ("warning: everybody on this machine can read" in events(folder, text).err) is warned
    for name in ("key", "default.yaml"):
        (folder / name).chmod(0o666)
        result = run_command("events")
        assert (result.code, f"{folder}/{name}, so it is not used" in result.err) == (2, True)
        (folder / name).chmod(0o600)


def test_the_documented_profile_is_read(folder: Path) -> None:
    (folder / "west.yaml").write_text(block("docs/cli.md", "yaml"))
    assert read_profile("west") == Profile(
        url="https://relay.example.com:8443",
        key_file=folder / "west.key",
        ca_file=folder / "west.pem",
    )


def test_profiles_are_in_the_folder_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli_profiles_folder({}) == tmp_path / ".config/imds-relay"
    assert cli_profiles_folder({"XDG_CONFIG_HOME": "relative"}) == tmp_path / ".config/imds-relay"
    assert cli_profiles_folder({"XDG_CONFIG_HOME": "/x"}) == Path("/x/imds-relay")
