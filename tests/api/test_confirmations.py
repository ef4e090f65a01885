"""Links of messages: what they show to whoever has one, and the decision behind them, which needs a key, a code, and happens once."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from relay.approvals.authorize import HOLD_NOTICE
from relay.approvals.confirmation_link import MAX_WRONG_CODES
from relay.outbox.chat_messages import token_digest
from relay.outbox.transaction import Transaction
from tests.api.confirmation_links import confirm, look, message
from tests.api.running_relay import EVENT_ID, Running, event, eventually, running, until
from tests.api.test_identity import PERSON, TENANT, VOTE, Entra, issuing, section

VOID = "a" * 43
EMPTY_ICON = b'<link rel="icon" href="data:,">'
"""The only reference in the page. Without it, browsers ask for /favicon.ico."""


async def _votes(relay: Running) -> list[dict[str, Any]]:
    return [one["data"] for one in await relay.said("approval.recorded")]


async def _wrong(relay: Running, token: str) -> int:
    def work(tx: Transaction) -> int:
        found = tx.messages.find_link(token)
        assert found is not None
        return found.wrong_codes

    return await relay.store.read(work)


def _plain(text: list[Any]) -> str:
    return "".join(one if isinstance(one, str) else next(iter(one.values())) for one in text)


# --- what a link shows


async def test_a_link_shows_what_it_stands_for(relay: Running) -> None:
    sent = await message(relay)
    await relay.decide(by="bob")
    shown = (await look(relay, sent.tokens["approve"])).json
    facts = {one["label"]: one["text"] for one in shown["facts"]}
    assert (shown["decision"], shown["label"], shown["title"]) == (
        "approve",
        "Approve",
        "Reboot of WestNO_0, WestNO_1",
    )
    assert (shown["machines"], shown["code"], shown["whyNot"], shown["changes"]) == (
        ["WestNO_0", "WestNO_1"],
        True,
        None,
        [],
    )
    assert "cannot be taken back" in _plain(shown["question"])
    assert {"moment": event().not_before} in shown["summary"]
    assert {"who": "client:bob"} in facts["Votes"]
    assert "Azure proceeds at NotBefore regardless." in [_plain(one) for one in shown["notes"]]


@pytest.mark.parametrize("decision", ["hold", "release"])
async def test_what_is_said_of_a_hold_says_what_a_hold_is(relay: Running, decision: str) -> None:
    if decision == "release":
        await relay.decide("hold")
    sent = await message(relay)
    shown = (await look(relay, sent.tokens[decision])).json
    assert HOLD_NOTICE[2:] in " ".join(_plain(one) for one in (shown["question"], *shown["notes"]))
    answer = await confirm(relay, sent.tokens[decision])
    assert HOLD_NOTICE[2:] in _plain(answer.json["said"])


async def test_looking_decides_nothing_and_uses_nothing_up(relay: Running) -> None:
    sent = await message(relay)
    before = await relay.store.read(lambda tx: tx.head())
    for _ in range(20):
        assert (await look(relay, sent.tokens["approve"])).status == 200
    assert await relay.store.read(lambda tx: tx.head()) == before
    assert relay.server.rejections.count == 0
    assert (await confirm(relay, sent.tokens["approve"], sent.code)).status == 202


async def test_every_link_that_is_none_gets_the_same_answer(relay: Running) -> None:
    sent = await message(relay)
    for _ in range(MAX_WRONG_CODES):
        await confirm(relay, sent.tokens["approve"], sent.wrong_code)
    await relay.see()
    await relay.store.transact(lambda tx: tx.messages.prune())
    answers = [
        await look(relay, one)
        for one in (
            VOID,
            sent.tokens["approve"],
            sent.tokens["hold"],
            "%00",
            token_digest(sent.tokens["hold"]),
        )
    ]
    assert {(one.status, one.body) for one in answers} == {(404, answers[0].body)}


async def test_who_looks_at_links_that_are_none_is_a_stranger_and_is_refused_after_a_hundred(
    relay: Running,
) -> None:
    sent = await message(relay)
    relay.clock.stop()
    answers = Counter([(await look(relay, VOID)).status for _ in range(101)])
    assert answers == {404: 100, 429: 1}
    assert relay.server.rejections.count == 100
    assert (await look(relay, sent.tokens["approve"])).status == 429


async def test_a_link_is_looked_at_as_often_as_a_client_may_call(relay: Running) -> None:
    sent = await message(relay)
    relay.clock.stop()
    for decision in ("hold", "approve"):  # together more than strangers may
        answers = Counter([(await look(relay, sent.tokens[decision])).status for _ in range(52)])
        assert answers == {200: 50, 429: 2}
    assert (await confirm(relay, sent.tokens["hold"])).status == 202


@pytest.mark.parametrize(
    ("happens", "decision", "why"),
    [
        ("changed", "approve", "Azure has changed the event"),
        ("ended", "approve", "Azure has taken it back"),
        ("started", "hold", "The event has started already."),
        ("late", "approve", "Too late: it closed at 20"),
        ("late", "hold", "can approve."),
        ("off", "hold", "Approvals are off"),
        ("granted", "approve", "It is approved already."),
        ("released", "release", "No hold is on this event; "),
    ],
)
async def test_a_link_says_why_it_is_too_late(
    relay: Running, happens: str, decision: str, why: str
) -> None:
    if happens == "released":
        await relay.decide("hold")
    sent = await message(relay)
    match happens:
        case "changed":
            await relay.see(event(duration=9))
        case "ended":
            await relay.see()
        case "started":
            await relay.see(event(event_status="Started"))
        case "late":
            relay.clock.ahead = 7300
        case "off":
            await relay.call("PUT", "/v1/approvals/mode", {"mode": "off"})
        case "granted":
            await relay.decide(by="alice")
            await relay.decide(by="bob")
        case "released":
            await relay.decide("release")
    assert why in _plain((await look(relay, sent.tokens[decision])).json["whyNot"])


async def test_a_link_says_what_has_changed_since_it_was_made(relay: Running) -> None:
    await relay.see(event(duration=6))
    sent = await message(relay)
    await relay.see(event(duration=7, description="More."))
    await relay.see(
        event(
            duration=7, description="More.", not_before="2099-01-01T00:00:00Z", resources=("db-1",)
        )
    )
    shown = (await look(relay, sent.tokens["approve"])).json
    lines = [_plain(one[1:]) for one in shown["changes"]]
    assert sorted(lines) == sorted(
        [
            ": seconds that it takes: now 7; before 6.",
            ": Azure says now More.; before Host maintenance: påvirker «WestNO».",
            f": NotBefore: now 2099-01-01T00:00:00Z; before {event().not_before}.",
            ": machines: now db-1; before WestNO_0, WestNO_1.",
        ]
    )
    assert {"moment": "2099-01-01T00:00:00Z"} in next(
        one for one in shown["changes"] if "NotBefore: now " in one
    )


async def test_a_link_whose_event_has_not_changed_tells_of_no_change(relay: Running) -> None:
    await relay.see(event(duration=6))
    sent = await message(relay)
    await relay.see(event(duration=6, description="The revision is the same."))
    shown = (await look(relay, sent.tokens["approve"])).json
    assert (shown["whyNot"], shown["changes"]) == (None, [])


# --- the decision


async def test_the_vote_is_that_of_the_key_and_came_by_the_page(relay: Running) -> None:
    sent = await message(relay)
    answer = await confirm(relay, sent.tokens["approve"], sent.code, reason="drained")
    assert (answer.status, answer.json["state"], answer.json["votes"], answer.json["repeat"]) == (
        202,
        "pending",
        1,
        False,
    )
    assert "1 of 2 votes" in _plain(answer.json["said"])
    (vote,) = await _votes(relay)
    assert (vote["principal"], vote["channel"], vote["reason"], vote["revision"]) == (
        "client:alice",
        "page",
        "drained",
        event().revision,
    )


async def test_a_person_with_a_token_votes_under_their_own_name(tmp_path: Path) -> None:
    async with (
        issuing() as (issuer, url),
        running(tmp_path, oidc=section(url), approvals={"rules": [VOTE]}) as relay,
    ):
        await relay.see(event())
        sent = await message(relay)
        headers = {"Authorization": f"Bearer {Entra(relay, issuer).token()}"}
        wish = {"token": sent.tokens["approve"], "code": sent.code}
        assert (await relay.call("POST", "/v1/confirmations", wish, by=None, headers=headers)).json[
            "state"
        ] == "granted"
        assert [one["principal"] for one in await _votes(relay)] == [f"entra:{TENANT}/{PERSON}"]


async def test_another_may_use_the_same_link_and_two_votes_start_it_once(relay: Running) -> None:
    sent = await message(relay)
    await confirm(relay, sent.tokens["approve"], sent.code, by="alice")
    answer = await confirm(relay, sent.tokens["approve"], sent.code, by="bob")
    assert answer.json["state"] == "granted"
    await eventually(lambda: relay.azure.started == [(EVENT_ID,)])


@pytest.mark.parametrize("between", [" ", "\u00a0", "\t", "\u202f"])
async def test_spaces_in_a_code_do_not_matter(relay: Running, between: str) -> None:
    sent = await message(relay)
    spaced = f" {sent.code[:3]}{between}{sent.code[3:]} "
    assert (await confirm(relay, sent.tokens["approve"], spaced)).status == 202


async def test_a_wrong_code_is_refused_told_and_counted_and_the_right_one_counts_afterwards(
    relay: Running,
) -> None:
    sent = await message(relay)
    answer = await confirm(relay, sent.tokens["approve"], sent.wrong_code)
    assert (answer.status, answer.json["field"]) == (403, "code")
    (refused,) = await relay.said("approval.refused")
    assert (
        refused["data"]["refusal"]
        == answer.json["detail"]
        == "this is not the code that the message shows; the link takes 4 more tries"
    )
    assert await _wrong(relay, sent.tokens["approve"]) == 1
    assert (await confirm(relay, sent.tokens["approve"], sent.code)).status == 202


@pytest.mark.parametrize("given", [None, "", "  "])
async def test_without_a_code_nothing_is_approved_and_nothing_counted(
    relay: Running, given: str | None
) -> None:
    sent = await message(relay)
    answer = await confirm(relay, sent.tokens["approve"], given)
    assert (answer.status, answer.json["field"]) == (403, "code")
    assert await _wrong(relay, sent.tokens["approve"]) == 0


@pytest.mark.parametrize("given", ["0", "000000000000000000000000", "à\U0001f600", "१२३४५६"])
async def test_a_code_of_another_shape_is_a_wrong_one(relay: Running, given: str) -> None:
    sent = await message(relay)
    assert (await confirm(relay, sent.tokens["approve"], given)).json["field"] == "code"
    assert await _wrong(relay, sent.tokens["approve"]) == 1


async def test_five_wrong_codes_void_a_link_and_the_next_edit_brings_another(
    relay: Running,
) -> None:
    sent = await message(relay)
    for _ in range(MAX_WRONG_CODES - 1):
        await confirm(relay, sent.tokens["approve"], sent.wrong_code)
    last = await confirm(relay, sent.tokens["approve"], sent.wrong_code)
    assert "the message gets a new link when it is edited next" in last.json["detail"]
    after = await confirm(relay, sent.tokens["approve"], sent.code, by="bob")
    assert (after.status, await _votes(relay)) == (403, [])
    assert "it is void" in after.json["detail"]
    assert (await look(relay, sent.tokens["approve"])).status == 404
    assert (await confirm(relay, sent.tokens["hold"])).status == 202
    fresh = await message(relay)
    assert (await confirm(relay, fresh.tokens["approve"], fresh.code)).status == 202


async def test_fifty_guesses_at_once_are_five(relay: Running) -> None:
    sent = await message(relay)
    answers = await asyncio.gather(
        *(confirm(relay, sent.tokens["approve"], f"9{number:06d}") for number in range(50))
    )
    assert Counter(("field" in one.json) for one in answers) == {
        True: MAX_WRONG_CODES - 1,
        False: 50 - MAX_WRONG_CODES + 1,
    }
    assert await _wrong(relay, sent.tokens["approve"]) == MAX_WRONG_CODES


async def test_who_may_not_decide_learns_nothing_of_the_code_and_uses_nothing_up(
    relay: Running,
) -> None:
    sent = await message(relay)
    answers = [
        await confirm(relay, sent.tokens["approve"], code, by="reader")
        for code in (sent.code, sent.wrong_code, None)
    ]
    assert {(one.status, one.body) for one in answers} == {(403, answers[0].body)}
    assert await _wrong(relay, sent.tokens["approve"]) == 0


async def test_a_stranger_uses_nothing_up_and_is_counted(relay: Running) -> None:
    sent = await message(relay)
    for by in (None, "nobody"):
        for code in (sent.code, sent.wrong_code):
            assert (await confirm(relay, sent.tokens["approve"], code, by=by)).status == 401
    assert await _wrong(relay, sent.tokens["approve"]) == 0
    assert (await _votes(relay), relay.server.rejections.count) == ([], 4)


async def test_hold_and_release_ask_for_no_code(relay: Running) -> None:
    sent = await message(relay)
    assert (await confirm(relay, sent.tokens["hold"])).json["state"] == "held"
    held = await message(relay)
    assert (await confirm(relay, held.tokens["release"])).json["state"] == "released"


async def test_a_repeat_gets_the_first_answer_whatever_else_it_says(relay: Running) -> None:
    sent = await message(relay)
    first = await confirm(relay, sent.tokens["approve"], sent.code)
    await confirm(relay, sent.tokens["approve"], sent.code, by="bob")
    again = await confirm(relay, sent.tokens["approve"], sent.wrong_code, reason="once more")
    assert {**again.json, "repeat": False, "said": first.json["said"]} == first.json
    assert (again.json["repeat"], _plain(again.json["said"])[:25]) == (
        True,
        "You have used this link b",
    )
    assert len(await _votes(relay)) == 2
    assert await _wrong(relay, sent.tokens["approve"]) == 0


async def test_a_used_link_brings_back_no_vote_that_is_void(relay: Running) -> None:
    sent = await message(relay)
    await confirm(relay, sent.tokens["hold"])
    await relay.decide("release")
    again = await confirm(relay, sent.tokens["hold"])
    assert again.json["repeat"] is True
    assert (await relay.call("GET", f"/v1/events/{EVENT_ID}")).json["approval"][
        "state"
    ] == "pending"


async def test_a_right_that_was_lacking_can_be_given_later(relay: Running) -> None:
    """A refusal uses no link up."""
    sent = await message(relay)
    await relay.see(event(duration=9))
    assert (await confirm(relay, sent.tokens["approve"], sent.code)).status == 409
    await relay.see(event())
    assert (await confirm(relay, sent.tokens["approve"], sent.code)).status == 202


async def test_fifty_copies_at_once_are_one_vote(relay: Running) -> None:
    sent = await message(relay)
    answers = await asyncio.gather(
        *(confirm(relay, sent.tokens["approve"], sent.code) for _ in range(50))
    )
    assert Counter((one.status, one.json["repeat"]) for one in answers) == {
        (202, False): 1,
        (202, True): 49,
    }
    assert len({one.json["approvalId"] for one in answers}) == 1
    assert len(await _votes(relay)) == 1


@pytest.mark.parametrize("field", ["eventId", "revision", "decision", "scope"])
async def test_what_is_decided_is_never_taken_from_the_body(relay: Running, field: str) -> None:
    sent = await message(relay)
    answer = await confirm(relay, sent.tokens["hold"], **{field: "approve"})
    assert (answer.status, answer.json["field"]) == (422, field)


async def test_a_link_to_approve_is_of_no_use_after_a_change(relay: Running) -> None:
    sent = await message(relay)
    await relay.see(event(duration=9))
    answer = await confirm(relay, sent.tokens["approve"], sent.code)
    assert (answer.status, answer.json["revision"]) == (409, event(duration=9).revision)
    assert (await confirm(relay, sent.tokens["hold"])).status == 202


async def test_a_link_to_an_event_that_is_over_does_nothing_to_its_next_occurrence(
    relay: Running,
) -> None:
    """The EventId is the same, and a hold needs no current revision: the link does."""
    sent = await message(relay)
    await relay.see()
    await relay.see(event())
    answers = [
        await confirm(relay, sent.tokens["hold"]),
        await confirm(relay, sent.tokens["approve"], sent.code),
    ]
    assert [one.status for one in answers] == [409, 409]
    assert await _votes(relay) == []


async def test_a_dry_run_says_so(relay: Running) -> None:
    await relay.call("PUT", "/v1/approvals/mode", {"mode": "dry-run"})
    sent = await message(relay)
    assert "no StartRequest is sent" in _plain(
        (await confirm(relay, sent.tokens["approve"], sent.code)).json["said"]
    )


async def test_while_nothing_can_be_written_links_are_shown_and_nothing_is_decided(
    relay: Running,
) -> None:
    sent = await message(relay)
    relay.spoil_disk()
    answer = await confirm(relay, sent.tokens["approve"], sent.code)
    assert (answer.status, (await look(relay, sent.tokens["approve"])).status) == (503, 200)
    assert await _votes(relay) == []


async def test_while_the_relay_stops_nothing_is_shown_or_decided(relay: Running) -> None:
    sent = await message(relay)
    relay.server.detach()
    assert (await look(relay, sent.tokens["approve"])).status == 503
    assert (await confirm(relay, sent.tokens["approve"], sent.code)).status == 503


# --- what is kept, and what is told to whom


async def test_no_token_is_on_disk_and_no_secret_in_a_log_or_an_event(
    relay: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    sent = await message(relay)
    token = sent.tokens["approve"]
    await look(relay, token)
    await look(relay, VOID)
    await confirm(relay, VOID, sent.code)
    await confirm(relay, token, sent.code, by="nobody")
    await confirm(relay, token, sent.wrong_code)
    await confirm(relay, token, sent.code)
    kept = b"".join(one.read_bytes() for one in (tmp_path / "relay.db", tmp_path / "relay.db-wal"))
    journal = await relay.store.read(
        lambda tx: b"".join(said.body for _, said in tx.journal.events_after(0, 1000))
    )
    logged = "\n".join(str(one.__dict__) for one in caplog.records)
    assert token_digest(token).encode() in kept
    for secret in (token, VOID, "key-of-alice", "key-of-nobody"):
        assert secret.encode() not in kept
    for secret in (token, token_digest(token), VOID, sent.code, "key-of-alice", "key-of-nobody"):
        assert secret.encode() not in journal
        assert secret not in logged


async def test_no_answer_repeats_what_was_sent(relay: Running) -> None:
    sent = await message(relay)
    token = sent.tokens["approve"]
    wishes: list[dict[str, Any]] = [
        {"token": token, "code": 7},
        {"token": [token]},
        {"token": token, "code": "654321"},
        {"token": token},
    ]
    for wish in wishes:
        answer = await relay.call("POST", "/v1/confirmations", wish)
        assert token.encode() not in answer.body
        assert b"654321" not in answer.body


# --- what approves nothing


@pytest.mark.parametrize("path", ["/approve", "/v1/confirmations", "/v1/confirmations/look"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"])
async def test_no_other_method_decides_anything(relay: Running, method: str, path: str) -> None:
    sent = await message(relay)
    purpose = {"Sec-Purpose": "prefetch", "Authorization": "Bearer key-of-alice"}
    url = f"http://127.0.0.1:{relay.server.port}{path}?token={sent.tokens['approve']}&code={sent.code}"
    async with relay.session.request(method, url, headers=purpose) as answer:
        assert answer.status == (200 if (method in ("GET", "HEAD") and path == "/approve") else 405)
    assert await _votes(relay) == []


@pytest.mark.parametrize(
    "kind",
    ["application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain", None],
)
async def test_what_a_form_of_another_page_can_send_is_not_taken(
    relay: Running, kind: str | None
) -> None:
    """A browser sends JSON across origins only after it was allowed to, and it is not."""
    sent = await message(relay)
    body = orjson.dumps({"token": sent.tokens["approve"], "code": sent.code})
    headers = {"Authorization": "Bearer key-of-alice"} | ({"Content-Type": kind} if kind else {})
    for path in ("/v1/confirmations", "/v1/confirmations/look"):
        url = f"http://127.0.0.1:{relay.server.port}{path}"
        skipped = () if kind else ("Content-Type",)
        async with relay.session.post(
            url, data=body, headers=headers, skip_auto_headers=skipped
        ) as answer:
            assert answer.status == 415
            assert "Access-Control-Allow-Origin" not in answer.headers
    assert await _votes(relay) == []


# --- the page


async def _page(
    relay: Running, method: str = "GET", path: str = "/approve"
) -> tuple[aiohttp.ClientResponse, bytes]:
    async with relay.session.request(
        method, f"http://127.0.0.1:{relay.server.port}{path}"
    ) as answer:
        return answer, await answer.read()


async def test_the_page_may_run_its_own_script_and_nothing_else(relay: Running) -> None:
    answer, page = await _page(relay)
    headers = answer.headers
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    policy = dict(one.partition(" ")[::2] for one in headers["Content-Security-Policy"].split("; "))
    for tag in (b"script", b"style"):
        assert page.count(b"<%b" % tag) == 1
        inline = page.partition(b"<%b>" % tag)[2].partition(b"</%b>" % tag)[0]
        digest = base64.b64encode(hashlib.sha256(inline).digest()).decode()
        assert policy.pop(f"{tag.decode()}-src") == f"'sha256-{digest}'"
    assert policy == {
        "default-src": "'none'",
        "img-src": "data:",
        "connect-src": "'self'",
        "form-action": "'none'",
        "base-uri": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }


async def test_the_page_is_kept_by_nobody_framed_by_nobody_and_tells_nobody_where_one_comes_from(
    relay: Running,
) -> None:
    answer, page = await _page(relay)
    wanted = {
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Frame-Options": "DENY",
        "X-Content-Type-Options": "nosniff",
        "X-Robots-Tag": "noindex, nofollow",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
    }
    assert wanted.items() <= dict(answer.headers).items()
    assert "camera=()" in answer.headers["Permissions-Policy"]
    assert "Set-Cookie" not in answer.headers
    assert page.count(EMPTY_ICON) == 1
    page = page.replace(EMPTY_ICON, b"")
    for word in (
        b"http:",
        b"https:",
        b"src=",
        b"href",
        b"innerHTML",
        b"localStorage",
        b"sessionStorage",
        b"cookie",
        b"eval",
    ):
        assert word not in page


async def test_head_says_the_same_as_get(relay: Running) -> None:
    (got, page), (head, nothing) = await _page(relay), await _page(relay, "HEAD")
    assert nothing == b""
    assert head.headers["Content-Length"] == str(len(page))
    assert {**head.headers, "Date": ""} == {**got.headers, "Date": ""}


async def test_the_page_is_the_same_for_everybody_and_while_the_relay_starts(
    relay: Running,
) -> None:
    _, page = await _page(relay)
    relay.server.detach()
    assert (await _page(relay, path="/approve?token=x"))[1] == page


async def test_the_page_shows_the_grant_that_another_completes(relay: Running) -> None:
    sent = await message(relay)
    await confirm(relay, sent.tokens["approve"], sent.code)
    await relay.decide(by="bob")
    shown = await until(
        lambda: look(relay, sent.tokens["approve"]), lambda one: "accepted" in one.body.decode()
    )
    assert "Azure has accepted the StartRequest" in " ".join(
        _plain(one) for one in shown.json["notes"]
    )
