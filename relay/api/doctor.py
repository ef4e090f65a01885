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
from yarl import URL

from relay.api.entra_settings import OidcSettings, redirect_uri
from relay.api.local_socket import (
    SERVICE_SOCKET,
    STATE_FILE_HEADER,
    automatic_places,
    socket_paths_of_state_file,
    state_file_id,
    supports_local_sockets,
)
from relay.api.settings import ApiSettings
from relay.api.sockets import make_server_context, open_tcp_sockets
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
    """Return warnings that follow from the configuration and this machine's folders."""
    if settings.socket == "auto":
        places = [place.path.parent for place in automatic_places(state_file, os.environ)]
        # The relay makes the folder of its state file.
        is_found = any(os.access(path, os.W_OK) or not folder_may_exist(path) for path in places)
        if supports_local_sockets() and not is_found:
            yield warning(
                "local socket",
                "api.socket: auto finds no place for it: the folder of the state file and "
                f"{SERVICE_SOCKET.parent} cannot be written, or the path is too long",
                "set api.socket to a path in a folder that this user may write, or to null",
            )
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A place where the relay may listen: the local socket, or TCP."""

    subject: str
    address: str
    """The address for people."""
    url: str = "http://relay"
    socket: Path | None = None
    state_file: Path | None = None
    """Only the relay with this state file is meant."""


def _places(settings: ApiSettings, state_file: Path) -> Iterator[_Place]:
    """Yield the places where this relay may listen, the local sockets first."""
    meant = state_file if settings.socket == "auto" else None
    sockets: list[Path] = []
    if settings.socket == "auto":
        sockets = [*socket_paths_of_state_file(state_file, os.environ), SERVICE_SOCKET]
    elif settings.socket is not None:
        sockets = [settings.socket]
    for path in filter(may_exist, sockets if supports_local_sockets() else []):
        yield _Place(subject="local socket", address=str(path), socket=path, state_file=meant)
    host = _LOOPBACK_OF_WILDCARD.get(settings.host, settings.host)
    url = URL.build(
        scheme="http" if settings.tls is None else "https", host=host, port=settings.port
    )
    yield _Place(subject="listener", address=settings.listen, url=str(url))


async def _probe_running_relay(settings: ApiSettings, state_file: Path) -> tuple[Finding, bool]:
    """Return the finding about the first place where something listens, and `is_running`.

    A local socket that this user may not open counts as that of the running relay if the
    configuration names it. An automatic one may be that of another relay.
    """
    needs_certificate = settings.tls is not None and settings.tls.client_ca_file is not None
    for place in _places(settings, state_file):
        subject, address = place.subject, place.address
        not_a_relay = failure(
            subject,
            f"something that is no relay of this configuration listens on {address}",
            "choose another address, or stop it",
        )
        try:
            answer = await _get_readiness(place)
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, PermissionError) and place.state_file is None:
                remedy = "join its group, or run doctor as the service's user"
                return warning(subject, f"you may not open {address}", remedy), True
            if isinstance(error, aiohttp.ClientSSLError):
                return not_a_relay, False
            continue  # nothing listens there, or only another user may know
        except (aiohttp.ClientError, TimeoutError, ValueError):
            if not needs_certificate:
                return not_a_relay, False
            message = (
                f"the program that listens on {address} needs a client certificate: "
                "doctor cannot check whether it is a relay"
            )
            remedy = "set api.socket: doctor then asks through the local socket"
            return warning(subject, message, remedy), True
        if answer is not None:
            return _readiness(address, *answer), True
    try:  # whether a relay could listen there
        for sock in await open_tcp_sockets(settings.host, settings.port):
            sock.close()
    except ConfigError as error:
        remedy = "choose another address in api.listen, or stop the program that uses it"
        return failure("listener", str(error), remedy), False
    return ok("listener", f"no relay runs here, and {settings.listen} is free"), False


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


async def _get_readiness(place: _Place) -> tuple[int, dict[str, Any]] | None:
    """Return the status and the body of `/readyz`; None from a relay with another state file.

    Raises aiohttp's errors, and ValueError for a response that is not a relay's.
    """
    connector = None if place.socket is None else aiohttp.UnixConnector(str(place.socket))
    meant = place.state_file
    headers = {} if meant is None else {STATE_FILE_HEADER: state_file_id(meant)}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session,
        # The certificate is not verified: its name is that of callers on other machines.
        session.get(
            f"{place.url}/readyz", headers=headers, ssl=False, allow_redirects=False
        ) as response,
    ):
        if response.status == HTTPStatus.MISDIRECTED_REQUEST:
            return None
        deadline = get_running_loop().time() + _TIMEOUT
        body: Any = orjson.loads(await read_body_start(response, deadline))
    is_readiness = isinstance(body, dict) and "status" in body
    if response.status not in (200, 503) or not is_readiness:
        raise ValueError("expected a relay's response")
    return response.status, body


async def _check_entra(settings: OidcSettings, public_url: str | None) -> list[Finding]:
    """Return what shows without a person: the keys, and with sign-in endpoints and secret."""
    # Imported here: the library takes ten megabytes, and only relays with api.oidc have it.
    from relay.api.entra import EntraUnavailable, fetch_endpoints, fetch_keys  # noqa: PLC0415
    from relay.api.sign_in import check_client_secret  # noqa: PLC0415

    subject = "keys of the token issuer"
    try:
        findings = [ok(subject, f"{len(await fetch_keys(settings))} fetched")]
    except EntraUnavailable as error:
        findings = [failure(subject, str(error), "correct api.oidc.keys_url")]
    if settings.sign_in is None or public_url is None:
        return findings
    subject = "sign-in"
    try:
        endpoints = await fetch_endpoints(settings)
    except EntraUnavailable as error:
        text = f"the endpoints of Entra ID could not be looked up: {error}"
        remedy = "correct api.oidc.issuer, and let this machine reach it"
        return [*findings, failure(subject, text, remedy)]
    target = f"Entra ID sends people back to {redirect_uri(public_url)}, which must be registered"
    try:
        refusal = await check_client_secret(settings, endpoints)
    except EntraUnavailable as error:
        text = f"{target}; Entra ID did not say whether it accepts the client secret: {error}"
        return [*findings, warning(subject, text, "sign in once")]
    if refusal is None:
        return [*findings, ok(subject, f"{target}; Entra ID accepts the client secret")]
    text = f"Entra ID refused client_id or the client secret: {refusal}"
    remedy = "make a new client secret, and put its value into api.oidc.sign_in"
    return [*findings, failure(subject, text, remedy)]
