"""Lets a sink deliver one event, and makes of whatever it does a result that the store can hold.

The worker calls `call_sink` for each try, and logs the result as the attempt of `make_attempt`. A
sink can be the code of an installed package. So its receipts and errors are checked here: a value
that the store cannot hold counts as a bug of the sink, as does any unexpected exception.
"""

from __future__ import annotations

import math
from datetime import datetime

from relay.errors import Deferred, DeliveryError, Rejected
from relay.events.cloudevent import CloudEvent
from relay.outbox import Attempt
from relay.sinks import Receipt, Sink

MAX_STATUS = 2**31
"""The largest status that a sink may report."""


async def call_sink(sink: Sink, event: CloudEvent) -> Receipt | Exception:
    """Let a sink deliver an event once; return its receipt, or why there is none.

    An exception that is no `relay.errors.DeliveryError` is a bug of the sink. Raises only what is
    no Exception, such as CancelledError.
    """
    try:
        try:
            receipt = await sink.deliver(event)
        except DeliveryError as error:
            return _make_error_storable(error)
        # What is no receipt, such as None, fails here: that is a bug of the sink too.
        return _make_receipt_storable(receipt)
    except Exception as error:  # noqa: BLE001  # a bug in one sink must not stop the others
        return error


def make_attempt(result: Receipt | Exception, at: datetime, elapsed: float) -> Attempt:
    """Return the attempt that ended so, in which "parked" stands for a rejection.

    ``elapsed`` is in seconds.
    """
    match result:
        case Receipt():
            return Attempt(
                at=at,
                elapsed=elapsed,
                outcome="delivered",
                status=result.status,
                response=result.response,
            )
        case Rejected() | Deferred():
            return Attempt(
                at=at,
                elapsed=elapsed,
                outcome="parked" if isinstance(result, Rejected) else "deferred",
                status=result.status,
                reason=result.reason,
                response=result.response,
            )
        case _:
            return Attempt(at=at, elapsed=elapsed, outcome="error", reason=error_name(result))


def error_name(error: Exception) -> str:
    """Return the type of an unexpected error. Its text may hold a secret, such as a password."""
    return type(error).__name__


def _make_receipt_storable(receipt: Receipt) -> Receipt:
    """Return a receipt that the store can hold. Raises TypeError or ValueError if it cannot.

    The store records it together with the deliveries of other sinks, and must not fail on them.
    """
    _check_status(receipt.status)
    _check_seconds(receipt.skew)
    response = receipt.response
    return Receipt(
        receipt.status,
        _replace_lone_surrogates(response) if response is not None else None,
        receipt.skew,
    )


def _make_error_storable(error: DeliveryError) -> DeliveryError:
    """Return the error with details that the store can hold, as `_make_receipt_storable` does."""
    _check_status(error.status)
    _check_seconds(error.skew)
    if isinstance(error, Deferred):
        _check_seconds(error.after)
    error.reason = _replace_lone_surrogates(error.reason)
    error.response = (
        _replace_lone_surrogates(error.response) if error.response is not None else None
    )
    return error


def _check_status(status: int | None) -> None:
    if status is not None and abs(status) > MAX_STATUS:
        raise ValueError(f"expected a status of at most {MAX_STATUS}, got a larger one")


def _check_seconds(seconds: float | None) -> None:
    if seconds is not None and math.isnan(seconds):
        raise ValueError("expected a number of seconds, got NaN")


def _replace_lone_surrogates(text: str) -> str:
    """Return the text without lone surrogates, which UTF-8 cannot encode."""
    if not isinstance(text, str):
        raise TypeError(f"expected a text, got {type(text).__name__}")
    return text.encode(errors="replace").decode()
