"""The section `api` of the configuration: where the API listens, and who may call it.

Clients are programs and people with credentials of their own. People of Entra ID (`api.oidc`) come
with bearer tokens, or sign in on the relay's pages.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    SecretStr,
    Tag,
    field_validator,
    model_validator,
)

from relay.approvals.principals import ENTRA_ID_PATTERN
from relay.approvals.request import Right, Rights
from relay.errors import ConfigError
from relay.net.egress import parse_receiver_url
from relay.settings import Name, Section, check_unique, text_pattern_validator
from relay.signature import decode_secret

_MAX_SOCKET_PATH = 107
"""Bytes of a socket's path: the size of sun_path without the final null byte, see unix(7)."""
KEY_PREFIX = "imdsr_"
"""The start of a bearer key that `imds-relay keys` makes."""
_MIN_KEY_LENGTH = 22
"""Characters of base64 that hold 128 bits."""
_MIN_HEX_KEY_LENGTH = 32
CALLBACK_PATH = "/sign-in/callback"
GUID = re.compile(ENTRA_ID_PATTERN)
"""The form of the ids of tenants, applications and objects in Entra ID."""
_LOOPBACK = re.compile(r"127(\.\d{1,3}){3}|localhost|\[?::1\]?")
_LISTEN = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[^:\s\[\]]+):(?P<port>\d{1,5})")


def _check_sha256(text: str) -> str:
    if re.fullmatch(r"[0-9a-fA-F]{64}", text) is None:
        raise ValueError(
            "expected 64 hexadecimal digits: the SHA-256 of the key, as `imds-relay keys` prints it"
        )
    if text.lower() == hashlib.sha256().hexdigest():
        raise ValueError(
            "expected the SHA-256 of a key, got that of an empty text: was a variable or file "
            "empty? `imds-relay keys` makes a key and its SHA-256"
        )
    return text.lower()


def _check_listen(text: str) -> str:
    match = _LISTEN.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ValueError("expected <host>:<port> such as 127.0.0.1:8080")
    return text


def _check_socket_path(path: Path) -> Path:
    if (size := len(os.fsencode(path))) > _MAX_SOCKET_PATH:
        raise ValueError(
            f"expected a path of at most {_MAX_SOCKET_PATH} bytes, "
            f"the limit for a socket, got {size} bytes"
        )
    return path


def supports_local_sockets() -> bool:
    return hasattr(socket, "AF_UNIX")


def automatic_socket(state_file: Path) -> Path:
    """Return the local socket of ``api.socket: auto``: `relay.sock` beside `relay.db`.

    A state file has the same one under each of its names, and two have two. Raises ConfigError if
    the path is too long for a socket.
    """
    state_file = Path(os.path.realpath(state_file))
    path = state_file.with_name(f"{state_file.name.removesuffix('.db')}.sock")
    try:
        return _check_socket_path(path)
    except ValueError as error:
        raise ConfigError(f"api.socket: auto would be {path}: {error}") from None


Sha256 = Annotated[str, AfterValidator(_check_sha256)]
NameInCertificate = Annotated[
    str, text_pattern_validator(r"[^*\s]+", "a name such as drain.example.com, without * and space")
]
PublicUrl = Annotated[
    str, text_pattern_validator(r"https?://\S+", "a URL such as https://relay.example.com")
]
LocalSocket = Annotated[
    Annotated[Literal["auto"], Tag("auto")]
    | Annotated[Path, AfterValidator(_check_socket_path), Tag("path")],
    Discriminator(lambda value: "auto" if value == "auto" else "path"),
]


