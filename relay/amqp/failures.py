"""Explains failures of connections and channels to RabbitMQ, without secrets.

It also tells a real cancellation of a task from one that aiormq raises or swallows.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass

from aio_pika import exceptions as amqp

from relay.errors import Deferred, Failure
from relay.net.tls import explain_refusal

AMQP_CA_OPTION = "cafile in the url, or install it on this machine"


@dataclass(frozen=True, slots=True)
class ConnectionFailure:
    """Why there is no connection, its kind for the retry plan, and AMQP's reply code."""

    reason: str
    failure: Failure = "transient"
    status: int | None = None

    def to_deferred_error(self) -> Deferred:
        """Return a new error to raise. An error keeps its traceback, so it is raised only once."""
        return Deferred(self.reason, failure=self.failure, status=self.status)


def combine_failure_reasons(failures: Sequence[ConnectionFailure]) -> ConnectionFailure:
    """Return the failures of several hosts as one, with the reasons in a fixed order."""
    reasons = {failure.reason for failure in failures}
    kinds = {failure.failure for failure in failures}
    last = failures[-1]
    return ConnectionFailure(
        reason="; ".join(sorted(reasons)),
        failure=last.failure if len(kinds) == 1 else "transient",
        status=last.status,
    )


def broker_message(error: BaseException) -> str:
    """Return the broker's own text, without what the library adds to it."""
    return str(error.args[-1]) if error.args else type(error).__name__


def connection_failure_from_exception(error: BaseException) -> ConnectionFailure:
    match error:
        case Deferred():
            return ConnectionFailure(error.reason, error.failure, error.status)
        case asyncio.CancelledError():
            return ConnectionFailure("nothing was heard from the broker for three heartbeats")
        case TimeoutError():
            return ConnectionFailure("the broker did not answer in time")
        case amqp.ProbableAuthenticationError():
            return ConnectionFailure(
                f"the broker refused user, password or certificate ({broker_message(error)}): "
                "correct the url",
                status=403,
            )
        case amqp.AuthenticationError(args=(mechanisms, _)):
            return ConnectionFailure(
                f"the broker accepts only {mechanisms}: correct auth in the url, "
                "or for auth=external enable rabbitmq_auth_mechanism_ssl",
                status=403,
            )
        case amqp.InvalidFrameError() if "Connection.Close" in broker_message(error):
            # aiormq does not keep the broker's own text.
            return ConnectionFailure(
                "the broker did not open the virtual host: check that it exists, that the user "
                "has rights in it, and that no limit of connections is reached",
                status=530,
            )
        case OSError() if not isinstance(error, amqp.AMQPError):
            return ConnectionFailure(_system_reason(error))
        case _:
            return ConnectionFailure(broker_message(error))


def _system_reason(error: OSError) -> str:
    match error:
        case socket.gaierror():
            return f"the name of the host was not found ({error.strerror})"
        case ssl.SSLCertVerificationError():
            problem, remedy = explain_refusal(error, AMQP_CA_OPTION)
            return f"the broker's certificate is not one that we trust ({problem}): {remedy}"
        case ssl.SSLError():
            return f"no TLS with the broker: {error.reason or broker_message(error)}"
        case OSError(errno=int(number)) if "Connect call failed" in broker_message(error):
            return os.strerror(number)  # asyncio's text hides that of the system
        case OSError(filename=str(file)):
            return f"{file}: {error.strerror}"
    return broker_message(error)


def is_current_task_cancelled_by_caller() -> bool:
    """Return whether a caller cancelled the current task.

    When its heartbeat watchdog fires, aiormq raises CancelledError in every task that waits for
    the connection, though nobody cancelled them.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def raise_if_cancelled() -> None:
    """Raise CancelledError if a caller cancelled the current task.

    Call it before a wait that may never end. aiormq waits with `asyncio.wait_for`, which up to
    Python 3.11 drops a cancellation that arrives in the same turn of the loop as the result.
    """
    if is_current_task_cancelled_by_caller():
        raise asyncio.CancelledError
