"""Why nothing can be sent or taken now, in a sentence."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass

from aio_pika import exceptions as amqp

from relay.errors import Deferred, Failure
from relay.net.tls_context import explain_refusal


@dataclass(frozen=True, slots=True)
class ConnectionFailure:
    """Why there is no connection, as a sentence without secrets, and what kind of failure that is to the retry plan."""

    reason: str
    failure: Failure = "transient"
    status: int | None = None

    def deferred(self) -> Deferred:
        """The same as an error to raise, new each time: a raised error holds on to its traceback."""
        return Deferred(self.reason, failure=self.failure, status=self.status)


def combine(troubles: Sequence[ConnectionFailure]) -> ConnectionFailure:
    """The same troubles as one, whatever their order: those of several hosts."""
    reasons, failures = (
        {trouble.reason for trouble in troubles},
        {trouble.failure for trouble in troubles},
    )
    failure = troubles[-1].failure if len(failures) == 1 else "transient"
    return ConnectionFailure("; ".join(sorted(reasons)), failure, troubles[-1].status)


def broker_message(error: BaseException) -> str:
    """What the broker said, or the library, without the words that the library puts around it."""
    return str(error.args[-1]) if error.args else type(error).__name__


def describe_failure(error: BaseException) -> ConnectionFailure:
    """Say why a connection or channel could not be had, or ended."""
    match error:
        case Deferred():
            return ConnectionFailure(error.reason, error.failure, error.status)
        case asyncio.CancelledError():
            return ConnectionFailure("nothing was heard from the broker for three heartbeats")
        case TimeoutError():
            return ConnectionFailure("the broker did not answer in time")
        case amqp.ProbableAuthenticationError():
            return ConnectionFailure(
                f"the broker refused user, password or certificate ({broker_message(error)}): correct the url",
                status=403,
            )
        case amqp.AuthenticationError(args=(offered, _)):
            remedy = (
                "correct auth in the url, or for auth=external enable rabbitmq_auth_mechanism_ssl"
            )
            return ConnectionFailure(f"the broker takes {offered} alone: {remedy}", status=403)
        case amqp.InvalidFrameError() if "Connection.Close" in broker_message(
            error
        ):  # aiormq keeps the broker's own words to itself
            remedy = "see that it exists, that the user has rights in it, and that no limit of connections is reached"
            return ConnectionFailure(
                f"the broker did not open the virtual host: {remedy}", status=530
            )
        case OSError() if not isinstance(error, amqp.AMQPError):
            return ConnectionFailure(_of_system(error))
        case _:
            return ConnectionFailure(broker_message(error))


def _of_system(error: OSError) -> str:
    match error:
        case socket.gaierror():
            return f"the host's name was not found ({error.strerror})"
        case ssl.SSLCertVerificationError():
            why, remedy = explain_refusal(error, "cafile in the url, or install it on this machine")
            return f"the broker's certificate is not one that we trust ({why}): {remedy}"
        case ssl.SSLError():
            return f"no TLS with the broker: {error.reason or broker_message(error)}"
        case OSError(errno=int(number)) if "Connect call failed" in broker_message(
            error
        ):  # asyncio's words, which hide the system's
            return os.strerror(number)
        case OSError(filename=str(file)):
            return f"{file}: {error.strerror}"
    return broker_message(error)
