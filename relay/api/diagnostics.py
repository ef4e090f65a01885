"""Checks of the API for `imds-relay doctor` and `imds-relay check`, as findings for people.

`diagnose` asks the relay that runs with this configuration for its readiness. It tries the places
where that relay may listen: local sockets first, then TCP. If no relay runs, it checks whether the
address is free. It also loads the certificate and asks Entra ID. `static_findings` asks nobody.
"""

from __future__ import annotations

import os
from asyncio import get_running_loop
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from relay.api.auth.entra_settings import OidcSettings, redirect_uri
from relay.api.local_socket import (
    SERVICE_SOCKET,
    STATE_FILE_HEADER,
    automatic_places,
    socket_paths_of_state_file,
    state_file_id,
    supports_local_sockets,
)
from relay.api.server.sockets import make_server_context, open_tcp_sockets
from relay.api.settings import ApiSettings, ServerTlsSettings
from relay.doctor_findings import Finding, failure, ok, warning
from relay.errors import ConfigError
from relay.files import folder_may_exist, may_exist
from relay.net.http import read_body_start

_TIMEOUT = 5.0
_LOOPBACK_OF_WILDCARD = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


async def diagnose(settings: ApiSettings, state_file: Path) -> tuple[list[Finding], bool]:
    """Return the findings, and whether a relay with this configuration seems to run."""
    finding, is_running = await _probe_running_relay(settings, state_file)
    findings = [finding, *static_findings(settings, state_file)]
    if settings.tls is not None:
        findings.append(_check_certificate_loads(settings.tls))
    if settings.oidc is not None:
        findings.append(await _check_issuer_signing_keys(settings.oidc))
        if settings.oidc.sign_in is not None and settings.public_url is not None:
            findings.append(await _check_sign_in(settings.oidc, settings.public_url))
    return findings, is_running


def static_findings(settings: ApiSettings, state_file: Path) -> Iterator[Finding]:
    """Return warnings that follow from the configuration and this machine's folders."""
    if settings.socket == "auto":
        yield from _check_automatic_socket_places(state_file)
    elif settings.socket is not None and not folder_may_exist(settings.socket.parent):
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


def _check_automatic_socket_places(state_file: Path) -> Iterator[Finding]:
    places = [place.path.parent for place in automatic_places(state_file, os.environ)]
    # The relay makes the folder of its state file.
    if any(os.access(folder, os.W_OK) or not folder_may_exist(folder) for folder in places):
        return
    if supports_local_sockets():
        yield warning(
            "local socket",
            "api.socket: auto finds no place for it: the folder of the state file and "
            f"{SERVICE_SOCKET.parent} cannot be written, or the path is too long",
            "set api.socket to a path in a folder that this user may write, or to null",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Endpoint:
    """A place where the relay may listen: the local socket, or TCP."""

    subject: str
    address: str
    """The address for people."""
    url: str
    socket: Path | None = None
    state_file: Path | None = None
    """Only the relay with this state file is meant."""


class _AnotherRelayAnswers(Exception):
    """The relay at an endpoint has another state file."""


def _endpoints_to_check(settings: ApiSettings, state_file: Path) -> Iterator[_Endpoint]:
    """Yield the places where this relay may listen, the local sockets first."""
    if settings.socket == "auto":
        sockets = [*socket_paths_of_state_file(state_file, os.environ), SERVICE_SOCKET]
    else:
        sockets = [] if settings.socket is None else [settings.socket]
    for path in filter(may_exist, sockets if supports_local_sockets() else []):
        yield _Endpoint(
            subject="local socket",
            address=str(path),
            url="http://relay",
            socket=path,
            state_file=state_file if settings.socket == "auto" else None,
        )
    scheme = "http" if settings.tls is None else "https"
    host = _LOOPBACK_OF_WILDCARD.get(settings.host, settings.host)
    host = f"[{host}]" if ":" in host else host
    url = f"{scheme}://{host}:{settings.port}"
    yield _Endpoint(subject="listener", address=settings.listen, url=url)


async def _probe_running_relay(settings: ApiSettings, state_file: Path) -> tuple[Finding, bool]:
    """Return the finding about the first place where something listens, and `is_running`.

    A local socket that this user may not open counts as that of the running relay if the
    configuration names it. An automatic one may be that of another relay.
    """
    needs_certificate = settings.tls is not None and settings.tls.client_ca_file is not None
    for endpoint in _endpoints_to_check(settings, state_file):
        subject, address = endpoint.subject, endpoint.address
        try:
            return await _check_readiness(endpoint), True
        except _AnotherRelayAnswers:
            continue
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, PermissionError) and endpoint.state_file is None:
                remedy = "join its group, or run doctor as the service's user"
                return warning(subject, f"you may not open {address}", remedy), True
            if isinstance(error, aiohttp.ClientSSLError):
                return _not_a_relay_finding(endpoint), False
            # Nothing listens there, or only another user may know: try the next place.
        except (aiohttp.ClientError, TimeoutError, ValueError):
            if not needs_certificate:
                return _not_a_relay_finding(endpoint), False
            message = (
                f"the program that listens on {address} needs a client certificate: "
                "doctor cannot check whether it is a relay"
            )
            remedy = "set api.socket: doctor then asks through the local socket"
            return warning(subject, message, remedy), True
    return await _check_address_is_free(settings), False


