"""The results of tries: makes each storable, and records it.

A sink can be the code of an installed package. So its receipts and errors pass `checked_result`: a
value that the store cannot hold counts as a bug of the sink, as does any unexpected exception.
`make_attempt` makes the attempt of the result, which goes to the `ResultRecorder`. The dispatcher
makes one for all sinks. It writes results to the store in the order in which tries ended, and
deliveries in batches.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from datetime import datetime
from typing import Any

from relay.errors import Deferred, DeliveryError, Rejected, RelayError
from relay.sinks import Receipt
from relay.store import Attempt
from relay.store.sqlite import Store, Work

MAX_STATUS = 2**31
"""The largest status that a sink may report."""
BATCH_PAUSE = 0.005
"""Seconds. No delivery waits for it, and no more can be repeated: a sink has a limit of its own."""
FULL_BATCH = 32
"""Deliveries that do not wait for others. It is half of what a sink may have open, so that the sink
goes on while the batch is written."""

_log = logging.getLogger(__name__)


def checked_result(result: Receipt | Exception) -> Receipt | Exception:
    """Return a result, or the error if the store cannot hold it: a bug of the sink.

    The store records it together with the deliveries of other sinks, and must not fail on them.
    """
    if isinstance(result, Exception) and not isinstance(result, DeliveryError):
        return result
    try:
        # What is no receipt, such as None, fails here: that is a bug of the sink too.
        if result.status is not None and abs(result.status) > MAX_STATUS:
            return ValueError(f"expected a status of at most {MAX_STATUS}, got a larger one")
        for seconds in (result.skew, result.after if isinstance(result, Deferred) else None):
            if seconds is not None and math.isnan(seconds):
                return ValueError("expected a number of seconds, got NaN")
        if isinstance(result, DeliveryError):
            result.reason = _encodable(result.reason)
            result.answer = None if result.answer is None else _encodable(result.answer)
            return result
        response = None if result.response is None else _encodable(result.response)
        if type(result) is Receipt and response == result.response:
            return result
        return Receipt(result.status, response, result.skew)
    except Exception as error:  # noqa: BLE001  # a bug in one sink must not stop the others
        return error


def _encodable(text: str) -> str:
    """Return the text without lone surrogates, which UTF-8 cannot encode."""
    if not isinstance(text, str):
        raise TypeError(f"expected a text, got {type(text).__name__}")
    return text.encode(errors="replace").decode()


def make_attempt(result: Receipt | Exception, at: datetime, elapsed: float) -> Attempt:
    """Return the attempt, "parked" for a rejection. ``elapsed`` is in seconds."""
    if isinstance(result, Receipt):
        return Attempt(
            at=at,
            elapsed=elapsed,
            outcome="delivered",
            status=result.status,
            response=result.response,
        )
    if isinstance(result, Rejected | Deferred):
        return Attempt(
            at=at,
            elapsed=elapsed,
            outcome="parked" if isinstance(result, Rejected) else "deferred",
            status=result.status,
            reason=result.reason,
            response=result.answer,
        )
    return Attempt(at=at, elapsed=elapsed, outcome="error", reason=error_type_name(result))


def error_type_name(error: Exception) -> str:
    """Return the type of an unexpected error. Its text may hold a secret, such as a password."""
    return type(error).__name__


class ResultRecorder:
    """Records in the store how deliveries went, for all sinks, in the order of their ends.

    No delivery waits for it. If something is lost with the process, the same event is sent again
    with the same id. Deliveries that succeed within a few milliseconds of each other, or while a
    batch is being written, form one batch: a commit costs the same for one as for many.

    ``pause`` is how many seconds the first delivery of a batch waits for others.
    """

    def __init__(self, store: Store, *, pause: float = BATCH_PAUSE) -> None:
        self._store = store
        self._pause = pause
        self._delivered: list[tuple[int, Attempt]] = []  # not yet submitted
        self._callbacks: list[Callable[[], None]] = []  # one for each of them
        self._timer: asyncio.TimerHandle | None = None  # ends the pause of the next batch
        self._batches = 0  # being written

    def record_delivery(
        self, entry_id: int, attempt: Attempt, on_written: Callable[[], None]
    ) -> None:
        """An entry was delivered. ``on_written`` is called once this is recorded, or cannot be."""
        self._delivered.append((entry_id, attempt))
        self._callbacks.append(on_written)
        self._write_full_batch_or_set_timer()

    def record(self, work: Work[None]) -> None:
        """Record another result, after the deliveries that ended before it."""
        self.submit()
        self._store.submit(work, fail_open=True).add_done_callback(_log_unexpected_recording_error)

    def submit(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._delivered:
            return
        delivered, self._delivered = self._delivered, []
        callbacks, self._callbacks = self._callbacks, []
        self._batches += 1

        def done(future: asyncio.Future[None]) -> None:
            self._batches -= 1
            _log_unexpected_recording_error(future)
            for callback in callbacks:
                callback()
            self._write_full_batch_or_set_timer()

        written = self._store.submit(
            lambda tx: tx.deliveries.log_attempts(delivered), fail_open=True
        )
        written.add_done_callback(done)

    def _write_full_batch_or_set_timer(self) -> None:
        if self._batches or not self._delivered:
            return
        if len(self._delivered) >= FULL_BATCH:
            self.submit()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._pause, self.submit)


def _log_unexpected_recording_error(future: asyncio.Future[Any]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None and not isinstance(error, RelayError):
        _log.error("the result of a delivery could not be recorded", exc_info=error)
