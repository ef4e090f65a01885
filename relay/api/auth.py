"""Who calls: bearer keys, signed callbacks, and users of the local socket."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence

from relay.api import Client
from relay.approvals.request import Caller, Rights
from relay.clock import Clock
from relay.signature import PREFIX, SignatureRefused, verify

ALL = Rights(frozenset({"read", "approve", "hold", "operate"}))
"""What users of the local socket may do: its file rights are the authority."""
NOBODY = Caller("anonymous", "http", Rights(frozenset()))
"""Who calls what needs no credentials."""
NEIGHBOUR = Caller("anonymous", "http", Rights(frozenset({"read"})))
"""Who calls from this machine what may be read there without credentials."""


class StrangerError(Exception):
    """No or wrong credentials. The text is for our log: the caller is told no more than 401."""


class Clients:
    """The configured clients, by what they can show."""

    def __init__(self, clients: Sequence[Client], clock: Clock) -> None:
        self._clients = tuple(clients)
        self._by_name: Mapping[str, Client] = {client.name: client for client in clients}
        self._clock = clock
        # Stands in for the secret of a client that does not exist, so that asking takes the same time.
        self._nobodys = PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()

    def by_key(self, given: Sequence[str]) -> Caller:
        """Whose bearer key it is, of all values of Authorization. Raises StrangerError.

        It is compared with every client's, and each comparison takes the same time.
        """
        if len(given) != 1:
            raise StrangerError(f"Authorization: expected it once, got it {len(given)} times")
        scheme, _, key = given[0].partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise StrangerError("Authorization: expected Bearer and a key")
        offered = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for client in self._clients:
            for digest in client.digests():
                if hmac.compare_digest(digest, offered):
                    found = client
        if found is None:
            raise StrangerError("the bearer key is no client's")
        return caller_of(found, "http")

    def by_signature(self, name: str, headers: Mapping[str, str], body: bytes) -> Caller:
        """The client of that name, when it has signed the body. Raises StrangerError, after as long for an unknown one."""
        client = self._by_name.get(name)
        known = client.reveal_all("secrets") if client is not None else ()
        try:
            verify(known or (self._nobodys,), headers, body, self._clock.now())
        except SignatureRefused as error:
            raise StrangerError(str(error)) from None
        if client is None or not known:
            raise StrangerError("no such client, or none that signs")
        return caller_of(client, "callback")


def local(user: str) -> Caller:
    """A user of the local socket."""
    return Caller(f"local:{user}", "local", ALL)


def caller_of(client: Client, channel: str) -> Caller:
    """The client as a caller through that channel."""
    return Caller(f"client:{client.name}", channel, Rights(frozenset(client.can), client.resources))
