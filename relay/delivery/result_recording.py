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
from relay.store import Attempt, EntryState, SinkState
from relay.store.sqlite import Store, Work
from relay.store.transaction import Transaction

MAX_STATUS = 2**31
"""The largest status that a sink may report."""
BATCH_PAUSE = 0.005
"""Seconds. No delivery waits for it, and no more can be repeated: a sink has a limit of its own."""
FULL_BATCH = 32
"""Deliveries that do not wait for others. It is half of what a sink may have open, so that the sink
goes on while the batch is written."""

_log = logging.getLogger(__name__)


def checked_result(result: Receipt | Exception) -> Receipt | Exception:
    """Return a result, or the error if the store cannot hold it: a bug of the sink."""
    if isinstance(result, Exception) and not isinstance(result, DeliveryError):
        return result
    try:
        # What is no receipt, such as None, fails here: that is a bug of the sink too.
        return _checked(result)
    except Exception as error:  # noqa: BLE001  # a bug in one sink must not stop the others
        return error


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


def _checked(result: Receipt | DeliveryError) -> Receipt | DeliveryError:
    """Return a result that the store can hold. Raises TypeError or ValueError if it cannot.

    The store records it together with the deliveries of other sinks, and must not fail on them.
    """
    if result.status is not None and abs(result.status) > MAX_STATUS:
        raise ValueError(f"expected a status of at most {MAX_STATUS}, got a larger one")
    for seconds in (result.skew, result.after if isinstance(result, Deferred) else None):
        if seconds is not None and math.isnan(seconds):
            raise ValueError("expected a number of seconds, got NaN")
    if isinstance(result, DeliveryError):
        result.reason = _encodable(result.reason)
        result.answer = None if result.answer is None else _encodable(result.answer)
        return result
    response = None if result.response is None else _encodable(result.response)
    if type(result) is Receipt and response == result.response:
        return result
    return Receipt(result.status, response, result.skew)


def _encodable(text: str) -> str:
    """Return the text without lone surrogates, which UTF-8 cannot encode."""
    if not isinstance(text, str):
        raise TypeError(f"expected a text, got {type(text).__name__}")
    return text.encode(errors="replace").decode()


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
        self._is_writing = False

    def record_delivery(
        self, entry_id: int, attempt: Attempt, on_written: Callable[[], None]
    ) -> None:
        """An entry was delivered. ``on_written`` is called once this is recorded, or cannot be."""
        self._delivered.append((entry_id, attempt))
        self._callbacks.append(on_written)
        self._write_full_batch_or_set_timer()

    def record_failed_attempt(self, entry_id: int, attempt: Attempt, until: datetime) -> None:
        self._submit_after_pending_results(lambda tx: tx.deliveries.defer(entry_id, attempt, until))

    def record_end_without_delivery(
        self, entry_id: int, state: EntryState, reason: str, at: datetime, attempt: Attempt | None
    ) -> None:
        def work(tx: Transaction) -> None:
            if attempt is not None:
                tx.deliveries.log_attempts([(entry_id, attempt)])
            tx.deliveries.store_final_state(entry_id, state, reason, at)

        self._submit_after_pending_results(work)

    def record_sink_state(self, sink: str, state: SinkState, reason: str) -> None:
        self._submit_after_pending_results(
            lambda tx: tx.deliveries.set_sink_state(sink, state, reason)
        )

    def submit(self) -> None:
        self._stop_timer()
        if self._delivered:
            self._submit_batch()

    def _submit_after_pending_results(self, work: Work[None]) -> None:
        self.submit()  # keep the order
        self._store.submit(work, fail_open=True).add_done_callback(_log_unexpected_recording_error)

    def _write_full_batch_or_set_timer(self) -> None:
        if self._is_writing or not self._delivered:
            return
        if len(self._delivered) >= FULL_BATCH:
            self._write_batch()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._pause, self._write_batch)

    def _write_batch(self) -> None:
        self._stop_timer()
        self._is_writing = True
        self._submit_batch().add_done_callback(self._on_batch_written)

    def _on_batch_written(self, _: asyncio.Future[None]) -> None:
        self._is_writing = False
        self._write_full_batch_or_set_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _submit_batch(self) -> asyncio.Future[None]:
        delivered, self._delivered = self._delivered, []
        callbacks, self._callbacks = self._callbacks, []

        def done(future: asyncio.Future[None]) -> None:
            _log_unexpected_recording_error(future)
            for callback in callbacks:
                callback()

        future = self._store.submit(
            lambda tx: tx.deliveries.log_attempts(delivered), fail_open=True
        )
        future.add_done_callback(done)
        return future


def _log_unexpected_recording_error(future: asyncio.Future[Any]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None and not isinstance(error, RelayError):
        _log.error("the result of a delivery could not be recorded", exc_info=error)
