"""Signatures: what we make others verify, what others make we verify, and nothing else passes."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict
from standardwebhooks import Webhook, WebhookVerificationError

from relay import signature
from relay.signature import SignatureRefused
from tests.journey.relay_process import signed_headers

NOW = datetime(2026, 4, 11, 22, 26, 58, 900_000, UTC)
BODY = '{"name":"påvirker"}'.encode()
MESSAGE_ID = "0f8fad5bd9cb469fa16570867728950e"


def secret_of(length: int, filler: int = 7) -> str:
    return "whsec_" + base64.b64encode(bytes([filler]) * length).decode()


OLD, NEW, STRANGE = secret_of(24, 1), secret_of(64, 2), secret_of(32, 3)


def headers_for(
    body: bytes = BODY, at: datetime = NOW, secrets: Sequence[str] = (NEW,)
) -> dict[str, str]:
    timestamp = int(at.timestamp())
    return {
        "webhook-id": MESSAGE_ID,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature.sign(secrets, MESSAGE_ID, timestamp, body),
    }


def verify(
    headers: Mapping[str, str],
    body: bytes = BODY,
    now: datetime = NOW,
    secrets: Sequence[str] = (NEW,),
) -> str:
    return signature.verify(secrets, headers, body, now)


# --- secrets


@pytest.mark.parametrize("length", [24, 32, 64])
def test_a_secret_holds_24_to_64_bytes(length: int) -> None:
    """Standard Webhooks 1.0.0, "Signature scheme"."""
    assert signature.decode_secret(secret_of(length)) == b"\x07" * length


@pytest.mark.parametrize(
    ("secret", "problem"),
    [
        (secret_of(23), "got 23 bytes"),
        (secret_of(65), "got 65 bytes"),
        ("whsec_", "got 0 bytes"),
        ("", "does not start with whsec_"),
        (secret_of(24).removeprefix("whsec_"), "does not start with whsec_"),
        ("whpk_" + "A" * 32, "does not start with whsec_"),
        (secret_of(25).rstrip("="), "padded base64"),
        (secret_of(24) + "\n", "padded base64"),
        (" " + secret_of(24), "does not start with whsec_"),
        ("whsec_" + "-_" * 16, "padded base64"),
        ("whsec_" + "é" * 32, "padded base64"),
        ("whsec_" + "\udc80" * 32, "padded base64"),
    ],
)
def test_any_other_secret_is_an_error_that_says_why_without_it(secret: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        signature.decode_secret(secret)
    assert "24 to 64 random bytes in base64" in str(caught.value)
    assert len(secret) < 8 or secret[6:] not in str(caught.value)


# --- signing, with the reference library as oracle


def test_the_reference_library_verifies_what_we_sign_with_either_secret_of_a_rotation() -> None:
    headers = headers_for(BODY, datetime.now(UTC), (OLD, NEW))
    signatures = headers["webhook-signature"]
    assert signatures.count("v1,") == len(signatures.split(" ")) == 2
    for secret in (OLD, NEW):
        assert Webhook(secret).verify(BODY, headers) == {"name": "påvirker"}
    with pytest.raises(WebhookVerificationError):
        Webhook(STRANGE).verify(BODY, headers)


# --- verifying


def test_what_the_reference_library_signs_is_verified_and_its_id_returned() -> None:
    headers = signed_headers(BODY, OLD, at=NOW)
    assert verify(headers, secrets=[NEW, OLD]) == "msg_1"
    with pytest.raises(SignatureRefused):
        verify(headers, secrets=[STRANGE])


def test_signatures_of_other_versions_stand_beside_ours_and_count_for_nothing() -> None:
    headers = headers_for()
    ours = headers["webhook-signature"]
    assert verify({**headers, "webhook-signature": f"v1a,AAAA v2,x {ours}"}) == MESSAGE_ID
    with pytest.raises(SignatureRefused):
        verify({**headers, "webhook-signature": ours.replace("v1,", "v1a,")})


@pytest.mark.parametrize("name", ["webhook-id", "webhook-timestamp", "webhook-signature"])
def test_each_header_must_be_there_exactly_once(name: str) -> None:
    headers = headers_for()
    with pytest.raises(SignatureRefused, match=f"{name}: expected it once, got it 0 times"):
        verify({key: value for key, value in headers.items() if key != name})
    twice = CIMultiDict(headers)
    twice.add(name.title(), headers[name])
    with pytest.raises(SignatureRefused, match=f"{name}: expected it once, got it 2 times"):
        verify(twice)


@pytest.mark.parametrize(
    ("age", "good"), [(-61, False), (-60, True), (0, True), (300, True), (301, False)]
)
def test_a_signature_is_good_for_300_s_and_60_s_ahead_of_our_clock(age: int, good: bool) -> None:
    now = NOW.replace(microsecond=0)
    headers = headers_for(at=now - timedelta(seconds=age))
    if good:
        assert verify(headers, now=now) == MESSAGE_ID
    else:
        with pytest.raises(SignatureRefused, match="webhook-timestamp: expected at most"):
            verify(headers, now=now)


MALFORMED = {
    "webhook-id": ["", "a.b", "a b", "x" * 257, "é"],
    "webhook-timestamp": [
        *("", "nan", "inf", "1e9", "-1", "1_000", "١٢٣", "1775946418.5"),
        *("9" * 5000, "9" * 12),
    ],
    "webhook-signature": ["", "v1", "v1,", "v1,a,b", ",", "v1,=" * 1000, "\udcff é"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in MALFORMED.items() for value in values]
)
def test_a_malformed_header_is_a_refusal_and_not_a_traceback(name: str, value: str) -> None:
    """The reference verifier raises ValueError or binascii.Error on several of these."""
    with pytest.raises(SignatureRefused):
        verify({**headers_for(), name: value})


@pytest.mark.parametrize(
    "secrets",
    [[], ["not a secret"], [NEW, "whsec_broken"]],
    ids=["none", "no secret", "second one is wrong"],
)
def test_without_usable_secrets_everything_is_refused(secrets: list[str]) -> None:
    with pytest.raises(SignatureRefused) as caught:
        verify(headers_for(), secrets=secrets)
    assert "broken" not in str(caught.value)


@given(data=st.data())
def test_a_change_of_any_byte_of_body_id_or_timestamp_is_refused(data: st.DataObject) -> None:
    headers, body = headers_for(), bytearray(BODY)
    part = data.draw(st.sampled_from(["body", "webhook-id", "webhook-timestamp"]))
    if part == "body":
        place = data.draw(st.integers(0, len(body) - 1))
        body[place] = data.draw(st.integers(0, 255).filter(lambda byte: byte != body[place]))
    else:
        text = headers[part]
        place = data.draw(st.integers(0, len(text) - 1))
        other = data.draw(st.characters(codec="latin-1").filter(lambda char: char != text[place]))
        headers[part] = text[:place] + other + text[place + 1 :]
    with pytest.raises(SignatureRefused):
        verify(headers, bytes(body))


def test_the_end_of_a_part_cannot_be_moved_over_a_full_stop() -> None:
    """``id.timestamp.body`` is signed. Another split of the text must not be valid."""
    later = int(NOW.timestamp()) + 30
    headers = headers_for(f"{later}.{{}}".encode())
    moved = {
        **headers,
        "webhook-id": f"{headers['webhook-id']}.{headers['webhook-timestamp']}",
        "webhook-timestamp": str(later),
    }
    with pytest.raises(SignatureRefused, match="webhook-id"):
        verify(moved, b"{}")
    with pytest.raises(ValueError, match="without a full stop"):
        signature.sign([NEW], "a.b", 0, BODY)
    with pytest.raises(ValueError, match="at least one secret"):
        signature.sign([], MESSAGE_ID, 0, BODY)


ANY_TEXT = st.text(alphabet=st.characters(exclude_categories=()), max_size=60)


@given(
    ANY_TEXT, ANY_TEXT, ANY_TEXT | ANY_TEXT.map(lambda text: f"v1,{text}"), st.binary(max_size=20)
)
def test_arbitrary_headers_raise_nothing_but_the_refusal(
    message_id: str, timestamp: str, offered: str, body: bytes
) -> None:
    headers = {
        "webhook-id": message_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": offered,
    }
    for tried in (
        headers,
        {**headers_for(body), "webhook-signature": offered},
        {**headers, "webhook-id": MESSAGE_ID},
    ):
        with pytest.raises(SignatureRefused):
            verify(tried, body)
