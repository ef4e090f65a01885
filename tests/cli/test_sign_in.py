"""``check`` and ``doctor`` about signing in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from relay.api.doctor import diagnose
from relay.api.settings import ApiSettings
from relay.logs import Finding
from tests.api.entra import Entra, run_entra


@pytest.fixture
async def entra() -> AsyncIterator[Entra]:
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


async def test_doctor_prints_the_redirect_uri(entra: Entra) -> None:
    finding = await examined(entra)
    assert finding.state == "ok"
    assert "https://relay.example.com/sign-in/callback, which must be registered" in finding.line


async def test_doctor_finds_an_issuer_without_endpoints(entra: Entra) -> None:
    entra.answers["discovery"] = web.Response(status=404)
    finding = await examined(entra)
    assert finding.state == "failed"
    assert "correct api.oidc.issuer" in finding.line