class Client(Section):
    """A program or person that may call the API, with its credentials and rights."""

    name: Name
    """The principal is client:<name>."""
    key_sha256: tuple[Sha256, ...] = Field(default=(), max_length=2)
    """SHA-256 of the bearer key; two during a key rotation."""
    key: SecretStr | None = None
    """The bearer key itself, of at least 22 characters or 32 hexadecimal digits. Prefer
    key_sha256."""
    key_file: Path | None = None
    secrets: tuple[SecretStr, ...] = ()
    """Sign this client's callbacks; several during a rotation."""
    secrets_file: Path | None = None
    san: NameInCertificate | None = None
    """A name in the client's certificate (subjectAltName): a URI if it has a colon, an e-mail
    address if it has an @, else a DNS name. URIs are compared with case.

    A caller with this certificate needs no key. Its principal is mtls:<name>.
    """
    amqp_user: str | None = None
    """The RabbitMQ user whose messages count as this client's."""
    can: tuple[Right, ...] = ("read",)
    """What the client may do."""
    resources: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Patterns. The client may decide about an event if every resource of it matches a pattern."""

    @field_validator("key_sha256", mode="before")
    @classmethod
    def _accept_single_digest(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_credentials(self) -> Client:
        if self.key is not None or self.key_file is not None:
            self.run_field_checks({"key": self._load_strong_key})
        self.run_field_checks({"secrets": self._signing_keys})
        return self

    def _load_strong_key(self) -> str:
        """Return the current bearer key. Raises ValueError for one too short for 128 bits."""
        key = self.reveal("key") or ""
        random_part = key.strip().removeprefix(KEY_PREFIX).rstrip("=")
        is_hex = re.fullmatch(r"[0-9a-fA-F]*", random_part) is not None
        if len(random_part) < (_MIN_HEX_KEY_LENGTH if is_hex else _MIN_KEY_LENGTH):
            raise ValueError(
                f"expected a bearer key of 128 bits: at least {_MIN_KEY_LENGTH} characters, or "
                f"{_MIN_HEX_KEY_LENGTH} if all are hexadecimal digits, not counting {KEY_PREFIX} "
                f"and padding; got {len(random_part)}. `imds-relay keys` makes one"
            )
        return key

    def _signing_keys(self) -> list[bytes]:
        return [decode_secret(text) for text in self.reveal_list("secrets")]

    @property
    def principals(self) -> tuple[str, ...]:
        """The principals that this client can have: one for its key, one for its certificate."""
        by_name = f"client:{self.name}"
        return (by_name,) if self.san is None else (by_name, f"mtls:{self.san}")

    @property
    def rights(self) -> Rights:
        return Rights(frozenset(self.can), self.resources)

    @property
    def credential_kinds(self) -> tuple[str, ...]:
        """The configured kinds of credentials, for people. Without any, nobody can call."""
        configured = {
            "key": self.key_sha256 or self.key or self.key_file,
            "signature": self.secrets or self.secrets_file,
            "certificate": self.san,
            f"RabbitMQ user {self.amqp_user}": self.amqp_user,
        }
        return tuple(kind for kind, value in configured.items() if value)

    def key_digests(self) -> tuple[bytes, ...]:
        """Return the SHA-256 of valid keys. A changed file is read again; a weak key is none."""
        digests = tuple(bytes.fromhex(digest) for digest in self.key_sha256)
        if self.key is None and self.key_file is None:
            return digests
        try:
            return (*digests, hashlib.sha256(self._load_strong_key().encode()).digest())
        except ValueError:
            return digests

    def credentials(self) -> Iterator[tuple[str, bytes]]:
        """Yield what proves who it is: digests of keys, keys that sign. Raises ValueError."""
        yield from (("key", digest) for digest in self.key_digests())
        yield from (("secret", key) for key in self._signing_keys())


def _check_guid(text: str, owner: str) -> str:
    if GUID.fullmatch(text.lower()) is None:
        raise ValueError(f"expected the {owner}'s id, 32 hexadecimal digits in five groups")
    return text.lower()


def check_https_or_loopback_url(text: str) -> str:
    """Return the URL. Raises ValueError for all but https, and http on this machine."""
    parts = urlsplit(text)
    if parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "::1", "localhost"):
        raise ValueError("expected https, or http on this machine, got http to another")
    parse_receiver_url(text, allow_http=True)
    return text


def redirect_uri(public_url: str) -> str:
    """Return where Entra ID sends people back who sign in. It must be registered there."""
    return f"{public_url.rstrip('/')}{CALLBACK_PATH}"


ApplicationId = Annotated[str, AfterValidator(partial(_check_guid, owner="application"))]


class SignInSettings(Section):
    """People sign in on the relay's pages, as an application with a client secret."""

    client_id: ApplicationId | None = None
    """The id of the application in which people sign in; null: audience is that id."""
    client_secret: SecretStr | None = None
    """The value of the application's client secret."""
    client_secret_file: Path | None = None

    @model_validator(mode="after")
    def _check_secret(self) -> SignInSettings:
        if not self.reveal("client_secret"):
            raise ValueError(
                "expected client_secret or client_secret_file, the value of the application's "
                "client secret, got neither"
            )
        self.run_field_checks({"client_secret": self._check_no_id})
        return self

    def _check_no_id(self) -> None:
        if GUID.fullmatch((self.reveal("client_secret") or "").lower()) is not None:
            raise ValueError(
                "expected the value of the client secret, got an id: "
                "Entra ID shows the value once, beside the secret's id"
            )


