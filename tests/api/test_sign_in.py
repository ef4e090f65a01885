"""People sign in with Entra ID over HTTP: the whole way, and everything that must not work."""

from __future__ import annotations

import asyncio
import hashlib
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
import orjson
import pytest
from aiohttp import web
from cryptography import x509
from pydantic import ValidationError

from relay.api.connections import ServerLimits
from relay.api.entra import RETRY_INTERVAL
from relay.api.responses import Problem, problem_page
from relay.api.sessions import SESSION_LIFETIME
from relay.api.settings import ApiSettings
from relay.approvals.request import Caller, Rights
from tests.api.entra import ACCOUNTS, ANN, CLIENT_ID, CLIENT_SECRET, Entra, principal
from tests.api.running_relay import SECRET, RunningRelay
from tests.api.signed_in import OWN_PAGE, PENDING_COOKIE, SESSION_COOKIE, Browser, Desk, run_desk
from tests.api.test_identity import run_certified
from tests.documented import block

NOBODY: dict[str, Any] = {"signIn": "/sign-in", "principal": None, "name": None, "can": []}


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with run_desk(tmp_path) as running:
        yield running


@pytest.fixture
def browser(desk: Desk) -> Browser:
    return desk.browser()


@pytest.fixture
async def ann(browser: Browser) -> Browser:
    """The browser, in which Ann has signed in."""
    assert (await browser.sign_in()).status == 303
    return browser


async def vote(browser: Browser, headers: dict[str, str] | None = None) -> int:
    """Approve the event, as a page of the relay would."""
    body, sent = browser.desk.relay.decision_body(), OWN_PAGE if headers is None else headers
    answer = await browser.call("POST", "/v1/approvals", body, sent)
    return answer.status


# --- the way in


