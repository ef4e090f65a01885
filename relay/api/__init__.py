"""The HTTP API: what programs and people call. This module names the parts of the relay it uses.

`server` accepts connections and checks each request, `auth` identifies callers, `routes` holds a
module for each resource, and `schema` describes requests, responses and errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from relay.api.settings import ApiSettings, Client
from relay.approvals.gate import Gate
from relay.chat import ChatSink
from relay.clock import Clock
from relay.delivery.dispatcher import Dispatcher
from relay.events.build import Origin
from relay.outbox.sqlite import Store
from relay.settings import Section
from relay.signature import decode_secret

__all__ = ["ApiSettings", "Client", "EventSource", "Relay"]


def _sha256(text: str) -> str:
    if re.fullmatch(r"[0-9a-fA-F]{64}", text) is None:
        raise ValueError(
            "expected 64 hexadecimal digits: the SHA-256 of the key, as `imds-relay keys` prints it"
        )
    return text.lower()


def _listen(text: str) -> str:
    match = _LISTEN.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ValueError("expected <host>:<port> such as 127.0.0.1:8080")
    return text


def _socket(path: Path) -> Path:
    if (length := len(os.fsencode(path))) > _LONGEST_SOCKET:
        raise ValueError(
            f"expected a path of at most {_LONGEST_SOCKET} bytes, which is what a socket can have, got one of {length}"
        )
    return path


class Client(Section):
    """One who may call: a bearer key, and secrets for signed callbacks; and what they may do."""

    name: str = Field(pattern=CLIENT_NAME)
    """The principal is client:<name>."""
    key_sha256: tuple[Annotated[str, AfterValidator(_sha256)], ...] = Field(
        default=(), max_length=2
    )
    """SHA-256 of the bearer key; two while it is changed."""
    key: SecretStr | None = None
    """The bearer key itself, where it must be."""
    key_file: Path | None = None
    secrets: tuple[SecretStr, ...] = ()
    """Signs this client's callbacks; several while they are changed."""
    secrets_file: Path | None = None
    san: str | None = Field(default=None, pattern=r"^[^*\s]+$")
    """A name in the client's certificate (subjectAltName: DNS, URI or e-mail). It is then mtls:<name>, and needs no key."""
    amqp_user: str | None = None
    """The RabbitMQ user whose messages count as this client's."""
    can: tuple[Literal["read", "approve", "hold", "operate"], ...] = ("read",)
    """What the client may do."""
    resources: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Patterns; every resource of an event must match one for this client to decide about it."""

    @field_validator("key_sha256", mode="before")
    @classmethod
    def _one_or_two(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("secrets")
    @classmethod
    def _usable(cls, values: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for value in values:
            decode_secret(value.get_secret_value())
        return values

    @property
    def principals(self) -> tuple[str, ...]:
        """As whom it may come: with key, signature or over AMQP, and with its certificate."""
        return (f"client:{self.name}", *((f"mtls:{self.san}",) if self.san is not None else ()))

    @property
    def credential_kinds(self) -> tuple[str, ...]:
        """By what it is known, in words; empty: nobody can be this client."""
        ways = {
            "key": self.key_sha256 or self.key or self.key_file,
            "signature": self.secrets or self.secrets_file,
            "certificate": self.san,
            f"RabbitMQ user {self.amqp_user}": self.amqp_user,
        }
        return tuple(way for way, given in ways.items() if given)

    def key_digests(self) -> tuple[bytes, ...]:
        """SHA-256 of every bearer key of this client that is good now: files are read again when they change."""
        key = self.reveal("key")
        plain = (hashlib.sha256(key.encode()).digest(),) if key else ()
        return (*(bytes.fromhex(one) for one in self.key_sha256), *plain)

    def signing_keys(self) -> tuple[bytes, ...]:
        """The keys of the secrets that sign this client's callbacks now. Raises ValueError for one that cannot be used."""
        try:
            return tuple(decode_secret(secret) for secret in self.reveal_all("secrets"))
        except ValueError as error:
            raise ValueError(
                f"clients: {self.name}: secrets{'_file' if self.secrets_file is not None else ''}: {error}"
            ) from None


class ServerTlsSettings(Section):
    """TLS on the listener."""

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None = None
    """Where given, callers must show a certificate that one of these has signed; `san` of a client names whose it is."""


class ApiSettings(Section):
    """Where the API listens, and who may call it."""

    listen: Annotated[str, AfterValidator(_listen)] = "127.0.0.1:8080"
    socket: Annotated[Path, AfterValidator(_socket)] | None = None
    """A local socket for the command line; its file rights are the authority."""
    tls: ServerTlsSettings | None = None
    allow_http: bool = False
    """Needed to listen beyond loopback without tls, behind a proxy."""
    public_url: str | None = Field(default=None, pattern=r"^https?://\S+$")
    """What links in messages start with."""
    clients: tuple[Client, ...] = ()
    oidc: OidcSettings | None = None
    """Also take bearer tokens of Entra ID."""

    @property
    def host(self) -> str:
        """The address to listen on."""
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port to listen on; 0 takes a free one."""
        return int(self.listen.rpartition(":")[2])

    @property
    def client_resources(self) -> dict[str, tuple[str, ...] | None]:
        """The principals of those clients that may approve, and the machines that each may speak for; None: every one."""
        return {
            principal: one.resources
            for one in self.clients
            if "approve" in one.can
            for principal in one.principals
        }

    @model_validator(mode="after")
    def _safe(self) -> ApiSettings:
        if self.tls is None and not self.allow_http and _LOOPBACK.fullmatch(self.host) is None:
            raise ValueError(
                f"listen: expected tls, or allow_http: true behind a proxy, to listen on {self.listen}"
            )
        if any(one.san for one in self.clients) and (
            self.tls is None or self.tls.client_ca_file is None
        ):
            raise ValueError(
                "clients: expected tls.client_ca_file, which signs the certificates that a san is in"
            )
        # The names in a certificate are compared without case.
        sans = [one.san.lower() if one.san is not None else None for one in self.clients]
        named: dict[str, list[str | None]] = {
            "name": [one.name for one in self.clients],
            "amqp_user": [one.amqp_user for one in self.clients],
            "san": sans,
        }
        for what, values in named.items():
            repeated = {value for value in values if value is not None and values.count(value) > 1}
            if repeated:
                raise ValueError(
                    f"clients: expected every {what} once, {', '.join(sorted(repeated))} comes again"
                )
        owners: dict[bytes, str] = {}
        for one in self.clients:
            for digest in one.key_digests():
                if owners.setdefault(digest, one.name) != one.name:
                    raise ValueError(
                        f"clients: expected a key of its own for each, {owners[digest]} and {one.name} have the same"
                    )
            # A signature covers the body, and not whose it is said to be: with one secret, one's vote would be another's too.
            for key in one.signing_keys():
                if owners.setdefault(key, one.name) != one.name:
                    raise ValueError(
                        f"clients: expected secrets of its own for each, {owners[key]} and {one.name} share one"
                    )
        return self


class Source(Protocol):
    """What the API may know of the poller."""

    lost: bool
    """Whether the metadata service gives no usable response."""
    polls: int
    failures: int
    """Polls in a row without a usable response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """The parts of a running relay that the API uses."""

    store: Store
    gate: Gate
    dispatcher: Dispatcher
    source: EventSource
    origin: Origin
    clock: Clock
    chats: Mapping[str, ChatSink] = field(default_factory=dict)
    """The chat sinks by name."""
