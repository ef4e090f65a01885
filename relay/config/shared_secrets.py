"""Finds secrets that a sink and a client share: the receiver of the sink could be the client."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress

from relay.api import Client
from relay.config.problems import WrongValue
from relay.signature import decode_secret
from relay.sinks import SinkSettings

_SEPARATORS = re.compile(r"[\s:/@?&=]+")
"""What is between a secret and the rest of a value: ``Bearer <key>``, ``amqp://user:<key>@host``."""


def check_secrets_not_shared(sinks: Sequence[SinkSettings], clients: Sequence[Client]) -> None:
    """Raise WrongValue if a sink has the key or a signing secret of a client.

    The values are compared, also those in files and behind digests, and never shown.
    """
    owners = {
        credential: (index, client.name, kind)
        for index, client in enumerate(clients)
        for kind, credential in client.credentials()
    }
    for sink in sinks:
        for fingerprint in _fingerprints(sink):
            if fingerprint in owners:
                index, client_name, kind = owners[fingerprint]
                raise WrongValue(
                    ("api", "clients", index),
                    f"client {client_name} and sink {sink.name} have the same {kind}, so whoever "
                    "knows it for the sink could decide as the client; give each its own: "
                    "`imds-relay keys` makes one",
                )


def _fingerprints(sink: SinkSettings) -> Iterator[bytes]:
    """Yield everything that a credential of a client would equal if it were a secret of a sink."""
    for secret in sink.reveal_everything():
        for text in {secret, *secret.split(), *_SEPARATORS.split(secret)}:
            yield hashlib.sha256(text.encode()).digest()
            with suppress(ValueError):  # most are no signing secrets
                yield decode_secret(text)
