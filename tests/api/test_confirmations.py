"""Confirmation links: what they show, and their decisions, which need a key and a code."""

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

from relay.approvals.admission import HOLD_NOTICE
from relay.approvals.confirmation_link import MAX_WRONG_CODES
from relay.store.chat_messages import confirmation_link_token_digest
from relay.store.transaction import Transaction
from tests.api.confirmation_links import post_confirmation, post_preview, render_message
from tests.api.running_relay import EVENT_ID, RunningRelay, make_event, run_relay
from tests.api.test_identity import PERSON, TENANT, VOTE, Entra, issuing, section
from tests.eventually import eventually

VOID = "a" * 43
EMPTY_ICON = b'<link rel="icon" href="data:,">'
"""The only reference in the page. Without it, browsers ask for /favicon.ico."""
RUNBOOK_LINK = b'{ href: runbook.url, target: "_blank", rel: "noopener noreferrer" }'
"""The only link that the page makes: to the runbook that the configuration names."""
KEPT_LINK_USES = (
    b"sessionStorage.setItem(KEPT_LINK, JSON.stringify({ token, at: Date.now() }));",
    b"sessionStorage.getItem(KEPT_LINK)",
    b"sessionStorage.removeItem(KEPT_LINK)",
)
"""What the page does with the storage of its tab: it keeps the link while a person signs in."""


async def _votes(relay: RunningRelay) -> list[dict[str, Any]]:
    return [event["data"] for event in await relay.recorded_events("approval.recorded")]


async def _wrong(relay: RunningRelay, token: str) -> int:
    def work(tx: Transaction) -> int:
        link = tx.messages.find_confirmation_link_by_token(token)
        assert link is not None
        return link.wrong_codes

    return await relay.store.read(work)


def _plain(text: list[Any]) -> str:
    return "".join(part if isinstance(part, str) else next(iter(part.values())) for part in text)


# --- what a link shows


async def test_a_preview_shows_the_decision_of_the_link(relay: RunningRelay) -> None:
    message = await render_message(relay)
    await relay.decide(by="bob")
    preview = (await post_preview(relay, message.tokens["approve"])).json
    facts = {fact["label"]: fact["text"] for fact in preview["facts"]}
    assert (preview["decision"], preview["label"], preview["title"]) == (
        "approve",
        "Approve",
        "Reboot of WestNO_0, WestNO_1",
    )
    assert (preview["machines"], preview["code"], preview["whyNot"], preview["changes"]) == (
        ["WestNO_0", "WestNO_1"],
        True,
        None,
        [],
    )
    assert "cannot be taken back" in _plain(preview["question"])
    assert {"moment": make_event().not_before} in preview["summary"]
    assert {"who": "client:bob"} in facts["Votes"]
    assert "Azure proceeds at NotBefore regardless." in [_plain(note) for note in preview["notes"]]


@pytest.mark.parametrize("decision", ["hold", "release"])
async def test_texts_about_a_hold_explain_holds(relay: RunningRelay, decision: str) -> None:
    if decision == "release":
        await relay.decide("hold")
    message = await render_message(relay)
    preview = (await post_preview(relay, message.tokens[decision])).json
    assert HOLD_NOTICE[2:] in " ".join(
        _plain(text) for text in (preview["question"], *preview["notes"])
    )
    answer = await post_confirmation(relay, message.tokens[decision])
    assert HOLD_NOTICE[2:] in _plain(answer.json["said"])


async def test_a_preview_decides_nothing_and_uses_no_link_up(relay: RunningRelay) -> None:
    message = await render_message(relay)
    before = await relay.store.read(lambda tx: tx.head())
    for _ in range(20):
        assert (await post_preview(relay, message.tokens["approve"])).status == 200
    assert await relay.store.read(lambda tx: tx.head()) == before
    assert relay.server.state.rejection_log.count == 0
    assert (await post_confirmation(relay, message.tokens["approve"], message.code)).status == 202


