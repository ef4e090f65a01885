"""Checks of the API for `imds-relay doctor` and `imds-relay check`, as findings for people.

`diagnose` asks the relay that runs with this configuration for its readiness: on the local socket,
else over TCP. If no relay runs, it checks whether the address is free. It also loads the
certificate and asks Entra ID. `static_findings` asks nobody.
"""

from __future__ import annotations

import stat
from asyncio import get_running_loop
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
from yarl import URL

from relay.api.server import make_server_context, open_tcp_sockets
from relay.api.settings import (
    ApiSettings,
    OidcSettings,
    automatic_socket,
    redirect_uri,
    supports_local_sockets,
)
from relay.errors import ConfigError
from relay.files import may_exist
from relay.logs import Finding, failure, ok, warning
from relay.net.http import read_body_start

_TIMEOUT = 5.0


async def diagnose(settings: ApiSettings, state_file: Path) -> tuple[list[Finding], bool]:
    finding, is_running = await _probe_running_relay(settings, state_file)
    findings = [finding, *static_findings(settings, state_file)]
    if settings.tls is not None:
        try:
            make_server_context(settings.tls)
        except ConfigError as error:
            remedy = "correct the files of api.tls, and who may read them"
            findings.append(failure("certificate", str(error), remedy))
        else:
            good = f"{settings.tls.cert_file} and its key can be used"
            findings.append(ok("certificate", good))
    if settings.oidc is not None:
        findings += await _check_entra(settings.oidc, settings.public_url)
    return findings, is_running


def static_findings(settings: ApiSettings, state_file: Path) -> Iterator[Finding]:
    if settings.socket == "auto":
        try:
            automatic_socket(state_file)
        except ConfigError as error:
            remedy = "set api.socket to a shorter path, or to null"
            yield warning("local socket", str(error), remedy)
    elif settings.socket is not None and not may_exist(settings.socket.parent, stat.S_ISDIR):
        yield warning(
            "local socket",
            f"there is no folder {settings.socket.parent} for {settings.socket}, "
            "and without it the relay does not start",
            "make it, or let the service manager make it at start (systemd: RuntimeDirectory)",
        )
    has_sign_in = settings.oidc is not None and settings.oidc.sign_in is not None
    if has_sign_in and urlsplit(settings.public_url or "").path not in ("", "/"):
        yield warning(
            "sign-in",
            "api.public_url has a path: every other program at that host gets the cookies of "
            "sessions, and its pages can act for whoever is signed in",
            "give the relay a host name of its own",
        )
    for client in settings.clients:
        if not client.credential_kinds:
            yield warning(
                f"client {client.name}",
                "nobody can be this client: "
                "it has no key, secrets, certificate's name or RabbitMQ user",
                "give it key_sha256 (see `imds-relay keys`), secrets, san or amqp_user",
            )


async def _probe_running_relay(settings: ApiSettings, state_file: Path) -> tuple[Finding, bool]:
    path = settings.socket
    if path == "auto":
        with suppress(ConfigError):  # `static_findings` warns of it
            path = automatic_socket(state_file)
    if isinstance(path, Path) and supports_local_sockets() and may_exist(path):
        connector = aiohttp.UnixConnector(str(path))
        found = await _ask("local socket", str(path), "http://relay", connector)
        if found is not None:
            return found
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104
    scheme = "http" if settings.tls is None else "https"
    url = str(URL.build(scheme=scheme, host=host, port=settings.port))
    found = await _ask("listener", settings.listen, url, None)
    if found is not None:
        needs_certificate = settings.tls is not None and settings.tls.client_ca_file is not None
        if found[0].about == "listener" and needs_certificate:
            message = (
                f"the program that listens on {settings.listen} needs a client certificate: "
                "doctor cannot check whether it is a relay"
            )
            remedy = "set api.socket: doctor then asks through the local socket"
            return warning("listener", message, remedy), True
        return found
    try:  # whether a relay could listen there
        for sock in await open_tcp_sockets(settings.host, settings.port):
            sock.close()
    except ConfigError as error:
        remedy = "choose another address in api.listen, or stop the program that uses it"
        return failure("listener", str(error), remedy), False
    return ok("listener", f"no relay runs here, and {settings.listen} is free"), False


async def _ask(
    subject: str, address: str, url: str, connector: aiohttp.BaseConnector | None
) -> tuple[Finding, bool] | None:
    """Return what a place answers, and whether a relay seems to run; None: nothing listens there.

    A local socket that this user may not open counts as that of the running relay.
    """
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session,
            # The certificate is not verified: its name is that of callers on other machines.
            session.get(f"{url}/readyz", ssl=False, allow_redirects=False) as response,
        ):
            deadline = get_running_loop().time() + _TIMEOUT
            body: Any = orjson.loads(await read_body_start(response, deadline))
        if response.status in (200, 503) and isinstance(body, dict) and "status" in body:
            return _readiness(address, response.status, body), True
    except aiohttp.ClientConnectorError as error:
        if isinstance(error.os_error, PermissionError):
            remedy = "join its group, or run doctor as the service's user"
            return warning(subject, f"you may not open {address}", remedy), True
        if not isinstance(error, aiohttp.ClientSSLError):
            return None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        pass
    message = f"something that is no relay of this configuration listens on {address}"
    return failure(subject, message, "choose another address, or stop it"), False


def _readiness(address: str, status: int, body: dict[str, Any]) -> Finding:
    if status != 200:
        message = f"one runs at {address}, and is not ready: {body.get('detail')}"
        return failure("relay", message, "its log says more")
    sinks = [f"{state} {', '.join(names)}" for state, names in body["sinks"].items() if names]
    if not sinks:
        return ok("relay", f"one runs at {address}, and is ready")
    reasons = "".join(f"; {sink}: {why}" for sink, why in body.get("reasons", {}).items())
    message = f"one runs at {address}; of its sinks: {'; '.join(sinks)}{reasons}"
    return warning("relay", message, "see the sinks below, and its log")


async def _check_entra(settings: OidcSettings, public_url: str | None) -> list[Finding]:
    """Return what shows without a person: the keys, and with sign-in the endpoints."""
    # Imported here: the library takes ten megabytes, and only relays with api.oidc have it.
    from relay.api.entra import EntraUnavailable, fetch_endpoints, fetch_keys  # noqa: PLC0415

    try:
        findings = [ok("keys of the token issuer", f"{len(await fetch_keys(settings))} fetched")]
    except EntraUnavailable as error:
        remedy = "correct api.oidc.keys_url"
        findings = [failure("keys of the token issuer", str(error), remedy)]
    if settings.sign_in is None or public_url is None:
        return findings
    try:
        await fetch_endpoints(settings)
    except EntraUnavailable as error:
        text = f"the endpoints of Entra ID could not be looked up: {error}"
        remedy = "correct api.oidc.issuer, and let this machine reach it"
        return [*findings, failure("sign-in", text, remedy)]
    target = f"Entra ID sends people back to {redirect_uri(public_url)}, which must be registered"
    return [*findings, ok("sign-in", f"{target}; sign in once to try the client secret")]
