"""A relay at which people sign in, and programs that behave like their browsers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http.cookies import Morsel, SimpleCookie
from pathlib import Path
from typing import Any

import orjson
from multidict import MultiMapping
from yarl import URL

from tests.api.entra import ACCOUNTS, ANN, BEN, Account, Entra, principal, run_entra
from tests.api.running_relay import Response, RunningRelay, make_event, run_relay
from tests.ports import reserve

VOTE = {"name": "all", "approve": {"votes": 2, "from": [principal(ANN), principal(BEN)]}}
SESSION_COOKIE = "__Host-imds-relay-session"
PENDING_COOKIE = "__Host-imds-relay-sign-in"
OWN_PAGE = {"Sec-Fetch-Site": "same-origin", "X-Requested-With": "imds-relay"}
"""What the relay's own pages show besides a cookie."""


@dataclass(slots=True)
class Desk:
    """A relay, the Entra ID that it trusts, and where browsers reach it."""

    relay: RunningRelay
    entra: Entra
    public_url: str

    @property
    def origin(self) -> str:
        return str(URL(self.public_url).origin())

    def browser(self) -> Browser:
        return Browser(self)


@dataclass(slots=True)
class Browser:
    """Keeps cookies of the relay, and sends what a browser would send."""

    desk: Desk
    cookies: dict[str, str] = field(default_factory=dict)
    received: list[Morsel[str]] = field(default_factory=list)
    """Every cookie that the relay set."""

    async def call(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Response:
        sent = dict(headers or {})
        if self.cookies:
            sent["Cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        answer = await self.desk.relay.call(method, path, body, by=None, headers=sent)
        assert isinstance(answer.headers, MultiMapping)
        for header in answer.headers.getall("Set-Cookie", []):
            for name, morsel in SimpleCookie(header).items():
                self.received.append(morsel)
                self.cookies.pop(name, None)
                if morsel["max-age"] != "0":
                    self.cookies[name] = morsel.value
        return answer

    async def begin(self) -> dict[str, str]:
        answer = await self.call("GET", "/sign-in")
        assert answer.status == 303, answer.body
        location = URL(answer.headers["Location"])
        assert str(location.origin()) == self.desk.entra.origin
        return dict(location.query)

    async def come_back(self, **query: str) -> Response:
        """Open the callback, to which Entra ID sends the browser."""
        path = URL("/sign-in/callback").with_query(query)
        return await self.call("GET", str(path), headers={"Sec-Fetch-Site": "cross-site"})

    async def begin_and_choose(self, account: Account = ACCOUNTS[0]) -> dict[str, str]:
        """Begin a sign-in, and return with what Entra ID sends the browser back."""
        query = await self.begin()
        return {"code": self.desk.entra.issue_code(query, account), "state": query["state"]}

    async def sign_in(self, account: Account = ACCOUNTS[0]) -> Response:
        return await self.come_back(**await self.begin_and_choose(account))

    async def session(self) -> dict[str, Any]:
        answer = await self.call("GET", "/v1/session", headers={"Sec-Fetch-Site": "same-origin"})
        assert answer.status == 200
        info: dict[str, Any] = orjson.loads(answer.body)
        return info

    @property
    def has_session_cookie(self) -> bool:
        return SESSION_COOKIE in self.cookies


@asynccontextmanager
async def run_desk(
    folder: Path,
    *,
    public_url: str | None = None,
    oidc: Mapping[str, Any] | None = None,
    **api: Any,
) -> AsyncIterator[Desk]:
    """Run a relay at which people sign in. `public_url` is that of a proxy, if there is one."""
    (port,) = reserve(1)
    public_url = public_url or f"http://127.0.0.1:{port}"
    async with (
        run_entra() as entra,
        run_relay(
            folder,
            approvals={"rules": [VOTE]},
            listen=f"127.0.0.1:{port}",
            public_url=public_url,
            oidc=entra.section(**(oidc or {})),
            **api,
        ) as relay,
    ):
        entra.redirect_uris.add(f"{public_url}/sign-in/callback")
        entra.now = relay.clock.now
        await relay.observe(make_event())
        yield Desk(relay, entra, public_url)
