"""Callers with a token of Entra ID or a certificate: real keys, key server and TLS."""

from __future__ import annotations

import asyncio
import hmac
import ssl
import time
import warnings
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import jwt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID
from pydantic import ValidationError

from relay.api.callers import Callers
from relay.api.entra import MAX_AGE, REFETCH_INTERVAL, RETRY_INTERVAL
from relay.api.settings import ApiSettings
from relay.clock import SystemClock
from tests.api.entra import ANN, CLIENT_ID, KEY, Entra, principal, public, run_entra
from tests.api.running_relay import Response, RunningRelay, make_event, run_relay
from tests.certificates import LOCALHOST, Authority
from tests.eventually import eventually

APPLICATION = "22222222-2222-2222-2222-22222222222a"
OTHER_APPLICATION = "33333333-3333-3333-3333-333333333333"
ISSUER = Entra(origin="https://login.example.com")
OTHER = rsa.generate_private_key(public_exponent=65537, key_size=2048)
VOTE = {"name": "all", "approve": {"votes": 1, "from": [principal(ANN), "mtls:drain.internal"]}}


@dataclass
class Bearers:
    """A relay that takes tokens, and the issuer behind them."""

    relay: RunningRelay
    issuer: Entra

    def token(
        self, key: Any = KEY, algorithm: str = "RS256", kid: str | None = "k1", **changes: Any
    ) -> str:
        headers = {"kid": kid} if kid is not None else None
        claims = self.issuer.claims(**{"azp": APPLICATION, **changes})
        return jwt.encode(claims, key, algorithm=algorithm, headers=headers)

    async def call(
        self, token: str, method: str = "GET", path: str = "/v1/events", body: Any = None
    ) -> Response:
        headers = {"Authorization": f"Bearer {token}"}
        return await self.relay.call(method, path, body, by=None, headers=headers)

    async def status(self, token: str) -> int:
        return (await self.call(token)).status

    def fetches(self) -> int:
        return len(self.issuer.calls_of("keys"))


def section(issuer: Entra, /, **changes: Any) -> dict[str, Any]:
    """``api.oidc`` for bearer tokens."""
    roles = {"Approver": ["read", "approve"], "Reader": ["read"]}
    tokens = {"sign_in": None, "applications": [APPLICATION.upper()], "roles": roles}
    return issuer.section(**tokens | changes)


@pytest.fixture
async def entra(tmp_path: Path) -> AsyncIterator[Bearers]:
    async with (
        run_entra() as issuer,
        run_relay(tmp_path, oidc=section(issuer), approvals={"rules": [VOTE]}) as relay,
    ):
        await relay.observe(make_event())
        relay.clock.freeze_monotonic()
        yield Bearers(relay, issuer)


async def test_a_person_with_a_token_approves_under_their_own_name(entra: Bearers) -> None:
    body = entra.relay.decision_body()
    answer = await entra.call(entra.token(), "POST", "/v1/approvals", body)
    assert (answer.status, answer.json["state"]) == (202, "granted")
    assert await entra.relay.voters() == [principal(ANN)]


async def test_roles_determine_the_rights_of_a_person(entra: Bearers) -> None:
    for roles, status in (
        (["Approver"], 200),
        (["Nobody", "Reader"], 200),
        ([], 403),
        (None, 403),
        ("Approver", 403),
    ):
        token = entra.token(roles=roles)
        assert await entra.status(token) == status
        answer = await entra.call(token, "PUT", "/v1/approvals/mode", {"mode": "on"})
        assert answer.status == 403


async def test_a_token_with_wrong_claims_is_401(entra: Bearers) -> None:
    required = "iss", "aud", "tid", "oid", "exp", "iat"
    missing: list[dict[str, Any]] = [{name: None} for name in required]
    for changes in (
        *missing,
        {"iss": "https://login.microsoftonline.com/common/v2.0"},
        {"iss": f"{entra.issuer.issuer}/"},
        {"aud": "another"},
        {"aud": [CLIENT_ID, "another"]},
        {"tid": "8f5f0d3c-59ac-4a4b-9d7b-0f0c7d2c1a12"},
        {"oid": "somebody"},
        {"oid": 7},
        {"exp": 1},
        {"exp": True},
        {"exp": float("nan")},
        {"iat": 99999999999},
        {"nbf": 99999999999},
        {"azp": OTHER_APPLICATION},
        {"azp": None, "appid": OTHER_APPLICATION},
        {"appid": OTHER_APPLICATION},
        {"azp": [APPLICATION]},
        {"azp": None},  # an ID token: no application uses it
        {"nonce": "n"},  # the rest are claims that ID tokens alone have
        {"c_hash": "c"},
        {"at_hash": "a"},
    ):
        assert await entra.status(entra.token(**changes)) == 401
        assert await entra.status(entra.token()) == 200


