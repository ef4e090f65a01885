"""``check`` and ``doctor`` about signing in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from relay.api import ApiSettings
from relay.api.doctor import diagnose
from relay.doctor_findings import Finding
from tests.api.entra import CLIENT_SECRET, Entra, run_entra
from tests.cli.command import run_command


@pytest.fixture
async def entra() -> AsyncIterator[Entra]:
    """The stand-in for Entra ID."""
    async with run_entra() as running:
        yield running


async def examined(entra: Entra) -> Finding:
    """Return what `doctor` finds about signing in."""
    settings = ApiSettings.model_validate(
        {
            "listen": "127.0.0.1:0",
            "public_url": "https://relay.example.com/",
            "oidc": entra.section(),
        }
    )
    findings, _ = await diagnose(settings, Path("relay.db"))
    (finding,) = (each for each in findings if each.subject == "sign-in")
    return finding


async def test_doctor_prints_the_redirect_uri_and_tries_the_client_secret(entra: Entra) -> None:
    finding = await examined(entra)
    assert finding.state == "ok"
    assert "https://relay.example.com/sign-in/callback, which must be registered" in finding.line
    (form,) = entra.calls_of("token")
    assert (form["grant_type"], form["scope"]) == (
        "client_credentials",
        "https://graph.microsoft.com/.default",
    )


async def test_doctor_finds_a_client_secret_that_has_expired(entra: Entra) -> None:
    entra.secrets = set()
    finding = await examined(entra)
    assert finding.state == "failed"
    assert "invalid_client AADSTS7000215" in finding.line
    assert CLIENT_SECRET not in finding.line


@pytest.mark.parametrize(
    "answer",
    [
        lambda: web.json_response(
            {"error": "temporarily_unavailable", "error_description": "AADSTS90033: later"},
            status=503,
        ),
        lambda: web.Response(text="<html>"),
    ],
)
async def test_doctor_says_so_where_entra_does_not_say(entra: Entra, answer: Any) -> None:
    entra.answers["token"] = answer()
    finding = await examined(entra)
    assert finding.state == "warning"
    assert "did not say whether it accepts the client secret" in finding.line


async def test_doctor_asks_no_other_cloud(entra: Entra) -> None:
    entra.document = {"msgraph_host": None}
    assert (await examined(entra)).state == "warning"
    assert entra.calls_of("token") == []


async def test_doctor_finds_an_issuer_without_endpoints(entra: Entra) -> None:
    entra.answers["discovery"] = web.Response(status=404)
    finding = await examined(entra)
    assert finding.state == "failed"
    assert "correct api.oidc.issuer" in finding.line


@pytest.mark.parametrize(
    ("public_url", "warns"), [("https://relay.example.com", False), ("https://ops.x/relay", True)]
)
def test_check_shows_the_redirect_uri_and_warns_of_a_host_that_others_share(
    tmp_path: Path, public_url: str, warns: bool
) -> None:
    section = Entra(origin="https://login.example.com").section()
    file = tmp_path / "relay.yaml"
    file.write_bytes(orjson.dumps({"api": {"public_url": public_url, "oidc": section}}))
    result = run_command("check", "--config", str(file))
    assert result.code == 0
    assert f"{public_url}/sign-in/callback" in "".join(result.out.split())
    assert CLIENT_SECRET not in result.out + result.err
    assert ("gets the cookies of sessions" in " ".join(result.err.split())) == warns
