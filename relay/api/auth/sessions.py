"""The sessions of people who signed in: in memory, bounded, and over after an hour at the latest.

The browser has a random cookie, and the relay its digest. There is no refresh: what a role gives is
looked up at Entra ID again at the next sign-in.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from dataclasses import dataclass

from relay.approvals.request import Caller
from relay.clock import Clock

SESSION_LIFETIME = 3600.0
"""Seconds."""
MAX_SESSIONS = 1000
MAX_SESSIONS_OF_PRINCIPAL = 10
"""A person has several browsers. The oldest session makes room for a new one."""


@dataclass(frozen=True, slots=True)
class Session:
    """The session of a person in one browser."""

    key: bytes
    """The digest of the cookie."""
    caller: Caller
    name: str | None
    """What the person is called, for people."""
    ends_at: float
    """Seconds since 1970. A machine that was suspended has a monotonic clock that stood still."""
    ends_at_monotonic: float
    """Monotonic seconds. A clock that is set back lengthens no session."""


class Sessions:
    """The open sessions of one process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()  # the oldest first

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, caller: Caller, name: str | None, seconds: float) -> str:
        """Begin a session of at most that many seconds, and return its cookie."""
        self._forget_ended()
        own = [
            key
            for key, other in self._sessions.items()
            if other.caller.principal == caller.principal
        ]
        for key in own[: max(0, len(own) + 1 - MAX_SESSIONS_OF_PRINCIPAL)]:
            del self._sessions[key]
        while len(self._sessions) >= MAX_SESSIONS:
            self._sessions.popitem(last=False)
        cookie, lifetime = secrets.token_urlsafe(32), min(seconds, SESSION_LIFETIME)
        session = Session(
            _digest(cookie),
            caller,
            name,
            self._clock.now().timestamp() + lifetime,
            self._clock.monotonic() + lifetime,
        )
        self._sessions[session.key] = session
        return cookie

    def find(self, cookie: str) -> Session | None:
        """Return the session of this cookie; None if there is none, or if it has ended."""
        session = self._sessions.get(_digest(cookie))
        return session if session is not None and self.is_open(session) else None

    def is_open(self, session: Session) -> bool:
        """Whether the session has not ended."""
        return session.key in self._sessions and not self._has_expired(session)

    def end(self, cookie: str) -> None:
        """End the session of this cookie, if there is one."""
        self._sessions.pop(_digest(cookie), None)

    def _has_expired(self, session: Session) -> bool:
        clock = self._clock
        return (
            clock.now().timestamp() >= session.ends_at
            or clock.monotonic() >= session.ends_at_monotonic
        )

    def _forget_ended(self) -> None:
        for key in [key for key, other in self._sessions.items() if self._has_expired(other)]:
            del self._sessions[key]


def _digest(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode("utf-8", "surrogateescape")).digest()