async def test_every_invalid_link_gets_the_same_response(relay: RunningRelay) -> None:
    message = await render_message(relay)
    for _ in range(MAX_WRONG_CODES):
        await post_confirmation(relay, message.tokens["approve"], message.wrong_code)
    await relay.observe()
    await relay.store.transact(lambda tx: tx.messages.prune())
    answers = [
        await post_preview(relay, token)
        for token in (
            VOID,
            message.tokens["approve"],
            message.tokens["hold"],
            "%00",
            confirmation_link_token_digest(message.tokens["hold"]),
        )
    ]
    assert {(answer.status, answer.body) for answer in answers} == {(404, answers[0].body)}


async def test_previews_of_invalid_links_are_counted_and_refused_after_a_hundred(
    relay: RunningRelay,
) -> None:
    message = await render_message(relay)
    relay.clock.freeze_monotonic()
    answers = Counter([(await post_preview(relay, VOID)).status for _ in range(101)])
    assert answers == {404: 100, 429: 1}
    assert relay.server.state.rejection_log.count == 100
    assert (await post_preview(relay, message.tokens["approve"])).status == 200


async def test_previews_of_a_link_have_the_rate_limit_of_a_client(relay: RunningRelay) -> None:
    message = await render_message(relay)
    relay.clock.freeze_monotonic()
    for decision in ("hold", "approve"):  # together more than an address without credentials may
        answers = Counter(
            [(await post_preview(relay, message.tokens[decision])).status for _ in range(52)]
        )
        assert answers == {200: 50, 429: 2}
    assert (await post_confirmation(relay, message.tokens["hold"])).status == 202


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
async def test_a_preview_says_why_it_is_too_late(
    relay: RunningRelay, happens: str, decision: str, why: str
) -> None:
    if happens == "released":
        await relay.decide("hold")
    message = await render_message(relay)
    match happens:
        case "changed":
            await relay.observe(make_event(duration=9))
        case "ended":
            await relay.observe()
        case "started":
            await relay.observe(make_event(event_status="Started"))
        case "late":
            relay.clock.offset = 7300
        case "off":
            await relay.call("PUT", "/v1/approvals/mode", {"mode": "off"})
        case "granted":
            await relay.decide(by="alice")
            await relay.decide(by="bob")
        case "released":
            await relay.decide("release")
    assert why in _plain((await post_preview(relay, message.tokens[decision])).json["whyNot"])


async def test_a_preview_lists_the_changes_since_the_link_was_made(relay: RunningRelay) -> None:
    await relay.observe(make_event(duration=6))
    message = await render_message(relay)
    await relay.observe(make_event(duration=7, description="More."))
    await relay.observe(
        make_event(
            duration=7, description="More.", not_before="2099-01-01T00:00:00Z", resources=("db-1",)
        )
    )
    preview = (await post_preview(relay, message.tokens["approve"])).json
    lines = [_plain(line[1:]) for line in preview["changes"]]
    assert sorted(lines) == sorted(
        [
            ": seconds that it takes: now 7; before 6.",
            ": Azure says now More.; before Host maintenance: påvirker «WestNO».",
            f": NotBefore: now 2099-01-01T00:00:00Z; before {make_event().not_before}.",
            ": machines: now db-1; before WestNO_0, WestNO_1.",
        ]
    )
    assert {"moment": "2099-01-01T00:00:00Z"} in next(
        line for line in preview["changes"] if "NotBefore: now " in line
    )


async def test_a_preview_of_an_unchanged_event_lists_no_changes(relay: RunningRelay) -> None:
    await relay.observe(make_event(duration=6))
    message = await render_message(relay)
    await relay.observe(make_event(duration=6, description="The revision is the same."))
    preview = (await post_preview(relay, message.tokens["approve"])).json
    assert (preview["whyNot"], preview["changes"]) == (None, [])


# --- the decision


async def test_the_vote_has_the_principal_of_the_key_and_the_channel_page(
    relay: RunningRelay,
) -> None:
    message = await render_message(relay)
    answer = await post_confirmation(
        relay, message.tokens["approve"], message.code, reason="drained"
    )
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
        make_event().revision,
    )