async def test_a_token_of_the_older_endpoint_names_its_application_in_appid(entra: Bearers) -> None:
    assert await entra.status(entra.token(azp=None, appid=APPLICATION, ver="1.0")) == 200
    assert await entra.status(entra.token(azp=APPLICATION.upper(), ver="2.0")) == 200


def base64(text: bytes) -> str:
    return urlsafe_b64encode(text).rstrip(b"=").decode()


async def test_a_token_with_another_algorithm_or_key_is_401(entra: Bearers) -> None:
    signed, body = entra.token(), entra.token().split(".")[1]
    pem = KEY.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    header, forged = (
        base64(b'{"alg":"none","kid":"k1","typ":"JWT"}'),
        base64(b'{"alg":"HS256","kid":"k1","typ":"JWT"}'),
    )
    digest = base64(hmac.digest(pem, f"{forged}.{body}".encode(), "sha256"))
    wrong = {
        "none": f"{header}.{body}.",
        "HS256 with the public key": f"{forged}.{body}.{digest}",
        "RS384": entra.token(algorithm="RS384"),
        "PS256": entra.token(algorithm="PS256"),
        "ES256": entra.token(key=ec.generate_private_key(ec.SECP256R1()), algorithm="ES256"),
        "another's key": entra.token(key=OTHER),
        "an unknown kid": entra.token(kid="k9"),
        "no kid": entra.token(kid=None),
        "cut": signed[:-8],
        "no signature": signed.rpartition(".")[0] + ".",
        "rubbish": "a.b.c",
        "long": "a" * 6000 + ".b.c",
    }
    for what, token in wrong.items():
        assert await entra.status(token) == 401, what
    assert await entra.status(signed) == 200


async def test_a_token_counts_within_its_times_and_a_minute_around_them(entra: Bearers) -> None:
    now = int(time.time())
    for name, good, bad in (("exp", -50, -61), ("nbf", 50, 120), ("iat", 50, 120)):
        for offset, status in ((good, 200), (bad, 401)):
            claims: dict[str, Any] = {name: now + offset}
            assert await entra.status(entra.token(**claims)) == status, claims


async def test_keys_are_fetched_once_and_for_an_unknown_kid_at_most_every_five_minutes(
    entra: Bearers,
) -> None:
    for _ in range(3):
        assert await entra.status(entra.token()) == 200
        assert await entra.status(entra.token(kid="k2", key=OTHER)) == 401
    assert entra.fetches() == 1
    entra.issuer.keys.append(public(OTHER, "k2"))
    entra.relay.clock.offset = REFETCH_INTERVAL
    assert await entra.status(entra.token(kid="k2", key=OTHER)) == 200
    assert entra.fetches() == 2


async def test_old_keys_hold_while_none_can_be_fetched_for_a_day_at_most(entra: Bearers) -> None:
    assert await entra.status(entra.token()) == 200
    entra.issuer.keys_status = 302  # not followed
    entra.relay.clock.offset = MAX_AGE
    assert await entra.status(entra.token()) == 200
    entra.relay.clock.offset = MAX_AGE + 2 * REFETCH_INTERVAL
    assert await entra.status(entra.token()) == 401
    assert not entra.issuer.calls_of("elsewhere")
    entra.issuer.keys_status, entra.issuer.keys = 200, [public(OTHER, "k2")]
    entra.relay.clock.offset = MAX_AGE + 3 * REFETCH_INTERVAL
    assert await entra.status(entra.token()) == 401
    assert await entra.status(entra.token(kid="k2", key=OTHER)) == 200


async def test_a_key_server_that_hangs_delays_nobody_whose_key_is_at_hand(entra: Bearers) -> None:
    """Anybody can make the relay ask for keys, with a token that names an unknown one."""
    assert await entra.status(entra.token()) == 200
    entra.issuer.may_give_keys.clear()
    for offset in (REFETCH_INTERVAL, MAX_AGE):
        entra.relay.clock.offset = offset
        fetches = entra.fetches()
        stranger = asyncio.create_task(entra.status(entra.token(kid="k2", key=OTHER)))
        await eventually(entra.fetches, fetches.__lt__)
        assert await entra.status(entra.token()) == 200
        assert not stranger.done()
        entra.issuer.may_give_keys.set()
        assert await stranger == 401
        entra.issuer.may_give_keys.clear()