async def test_a_person_signs_in_and_approves_under_their_own_name(
    desk: Desk, browser: Browser, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    answer = await browser.sign_in()
    assert (answer.status, answer.headers["Location"]) == (303, f"{desk.public_url}/")
    documented = orjson.loads(block("docs/sign-in.md", "json"))
    assert await browser.session() == {**documented, "principal": principal(ANN)}
    assert f"{principal(ANN)} signed in" in caplog.messages
    assert await vote(browser) == 202
    assert await desk.relay.voters() == [principal(ANN)]


async def test_the_call_for_authorization_has_what_protects_it(desk: Desk) -> None:
    query = await desk.browser().begin()
    assert {name: query[name] for name in query if name not in ("state", "nonce")} == {
        "client_id": CLIENT_ID,
        "response_type": "code",
        "response_mode": "query",
        "redirect_uri": f"{desk.public_url}/sign-in/callback",
        "scope": "openid profile",
        "code_challenge": query["code_challenge"],
        "code_challenge_method": "S256",
        "prompt": "select_account",
    }
    assert len({query["state"], query["nonce"], query["code_challenge"]}) == 3
    assert all(len(query[name]) == 43 for name in ("state", "nonce", "code_challenge"))


async def test_the_code_is_exchanged_with_verifier_and_secret(desk: Desk, browser: Browser) -> None:
    query = await browser.begin()
    code = desk.entra.issue_code(query)
    await browser.come_back(code=code, state=query["state"])
    form = dict(desk.entra.calls_of("token")[0])
    digest = hashlib.sha256(form.pop("code_verifier").encode()).digest()
    assert urlsafe_b64encode(digest).rstrip(b"=").decode() == query["code_challenge"]
    assert form == {
        "grant_type": "authorization_code",
        "code": code,
        "redirect_uri": f"{desk.public_url}/sign-in/callback",
        "client_id": CLIENT_ID,
        "client_secret": CLIENT_SECRET,
    }


async def test_cookies_are_for_this_host_over_https_and_no_script_reads_them(ann: Browser) -> None:
    for name, same_site in ((PENDING_COOKIE, "Lax"), (SESSION_COOKIE, "Strict")):
        assert name.startswith("__Host-")
        for morsel in [each for each in ann.received if each.key == name]:
            kept = {key: value for key, value in morsel.items() if value}
            lifetime = kept.pop("max-age")
            assert kept == {"path": "/", "secure": True, "httponly": True, "samesite": same_site}
            assert lifetime in ("0", "600" if name == PENDING_COOKIE else "3600")
    assert ann.has_session_cookie
    assert PENDING_COOKIE not in ann.cookies


async def test_answers_of_sign_ins_are_not_stored_and_send_no_referrer(browser: Browser) -> None:
    chosen = await browser.begin_and_choose()
    for answer in (
        await browser.call("GET", "/sign-in"),
        await browser.come_back(**chosen | {"state": "wrong"}),
        await browser.come_back(**chosen),
    ):
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert chosen["code"] not in answer.headers.get("Location", "")


async def test_below_a_path_the_public_url_says_where_the_browser_goes(tmp_path: Path) -> None:
    url = "https://relay.example.com/relay"
    async with run_desk(tmp_path, public_url=f"{url}/") as desk:
        desk.entra.redirect_uris = {f"{url}/sign-in/callback"}
        browser = desk.browser()
        answer = await browser.sign_in()
        assert answer.headers["Location"] == f"{url}/"
        assert (await browser.session())["principal"] == principal(ANN)


# --- the state ties the answer to the browser


async def test_an_answer_in_another_browser_signs_nobody_in(desk: Desk) -> None:
    """Login CSRF: an attacker sends a victim the end of their own sign-in."""
    attacker, victim = desk.browser(), desk.browser()
    chosen = await attacker.begin_and_choose(ACCOUNTS[1])
    await victim.begin()
    for cookies in ({}, {PENDING_COOKIE: "1.x.Lw"}, victim.cookies):
        victim.cookies = dict(cookies)
        answer = await victim.come_back(**chosen)
        assert (answer.status, victim.has_session_cookie) == (403, False)
        assert b"Begin again" in answer.body
    assert desk.entra.calls_of("token") == []


async def test_a_cookie_that_a_sibling_host_can_set_counts_for_nothing(desk: Desk) -> None:
    """Browsers keep the prefix from other hosts, but not what a lenient parser takes for it."""
    for tossed in ("x=1 {}", "x=1\t{}", "x {}", "\u2000{}", "\xa0{}", "{0}; {0}", "x=a,{}"):
        attacker, victim = desk.browser(), desk.browser()
        await attacker.sign_in()
        cookie = f"{SESSION_COOKIE}={attacker.cookies[SESSION_COOKIE]}"
        headers = {**OWN_PAGE, "Cookie": tossed.format(cookie)}
        assert await vote(victim, headers) == 401
        answer = await victim.call("GET", "/v1/session", headers=headers)
        assert (answer.json, victim.received) == (NOBODY, [])
        end = f"/sign-in/callback?{urlencode(await attacker.begin_and_choose())}"
        cookie = f"{PENDING_COOKIE}={attacker.cookies[PENDING_COOKIE]}"
        answer = await victim.call("GET", end, headers={"Cookie": tossed.format(cookie)})
        assert (answer.status, victim.has_session_cookie) == (403, False)
        assert await desk.relay.voters() == []


async def test_cookies_of_other_programs_do_not_hide_that_of_the_session(ann: Browser) -> None:
    ann.cookies = {"x": '"1 2', "ä": "[]", **ann.cookies, "y": ""}
    assert (await ann.session())["principal"] == principal(ANN)


async def test_a_stolen_code_is_worth_nothing_in_another_sign_in(desk: Desk) -> None:
    """Code injection: the verifier of the other sign-in does not fit."""
    thief, victim = desk.browser(), desk.browser()
    stolen = await victim.begin_and_choose(ACCOUNTS[1])
    own = await thief.begin()
    answer = await thief.come_back(code=stolen["code"], state=own["state"])
    assert (answer.status, thief.has_session_cookie) == (403, False)
    assert b"AADSTS501481" in answer.body


async def test_an_answer_of_another_issuer_is_refused(desk: Desk, browser: Browser) -> None:
    """Mix-up: the code goes to nobody."""
    chosen = await browser.begin_and_choose()
    assert (await browser.come_back(**chosen, iss="https://evil.example")).status == 400
    assert desk.entra.calls_of("token") == []
    chosen = await browser.begin_and_choose()
    assert (await browser.come_back(**chosen, iss=desk.entra.issuer)).status == 303


async def test_an_answer_without_exactly_one_code_is_refused(desk: Desk, browser: Browser) -> None:
    for query in ("code=a&code=b", "code=", "", "code=%C3%A5", f"code={'a' * 4097}"):
        state = (await browser.begin())["state"]
        answer = await browser.call("GET", f"/sign-in/callback?state={state}&{query}")
        assert (answer.status, browser.has_session_cookie) == (400, False)
        assert desk.entra.calls_of("token") == []


# --- another site


async def test_a_sign_in_that_another_site_begins_is_refused(browser: Browser) -> None:
    for headers in (
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Dest": "iframe"},
    ):
        answer = await browser.call("GET", "/sign-in", headers=headers)
        assert (answer.status, browser.cookies) == (403, {})
    for headers in ({"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}, {}):
        assert (await browser.call("GET", "/sign-in", headers=headers)).status == 303


# --- the ID token


async def test_an_id_token_with_wrong_claims_signs_nobody_in(desk: Desk, browser: Browser) -> None:
    for changes, reason in (
        ({"iss": None}, "MissingRequiredClaimError"),
        ({"nonce": None}, "nonce"),
        ({"nonce": "another"}, "nonce"),  # of another sign-in
        ({"nonce": 7}, "nonce"),
        ({"nonce": "\udc80"}, "nonce"),
        ({"azp": "22222222-2222-2222-2222-222222222222"}, "azp"),
        ({"roles": None}, "none of the application roles"),
        ({"roles": None, "groups": ["Approver"]}, "groups in a token give no rights"),
        ({"roles": None, "_claim_names": {"roles": "src1"}}, "none of the application roles"),
    ):
        desk.entra.changes = changes
        answer = await browser.sign_in()
        assert (answer.status, browser.has_session_cookie) == (403, False)
        assert reason in answer.body.decode()
        assert await browser.session() == NOBODY


async def test_a_name_is_one_line_of_what_can_be_seen(desk: Desk, browser: Browser) -> None:
    desk.entra.changes = {"name": "Ann\n\u202eexe\x00" + "x" * 200}
    await browser.sign_in()
    assert (await browser.session())["name"] == "Annexe" + "x" * 94
    desk.entra.changes = {"name": 7}
    await browser.sign_in()
    assert (await browser.session())["name"] is None


# --- Entra ID says no, or nothing


async def test_an_error_of_entra_is_told_by_its_codes_alone(browser: Browser) -> None:
    state = (await browser.begin())["state"]
    answer = await browser.come_back(
        state=state, error="access_denied", error_description="AADSTS65004: <b>call 555</b>"
    )
    text = answer.body.decode()
    assert answer.status == 403
    assert "access_denied AADSTS65004" in text
    assert "call 555" not in text
    state = (await browser.begin())["state"]
    answer = await browser.come_back(state=state, error="<script>", error_description="x")
    assert "without a known error code" in answer.body.decode()


async def test_a_refused_client_secret_is_told_to_the_person_and_in_the_log(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.entra.secrets = {"another"}
    answer = await desk.browser().sign_in()
    assert answer.status == 502
    assert "client secret is wrong or has expired" in answer.body.decode()
    assert "refused the client secret of api.oidc.sign_in" in caplog.text
    assert "AADSTS7000215" in caplog.text
    assert CLIENT_SECRET not in caplog.text + answer.body.decode()


async def test_a_browser_does_not_say_that_the_client_secret_is_refused(
    browser: Browser, caplog: pytest.LogCaptureFixture
) -> None:
    """Strangers can begin a sign-in, and end it with any error."""
    query = await browser.begin()
    answer = await browser.come_back(error="invalid_client", state=query["state"])
    assert answer.status == 403
    assert "Entra ID refused the sign-in (invalid_client)" in answer.body.decode()
    assert "client secret" not in caplog.text + answer.body.decode()


async def test_a_changed_secret_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("the first~secret~of~this~application\n")
    async with run_desk(tmp_path, oidc={"sign_in": {"client_secret_file": str(file)}}) as desk:
        assert (await desk.browser().sign_in()).status == 502
        file.write_text(f"{CLIENT_SECRET}\n")
        assert (await desk.browser().sign_in()).status == 303


@pytest.mark.parametrize(
    "response",
    [
        lambda: web.Response(status=500, text="<html>"),
        lambda: web.Response(status=302, headers={"Location": "/elsewhere"}),
        lambda: web.json_response([]),
        lambda: web.Response(text="x" * 70_000),
        lambda: web.Response(text="{" + " " * 70_000 + "}"),
    ],
)
async def test_an_unusable_answer_of_entra_is_502_and_nobody_is_signed_in(
    desk: Desk, browser: Browser, response: Any
) -> None:
    desk.entra.answers["discovery"] = response()
    answer = await browser.call("GET", "/sign-in")
    assert answer.status == 502
    assert "Try again, or use a key." in answer.body.decode()
    del desk.entra.answers["discovery"]
    desk.relay.clock.offset = RETRY_INTERVAL
    desk.entra.answers["token"] = response()
    answer = await browser.sign_in()
    assert (answer.status, browser.has_session_cookie) == (502, False)
    assert "Try again, or use a key." in answer.body.decode()


@pytest.mark.parametrize(
    "document",
    [
        {"issuer": "https://evil.example/"},
        {"authorization_endpoint": "http://evil.example/"},
        {"token_endpoint": "http://evil.example/"},
        {"token_endpoint": "https://169.254.169.254/"},
        {"token_endpoint": None},
        {"token_endpoint": 7},
    ],
)
async def test_endpoints_of_others_are_not_used(
    desk: Desk, browser: Browser, document: dict[str, Any]
) -> None:
    desk.entra.document = document
    assert (await browser.call("GET", "/sign-in")).status == 502


def test_a_page_of_a_problem_shows_the_texts_of_others_as_text() -> None:
    problem = Problem(403, "<b>no</b>", link='/"><script>')
    page = bytes(problem_page(problem, "/sign-in").body or b"").decode()  # type: ignore[arg-type]
    assert "&lt;b&gt;no&lt;/b&gt;" in page
    assert "<script>" not in page


# --- an ID token and a session are no bearer tokens


async def test_an_id_token_is_no_bearer_token(tmp_path: Path) -> None:
    for applications in ([], [CLIENT_ID]):
        async with run_desk(tmp_path, oidc={"applications": applications}) as desk:
            browser = desk.browser()
            await browser.sign_in()
            (token,) = desk.entra.issued
            for bearer in (token, browser.cookies[SESSION_COOKIE]):
                answer = await desk.relay.call(
                    "GET", "/v1/events", by=None, headers={"Authorization": f"Bearer {bearer}"}
                )
                assert answer.status == 401


async def test_an_access_token_is_no_id_token(tmp_path: Path) -> None:
    async with run_desk(tmp_path, oidc={"applications": [CLIENT_ID]}) as desk:
        desk.entra.changes = {"nonce": None, "azp": CLIENT_ID}
        browser = desk.browser()
        assert (await browser.sign_in()).status == 403
        (token,) = desk.entra.issued
        headers = {"Authorization": f"Bearer {token}"}
        answer = await desk.relay.call("GET", "/v1/events", by=None, headers=headers)
        assert answer.status == 200


# --- the session


async def test_a_call_that_no_page_of_the_relay_makes_is_403(desk: Desk, ann: Browser) -> None:
    for headers in (
        {},
        {"X-Requested-With": "imds-relay"},
        {"Sec-Fetch-Site": "same-origin"},
        {**OWN_PAGE, "X-Requested-With": "XMLHttpRequest"},
        {**OWN_PAGE, "Sec-Fetch-Site": "cross-site"},
        {**OWN_PAGE, "Sec-Fetch-Site": "same-site"},
        {**OWN_PAGE, "Sec-Fetch-Site": "none"},
        {**OWN_PAGE, "Origin": "https://evil.example"},
        {**OWN_PAGE, "Origin": "null"},
        {"X-Requested-With": "imds-relay", "Origin": "http://127.0.0.1:1"},
        {"X-Requested-With": "imds-relay", "Origin": desk.origin, "Sec-Fetch-Site": "cross-site"},
    ):
        assert await vote(ann, headers) == 403
        assert (await ann.call("POST", "/sign-out", headers=headers)).status == 403
        assert await desk.relay.voters() == []
        assert (await ann.session())["principal"] == principal(ANN)


async def test_a_call_of_the_relay_s_page_counts_in_every_browser(desk: Desk, ann: Browser) -> None:
    """Older ones send no Sec-Fetch-Site, and some proxies take it away."""
    for headers in (
        OWN_PAGE,
        {**OWN_PAGE, "Origin": desk.origin},
        {"X-Requested-With": "imds-relay", "Origin": desk.origin},
    ):
        assert await vote(ann, headers) == 202


async def test_a_reading_call_from_another_site_is_403(ann: Browser) -> None:
    for site in ("same-origin", "none", "same-site", "cross-site"):
        answer = await ann.call("GET", "/v1/events", headers={"Sec-Fetch-Site": site})
        assert answer.status == (200 if site in ("same-origin", "none") else 403)
    info = await ann.call("GET", "/v1/session", headers={"Sec-Fetch-Site": "cross-site"})
    assert info.json == NOBODY


async def test_a_key_counts_instead_of_the_cookie(ann: Browser) -> None:
    key = {"Authorization": "Bearer bearer-test-key-of-reader"}
    answer = await ann.call("GET", "/v1/session", headers=key)
    assert (answer.json["principal"], answer.json["can"]) == ("client:reader", ["read"])
    wrong = {"Authorization": "Bearer bearer-test-key-of-nobody"}
    assert (await ann.call("GET", "/v1/events", headers=wrong)).status == 401
    assert await vote(ann, {**OWN_PAGE, **key}) == 403  # the reader may not approve


async def test_a_certificate_counts_only_where_nobody_signed_in(tmp_path: Path) -> None:
    """Else the client of the certificate would go on where a person's session has ended."""
    clients = ({"name": "drain", "san": "drain.internal", "can": ["read"]},)
    async with run_certified(
        tmp_path, clients=clients, public_url="https://localhost", oidc=SECTION
    ) as certified:
        relay = certified.relay
        san = x509.DNSName("drain.internal")
        sign_in = relay.server.state.callers.sign_in
        assert sign_in is not None
        ann = Caller(principal(ANN), "http", Rights(frozenset({"approve"})))
        cookie = sign_in.sessions.begin(ann, "Ann Example", 3600.0)
        for sent, status, who in (
            ({}, 200, "mtls:drain.internal"),
            ({"Cookie": f"{SESSION_COOKIE}=over"}, 401, None),
            ({"Cookie": f"{SESSION_COOKIE}={cookie}"}, 403, principal(ANN)),  # she may not read
        ):
            assert (await certified.call("GET", "/v1/events", san, **sent))[0] == status
            info = await certified.call("GET", "/v1/session", san, **sent)
            assert info[1]["principal"] == who


async def test_the_cookie_authenticates_no_callback(desk: Desk, ann: Browser) -> None:
    body = desk.relay.decision_body()
    for path in ("/v1/callbacks/drain", "/v1/callbacks/alice", "/v1/chat/nowhere"):
        answer = await ann.call("POST", path, body, OWN_PAGE)
        assert answer.status in (401, 404)
    assert SECRET not in str(ann.cookies)
    assert await desk.relay.voters() == []


async def test_a_session_ends_after_an_hour_by_both_clocks(desk: Desk, ann: Browser) -> None:
    desk.relay.clock.offset = SESSION_LIFETIME / 2
    assert await vote(ann) == 202
    desk.relay.clock.offset = SESSION_LIFETIME
    answer = await ann.call("GET", "/v1/events")
    assert (answer.status, answer.json["detail"]) == (401, "the session has ended: sign in again")
    assert await ann.session() == NOBODY
    assert not ann.has_session_cookie


async def test_a_session_lasts_no_longer_than_the_id_token(desk: Desk, browser: Browser) -> None:
    desk.entra.changes = {"exp": int(desk.entra.now().timestamp()) + 300}
    await browser.sign_in()
    desk.relay.clock.offset = 150
    assert (await browser.session())["principal"] == principal(ANN)
    desk.relay.clock.offset = 300 + 60
    assert await browser.session() == NOBODY


async def test_signing_out_ends_the_session_and_its_streams(
    desk: Desk, browser: Browser, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    # An idle stream would find out with its next comment.
    desk.relay.server.state.limits = ServerLimits(stream_keep_alive_interval=3600.0)
    await browser.sign_in()
    kept = dict(browser.cookies)
    cookie = {"Cookie": f"{SESSION_COOKIE}={kept[SESSION_COOKIE]}"}
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{desk.origin}/v1/stream", headers=cookie) as stream,
    ):
        assert stream.status == 200
        await stream.content.readline()
        answer = await browser.call("POST", "/sign-out", headers=OWN_PAGE)
        assert (answer.status, answer.json) == (200, NOBODY)
        assert f"{principal(ANN)} signed out" in caplog.messages
        async with asyncio.timeout(60):
            await stream.content.read()
    assert not browser.has_session_cookie
    copy = Browser(desk, kept)
    assert (await copy.call("GET", "/v1/events")).status == 401
    assert (await browser.call("POST", "/sign-out", headers=OWN_PAGE)).status == 200


async def test_a_new_sign_in_ends_the_session_that_the_browser_had(desk: Desk) -> None:
    """Session fixation: nobody's cookie outlives a sign-in, and the new one is random."""
    browser = desk.browser()
    await browser.sign_in(ACCOUNTS[1])
    old = Browser(desk, dict(browser.cookies))
    await browser.sign_in(ACCOUNTS[0])
    assert (await browser.session())["principal"] == principal(ANN)
    assert await old.session() == NOBODY
    planted = desk.browser()
    planted.cookies[SESSION_COOKIE] = "chosen-by-an-attacker"
    await planted.sign_in()
    assert planted.cookies[SESSION_COOKIE] != "chosen-by-an-attacker"
    assert len(planted.cookies[SESSION_COOKIE]) == 43


async def test_sign_ins_and_guessed_cookies_count_as_bad_calls(desk: Desk, ann: Browser) -> None:
    """And whoever is signed in is let through."""
    desk.relay.use_up_rate()
    guess = desk.browser()
    guess.cookies[SESSION_COOKIE] = "x" * 43
    assert (await guess.call("GET", "/v1/events")).status == 429
    assert (await ann.call("GET", "/v1/events")).status == 200
    answer = await desk.browser().come_back(code="x", state="y")
    assert (answer.status, "Retry-After" in answer.headers) == (429, True)
    assert (await ann.call("GET", "/v1/events")).status == 200


# --- not configured


async def test_without_sign_in_nothing_speaks_of_it(relay: RunningRelay) -> None:
    for path in ("/sign-in", "/sign-in/callback"):
        answer = await relay.call("GET", path, by=None)
        assert answer.status == 404
        assert "Set-Cookie" not in answer.headers
    assert (await relay.call("POST", "/sign-out", by=None)).status == 404
    nobody = NOBODY | {"signIn": None}
    reader = nobody | {"principal": "client:reader", "can": ["read"]}
    for by, info in ((None, nobody), ("nobody", nobody), ("reader", reader)):
        answer = await relay.call("GET", "/v1/session", by=by)
        assert (answer.status, answer.json) == (200, info)
    cookie = {"Cookie": f"{SESSION_COOKIE}=x"}
    assert (await relay.call("GET", "/v1/events", headers=cookie)).status == 200


async def test_bearer_tokens_alone_let_nobody_sign_in(tmp_path: Path) -> None:
    async with run_desk(tmp_path, oidc={"sign_in": None, "applications": [CLIENT_ID]}) as desk:
        assert (await desk.browser().call("GET", "/sign-in")).status == 404
        assert desk.relay.server.state.callers.sign_in is None


# --- the configuration


SECTION = Entra(origin="https://login.microsoftonline.com").section()
URL = "https://relay.example.com"
USABLE = {"client_secret": CLIENT_SECRET}


def api_settings(
    sign_in: dict[str, Any] | None, public_url: str | None = URL, **changes: Any
) -> ApiSettings:
    section = {**SECTION, "sign_in": sign_in, **changes}
    return ApiSettings.model_validate({"public_url": public_url, "oidc": section})


@pytest.mark.parametrize(
    ("words", "sign_in", "public_url", "changes"),
    [
        ("tenant's id", None, URL, {"tenant": "common"}),
        ("http on this machine", None, URL, {"keys_url": "http://keys.example.com/"}),
        ("metadata or host", None, URL, {"keys_url": "https://169.254.169.254/keys"}),
        ("metadata or host", None, URL, {"keys_url": "https://[64:ff9b:1::a9fe:a9fe]/keys"}),
        ("at least 1", None, URL, {"roles": {}}),
        ("read", None, URL, {"roles": {"x": ["all"]}}),
        ("at least 1", None, URL, {"issuer": ""}),
        ("application's id", None, URL, {"applications": ["a-name"]}),
        ("expected client_secret or client_secret_file", {}, URL, {}),
        ("expected client_secret or client_secret_file", {"client_secret": ""}, URL, {}),
        ("expected the value of the client secret, got an id", {"client_secret": ANN}, URL, {}),
        ("application's id", {"client_secret": "x", "client_id": "relay"}, URL, {}),
        ("expected client_id", {"client_secret": "x"}, URL, {"audience": "api://relay"}),
        ("issuer: with sign_in, expected https", None, URL, {"issuer": "http://sts.example.com"}),
        ("issuer: with sign_in, expected a URL", None, URL, {"issuer": "sts"}),
        ("public_url: expected the https URL .* got none", None, None, {}),
        ("public_url: expected the https URL", None, "http://relay.example.com", {}),
        ("public_url: expected the https URL", None, "http://10.0.0.4:8080", {}),
        ("public_url: expected the https URL", None, "https://ann:x@relay.example.com", {}),
        ("public_url: expected the https URL", None, "https://relay.example.com/#x", {}),
        ("public_url: .* got another", None, "https://relay.example.com/?x=y", {}),
    ],
)
def test_a_section_that_is_unsafe_or_cannot_work_is_an_error(
    words: str, sign_in: dict[str, Any] | None, public_url: str | None, changes: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError, match=words):
        api_settings(USABLE if sign_in is None else sign_in, public_url, **changes)


def test_a_sign_in_needs_no_applications_and_no_https_on_this_machine_and_shows_no_secret() -> None:
    for url in ("http://localhost:8080", "http://127.0.0.1:8080", "https://relay.example.com/r"):
        settings = api_settings(USABLE, url)
        assert settings.public_url == url
        assert CLIENT_SECRET not in repr(settings) + settings.model_dump_json()
    with pytest.raises(ValidationError, match="applications: expected at least 1"):
        api_settings(None)


async def test_the_id_of_the_application_can_differ_from_the_audience(tmp_path: Path) -> None:
    sign_in = {"client_id": CLIENT_ID.upper(), "client_secret": CLIENT_SECRET}
    async with run_desk(tmp_path, oidc={"audience": "api://relay", "sign_in": sign_in}) as desk:
        assert (await desk.browser().sign_in()).status == 303


async def test_sessions_end_when_a_reload_changes_who_may_sign_in(desk: Desk, ann: Browser) -> None:
    """They keep the rights of their sign-in, which may have been taken away. Others stay."""
    server, settings = desk.relay.server, desk.relay.server.state.callers.settings
    server.prepare_reload(settings.model_copy(update={"clients": ()}))()
    assert (await ann.session())["can"] == ["read", "approve", "hold"]
    assert settings.oidc is not None
    oidc = settings.oidc.model_copy(update={"roles": {"Approver": ("read",)}})
    server.prepare_reload(settings.model_copy(update={"oidc": oidc}))()
    assert (await ann.session())["principal"] is None
    await ann.sign_in()
    assert (await ann.session())["can"] == ["read"]
    server.prepare_reload(settings.model_copy(update={"oidc": None}))()
    assert await ann.session() == NOBODY | {"signIn": None}


async def test_a_reload_with_another_public_url_takes_calls_of_its_pages(desk: Desk) -> None:
    """Those of the former URL count no longer."""
    server, browser = desk.relay.server, desk.browser()
    settings = server.state.callers.settings.model_copy(update={"public_url": "https://b.example"})
    server.prepare_reload(settings)()
    assert (await browser.begin())["redirect_uri"] == "https://b.example/sign-in/callback"
    answer = await browser.sign_in()
    assert answer.headers["Location"] == "https://b.example/"
    own = {"X-Requested-With": "imds-relay", "Origin": "https://b.example"}
    for headers, status in ((own | {"Origin": desk.origin}, 403), (own, 200)):
        assert (await browser.call("POST", "/sign-out", headers=headers)).status == status
