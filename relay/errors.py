"""Every error the relay raises on purpose, as one tree.

    RelayError
    ├── ConfigError               the YAML document, an environment variable or a file it names is wrong
    ├── SourceError               the metadata service did not give a usable answer
    │   ├── SourceUnavailable         try again later: 404, 410, 429, 5xx, resets, timeouts
    │   ├── SourceRefused             400: our own request is wrong
    │   └── DocumentError             a 200 whose body is not a Scheduled Events document
    ├── DeliveryError             a sink could not deliver
    │   ├── Deferred                  a later try may work
    │   └── Rejected                  no later try will
    ├── SignatureRefused          headers that do not prove who sent a body (in `signature`)
    └── StoreError                the state file
        ├── StoreLocked               another relay holds it
        ├── StoreTooNew               a newer version wrote it
        └── StoreUnavailable          it cannot be written now

The text of an error says what was expected, what came and what to do. It never holds a secret.
"""

from __future__ import annotations

from typing import Literal

Failure = Literal["transient", "slow", "disabled"]


class RelayError(Exception):
    """The root of everything that the relay raises on purpose."""


class ConfigError(RelayError):
    """A configuration that cannot be used: names the place, the expectation and what came. Nothing was started."""


class SourceError(RelayError):
    """The metadata service did not give a usable answer. ``status`` is the HTTP status, None when there was none."""

    def __init__(self, reason: str, *, status: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status


class SourceUnavailable(SourceError):
    """A later call may work. ``retry_after`` is what the service asked for, in seconds, or None."""

    def __init__(
        self, reason: str, *, status: int | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(reason, status=status)
        self.retry_after = retry_after


class SourceRefused(SourceError):
    """400: our header, version or body is wrong (Azure, "Scheduled Events", section on starting an event)."""


class DocumentError(SourceError):
    """A 200 answer that is not a Scheduled Events document. It changes nothing and ends no event."""


class DeliveryError(RelayError):
    """A sink could not deliver. ``reason`` is a sentence for the operator, ``status`` the far side's code if it gave one.

    ``answer`` holds the first bytes of what the far side said, for the log of attempts; ``skew`` the seconds that its clock
    is ahead of ours, None where that is not known.
    """

    def __init__(
        self,
        reason: str,
        *,
        status: int | None = None,
        answer: str | None = None,
        skew: float | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status
        self.response = answer
        self.skew = skew


class Deferred(DeliveryError):
    """A later try may work.

    ``after``: the far side asked for this many seconds of rest. ``failure`` tells the retry plan what kind it was:
    ``transient`` (tried again by the plan), ``slow`` (somebody must mend something: tried slowly until NotBefore, then
    parked), ``disabled`` (the far side asked us to stop: the sink is disabled and keeps its entries).
    """

    def __init__(
        self,
        reason: str,
        *,
        after: float | None = None,
        failure: Failure = "transient",
        status: int | None = None,
        answer: str | None = None,
        skew: float | None = None,
    ) -> None:
        super().__init__(reason, status=status, answer=answer, skew=skew)
        self.after = after
        self.failure: Failure = failure


class Rejected(DeliveryError):
    """No later try will work: the entry is parked as a dead letter with this reason."""


class StoreError(RelayError):
    """The state file cannot be used as it is."""


class StoreLocked(StoreError):
    """Another relay holds the state file."""


class StoreTooNew(StoreError):
    """A newer version of the relay wrote the state file."""


class StoreUnavailable(StoreError):
    """The state file cannot be written now. Notices go out from memory; approvals are refused."""
