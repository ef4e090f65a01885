"""Looks at the API for `doctor`: whether a relay answers there, or the address is free; and whether tokens could be verified."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from relay.api import ApiSettings, ServerTlsSettings
from relay.api.auth.entra_settings import OidcSettings
from relay.api.server.sockets import open_tcp
from relay.api.server.tls import ServerTlsContext
from relay.diagnostics import Finding, failure, ok, warning
from relay.errors import ConfigError
from relay.files import may_be_folder, may_exist

_TIMEOUT = aiohttp.ClientTimeout(total=5)
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # where one that listens everywhere is asked


async def diagnose(settings: ApiSettings) -> tuple[list[Finding], bool]:
    """What is where the relay listens, and whether it is a relay that runs."""
    findings, runs = await _listener(settings)
    findings.extend(static_findings(settings))
    if settings.tls is not None:
        findings.append(_certificate(settings.tls))
    if settings.oidc is not None:
        findings.append(await _tokens(settings.oidc))
    return findings, runs


def static_findings(settings: ApiSettings) -> Iterator[Finding]:
    """What nobody need be asked for: warnings that follow from the section and the folders of this machine."""
    if settings.socket is not None and not may_be_folder(settings.socket.parent):
        said = f"there is no folder {settings.socket.parent} for {settings.socket}, and without it the relay does not start"
        yield warning(
            "local socket",
            said,
            "make it, or let the service manager make it at start (systemd: RuntimeDirectory)",
        )
    for client in settings.clients:
        if not client.credential_kinds:
            said = "nobody can be this client: it has no key, secrets, certificate's name or RabbitMQ user"
            yield warning(
                f"client {client.name}",
                said,
                "give it key_sha256 (see `imds-relay keys`), secrets, san or amqp_user",
            )


async def _listener(settings: ApiSettings) -> tuple[list[Finding], bool]:
    places = [one for one in (settings.socket, None) if one is None or may_exist(one)]
    for place in places:
        about, shown = (
            ("local socket", str(place)) if place is not None else ("listener", settings.listen)
        )
        try:
            return [await _asked(settings, place, shown)], True
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, PermissionError):
                return [
                    warning(
                        about,
                        f"you may not open {shown}",
                        "join its group, or run doctor as the service's user",
                    )
                ], True
            if isinstance(error, aiohttp.ClientSSLError):
                return [_another(about, shown)], False
        except (aiohttp.ClientError, TimeoutError, ValueError):
            if settings.tls is not None and settings.tls.client_ca_file is not None:
                wants = f"somebody listens on {shown} and wants a client certificate: whether it is a relay is not known"
                return [warning(about, wants, "set api.socket, through which doctor can ask")], True
            return [_another(about, shown)], False
    try:
        for sock in await open_tcp(settings.host, settings.port):
            sock.close()
    except ConfigError as error:
        return [
            failure(
                "listener", str(error), "choose another address in api.listen, or stop who has it"
            )
        ], False
    return [ok("listener", f"no relay runs here, and {settings.listen} is free")], False


async def _asked(settings: ApiSettings, place: Path | None, shown: str) -> Finding:
    """What ``/readyz`` says. Raises what aiohttp raises, and ValueError where no relay answers so."""
    connector = aiohttp.UnixConnector(str(place)) if place is not None else None
    host = _EVERYWHERE.get(settings.host, settings.host)
    host = f"[{host}]" if ":" in host else host
    base = (
        "http://relay"
        if place is not None
        else f"{'https' if settings.tls is not None else 'http'}://{host}:{settings.port}"
    )
    async with (
        aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT, trust_env=False) as session,
        session.get(
            f"{base}/readyz", ssl=False, allow_redirects=False
        ) as answer,  # whose certificate it is, callers see for themselves
    ):
        said: Any = orjson.loads(await answer.content.read(64 * 1024))
        if answer.status not in (200, 503) or not isinstance(said, dict) or "status" not in said:
            raise ValueError("expected a relay's answer")
    if answer.status != 200:
        return failure(
            "relay",
            f"one runs at {shown}, and is not ready: {said.get('detail')}",
            "its log says more",
        )
    troubled = [f"{name} {', '.join(sinks)}" for name, sinks in said["sinks"].items() if sinks]
    if troubled:
        why = "".join(f"; {name}: {reason}" for name, reason in said.get("reasons", {}).items())
        return warning(
            "relay",
            f"one runs at {shown}; of its sinks: {'; '.join(troubled)}{why}",
            "see the sinks below, and its log",
        )
    return ok("relay", f"one runs at {shown}, and is ready")


def _another(about: str, shown: str) -> Finding:
    return failure(
        about,
        f"something that is no relay of this configuration listens on {shown}",
        "choose another address, or stop it",
    )


def _certificate(settings: ServerTlsSettings) -> Finding:
    try:
        ServerTlsContext(settings)
    except ConfigError as error:
        return failure(
            "certificate", str(error), "correct the files of api.tls, and who may read them"
        )
    return ok("certificate", f"{settings.cert_file} and its key can be used")


async def _tokens(settings: OidcSettings) -> Finding:
    from relay.api.auth.entra_tokens import fetch_keys  # noqa: PLC0415  # ten megabytes, for relays that take tokens

    try:
        count = len(await fetch_keys(settings))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        said = str(error) or type(error).__name__
        return failure(
            "keys of the token issuer",
            f"they could not be fetched from keys_url: {said}",
            "correct api.oidc.keys_url",
        )
    return ok("keys of the token issuer", f"{count} fetched")