async def test_a_token_that_waited_over_a_reload_has_the_newer_rights(entra: Bearers) -> None:
    entra.issuer.may_give_keys.clear()
    reading = asyncio.create_task(entra.status(entra.token()))
    await eventually(entra.fetches, bool)
    settings = entra.relay.server.state.callers.settings
    assert settings.oidc is not None
    oidc = settings.oidc.model_copy(update={"roles": {"Approver": ("hold",)}})
    entra.relay.server.prepare_reload(settings.model_copy(update={"oidc": oidc}))()
    entra.issuer.may_give_keys.set()
    assert await reading == 403


async def test_after_a_failure_the_keys_are_fetched_again_soon(entra: Bearers) -> None:
    entra.issuer.keys_status = 503
    for _ in range(3):
        assert await entra.status(entra.token()) == 401
    assert entra.fetches() == 1
    entra.issuer.keys_status = 200
    entra.relay.clock.offset = RETRY_INTERVAL
    assert await entra.status(entra.token()) == 200
    assert entra.fetches() == 2


async def test_a_weak_key_verifies_nothing(entra: Bearers) -> None:
    """1024 bits: others could compute the private key."""
    weak = rsa.generate_private_key(public_exponent=65537, key_size=1024)  # noqa: S505
    entra.issuer.keys = [public(weak, "k1"), public(KEY, "k2")]
    with warnings.catch_warnings(action="ignore"):  # the library warns of such a key too
        token = entra.token(key=weak)
    assert await entra.status(token) == 401
    assert await entra.status(entra.token(kid="k2")) == 200


@pytest.mark.parametrize(
    "keys",
    [
        [],
        [{"kid": "k1"}],
        [public(KEY, "k1", use="enc")],
        [public(KEY, "k1", n="AQAB")],
        [public(KEY, "k1", n=7)],
        [{"kty": "oct", "kid": "k1", "k": "eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4"}],
        [7],
    ],
)
async def test_only_rsa_keys_for_signatures_verify_tokens(entra: Bearers, keys: list[Any]) -> None:
    entra.issuer.keys = keys
    assert await entra.status(entra.token()) == 401


# --- certificates


