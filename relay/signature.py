"""Standard Webhooks signatures, made and checked: one code for what the sinks send and for the callbacks that come in.

Source: https://github.com/standard-webhooks/standard-webhooks, spec/standard-webhooks.md, version 1.0.0. Only the symmetric
scheme (``v1``, HMAC-SHA256) is spoken.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from datetime import datetime

from relay.errors import RelayError

PREFIX = "whsec_"
SHORTEST, LONGEST = 24, 64
"""Bounds on the key, in bytes (specification, "Signature scheme")."""

MAX_AGE = 300.0
"""Seconds for which a signature is good. Whoever remembers ids to find repeats must remember them for longer."""
MAX_AHEAD = 60.0
"""Seconds by which the sender's clock may be ahead of ours."""

# No full stop: with one, id, timestamp and body could be cut at another place and still have the same signature.
_ID = re.compile(r"[\x21-\x2d\x2f-\x7e]{1,256}")
_TIMESTAMP = re.compile(r"[0-9]{1,12}")


class SignatureRefused(RelayError):
    """Headers that do not prove who sent the body. The text is for our log: the sender is told no more than 401."""


def key_of(secret: str) -> bytes:
    """The key in a secret: ``whsec_`` and 24 to 64 bytes in base64. Raises ValueError, which never holds the secret."""
    wanted = f"expected {PREFIX} and then {SHORTEST} to {LONGEST} random bytes in base64"
    if not secret.startswith(PREFIX):
        raise ValueError(f"{wanted}, got a text that does not start with {PREFIX}")
    try:
        key = binascii.a2b_base64(secret.removeprefix(PREFIX), strict_mode=True)
    except ValueError:
        raise ValueError(
            f"{wanted}, got something else than padded base64 after {PREFIX}"
        ) from None
    if not SHORTEST <= len(key) <= LONGEST:
        raise ValueError(f"{wanted}, got {len(key)} bytes")
    return key


def sign(secrets: Iterable[str], message_id: str, timestamp: int, body: bytes) -> str:
    """The value of ``webhook-signature``: one signature for each secret, so that a receiver may know any of them.

    ``timestamp`` is the attempt's, in seconds since 1970. Raises ValueError for an unusable id or secret, or without secrets.
    """
    if _ID.fullmatch(message_id) is None:
        raise ValueError(
            "expected an id of at most 256 visible ASCII characters without a full stop"
        )
    signatures = _signatures(secrets, message_id, str(timestamp), body)
    if not signatures:
        raise ValueError("expected at least one secret to sign with, got none")
    return " ".join(signatures)


def verify(secrets: Iterable[str], headers: Mapping[str, str], body: bytes, now: datetime) -> str:
    """Return the id under which one of the secrets has signed this body within the last five minutes.

    ``headers`` are looked up without case, and each of the three must be there once. Raises SignatureRefused for anything
    else, whatever the headers hold, and when the secrets themselves cannot be used: an approval fails closed.
    """
    message_id = _single(headers, "webhook-id", _ID)
    timestamp = _single(headers, "webhook-timestamp", _TIMESTAMP)
    offered = _single(headers, "webhook-signature").encode("utf-8", "replace").split(b" ")
    age = now.timestamp() - int(timestamp)
    if age > MAX_AGE:
        raise SignatureRefused(
            f"webhook-timestamp: expected at most {MAX_AGE:g} s ago, got {age:.0f} s"
        )
    if -age > MAX_AHEAD:
        raise SignatureRefused(
            f"webhook-timestamp: expected at most {MAX_AHEAD:g} s ahead of our clock, got {-age:.0f} s"
        )
    try:
        expected = [
            signature.encode() for signature in _signatures(secrets, message_id, timestamp, body)
        ]
    except ValueError as error:
        raise SignatureRefused(f"the secrets to verify with cannot be used: {error}") from None
    # The texts are compared, not what they decode to: one signature has one spelling. All are compared, without a short cut.
    if not sum(hmac.compare_digest(one, other) for one in expected for other in offered):
        raise SignatureRefused(
            "webhook-signature: expected a v1 signature of this body by one of the secrets, got none"
        )
    return message_id


def _signatures(secrets: Iterable[str], message_id: str, timestamp: str, body: bytes) -> list[str]:
    content = b".".join((message_id.encode(), timestamp.encode(), body))
    digests = (hmac.digest(key_of(secret), content, hashlib.sha256) for secret in secrets)
    return [f"v1,{base64.b64encode(digest).decode()}" for digest in digests]


def _single(headers: Mapping[str, str], name: str, form: re.Pattern[str] | None = None) -> str:
    found = [value for key, value in headers.items() if key.lower() == name]
    if len(found) != 1:
        raise SignatureRefused(f"{name}: expected it once, got it {len(found)} times")
    if form is not None and form.fullmatch(found[0]) is None:
        raise SignatureRefused(f"{name}: it is malformed")
    return found[0]
