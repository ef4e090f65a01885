"""Makes one try to deliver an event, and describes how it went. It decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from relay.clock import Clock
from relay.errors import Deferred, Rejected
from relay.events.cloudevent import CloudEvent
from relay.outbox import Attempt, AttemptOutcome
from relay.sinks import Sink


@dataclass(slots=True)
class AttemptResult:
    """How a try went.

    ``error`` is None if the event was delivered. It is an unexpected error, a bug of the sink,
    unless it is Rejected or Deferred. ``began`` is in monotonic seconds. ``skew`` is how many
    seconds the receiver's clock is ahead of ours, None if that is not known.
    """

    attempt: Attempt
    began: float
    error: Exception | None = None
    skew: float | None = None


async def attempt_delivery(
    sink: Sink, event: CloudEvent, clock: Clock, *, is_stopping: Callable[[], bool]
) -> AttemptResult:
    """Let a sink deliver an event once.

    Raises CancelledError only if ``is_stopping`` returns True.
    """
    began, at = clock.monotonic(), clock.now()

    def describe(
        outcome: AttemptOutcome,
        status: int | None = None,
        reason: str | None = None,
        response: str | None = None,
    ) -> Attempt:
        return Attempt(
            at=at,
            elapsed=clock.monotonic() - began,
            outcome=outcome,
            status=status,
            reason=reason,
            response=response,
        )

    try:
        receipt = await sink.deliver(event)
        attempt = describe("delivered", receipt.status, None, receipt.response)
        return AttemptResult(attempt, began, None, receipt.skew)
    except Rejected as error:
        attempt = describe("parked", error.status, error.reason, error.response)
        return AttemptResult(attempt, began, error, error.skew)
    except Deferred as error:
        attempt = describe("deferred", error.status, error.reason, error.response)
        return AttemptResult(attempt, began, error, error.skew)
    except asyncio.CancelledError:
        if is_stopping():
            raise
        # Nobody canceled this task: docs/protocol.md#a-library-cancels-publishers
        lost = Deferred("the connection was lost")
        return AttemptResult(describe("deferred", None, lost.reason), began, lost)
    except Exception as error:  # noqa: BLE001  # a bug in one sink must not stop the others
        return AttemptResult(describe("error", None, error_name(error)), began, error)


def error_name(error: Exception) -> str:
    """Return the type of an unexpected error. Its text may hold a secret, such as a password."""
    return type(error).__name__