@dataclass
class Certified:
    """A relay that asks for certificates, and the authority that signs them."""

    relay: RunningRelay
    folder: Path
    authority: Authority

    def session(self, certificate: bytes) -> aiohttp.ClientSession:
        """Return a client with this certificate and its key."""
        file = self.folder / "client.pem"
        file.write_bytes(certificate)
        context = ssl.create_default_context(cafile=self.folder / "authority.pem")
        context.load_cert_chain(file)
        url = f"https://localhost:{self.relay.server.port}"
        return aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(ssl=context))

    async def call(
        self, method: str, path: str, *sans: x509.GeneralName, body: Any = None, **headers: str
    ) -> tuple[int, Any]:
        """Call with a certificate of these names; ``headers`` have _ for -."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with (
            self.session(self.authority.issue("drain.internal", sans)) as session,
            session.request(method, path, json=body, headers=sent) as answer,
        ):
            return answer.status, await answer.json()


@asynccontextmanager
async def run_certified(folder: Path, **settings: Any) -> AsyncIterator[Certified]:
    authority = Authority("authority")
    (folder / "authority.pem").write_bytes(authority.pem)
    (folder / "server.pem").write_bytes(authority.issue("localhost", LOCALHOST))
    tls = {
        "cert_file": folder / "server.pem",
        "key_file": folder / "server.pem",
        "client_ca_file": folder / "authority.pem",
    }
    async with run_relay(folder, tls=tls, **settings) as relay:
        await relay.observe(make_event())
        yield Certified(relay, folder, authority)


KEY_OF_JOB = "bearer-test-key-of-job"


@pytest.fixture
async def certified(tmp_path: Path) -> AsyncIterator[Certified]:
    clients = (
        {"name": "drain", "san": "drain.internal", "can": ["read", "approve"]},
        {"name": "job", "san": "spiffe://west/job", "can": ["read"], "key": KEY_OF_JOB},
    )
    async with run_certified(tmp_path, clients=clients, approvals={"rules": [VOTE]}) as certified:
        yield certified


async def test_the_name_in_a_certificate_is_the_principal(certified: Certified) -> None:
    drain, decision = x509.DNSName("Drain.internal"), certified.relay.decision_body()
    status, answer = await certified.call("POST", "/v1/approvals", drain, body=decision)
    assert (status, answer["state"]) == (202, "granted")
    assert await certified.relay.voters() == ["mtls:drain.internal"]
    job = x509.UniformResourceIdentifier("spiffe://west/job")
    assert (await certified.call("GET", "/v1/events", job))[0] == 200


async def test_a_certificate_of_no_client_or_two_clients_is_401(certified: Certified) -> None:
    """Common names do not count (RFC 9525, section 2): all of these have drain.internal."""
    both = (x509.DNSName("drain.internal"), x509.UniformResourceIdentifier("spiffe://west/job"))
    for sans in ((), (x509.DNSName("other.internal"),), (x509.DNSName("*.internal"),), both):
        assert (await certified.call("GET", "/v1/events", *sans))[0] == 401, sans


async def test_a_name_that_only_resembles_a_clients_is_401(certified: Certified) -> None:
    """A CA can give these to somebody else."""
    for san in (
        x509.UniformResourceIdentifier("spiffe://west/JOB"),
        x509.DNSName("spiffe://west/job"),
        x509.UniformResourceIdentifier("drain.internal"),
        x509.RFC822Name("drain.internal"),
        x509.DNSName("drain.internal."),
        x509.DNSName("drain.internal\0.example.com"),
        x509.DNSName("x, DNS:drain.internal"),
    ):
        assert (await certified.call("GET", "/v1/events", san))[0] == 401


@pytest.mark.parametrize("kind", ["another CA", "for servers", "expired", "signed by no CA"])
async def test_a_foreign_certificate_ends_the_handshake(certified: Certified, kind: str) -> None:
    """The other CA has the same name, and each certificate has the name of a client."""
    names = (x509.DNSName("drain.internal"),)
    issuer = certified.authority
    if kind == "another CA":
        issuer = Authority("authority")
    elif kind == "signed by no CA":
        issuer = Authority("authority", ca=False)
    content = issuer.issue(
        "drain",
        names,
        usage=ExtendedKeyUsageOID.SERVER_AUTH if kind == "for servers" else None,
        ends=timedelta(seconds=-1) if kind == "expired" else timedelta(days=1),
    )
    content += issuer.pem if kind == "signed by no CA" else b""
    async with certified.session(content) as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get("/v1/events")


async def test_a_certificate_that_ends_on_an_open_connection_is_401(certified: Certified) -> None:
    ends = timedelta(seconds=3)
    names = (x509.DNSName("drain.internal"),)
    async with certified.session(certified.authority.issue("drain", names, ends=ends)) as session:
        assert (await session.get("/v1/events")).status == 200
        certified.relay.clock.offset = ends.total_seconds() + 1
        assert (await session.get("/v1/events")).status == 401


async def test_readiness_refuses_no_certificate_and_tells_clients_why(certified: Certified) -> None:
    await certified.relay.dispatcher.set_state("box", "paused", "paused by client:job")
    for name, reasons in (
        ("drain.internal", {"box": "paused by client:job"}),
        ("probe.internal", None),
    ):
        san = x509.DNSName(name)
        status, answer = await certified.call("GET", "/readyz", san, X_Forwarded_For="x")
        assert (status, answer["sinks"]["paused"], answer.get("reasons")) == (200, ["box"], reasons)
    assert certified.relay.server.state.rates.rejections.count == 0


async def test_a_key_takes_precedence_over_a_certificate(certified: Certified) -> None:
    drain, decision = x509.DNSName("drain.internal"), certified.relay.decision_body()
    for key, status in ((KEY_OF_JOB, 403), ("wrong", 401)):
        credentials = {"Authorization": f"Bearer {key}"}
        answer = await certified.call("POST", "/v1/approvals", drain, body=decision, **credentials)
        assert answer[0] == status


def test_a_san_without_a_client_ca_is_an_error() -> None:
    with pytest.raises(ValidationError, match="client_ca_file"):
        ApiSettings.model_validate({"clients": [{"name": "a", "san": "a.internal"}]})


CERTIFIED: dict[str, Any] = {
    "clients": [{"name": "alice", "san": "alice.internal", "can": ["read"]}],
    "tls": {"cert_file": "a", "key_file": "b", "client_ca_file": "c"},
    "oidc": section(ISSUER),
}


@pytest.mark.parametrize(
    ("whose", "changed"),
    [
        ("client:alice", {"clients": [{"name": "alice", "can": ["hold"]}]}),
        ("client:alice", {"clients": []}),
        ("mtls:alice.internal", {"clients": [{**CERTIFIED["clients"][0], "can": ["hold"]}]}),
        ("mtls:alice.internal", {"tls": {**CERTIFIED["tls"], "client_ca_file": "d"}}),
        (principal(ANN), {"oidc": {**CERTIFIED["oidc"], "roles": {"Reader": ["hold"]}}}),
    ],
)
def test_a_reload_knows_whose_settings_have_changed(whose: str, changed: dict[str, Any]) -> None:
    """Their streams end; those of the others go on."""
    before, same, after = (
        Callers(ApiSettings.model_validate(found), SystemClock()).what_makes(whose)
        for found in (CERTIFIED, CERTIFIED, {**CERTIFIED, **changed})
    )
    assert before == same != after
