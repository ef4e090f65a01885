"""Finds secrets that a sink and a client share: the receiver of the sink could be the client."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress

from relay.api import Client
from relay.settings import WrongValue
from relay.signature import decode_secret
from relay.sinks import SinkSettings

_SEPARATORS = re.compile(r"[\s:/@?&=]+")
"""What is between a secret and the rest of a value: ``Bearer <key>``,
``amqp://user:<key>@host``."""


def check_secrets_not_shared(sinks: Sequence[SinkSettings], clients: Sequence[Client]) -> None:
    """Raise WrongValue if a sink has the key or a signing secret of a client.

    The values are compared, also those in files and behind digests, and never shown.
    """
    owners: dict[bytes, tuple[int, str]] = {}
    for index, client in enumerate(clients):
        for kind, credential in client.key_digests_and_signing_keys():
            owner, _ = owners.setdefault(credential, (index, kind))
            if owner != index:
                raise WrongValue(
                    ("api", "clients", owner),
                    f"clients {clients[owner].name} and {client.name} have the same {kind}",
                )
    for sink in sinks:
        for fingerprint in _secret_fingerprints_of_sink(sink):
            if fingerprint in owners:
                index, kind = owners[fingerprint]
                problem = (
                    f"client {clients[index].name} and sink {sink.name} have the same {kind}, so "
                    "whoever knows it for the sink could decide as the client; give each its own: "
                    "`imds-relay keys` makes one"
                )
                raise WrongValue(("api", "clients", index), problem)


def _secret_fingerprints_of_sink(sink: SinkSettings) -> Iterator[bytes]:
    """Yield everything that a credential of a client would equal if it were a secret of a sink."""
    for secret in sink.iter_current_secret_texts():
        for text in {secret, *secret.split(), *_SEPARATORS.split(secret)}:
            yield hashlib.sha256(text.encode()).digest()
            with suppress(ValueError):  # most are no signing secrets
                yield decode_secret(text)
