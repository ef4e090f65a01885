"""Identifies callers: bearer keys and tokens, certificates, signed callbacks, local users.

`relay.api.server.pipeline` asks an `Authenticator` who calls. The result is a `Caller`: a principal
such as `client:<name>`, the channel by which the call came, and the rights of the caller. The
consumer of approvals over RabbitMQ makes its callers with `caller_for_client`, too. A reload makes
a new `Authenticator`, and compares it with the old one.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from relay.api.settings import ApiSettings, Client
from relay.approvals.request import Caller, Rights
from relay.clock import Clock
from relay.signature import SignatureRefused, verify

if TYPE_CHECKING:
    from relay.api.auth.entra_tokens import TokenVerifier

ALL_RIGHTS = Rights(frozenset({"read", "approve", "hold", "operate"}))
ANONYMOUS = Caller("anonymous", "http", Rights(frozenset()))
"""The caller of routes that need no credentials."""
LOOPBACK_READER = Caller("anonymous", "http", Rights(frozenset({"read"})))
"""A caller on this machine, for routes that it may read without credentials."""


class NotAuthenticated(Exception):
    """Missing or wrong credentials. The caller learns only the 401.

    The text is for the log. It contains no part of the credentials.
    """


class Authenticator:
    """Identifies callers by the credentials of the configured clients."""

    def __init__(self, settings: ApiSettings, clock: Clock) -> None:
        self._settings = settings
        self._clients = settings.clients
        self._clients_by_name = {client.name: client for client in settings.clients}
        self._clients_by_san = {
            _comparable_certificate_name(_san_kind(client.san), client.san): client
            for client in settings.clients
            if client.san is not None
        }
        self.tokens: TokenVerifier | None = None
        """Verifies tokens of Entra ID; None without api.oidc."""
        if settings.oidc is not None:
            # Imported here: the library takes ten megabytes, and only relays with api.oidc have it.
            from relay.api.auth.entra_tokens import TokenVerifier  # noqa: PLC0415

            self.tokens = TokenVerifier(settings.oidc, clock)
        self._clock = clock

    async def caller_from_bearer_or_certificate(
        self,
        authorization: Sequence[str],
        certificate: Mapping[str, Any] | None,
    ) -> Caller:
        """Return the owner of the bearer key or token, or else of the verified certificate.

        `authorization` are the values of all Authorization headers. Raises NotAuthenticated.
        """
        if not authorization and certificate and self._clients_by_san:
            return self._caller_from_certificate(certificate)
        if len(authorization) != 1:
            raise NotAuthenticated(
                f"Authorization: expected it once, got it {len(authorization)} times"
            )
        scheme, _, key = authorization[0].partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise NotAuthenticated("Authorization: expected Bearer and a key")
        caller = self._caller_from_key(key)
        if caller is not None:
            return caller
        is_token = key.count(".") == 2  # RFC 7515, section 3.1
        if self.tokens is None or not is_token:
            raise NotAuthenticated("the bearer key is no client's")
        return await self.tokens.caller_from_token(key)

    def _caller_from_certificate(self, certificate: Mapping[str, Any]) -> Caller:
        # The handshake checked the time. The connection, or its TLS session, can outlast it.
        if self._clock.now().timestamp() > ssl.cert_time_to_seconds(certificate["notAfter"]):
            raise NotAuthenticated("the certificate has expired since the handshake")
        names = {
            _comparable_certificate_name(kind, value)
            for kind, value in certificate.get("subjectAltName", ())
        }
        clients = [client for name, client in self._clients_by_san.items() if name in names]
        if len(clients) != 1:
            raise NotAuthenticated(
                f"the certificate: expected the name of one client, got those of {len(clients)}"
            )
        return Caller(f"mtls:{clients[0].san}", "http", clients[0].rights)

    def _caller_from_key(self, key: str) -> Caller | None:
        """Return the client with this key. Always compares all keys, each in constant time."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        owner = None
        for client in self._clients:
            for client_digest in client.key_digests():
                if hmac.compare_digest(client_digest, digest):
                    owner = client
        return None if owner is None else caller_for_client(owner, "http")

    def caller_from_signature(
        self, name: str, headers: Mapping[str, str], content: bytes
    ) -> Caller:
        """Return the client of this name if it signed the content. Raises NotAuthenticated."""
        client = self._clients_by_name.get(name)
        client_secrets = () if client is None else client.reveal_list("secrets")
        if client is None or not client_secrets:
            raise NotAuthenticated("no client with secrets has this name")
        try:
            verify(client_secrets, headers, content, self._clock.now())
        except SignatureRefused as error:
            raise NotAuthenticated(str(error)) from None
        return caller_for_client(client, "callback")

    def has_same_settings_for_principal(self, other: Authenticator, principal: str) -> bool:
        """Whether the settings that make somebody this principal are the same in both."""
        if self is other:
            return True
        before, after = other._settings, self._settings
        kind, _, name = principal.partition(":")
        match kind:
            case "client":
                return self._clients_by_name.get(name) == other._clients_by_name.get(name)
            case "mtls":
                client, known = (
                    _find_client_with_san(each.clients, name) for each in (before, after)
                )
                return client == known and before.tls == after.tls
            case "entra":
                return before.oidc == after.oidc
        return True


def _find_client_with_san(clients: Sequence[Client], san: str) -> Client | None:
    return next((client for client in clients if client.san == san), None)


def _san_kind(san: str) -> str:
    """Return the kind of name that a client's ``san`` is, as Python's ssl module calls it."""
    if ":" in san:
        return "URI"
    return "email" if "@" in san else "DNS"


def _comparable_certificate_name(kind: str, value: str) -> tuple[str, str]:
    """Return a name such that equal ones belong to the same client.

    A CA checks each kind in its own way, so a name of one kind is none of another. The path of a
    URI has a case (RFC 3986, section 6.2.2.1), and two SPIFFE IDs can differ by it.
    """
    return kind, value if kind == "URI" else value.lower()


def local_socket_caller(user: str) -> Caller:
    """Return a user of the local socket. The file rights of the socket are the authority."""
    return Caller(f"local:{user}", "local", ALL_RIGHTS)


def caller_for_client(client: Client, channel: str) -> Caller:
    """Return the client as a caller through a channel: http, callback or amqp."""
    return Caller(f"client:{client.name}", channel, client.rights)
