"""All errors that the relay raises on purpose, as one tree under `RelayError`.

The text of an error says what was expected, what was found and what to do, without secrets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Failure = Literal["transient", "slow", "disabled"]
"""The kind of a failed delivery, see `Deferred`."""


class RelayError(Exception):
    """The base class of all errors that the relay raises on purpose."""


@dataclass(eq=False, repr=False)
class _ErrorWithFields(RelayError):
    """An error whose text is ``reason``, and which has more fields."""

    reason: str

    def __post_init__(self) -> None:
        super().__init__(self.reason)


class ConfigError(RelayError):
    """The YAML document, a variable or a file is wrong. The text names the place."""


@dataclass(eq=False, repr=False, kw_only=True)
class ReloadRefused(_ErrorWithFields):
    """The configuration was not reloaded: nothing has changed.

    ``restart_keys`` are the keys that need a restart. ``is_stopping``: the relay stops.
    """

    restart_keys: Sequence[str] = ()
    is_stopping: bool = False


@dataclass(eq=False, repr=False, kw_only=True)
class SourceError(_ErrorWithFields):
    """The metadata service gave no usable answer.

    ``status`` is the HTTP status, if any. ``retry_after`` is the pause in seconds that the service
    asks for, if it does.
    """

    status: int | None = None
    retry_after: float | None = None


class SourceUnavailable(SourceError):
    """A later call may work: 404, 410, 429, 5xx, a reset or a timeout."""


class StartRequestNotDelivered(SourceUnavailable):
    """A hub's order to send a StartRequest reached no agent. Another agent may get it at once."""


class SourceRefused(SourceError):
    """400: the relay's header, version or body is wrong."""


class SourceCallNotSentInTime(SourceError):
    """The call may not be sent any more. Nothing of it was sent."""


class DocumentError(SourceError):
    """200 with a body that is not a Scheduled Events document. It changes no event."""


class DocumentTooLarge(DocumentError):
    """The body of an answer is larger than the relay reads. The rest of it is not read."""


@dataclass(eq=False, repr=False, kw_only=True)
class DeliveryError(_ErrorWithFields):
    """A sink could not deliver.

    ``reason`` is a sentence for the operator. ``status`` is the destination's status code, if there
    is one. ``answer`` is the start of its answer, for the log of attempts. ``skew`` is how many
    seconds the destination's clock is ahead of ours; None if unknown.
    """

    status: int | None = None
    answer: str | None = None
    skew: float | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class Deferred(DeliveryError):
    """A later try may work.

    ``after`` is the pause in seconds that the destination asks for. ``remedy`` is the end of the
    reason, if that says what to do and ``imds-relay doctor`` shows it apart. ``failure`` tells
    `relay.delivery.retry` what kind of failure it is:

    - ``transient``: it can pass by itself. Retries get slower.
    - ``slow``: a person must correct something. Retries are slow until NotBefore; then the delivery
      becomes a dead letter.
    - ``disabled``: the destination asks the relay to stop. The sink is disabled, and keeps what
      waits.
    """

    after: float | None = None
    failure: Failure = "transient"
    remedy: str | None = None


class Rejected(DeliveryError):
    """No later try can work: the entry becomes a dead letter with this reason."""


class Superseded(DeliveryError):
    """The destination does not need the event any more: it has the same from another sender."""


class StoreError(RelayError):
    """The state file is unusable."""


class StoreUnavailable(StoreError):
    """The state file cannot be written now: events are sent from memory, approvals are refused."""