async def test_a_person_with_a_token_votes_under_their_own_name(tmp_path: Path) -> None:
    async with (
        issuing() as (issuer, url),
        run_relay(tmp_path, oidc=section(url), approvals={"rules": [VOTE]}) as relay,
    ):
        await relay.observe(make_event())
        message = await render_message(relay)
        headers = {"Authorization": f"Bearer {Entra(relay, issuer).token()}"}
        body = {"token": message.tokens["approve"], "code": message.code}
        assert (await relay.call("POST", "/v1/confirmations", body, by=None, headers=headers)).json[
            "state"
        ] == "granted"
        assert [vote["principal"] for vote in await _votes(relay)] == [f"entra:{TENANT}/{PERSON}"]


async def test_two_people_may_use_the_same_link_and_their_votes_start_the_event_once(
    relay: RunningRelay,
) -> None:
    message = await render_message(relay)
    await post_confirmation(relay, message.tokens["approve"], message.code, by="alice")
    answer = await post_confirmation(relay, message.tokens["approve"], message.code, by="bob")
    assert answer.json["state"] == "granted"
    await eventually(lambda: relay.azure.started == [(EVENT_ID,)])


@pytest.mark.parametrize("between", [" ", "\u00a0", "\t", "\u202f"])
async def test_spaces_in_a_code_do_not_matter(relay: RunningRelay, between: str) -> None:
    message = await render_message(relay)
    spaced = f" {message.code[:3]}{between}{message.code[3:]} "
    assert (await post_confirmation(relay, message.tokens["approve"], spaced)).status == 202


async def test_a_wrong_code_is_refused_and_counted_and_the_right_code_still_works(
    relay: RunningRelay,
) -> None:
    message = await render_message(relay)
    answer = await post_confirmation(relay, message.tokens["approve"], message.wrong_code)
    assert (answer.status, answer.json["field"]) == (403, "code")
    (refused,) = await relay.recorded_events("approval.refused")
    assert (
        refused["data"]["refusal"]
        == answer.json["detail"]
        == "this is not the code that the message shows; the link takes 4 more tries"
    )
    assert await _wrong(relay, message.tokens["approve"]) == 1
    assert (await post_confirmation(relay, message.tokens["approve"], message.code)).status == 202


@pytest.mark.parametrize("given", [None, "", "  "])
async def test_a_missing_code_approves_nothing_and_is_not_counted(
    relay: RunningRelay, given: str | None
) -> None:
    message = await render_message(relay)
    answer = await post_confirmation(relay, message.tokens["approve"], given)
    assert (answer.status, answer.json["field"]) == (403, "code")
    assert await _wrong(relay, message.tokens["approve"]) == 0


@pytest.mark.parametrize("given", ["0", "000000000000000000000000", "à\U0001f600", "१२३४५६"])
async def test_a_code_of_another_form_is_wrong(relay: RunningRelay, given: str) -> None:
    message = await render_message(relay)
    assert (await post_confirmation(relay, message.tokens["approve"], given)).json[
        "field"
    ] == "code"
    assert await _wrong(relay, message.tokens["approve"]) == 1


async def test_five_wrong_codes_make_a_link_invalid_and_the_next_edit_makes_a_new_link(
    relay: RunningRelay,
) -> None:
    message = await render_message(relay)
    for _ in range(MAX_WRONG_CODES - 1):
        await post_confirmation(relay, message.tokens["approve"], message.wrong_code)
    last = await post_confirmation(relay, message.tokens["approve"], message.wrong_code)
    assert "the message gets a new link when it is edited next" in last.json["detail"]
    after = await post_confirmation(relay, message.tokens["approve"], message.code, by="bob")
    assert (after.status, await _votes(relay)) == (403, [])
    assert "it is void" in after.json["detail"]
    assert (await post_preview(relay, message.tokens["approve"])).status == 404
    assert (await post_confirmation(relay, message.tokens["hold"])).status == 202
    fresh = await render_message(relay)
    assert (await post_confirmation(relay, fresh.tokens["approve"], fresh.code)).status == 202