class OidcSettings(Section):
    """People of Entra ID: bearer tokens, and sign-in. The principal is entra:<tenant>/<object>."""

    issuer: str = Field(min_length=1)
    """The issuer of the tokens, exactly as in the claim iss."""
    audience: str = Field(min_length=1)
    """The recipient of the tokens, exactly as in the claim aud: this relay's application."""
    tenant: Annotated[str, AfterValidator(partial(_check_guid, owner="tenant"))]
    """The tenant whose members are accepted (the claim tid)."""
    applications: tuple[ApplicationId, ...] = ()
    """The ids of the applications whose access tokens are accepted (the claim azp or appid).
    Required without sign_in."""
    keys_url: Annotated[str, AfterValidator(check_https_or_loopback_url)]
    """The URL of the issuer's keys (JWKS): https, or http on this machine."""
    roles: Mapping[str, tuple[Right, ...]] = Field(min_length=1)
    """The rights of each application role (roles): read, approve, hold, operate."""
    sign_in: SignInSettings | None = None
    """Let people sign in on the page; null: they cannot."""

    def rights_of_roles(self, roles: object) -> Rights:
        """Return the rights of the roles in the claim `roles`."""
        names = [role for role in roles if isinstance(role, str)] if isinstance(roles, list) else []
        return Rights(frozenset(right for name in names for right in self.roles.get(name, ())))

    @property
    def client_id(self) -> str:
        """The id of the application in which people sign in. Only valid if sign_in is set."""
        configured = None if self.sign_in is None else self.sign_in.client_id
        return configured or self.audience.lower()

    @model_validator(mode="after")
    def _check_section(self) -> OidcSettings:
        if find_spec("jwt") is None:
            raise ValueError(
                "expected the package pyjwt, which verifies tokens, it is not installed: "
                "requirements/run.lock has it"
            )
        if self.sign_in is None and not self.applications:
            raise ValueError(
                "applications: expected at least 1 application whose access tokens are "
                "accepted, or sign_in"
            )
        if self.sign_in is not None and GUID.fullmatch(self.client_id) is None:
            raise ValueError(
                "sign_in: expected client_id, the id of the application in which people sign in, "
                "because audience is no such id"
            )
        try:
            if self.sign_in is not None:
                check_https_or_loopback_url(self.issuer)
        except ValueError as error:
            raise ValueError(f"issuer: with sign_in, {error}") from None
        return self


class ServerTlsSettings(Section):
    """TLS on the listener."""

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None = None
    """Callers must then show a certificate that this CA signed. `san` maps it to a client."""


class ApiSettings(Section):
    """Where the API listens, and who may call it."""

    listen: Annotated[str, AfterValidator(_check_listen)] = "127.0.0.1:8080"
    socket: LocalSocket | None = "auto"
    """A local socket for the command line; its file rights are the authority. auto: beside the
    state file. null: none."""
    tls: ServerTlsSettings | None = None
    allow_http: bool = False
    """Needed to listen beyond loopback without tls, behind a proxy."""
    public_url: PublicUrl | None = None
    """What links in messages start with."""
    clients: tuple[Client, ...] = ()
    oidc: OidcSettings | None = None
    """Also accept people of Entra ID, with bearer tokens or by signing in."""

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port to listen on. 0 selects a free port."""
        return int(self.listen.rpartition(":")[2])

    @property
    def rights_by_client_principal(self) -> dict[str, Rights]:
        return {name: client.rights for client in self.clients for name in client.principals}

    @property
    def resources_by_client_principal(self) -> dict[str, tuple[str, ...] | None]:
        """Resource patterns by the principal of each client that may approve. None: no limit."""
        rights = self.rights_by_client_principal.items()
        return {name: given.resources for name, given in rights if "approve" in given.can}

    @model_validator(mode="after")
    def _check_section(self) -> ApiSettings:
        if self.tls is None and not self.allow_http and _LOOPBACK.fullmatch(self.host) is None:
            raise ValueError(
                "listen: expected tls, or allow_http: true behind a proxy, "
                f"to listen on {self.listen}"
            )
        has_client_ca = self.tls is not None and self.tls.client_ca_file is not None
        if not has_client_ca and any(client.san for client in self.clients):
            raise ValueError(
                "clients: expected tls.client_ca_file, the CA of the certificates that san names"
            )
        if self.oidc is not None and self.oidc.sign_in is not None:
            _check_public_url_for_sign_in(self.public_url)
        check_unique("clients", self.clients)
        check_unique("clients", self.clients, "amqp_user", with_case=True)
        # Most names in certificates are compared without case.
        check_unique("clients", self.clients, "san")
        return self


def _check_public_url_for_sign_in(public_url: str | None) -> None:
    """Raise ValueError for a URL at which a browser would not keep the cookie of a session."""
    try:
        is_usable = public_url is not None and "?" not in check_https_or_loopback_url(public_url)
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ValueError(
            "public_url: expected the https URL at which browsers reach this relay (http only on "
            "this machine), without user, query, fragment and spaces, got "
            f"{'none' if public_url is None else 'another'}; oidc.sign_in sends people back "
            "there, and its cookies are for https alone"
        )
