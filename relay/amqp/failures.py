"""Explains failures of connections and channels to RabbitMQ, without secrets.

It also tells a real cancellation of a task from one that aiormq raises or swallows.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from aio_pika import exceptions as amqp
from aiormq.exceptions import ChannelAccessRefused

from relay.errors import Deferred
from relay.net.tls import explain_refusal

AMQP_CA_OPTION = "cafile in the url, or install it on this machine"


def broker_message(error: BaseException) -> str:
    """Return the broker's own text, without what the library adds to it."""
    return str(error.args[-1]) if error.args else type(error).__name__


@contextmanager
def explained_refusal(if_missing: str, if_refused: str) -> Iterator[None]:
    """Raise Deferred with one of these texts, with the broker's own for {}, if it says no."""
    try:
        yield
    except amqp.ChannelNotFoundEntity as error:
        raise Deferred(if_missing.format(broker_message(error))) from None
    except ChannelAccessRefused as error:
        raise Deferred(if_refused.format(broker_message(error))) from None


def explain_failure(error: BaseException) -> Deferred:
    """Return why there is no connection, with AMQP's reply code."""
    match error:
        case Deferred():
            return error.with_traceback(None)  # whose frames would keep the connection
        case asyncio.CancelledError():
            return Deferred("nothing was heard from the broker for three heartbeats")
        case TimeoutError():
            return Deferred("the broker did not answer in time")
        case amqp.ProbableAuthenticationError():
            problem = f"the broker refused user, password or certificate ({broker_message(error)})"
            return _remediable(problem, "correct the url", 403)
        case amqp.AuthenticationError(args=(mechanisms, _)):
            remedy = (
                "correct auth in the url, or for auth=external enable rabbitmq_auth_mechanism_ssl"
            )
            return _remediable(f"the broker accepts only {mechanisms}", remedy, 403)
        case amqp.InvalidFrameError() if "Connection.Close" in broker_message(error):
            # aiormq does not keep the broker's own text.
            remedy = (
                "check that it exists, that the user has rights in it, and that no limit of "
                "connections is reached"
            )
            return _remediable("the broker did not open the virtual host", remedy, 530)
        case ssl.SSLCertVerificationError():
            problem, remedy = explain_refusal(error, AMQP_CA_OPTION)
            problem = f"the broker's certificate is not one that we trust ({problem})"
            return _remediable(problem, remedy)
        case OSError() if not isinstance(error, amqp.AMQPError):
            return Deferred(_system_reason(error))
        case _:
            return Deferred(broker_message(error))


def _remediable(problem: str, remedy: str, status: int | None = None) -> Deferred:
    return Deferred(f"{problem}: {remedy}", remedy=remedy, status=status)


def _system_reason(error: OSError) -> str:
    match error:
        case socket.gaierror():
            return f"the name of the host was not found ({error.strerror})"
        case ssl.SSLError():
            return f"no TLS with the broker: {error.reason or broker_message(error)}"
        case OSError(errno=int(number)) if "Connect call failed" in broker_message(error):
            return os.strerror(number)  # asyncio's text hides that of the system
        case OSError(filename=str(file)):
            return f"{file}: {error.strerror}"
    return broker_message(error)


def raise_if_cancelled() -> None:
    """Raise CancelledError if a caller cancelled the current task.

    Call it where CancelledError is handled: when its heartbeat watchdog fires, aiormq raises it in
    every task that waits for the connection, though nobody cancelled them. Call it also before a
    wait that may never end: aiormq waits with `asyncio.wait_for`, which up to Python 3.11 drops a
    cancellation that arrives in the same turn of the loop as the result.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling() > 0:
        raise asyncio.CancelledError