async def _check_address_is_free(settings: ApiSettings) -> Finding:
    """Return whether a relay could listen there, by listening for a moment."""
    try:
        for sock in await open_tcp_sockets(settings.host, settings.port):
            sock.close()
    except ConfigError as error:
        remedy = "choose another address in api.listen, or stop the program that uses it"
        return failure("listener", str(error), remedy)
    return ok("listener", f"no relay runs here, and {settings.listen} is free")


async def _check_readiness(endpoint: _Endpoint) -> Finding:
    """Return the readiness of the relay there.

    Raises aiohttp's errors, _AnotherRelayAnswers, and ValueError for a response that is not a
    relay's.
    """
    status, body = await _get_readiness(endpoint)
    if status != 200:
        message = f"one runs at {endpoint.address}, and is not ready: {body.get('detail')}"
        return failure("relay", message, "its log says more")
    undelivering = [
        f"{state} {', '.join(names)}" for state, names in body["sinks"].items() if names
    ]
    if undelivering:
        reasons = "".join(f"; {sink}: {why}" for sink, why in body.get("reasons", {}).items())
        return warning(
            "relay",
            f"one runs at {endpoint.address}; of its sinks: {'; '.join(undelivering)}{reasons}",
            "see the sinks below, and its log",
        )
    return ok("relay", f"one runs at {endpoint.address}, and is ready")


async def _get_readiness(endpoint: _Endpoint) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of `/readyz`. Raises as `_check_readiness`."""
    connector = None
    if endpoint.socket is not None:
        connector = aiohttp.UnixConnector(str(endpoint.socket))
    headers = {}
    if endpoint.state_file is not None:
        headers[STATE_FILE_HEADER] = state_file_id(endpoint.state_file)
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session,
        # The certificate is not verified: its name is that of callers on other machines.
        session.get(
            f"{endpoint.url}/readyz", headers=headers, ssl=False, allow_redirects=False
        ) as response,
    ):
        if response.status == HTTPStatus.MISDIRECTED_REQUEST:
            raise _AnotherRelayAnswers
        deadline = get_running_loop().time() + _TIMEOUT
        body: Any = orjson.loads(await read_body_start(response, deadline))
    is_readiness = isinstance(body, dict) and "status" in body
    if response.status not in (200, 503) or not is_readiness:
        raise ValueError("expected a relay's response")
    return response.status, body


def _not_a_relay_finding(endpoint: _Endpoint) -> Finding:
    return failure(
        endpoint.subject,
        f"something that is no relay of this configuration listens on {endpoint.address}",
        "choose another address, or stop it",
    )


def _check_certificate_loads(settings: ServerTlsSettings) -> Finding:
    try:
        make_server_context(settings)
    except ConfigError as error:
        remedy = "correct the files of api.tls, and who may read them"
        return failure("certificate", str(error), remedy)
    return ok("certificate", f"{settings.cert_file} and its key can be used")


async def _check_issuer_signing_keys(settings: OidcSettings) -> Finding:
    # Imported here: the library takes ten megabytes, and only relays with api.oidc have it.
    from relay.api.auth.entra_tokens import fetch_keys  # noqa: PLC0415

    subject = "keys of the token issuer"
    try:
        keys = await fetch_keys(settings)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        return failure(
            subject,
            f"they could not be fetched from keys_url: {str(error) or type(error).__name__}",
            "correct api.oidc.keys_url",
        )
    return ok(subject, f"{len(keys)} fetched")


async def _check_sign_in(settings: OidcSettings, public_url: str) -> Finding:
    """Return whether people could sign in, as far as that shows without a person."""
    # Imported here: only relays where people sign in need it.
    from relay.api.auth.entra_endpoints import (  # noqa: PLC0415
        EntraUnavailable,
        check_client_secret,
        fetch_endpoints,
    )

    subject = "sign-in"
    try:
        endpoints = await fetch_endpoints(settings)
    except EntraUnavailable as error:
        return failure(
            subject,
            f"the endpoints of Entra ID could not be looked up: {error}",
            "correct api.oidc.issuer, and let this machine reach it",
        )
    target = f"Entra ID sends people back to {redirect_uri(public_url)}, which must be registered"
    try:
        refusal = await check_client_secret(settings, endpoints)
    except EntraUnavailable as error:
        return warning(
            subject,
            f"{target}; Entra ID did not say whether it accepts the client secret: {error}",
            "sign in once",
        )
    if refusal is not None:
        return failure(
            subject,
            f"Entra ID refused client_id or the client secret: {refusal}",
            "make a new client secret, and put its value into api.oidc.sign_in",
        )
    return ok(subject, f"{target}; Entra ID accepts the client secret")
