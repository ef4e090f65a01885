"""Makes and verifies signatures of Standard Webhooks, for webhooks and for signed callbacks.

Source: https://github.com/standard-webhooks/standard-webhooks, spec/standard-webhooks.md, version
1.0.0. Only the symmetric scheme (``v1``, HMAC-SHA256) is supported.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import lru_cache

from relay.errors import RelayError

PREFIX = "whsec_"
MIN_KEY_BYTES = 24
MAX_KEY_BYTES = 64
"""Source: the specification, section "Signature scheme"."""

MAX_AGE = 300.0
"""Seconds for which a signature is valid. Ids must be remembered longer, to detect a repeat."""
MAX_AHEAD = 60.0
"""Seconds by which the sender's clock may be ahead of ours."""

# An id has no full stop: with one, the id, timestamp and body of a signed text could be split
# differently.
_ID = re.compile(r"[\x21-\x2d\x2f-\x7e]{1,256}")
_TIMESTAMP = re.compile(r"[0-9]{1,12}")


class SignatureRefused(RelayError):
    """The headers do not prove who sent the body. The text is for our log, not for the sender."""


@lru_cache(maxsize=256)  # the same few secrets sign and verify everything
def decode_secret(secret: str) -> bytes:
    """Return the key: ``whsec_`` and 24 to 64 bytes in base64. Raises ValueError without it."""
    expected = (
        f"expected {PREFIX} and then {MIN_KEY_BYTES} to {MAX_KEY_BYTES} random bytes in base64"
    )
    if not secret.startswith(PREFIX):
        raise ValueError(f"{expected}, got a text that does not start with {PREFIX}")
    try:
        key = binascii.a2b_base64(secret.removeprefix(PREFIX), strict_mode=True)
    except ValueError:
        raise ValueError(
            f"{expected}, got something else than padded base64 after {PREFIX}"
        ) from None
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"{expected}, got {len(key)} bytes")
    return key


def sign(secrets: Iterable[str], message_id: str, timestamp: int, body: bytes) -> str:
    """Return the header ``webhook-signature``, with one signature for each secret.

    ``timestamp`` is the time of the try, in seconds since 1970. Raises ValueError for an unusable
    id or secret, or without secrets.
    """
    if _ID.fullmatch(message_id) is None:
        raise ValueError(
            "expected an id of at most 256 visible ASCII characters without a full stop"
        )
    signatures = _compute_signatures(secrets, message_id, str(timestamp), body)
    if not signatures:
        raise ValueError("expected at least one secret to sign with, got none")
    return " ".join(signatures)


def verify(secrets: Iterable[str], headers: Mapping[str, str], body: bytes, now: datetime) -> str:
    """Return the id of a body that one of the secrets signed within the last `MAX_AGE` seconds.

    The three headers must each be there once; case does not matter. Raises SignatureRefused for
    anything else, and if a secret is unusable, because an approval must fail closed.
    """
    message_id = _require_header(headers, "webhook-id", _ID)
    timestamp = _require_header(headers, "webhook-timestamp", _TIMESTAMP)
    received = _require_header(headers, "webhook-signature").encode("utf-8", "replace").split(b" ")
    age = now.timestamp() - int(timestamp)
    if not -MAX_AHEAD <= age <= MAX_AGE:
        limit = f"{MAX_AGE:g} s ago" if age > 0 else f"{MAX_AHEAD:g} s ahead of our clock"
        raise SignatureRefused(f"webhook-timestamp: expected at most {limit}, got {abs(age):.0f} s")
    try:
        signatures = _compute_signatures(secrets, message_id, timestamp, body)
    except ValueError as error:
        raise SignatureRefused(f"the secrets to verify with cannot be used: {error}") from None
    # Texts are compared, not decoded bytes: a signature has only one spelling. All pairs are
    # compared, so that the duration says nothing.
    matches = [
        hmac.compare_digest(signature.encode(), candidate)
        for signature in signatures
        for candidate in received
    ]
    if not any(matches):
        raise SignatureRefused(
            "webhook-signature: expected a v1 signature of this body by one of the secrets, "
            "got none"
        )
    return message_id


def _compute_signatures(
    secrets: Iterable[str], message_id: str, timestamp: str, body: bytes
) -> list[str]:
    content = b".".join((message_id.encode(), timestamp.encode(), body))
    digests = []
    for secret in secrets:
        # `hmac.digest` would let another thread run, and wait for its own turn again.
        keyed = hmac.new(decode_secret(secret), content, "sha256")
        digests.append(f"v1,{base64.b64encode(keyed.digest()).decode()}")
    return digests


def _require_header(
    headers: Mapping[str, str], name: str, pattern: re.Pattern[str] | None = None
) -> str:
    values = [value for key, value in headers.items() if key.lower() == name]
    if len(values) != 1:
        raise SignatureRefused(f"{name}: expected it once, got it {len(values)} times")
    if pattern is not None and pattern.fullmatch(values[0]) is None:
        raise SignatureRefused(f"{name}: it is malformed")
    return values[0]