async def test_a_link_of_an_older_version_approves_nothing(relay: RunningRelay) -> None:
    """The file of an older version held codes as they are; its links have no digest of one."""
    message = await render_message(relay)
    await relay.store.transact(
        lambda tx: tx.messages._connection.execute("UPDATE invitation SET code = NULL")  # noqa: SLF001  # as the migration leaves it
    )
    answer = await post_confirmation(relay, message.tokens["approve"], message.code)
    assert answer.status == 409
    assert "an older version of the relay made this link" in answer.json["detail"]
    assert (await post_confirmation(relay, message.tokens["hold"])).status == 202


async def test_of_fifty_guesses_at_once_five_are_checked(relay: RunningRelay) -> None:
    message = await render_message(relay)
    answers = await asyncio.gather(
        *(
            post_confirmation(relay, message.tokens["approve"], f"9{number:06d}")
            for number in range(50)
        )
    )
    assert Counter(("field" in answer.json) for answer in answers) == {
        True: MAX_WRONG_CODES - 1,
        False: 50 - MAX_WRONG_CODES + 1,
    }
    assert await _wrong(relay, message.tokens["approve"]) == MAX_WRONG_CODES


async def test_without_rights_a_caller_cannot_test_codes_and_uses_no_link_up(
    relay: RunningRelay,
) -> None:
    message = await render_message(relay)
    answers = [
        await post_confirmation(relay, message.tokens["approve"], code, by="reader")
        for code in (message.code, message.wrong_code, None)
    ]
    assert {(answer.status, answer.body) for answer in answers} == {(403, answers[0].body)}
    assert await _wrong(relay, message.tokens["approve"]) == 0


async def test_a_caller_without_credentials_is_counted_and_uses_no_link_up(
    relay: RunningRelay,
) -> None:
    message = await render_message(relay)
    for by in (None, "nobody"):
        for code in (message.code, message.wrong_code):
            assert (
                await post_confirmation(relay, message.tokens["approve"], code, by=by)
            ).status == 401
    assert await _wrong(relay, message.tokens["approve"]) == 0
    assert (await _votes(relay), relay.server.state.rejection_log.count) == ([], 4)


async def test_hold_and_release_need_no_code(relay: RunningRelay) -> None:
    message = await render_message(relay)
    assert (await post_confirmation(relay, message.tokens["hold"])).json["state"] == "held"
    held = await render_message(relay)
    assert (await post_confirmation(relay, held.tokens["release"])).json["state"] == "released"


async def test_a_repeat_gets_the_first_answer_whatever_else_it_says(relay: RunningRelay) -> None:
    message = await render_message(relay)
    first = await post_confirmation(relay, message.tokens["approve"], message.code)
    await post_confirmation(relay, message.tokens["approve"], message.code, by="bob")
    again = await post_confirmation(
        relay, message.tokens["approve"], message.wrong_code, reason="once more"
    )
    assert {**again.json, "repeat": False, "said": first.json["said"]} == first.json
    assert (again.json["repeat"], _plain(again.json["said"])[:25]) == (
        True,
        "You have used this link b",
    )
    assert len(await _votes(relay)) == 2
    assert await _wrong(relay, message.tokens["approve"]) == 0


async def test_a_used_link_does_not_restore_a_voided_vote(relay: RunningRelay) -> None:
    message = await render_message(relay)
    await post_confirmation(relay, message.tokens["hold"])
    await relay.decide("release")
    again = await post_confirmation(relay, message.tokens["hold"])
    assert again.json["repeat"] is True
    assert (await relay.call("GET", f"/v1/events/{EVENT_ID}")).json["approval"][
        "state"
    ] == "pending"


async def test_a_missing_right_can_be_granted_later(relay: RunningRelay) -> None:
    """A refusal uses no link up."""
    message = await render_message(relay)
    await relay.observe(make_event(duration=9))
    assert (await post_confirmation(relay, message.tokens["approve"], message.code)).status == 409
    await relay.observe(make_event())
    assert (await post_confirmation(relay, message.tokens["approve"], message.code)).status == 202


async def test_fifty_copies_at_once_are_one_vote(relay: RunningRelay) -> None:
    message = await render_message(relay)
    answers = await asyncio.gather(
        *(post_confirmation(relay, message.tokens["approve"], message.code) for _ in range(50))
    )
    assert Counter((answer.status, answer.json["repeat"]) for answer in answers) == {
        (202, False): 1,
        (202, True): 49,
    }
    assert len({answer.json["approvalId"] for answer in answers}) == 1
    assert len(await _votes(relay)) == 1


