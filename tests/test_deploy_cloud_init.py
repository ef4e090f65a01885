"""The user data for scale sets is valid, holds no secret, and fetches it with the VM's identity."""

from __future__ import annotations

import asyncio
import getpass
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pytest_aiohttp import AiohttpServer

from relay.config import load
from tests.cli.command import CommandResult, run_program
from tests.test_deploy import ROOT, read_yaml

FOLDER = ROOT / "deploy/cloud-init"
ROLES = ("agent", "plain")
SETUP = "/usr/local/sbin/imds-relay-setup"
FETCH = "/usr/local/sbin/imds-relay-fetch-secret"
URL = "amqps://vmss-web:secret@broker.example.com/prod"


def files_of(role: str) -> dict[str, str]:
    """Return the files that the user data writes, by path."""
    written = read_yaml(FOLDER / f"{role}.yaml")["write_files"]
    return {file["path"]: file["content"] for file in written}


# Installing it for a test would set up the machine at its next boot.


@pytest.mark.parametrize("role", ROLES)
def test_the_setup_runs_once_and_is_written_before(role: str) -> None:
    document = read_yaml(FOLDER / f"{role}.yaml")
    assert document["runcmd"] == [[SETUP]]
    modes = {file["path"]: file["permissions"] for file in document["write_files"]}
    assert modes[SETUP] == modes[FETCH] == "0755"
    subprocess.run(["sh", "-n"], input=files_of(role)[SETUP], text=True, check=True)


@pytest.mark.parametrize("role", ROLES)
def test_the_user_data_has_placeholders_and_no_secret(role: str) -> None:
    """Every process of the VM can read it."""
    text = (FOLDER / f"{role}.yaml").read_text()
    assert not re.search(r"amqps?://|://[^/\s]*:[^/\s]*@", text)
    settings = dict(
        line.split("=", 1) for line in files_of(role)["/etc/imds-relay/setup.env"].splitlines()
    )
    used = set(re.findall(r"\$([A-Z][A-Z0-9_]+)", files_of(role)[SETUP]))
    assert used == set(settings)
    assert settings["SOURCE_SHA256"] == "0" * 64


@pytest.mark.parametrize("role", ROLES)
def test_the_relay_takes_the_configuration_of_the_user_data(role: str, tmp_path: Path) -> None:
    text = files_of(role)["/etc/imds-relay/relay.yaml"]
    assert "url_file: /etc/imds-relay/broker-url\n" in text
    assert "/etc/imds-relay/broker-url imds-relay\n" in files_of(role)[SETUP]
    (tmp_path / "broker-url").write_text(URL)
    (tmp_path / "relay.yaml").write_text(text.replace("/etc/imds-relay", str(tmp_path)))
    fleet = load(tmp_path / "relay.yaml", {}).config.fleet
    assert (fleet.role if fleet else "plain") == role


# --- the program that fetches the secret


async def token(request: web.Request) -> web.Response:
    """Give a token, as the metadata service of a VM does."""
    if request.headers.get("Metadata") != "true" or request.query["api-version"] == "":
        return web.Response(status=400)
    return web.json_response({"access_token": f"token for {request.query['resource']}"})


async def secret(request: web.Request) -> web.Response:
    """Give the secret, as a Key Vault does."""
    if request.headers.get("Authorization") != "Bearer token for https://vault.azure.net":
        return web.Response(status=401)
    return web.json_response({"value": URL, "id": f"{request.url}/1"})


@pytest.fixture
async def azure(aiohttp_server: AiohttpServer) -> TestServer:
    """The metadata service and the Key Vault of the VM."""
    application = web.Application()
    application.router.add_get("/metadata/identity/oauth2/token", token)
    application.router.add_get("/secrets/agent-broker-url", secret)
    return await aiohttp_server(application)


async def fetch(azure: TestServer, folder: Path, name: str) -> CommandResult:
    """Run the program."""
    program, file = folder / "fetch", str(folder / "broker-url")
    program.write_text(files_of("agent")[FETCH])
    url = f"http://127.0.0.1:{azure.port}"
    command = (sys.executable, str(program), url, name, file, getpass.getuser())
    return await asyncio.to_thread(run_program, *command, IMDS=url, PATIENCE="0")


async def test_the_vm_fetches_the_secret_for_its_owner_alone(
    azure: TestServer, tmp_path: Path
) -> None:
    assert await fetch(azure, tmp_path, "agent-broker-url") == CommandResult(0, "", "")
    file = tmp_path / "broker-url"
    assert file.read_text() == URL
    assert stat.S_IMODE(file.stat().st_mode) == 0o400


async def test_an_absent_secret_ends_setup_and_keeps_the_old(
    azure: TestServer, tmp_path: Path
) -> None:
    (tmp_path / "broker-url").write_text("amqps://old")
    result = await fetch(azure, tmp_path, "another")
    assert result.code == 1
    assert "another of http://127.0.0.1" in result.err
    assert "404" in result.err
    assert (tmp_path / "broker-url").read_text() == "amqps://old"
