"""A stand-in for Entra ID: discovery, authorization, token and key endpoints, over real HTTP.

It is strict where Entra ID is: a registered redirect URI, PKCE with S256, the client secret, and
codes that count once. A person chooses an account on its page.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from typing import Any
from urllib.parse import urlencode

import jwt
import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer
from cryptography.hazmat.primitives.asymmetric import rsa

TENANT = "8f5f0d3c-59ac-4a4b-9d7b-0f0c7d2c1a11"
CLIENT_ID = "11111111-1111-1111-1111-111111111111"
CLIENT_SECRET = "fake~entra~client~secret~of~forty~chars~1"
ANN = "0b1c2d3e-1111-2222-3333-444455556666"
BEN = "0b1c2d3e-1111-2222-3333-44445555aaaa"
EVE = "0b1c2d3e-1111-2222-3333-44445555eeee"
KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)


def public(key: rsa.RSAPrivateKey, kid: str, **more: Any) -> dict[str, Any]:
    document: dict[str, Any] = orjson.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key()))
    return {**document, "kid": kid, "use": "sig", **more}


def principal(object_id: str) -> str:
    return f"entra:{TENANT}/{object_id}"


@dataclass(frozen=True, slots=True)
class Account:
    object_id: str
    name: str
    roles: tuple[str, ...]


ACCOUNTS = (
    Account(ANN, "Ann Example", ("Approver",)),
    Account(BEN, "Ben Example", ("Approver", "Operator")),
    Account(EVE, "Eve Example", ()),
)


@dataclass(frozen=True, slots=True)
class Grant:
    account: Account
    redirect_uri: str
    challenge: str
    nonce: str


@dataclass(slots=True, kw_only=True)
class Entra:
    origin: str = ""
    redirect_uris: set[str] = field(default_factory=set)
    secrets: set[str] = field(default_factory=lambda: {CLIENT_SECRET})
    now: Callable[[], datetime] = field(default=lambda: datetime.now(UTC))
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the next ID tokens' claims; None removes a claim."""
    answers: dict[str, web.Response] = field(default_factory=dict)
    """Answers that replace those of a path: discovery, token."""
    document: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the discovery document."""
    calls: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)
    """The calls so far: the name of the endpoint, and the parameters."""
    issued: list[str] = field(default_factory=list)
    """The ID tokens so far."""
    codes: dict[str, Grant] = field(default_factory=dict)
    keys: list[Any] = field(default_factory=lambda: [public(KEY, "k1")])
    keys_status: int = 200
    may_give_keys: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is not set, whoever asks for the keys waits."""

    def __post_init__(self) -> None:
        self.may_give_keys.set()

    @property
    def issuer(self) -> str:
        return f"{self.origin}/{TENANT}/v2.0"

    def section(self, **changes: Any) -> dict[str, Any]:
        return {
            "issuer": self.issuer,
            "audience": CLIENT_ID,
            "tenant": TENANT,
            "keys_url": f"{self.origin}/keys",
            "roles": {"Approver": ["read", "approve", "hold"], "Operator": ["operate"]},
            "sign_in": {"client_secret": CLIENT_SECRET},
        } | changes

    def calls_of(self, name: str) -> list[Mapping[str, str]]:
        return [parameters for endpoint, parameters in self.calls if endpoint == name]

    def issue_code(self, query: Mapping[str, str], account: Account = ACCOUNTS[0]) -> str:
        """Return a code for an authorization request, as after the account was chosen."""
        code = secrets.token_urlsafe(24)
        self.codes[code] = Grant(
            account, query["redirect_uri"], query["code_challenge"], query["nonce"]
        )
        return code

    def claims(self, account: Account = ACCOUNTS[0], **changes: Any) -> dict[str, Any]:
        """Return what a token says of an account; a change to None removes a claim."""
        now = int(self.now().timestamp())
        claims: dict[str, Any] = {
            "aud": CLIENT_ID,
            "iss": self.issuer,
            "iat": now,
            "nbf": now,
            "exp": now + 3600,
            "name": account.name,
            "oid": account.object_id,
            "roles": list(account.roles) or None,
            "tid": TENANT,
        }
        return {name: value for name, value in (claims | changes).items() if value is not None}

    async def _discovery(self, _request: web.Request) -> web.Response:
        self.calls.append(("discovery", {}))
        if "discovery" in self.answers:
            return self.answers["discovery"]
        places = {"authorization_endpoint": "authorize", "token_endpoint": "token"}
        urls = {name: f"{self.origin}/{place}" for name, place in places.items()}
        return web.json_response({"issuer": self.issuer, **urls, **self.document})

    async def _authorize(self, request: web.Request) -> web.Response:
        query = dict(request.query)
        self.calls.append(("authorize", query))
        if query.get("client_id") != CLIENT_ID:
            return web.Response(status=400, text="AADSTS700016: unknown application")
        if query.get("redirect_uri") not in self.redirect_uris:
            return web.Response(status=400, text="AADSTS50011: unknown redirect URI")
        chosen = query.pop("account", None)
        required = {"response_type": "code", "response_mode": "query"}
        required |= {"code_challenge_method": "S256", "scope": "openid profile"}
        if not required.items() <= query.items() or not query.get("nonce"):
            return web.Response(status=400, text="AADSTS900144: invalid request")
        if chosen == "cancel":
            text = "AADSTS65004: User declined to consent."
            return _to(query, error="access_denied", error_description=text)
        for account in ACCOUNTS:
            if account.object_id == chosen:
                return _to(query, code=self.issue_code(query, account))
        choices = {account.object_id: account.name for account in ACCOUNTS} | {"cancel": "Cancel"}
        links = [
            f'<p><a href="/authorize?{escape(urlencode({**query, "account": key}))}">{name}</a>'
            for key, name in choices.items()
        ]
        text = f"<!doctype html><title>Pick an account</title>{''.join(links)}"
        return web.Response(text=text, content_type="text/html")

    async def _token(self, request: web.Request) -> web.Response:
        form = {name: str(value) for name, value in (await request.post()).items()}
        self.calls.append(("token", form))
        if "token" in self.answers:
            return self.answers["token"]
        if form.get("client_id") != CLIENT_ID or form.get("client_secret") not in self.secrets:
            return _error("invalid_client", "AADSTS7000215: Invalid client secret provided.")
        grant = self.codes.pop(form.get("code", ""), None)
        if grant is None:
            return _error("invalid_grant", "AADSTS70008: The code was used, or has expired.")
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = urlsafe_b64encode(digest).rstrip(b"=").decode()
        if challenge != grant.challenge or form.get("redirect_uri") != grant.redirect_uri:
            return _error("invalid_grant", "AADSTS501481: The code_verifier does not match.")
        claims = self.claims(grant.account, **{"nonce": grant.nonce, **self.changes})
        token = jwt.encode(claims, KEY, algorithm="RS256", headers={"kid": "k1"})
        self.issued.append(token)
        return web.json_response({"access_token": "for Microsoft Graph", "id_token": token})

    async def _keys(self, _request: web.Request) -> web.Response:
        self.calls.append(("keys", {}))
        await self.may_give_keys.wait()
        headers = {"Location": "/elsewhere"}
        return web.json_response({"keys": self.keys}, status=self.keys_status, headers=headers)

    async def _elsewhere(self, _request: web.Request) -> web.Response:
        self.calls.append(("elsewhere", {}))
        return web.json_response({"keys": self.keys})

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_get(
            f"/{TENANT}/v2.0/.well-known/openid-configuration", self._discovery
        )
        application.router.add_get("/authorize", self._authorize)
        application.router.add_post("/token", self._token)
        application.router.add_get("/keys", self._keys)
        application.router.add_get("/elsewhere", self._elsewhere)
        return application


def _to(query: Mapping[str, str], **parameters: str) -> web.Response:
    location = f"{query['redirect_uri']}?{urlencode({**parameters, 'state': query['state']})}"
    return web.Response(status=302, headers={"Location": location})


def _error(error: str, description: str) -> web.Response:
    return web.json_response({"error": error, "error_description": description}, status=400)


@asynccontextmanager
async def run_entra() -> AsyncIterator[Entra]:
    """Run the stand-in. For a browser it is another site than a relay at 127.0.0.1."""
    entra = Entra()
    async with TestServer(entra.application()) as server:
        entra.origin = f"http://localhost:{server.port}"
        yield entra
