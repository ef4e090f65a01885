"""Sign-ins that have begun, and sessions, under any actions in any order."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from relay.api.callers import NotAuthenticated
from relay.api.sessions import (
    MAX_SESSIONS,
    MAX_SESSIONS_OF_PRINCIPAL,
    PENDING_LIFETIME,
    SESSION_LIFETIME,
    Sessions,
)
from relay.api.sign_in import PendingSignIn, PendingSignIns
from relay.approvals.request import Caller, Rights
from tests.clocks import ManualClock
from tests.depth import depth

BROWSERS = st.integers(0, 2)
PEOPLE = st.integers(0, 2)


@dataclass(frozen=True, slots=True)
class Begun:
    """A sign-in, and when it began in which browser."""

    browser: int
    at: float
    pending: PendingSignIn


class SignInMachine(RuleBasedStateMachine):
    """Three browsers, and an attacker who can show any state and cookie that was ever made.

    The model says which sign-in each browser has. Only that may end, with its own state, once, in
    time, and with the nonce and the verifier that it began with.
    """

    begun: Bundle[Begun] = Bundle("begun")

    def __init__(self) -> None:
        super().__init__()
        self.pending = PendingSignIns()
        self.now = 1000.0
        self.cookies: dict[int, str] = {}
        self.ended: set[str] = set()

    @rule(target=begun, browser=BROWSERS)
    def begin(self, browser: int) -> Begun:
        pending = self.pending.begin(self.now)
        self.cookies[browser] = pending.cookie
        return Begun(browser, self.now, pending)

    @rule(seconds=st.sampled_from([1.0, 299.0, PENDING_LIFETIME - 1, PENDING_LIFETIME]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(browser=BROWSERS, sign_in=begun, other=begun, part=st.sampled_from(["", "x", None]))
    def finish(self, browser: int, sign_in: Begun, other: Begun, part: str | None) -> None:
        """Show a state in a browser, of its own sign-in or of another one, whole or altered."""
        state = other.pending.state if part is None else sign_in.pending.state + part
        self._finish(self.cookies.get(browser), state)

    @rule(sign_in=begun, other=begun)
    def replay(self, sign_in: Begun, other: Begun) -> None:
        self._finish(sign_in.pending.cookie, other.pending.state)
        self._finish(f"{sign_in.pending.cookie}x", sign_in.pending.state)

    @rule(sign_in=begun)
    def restart(self, sign_in: Begun) -> None:
        with pytest.raises(NotAuthenticated):
            PendingSignIns().finish(sign_in.pending.cookie, sign_in.pending.state, self.now)

    def _finish(self, cookie: str | None, state: str) -> None:
        expected = self._expected(cookie, state)
        if expected is None:
            with pytest.raises(NotAuthenticated):
                self.pending.finish(cookie, state, self.now)
            return
        assert self.pending.finish(expected.cookie, state, self.now) == expected
        self.ended.add(expected.state)

    def _expected(self, cookie: str | None, state: str) -> PendingSignIn | None:
        """Return the sign-in that may end now, by the model."""
        for sign_in in self._made:
            pending = sign_in.pending
            is_own = (pending.cookie, pending.state) == (cookie, state)
            is_in_time = self.now < int(sign_in.at) + PENDING_LIFETIME
            if is_own and is_in_time and state not in self.ended:
                return pending
        return None

    @property
    def _made(self) -> list[Begun]:
        values: list[Any] = list(self.names_to_values.values())
        return [value for value in values if isinstance(value, Begun)]

    @invariant()
    def every_sign_in_has_values_of_its_own(self) -> None:
        """No state, nonce or verifier is that of another sign-in, or says another."""
        values = []
        for sign_in in self._made:
            made = sign_in.pending
            values += [made.state, made.nonce, made.verifier, made.challenge, made.cookie]
            for secret in (made.verifier, made.nonce):
                assert secret not in made.cookie + made.state
        assert len(set(values)) == len(values)


TestSignIns = SignInMachine.TestCase
TestSignIns.settings = settings(max_examples=depth(40, 10), stateful_step_count=20)


class SessionMachine(RuleBasedStateMachine):
    """Sessions of three people, compared with a list of what must be open."""

    cookies: Bundle[str] = Bundle("cookies")

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.sessions = Sessions(self.clock)
        self.open: dict[str, tuple[str, float]] = {}

    @rule(target=cookies, person=PEOPLE, seconds=st.sampled_from([0.0, 300.0, 9999.0]))
    def begin(self, person: int, seconds: float) -> str:
        principal = f"entra:{person}"
        cookie = begin(self.sessions, principal, seconds)
        self._forget()
        own = [key for key, (other, _) in self.open.items() if other == principal]
        for key in own[: max(0, len(own) + 1 - MAX_SESSIONS_OF_PRINCIPAL)]:
            del self.open[key]
        ends_at = self.clock.monotonic() + min(seconds, SESSION_LIFETIME)
        self.open[cookie] = (principal, ends_at)
        return cookie

    @rule(seconds=st.sampled_from([1.0, 299.0, 300.0, SESSION_LIFETIME]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(cookie=cookies)
    def sign_out(self, cookie: str) -> None:
        self.sessions.end(cookie)
        self.open.pop(cookie, None)

    @rule(cookie=cookies)
    def look(self, cookie: str) -> None:
        """Only an open session is found, and its person is the one who signed in."""
        self._forget()
        session = self.sessions.find(cookie)
        expected = self.open.get(cookie)
        assert (session and session.caller.principal) == (expected and expected[0])
        assert self.sessions.find(cookie + "x") is None

    @invariant()
    def there_are_few(self) -> None:
        assert len(self.sessions) <= 3 * MAX_SESSIONS_OF_PRINCIPAL

    def _forget(self) -> None:
        now = self.clock.monotonic()
        self.open = {key: value for key, value in self.open.items() if now < value[1]}


TestSessions = SessionMachine.TestCase
TestSessions.settings = settings(max_examples=depth(40, 10), stateful_step_count=40)


def begin(sessions: Sessions, principal: str, seconds: float = SESSION_LIFETIME) -> str:
    return sessions.begin(Caller(principal, "http", Rights(frozenset())), None, seconds)


def test_a_relay_has_a_maximum_of_sessions_and_the_oldest_gives_way() -> None:
    sessions = Sessions(ManualClock())
    cookies = [begin(sessions, f"entra:{number}") for number in range(MAX_SESSIONS + 1)]
    assert len(sessions) == MAX_SESSIONS
    assert sessions.find(cookies[0]) is None
    assert all(sessions.find(cookie) for cookie in cookies[1:])


def test_a_person_has_few_sessions_and_the_oldest_gives_way() -> None:
    sessions = Sessions(ManualClock())
    of_ben = begin(sessions, "entra:ben")
    oldest, *others = [begin(sessions, "entra:ann") for _ in range(MAX_SESSIONS_OF_PRINCIPAL + 1)]
    assert sessions.find(oldest) is None
    assert all(sessions.find(cookie) for cookie in (of_ben, *others))


def test_either_clock_ends_a_session() -> None:
    """A clock that is set back lengthens none, and neither does a machine that was suspended."""
    for wall, elapsed in ((SESSION_LIFETIME, 0.0), (-SESSION_LIFETIME, SESSION_LIFETIME)):
        clock = ManualClock()
        sessions = Sessions(clock)
        cookie = begin(sessions, "entra:x")
        assert sessions.find(cookie) is not None
        clock.advance(elapsed)
        clock.set_wall_clock(clock.now() + timedelta(seconds=wall - elapsed))
        assert sessions.find(cookie) is None
