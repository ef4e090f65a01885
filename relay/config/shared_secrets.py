"""Finds secrets that a sink and a client share: the receiver of the sink could be the client."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import NoReturn

from relay.api import Client
from relay.clock import Clock
from relay.log_once import LogOnce
from relay.settings import WrongValue
from relay.signature import decode_secret
from relay.sinks import SinkSettings

CHECK_INTERVAL = 10.0
"""Seconds between two comparisons while the relay runs."""
_log = logging.getLogger(__name__)
_SEPARATORS = re.compile(r"[\s:/@?&=]+")
"""What is between a secret and the rest of a value: ``Bearer <key>``,
``amqp://user:<key>@host``."""


def check_secrets_not_shared(sinks: Sequence[SinkSettings], clients: Sequence[Client]) -> None:
    """Raise WrongValue if a sink has the key or a signing secret of a client.

    The values are compared, also those in files and behind digests, and never shown.
    """
    for index, problem in _secret_sharing_problems_by_client_index(sinks, clients):
        raise WrongValue(("api", "clients", index), problem)


async def watch_and_suspend_clients_sharing_secrets(
    sinks: Sequence[SinkSettings],
    clients: Sequence[Client],
    clock: Clock,
    suspend: Callable[[Collection[str]], None],
) -> NoReturn:
    """Suspend the clients whose key or secret is a sink's or another client's, until canceled.

    Files can change at any time. ``suspend`` gets the names of all clients that are no longer
    accepted with a key or a signature.
    """
    state_log = LogOnce(_log)
    while True:
        await clock.sleep(CHECK_INTERVAL)
        problems = dict(_secret_sharing_problems_by_client_index(sinks, clients))
        suspend({clients[index].name for index in problems})
        if problems:
            state_log.log_if_changed(
                logging.ERROR,
                "keys and signatures are refused until the files differ: %s",
                "; ".join(problems.values()),
            )
        else:
            state_log.log_if_changed(
                logging.DEBUG, "no client has a secret of a sink or another client"
            )


def _secret_sharing_problems_by_client_index(
    sinks: Sequence[SinkSettings], clients: Sequence[Client]
) -> Iterator[tuple[int, str]]:
    """Yield the index of each client that shares a secret, and what is wrong."""
    owners: dict[bytes, tuple[int, str]] = {}
    for index, client in enumerate(clients):
        with suppress(ValueError):  # a file has changed and holds no usable secret
            for kind, credential in client.key_digests_and_signing_keys():
                owner, _ = owners.setdefault(credential, (index, kind))
                if owner != index:
                    problem = (
                        f"clients {clients[owner].name} and {client.name} have the same {kind}"
                    )
                    yield owner, problem
                    yield index, problem
    for sink in sinks:
        for fingerprint in _secret_fingerprints_of_sink(sink):
            if fingerprint in owners:
                index, kind = owners[fingerprint]
                problem = (
                    f"client {clients[index].name} and sink {sink.name} have the same {kind}, so "
                    "whoever knows it for the sink could decide as the client; give each its own: "
                    "`imds-relay keys` makes one"
                )
                yield index, problem


def _secret_fingerprints_of_sink(sink: SinkSettings) -> Iterator[bytes]:
    """Yield everything that a credential of a client would equal if it were a secret of a sink."""
    for secret in sink.iter_current_secret_texts():
        for text in {secret, *secret.split(), *_SEPARATORS.split(secret)}:
            yield hashlib.sha256(text.encode()).digest()
            with suppress(ValueError):  # most are no signing secrets
                yield decode_secret(text)
