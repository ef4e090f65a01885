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
from relay.tls import explain_refusal


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why there is no connection, as a sentence without secrets, and what kind of failure that is to the retry plan."""

    reason: str
    failure: Failure = "transient"
    status: int | None = None

    def deferred(self) -> Deferred:
        """The same as an error to raise, new each time: a raised error holds on to its traceback."""
        return Deferred(self.reason, failure=self.failure, status=self.status)


def together(troubles: Sequence[Trouble]) -> Trouble:
    """The same troubles as one, whatever their order: those of several hosts."""
    reasons, failures = {trouble.reason for trouble in troubles}, {trouble.failure for trouble in troubles}
    failure = troubles[-1].failure if len(failures) == 1 else "transient"
    return Trouble("; ".join(sorted(reasons)), failure, troubles[-1].status)


def said(error: BaseException) -> str:
    """What the broker said, or the library, without the words that the library puts around it."""
    return str(error.args[-1]) if error.args else type(error).__name__


def explain(error: BaseException) -> Trouble:
    """Say why a connection or channel could not be had, or ended."""
    match error:
        case Deferred():
            return Trouble(error.reason, error.failure, error.status)
        case asyncio.CancelledError():
            return Trouble("nothing was heard from the broker for three heartbeats")
        case TimeoutError():
            return Trouble("the broker did not answer in time")
        case amqp.ProbableAuthenticationError():
            return Trouble(f"the broker refused user, password or certificate ({said(error)}): correct the url", status=403)
        case amqp.AuthenticationError(args=(offered, _)):
            remedy = "correct auth in the url, or for auth=external enable rabbitmq_auth_mechanism_ssl"
            return Trouble(f"the broker takes {offered} alone: {remedy}", status=403)
        case amqp.InvalidFrameError() if "Connection.Close" in said(error):  # aiormq keeps the broker's own words to itself
            remedy = "see that it exists, that the user has rights in it, and that no limit of connections is reached"
            return Trouble(f"the broker did not open the virtual host: {remedy}", status=530)
        case OSError() if not isinstance(error, amqp.AMQPError):
            return Trouble(_of_system(error))
        case _:
            return Trouble(said(error))


def _of_system(error: OSError) -> str:
    match error:
        case socket.gaierror():
            return f"the host's name was not found ({error.strerror})"
        case ssl.SSLCertVerificationError():
            why, remedy = explain_refusal(error, "cafile in the url, or install it on this machine")
            return f"the broker's certificate is not one that we trust ({why}): {remedy}"
        case ssl.SSLError():
            return f"no TLS with the broker: {error.reason or said(error)}"
        case OSError(errno=int(number)) if "Connect call failed" in said(error):  # asyncio's words, which hide the system's
            return os.strerror(number)
        case OSError(filename=str(file)):
            return f"{file}: {error.strerror}"
    return said(error)