@pytest.mark.parametrize("field", ["eventId", "revision", "decision", "scope"])
async def test_the_decision_of_a_link_is_never_taken_from_the_body(
    relay: RunningRelay, field: str
) -> None:
    message = await render_message(relay)
    answer = await post_confirmation(relay, message.tokens["hold"], **{field: "approve"})
    assert (answer.status, answer.json["field"]) == (422, field)


async def test_a_link_to_approve_cannot_be_used_after_a_change(relay: RunningRelay) -> None:
    message = await render_message(relay)
    await relay.observe(make_event(duration=9))
    answer = await post_confirmation(relay, message.tokens["approve"], message.code)
    assert (answer.status, answer.json["revision"]) == (409, make_event(duration=9).revision)
    assert (await post_confirmation(relay, message.tokens["hold"])).status == 202


async def test_a_link_to_an_ended_event_does_nothing_to_its_next_occurrence(
    relay: RunningRelay,
) -> None:
    """The EventId is the same, and a hold needs no current revision: the link does."""
    message = await render_message(relay)
    await relay.observe()
    await relay.observe(make_event())
    answers = [
        await post_confirmation(relay, message.tokens["hold"]),
        await post_confirmation(relay, message.tokens["approve"], message.code),
    ]
    assert [answer.status for answer in answers] == [409, 409]
    assert await _votes(relay) == []


async def test_a_dry_run_says_so(relay: RunningRelay) -> None:
    await relay.call("PUT", "/v1/approvals/mode", {"mode": "dry-run"})
    message = await render_message(relay)
    assert "no StartRequest is sent" in _plain(
        (await post_confirmation(relay, message.tokens["approve"], message.code)).json["said"]
    )


async def test_while_nothing_can_be_written_links_are_shown_and_nothing_is_decided(
    relay: RunningRelay,
) -> None:
    message = await render_message(relay)
    relay.make_store_read_only()
    answer = await post_confirmation(relay, message.tokens["approve"], message.code)
    assert (answer.status, (await post_preview(relay, message.tokens["approve"])).status) == (
        503,
        200,
    )
    assert await _votes(relay) == []


async def test_while_the_relay_stops_nothing_is_shown_or_decided(relay: RunningRelay) -> None:
    message = await render_message(relay)
    relay.server.state.detach_relay()
    assert (await post_preview(relay, message.tokens["approve"])).status == 503
    assert (await post_confirmation(relay, message.tokens["approve"], message.code)).status == 503


# --- what is kept, and what is told to whom


