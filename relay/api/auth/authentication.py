"""Who calls: bearer keys and tokens, certificates, signed callbacks, and users of the local socket."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from relay.api import ApiSettings, Client
from relay.api.auth.entra_settings import OidcSettings, TokenRefused
from relay.approvals.request import Caller, Rights
from relay.clock import Clock
from relay.signature import PREFIX, SignatureRefused, verify

if TYPE_CHECKING:
    from relay.api.auth.entra_tokens import TokenVerifier

ALL_RIGHTS = Rights(frozenset({"read", "approve", "hold", "operate"}))
"""What users of the local socket may do: its file rights are the authority."""
ANONYMOUS = Caller("anonymous", "http", Rights(frozenset()))
"""Who calls what needs no credentials."""
LOOPBACK_READER = Caller("anonymous", "http", Rights(frozenset({"read"})))
"""Who calls from this machine what may be read there without credentials."""


class NotAuthenticated(Exception):
    """No or wrong credentials. The text is for our log: the caller is told no more than 401."""


class Authenticator:
    """The configured clients, by what they can show."""

    def __init__(self, settings: ApiSettings, clock: Clock) -> None:
        self._clients = settings.clients
        self._by_name: Mapping[str, Client] = {client.name: client for client in self._clients}
        self._by_san: Mapping[str, Client] = {
            client.san.lower(): client for client in self._clients if client.san is not None
        }
        self._tokens = _tokens(settings.oidc, clock) if settings.oidc is not None else None
        self._clock = clock
        # Stands in for the secret of a client that does not exist, so that asking takes the same time.
        self._nobodys = PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()

    async def by_bearer(
        self, given: Sequence[str], certificate: Mapping[str, Any] | None
    ) -> Caller:
        """Whose key or token it is, of all values of Authorization; without any, whose certificate. Raises StrangerError."""
        if not given and certificate and self._by_san:
            return self._by_certificate(certificate)
        if len(given) != 1:
            raise NotAuthenticated(f"Authorization: expected it once, got it {len(given)} times")
        scheme, _, key = given[0].partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise NotAuthenticated("Authorization: expected Bearer and a key")
        found = self._by_key(key)
        if found is not None:
            return found
        if self._tokens is None or key.count(".") != 2:  # three parts: RFC 7515, section 3.1
            raise NotAuthenticated("the bearer key is no client's")
        try:
            return await self._tokens.caller(key)
        except TokenRefused as error:
            raise NotAuthenticated(str(error)) from None

    def _by_certificate(self, certificate: Mapping[str, Any]) -> Caller:
        """Whose certificate TLS has verified, by its names."""
        names = {
            value.lower()
            for kind, value in certificate.get("subjectAltName", ())
            if kind in ("DNS", "URI", "email")
        }
        found = [client for san, client in self._by_san.items() if san in names]
        if len(found) != 1:
            raise NotAuthenticated(
                f"the certificate: expected the name of one client, got those of {len(found)}"
            )
        return Caller(f"mtls:{found[0].san}", "http", _rights(found[0]))

    def _by_key(self, key: str) -> Caller | None:
        """It is compared with every client's, and each comparison takes the same time."""
        offered = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = None
        for client in self._clients:
            for digest in client.key_digests():
                if hmac.compare_digest(digest, offered):
                    found = client
        return client_caller(found, "http") if found is not None else None

    def by_signature(self, name: str, headers: Mapping[str, str], body: bytes) -> Caller:
        """The client of that name, when it has signed the body. Raises StrangerError, after as long for an unknown one."""
        client = self._by_name.get(name)
        known = client.reveal_all("secrets") if client is not None else ()
        try:
            verify(known or (self._nobodys,), headers, body, self._clock.now())
        except SignatureRefused as error:
            raise NotAuthenticated(str(error)) from None
        if client is None or not known:
            raise NotAuthenticated("no such client, or none that signs")
        return client_caller(client, "callback")


def local_caller(user: str) -> Caller:
    """A user of the local socket."""
    return Caller(f"local:{user}", "local", ALL_RIGHTS)


def client_caller(client: Client, channel: str) -> Caller:
    """The client as a caller through that channel."""
    return Caller(f"client:{client.name}", channel, _rights(client))


def _rights(client: Client) -> Rights:
    return Rights(frozenset(client.can), client.resources)


def _tokens(settings: OidcSettings, clock: Clock) -> TokenVerifier:
    from relay.api.auth.entra_tokens import TokenVerifier  # noqa: PLC0415  # ten megabytes, for relays that take tokens

    return TokenVerifier(settings, clock)