async def test_no_token_is_on_disk_and_no_secret_in_a_log_or_an_event(
    relay: RunningRelay, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    message = await render_message(relay)
    token = message.tokens["approve"]
    await post_preview(relay, token)
    await post_preview(relay, VOID)
    await post_confirmation(relay, VOID, message.code)
    await post_confirmation(relay, token, message.code, by="nobody")
    await post_confirmation(relay, token, message.wrong_code)
    await post_confirmation(relay, token, message.code)
    kept = b"".join(
        file.read_bytes() for file in (tmp_path / "relay.db", tmp_path / "relay.db-wal")
    )
    journal = await relay.store.read(
        lambda tx: b"".join(event.body for _, event in tx.journal.events_after(0, 1000))
    )
    logged = "\n".join(str(record.__dict__) for record in caplog.records)
    assert confirmation_link_token_digest(token).encode() in kept
    for secret in (token, VOID, "bearer-test-key-of-alice", "bearer-test-key-of-nobody"):
        assert secret.encode() not in kept
    for secret in (
        token,
        confirmation_link_token_digest(token),
        VOID,
        message.code,
        "bearer-test-key-of-alice",
        "bearer-test-key-of-nobody",
    ):
        assert secret.encode() not in journal
        assert secret not in logged


async def test_no_answer_repeats_what_was_sent(relay: RunningRelay) -> None:
    message = await render_message(relay)
    token = message.tokens["approve"]
    bodies: list[dict[str, Any]] = [
        {"token": token, "code": 7},
        {"token": [token]},
        {"token": token, "code": "654321"},
        {"token": token},
    ]
    for body in bodies:
        answer = await relay.call("POST", "/v1/confirmations", body)
        assert token.encode() not in answer.body
        assert b"654321" not in answer.body


# --- what approves nothing


@pytest.mark.parametrize("path", ["/approve", "/v1/confirmations", "/v1/confirmations/look"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"])
async def test_no_other_method_decides_anything(
    relay: RunningRelay, method: str, path: str
) -> None:
    message = await render_message(relay)
    purpose = {"Sec-Purpose": "prefetch", "Authorization": "Bearer bearer-test-key-of-alice"}
    query = f"token={message.tokens['approve']}&code={message.code}"
    url = f"http://127.0.0.1:{relay.server.port}{path}?{query}"
    async with relay.session.request(method, url, headers=purpose) as answer:
        assert answer.status == (200 if (method in ("GET", "HEAD") and path == "/approve") else 405)
    assert await _votes(relay) == []


@pytest.mark.parametrize(
    "kind",
    ["application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain", None],
)
async def test_bodies_that_a_form_can_send_are_refused(
    relay: RunningRelay, kind: str | None
) -> None:
    """A browser sends JSON across origins only after it was allowed to, and it is not."""
    message = await render_message(relay)
    body = orjson.dumps({"token": message.tokens["approve"], "code": message.code})
    headers = {"Authorization": "Bearer bearer-test-key-of-alice"} | (
        {"Content-Type": kind} if kind else {}
    )
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
    relay: RunningRelay, method: str = "GET", path: str = "/approve"
) -> tuple[aiohttp.ClientResponse, bytes]:
    async with relay.session.request(
        method, f"http://127.0.0.1:{relay.server.port}{path}"
    ) as answer:
        return answer, await answer.read()


async def test_the_page_may_run_its_own_script_and_nothing_else(relay: RunningRelay) -> None:
    answer, page = await _page(relay)
    headers = answer.headers
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    policy = dict(
        directive.partition(" ")[::2]
        for directive in headers["Content-Security-Policy"].split("; ")
    )
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


async def test_the_page_is_not_cached_not_framed_and_sends_no_referrer(
    relay: RunningRelay,
) -> None:
    answer, page = await _page(relay)
    expected_headers = {
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Frame-Options": "DENY",
        "X-Content-Type-Options": "nosniff",
        "X-Robots-Tag": "noindex, nofollow",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
    }
    assert expected_headers.items() <= dict(answer.headers).items()
    assert "camera=()" in answer.headers["Permissions-Policy"]
    assert "Set-Cookie" not in answer.headers
    assert page.count(EMPTY_ICON) == 1
    assert page.count(RUNBOOK_LINK) == 1
    page = page.replace(EMPTY_ICON, b"").replace(RUNBOOK_LINK, b"")
    for use in KEPT_LINK_USES:  # during a sign-in, and never the key
        assert page.count(use) == 1
        page = page.replace(use, b"")
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


async def test_head_says_the_same_as_get(relay: RunningRelay) -> None:
    (got, page), (head, nothing) = await _page(relay), await _page(relay, "HEAD")
    assert nothing == b""
    assert head.headers["Content-Length"] == str(len(page))
    assert {**head.headers, "Date": ""} == {**got.headers, "Date": ""}


async def test_the_page_is_the_same_for_everybody_and_while_the_relay_starts(
    relay: RunningRelay,
) -> None:
    _, page = await _page(relay)
    relay.server.state.detach_relay()
    assert (await _page(relay, path="/approve?token=x"))[1] == page


async def test_a_preview_shows_a_grant_that_another_vote_completed(relay: RunningRelay) -> None:
    message = await render_message(relay)
    await post_confirmation(relay, message.tokens["approve"], message.code)
    await relay.decide(by="bob")
    preview = await eventually(
        lambda: post_preview(relay, message.tokens["approve"]),
        lambda response: "accepted" in response.body.decode(),
    )
    assert "Azure has accepted the StartRequest" in " ".join(
        _plain(note) for note in preview.json["notes"]
    )
