"""Verifies that Slack signed a request. Pure.

Source: https://docs.slack.dev/authentication/verifying-requests-from-slack. The SDK's verifier is
not used: it raises on malformed headers and bodies (docs/decisions/0017-own-slack-socket.md).
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from datetime import datetime

from relay.chat import CallbackRefused

MAX_SIGNATURE_AGE = 300
"""Seconds between a signature's timestamp and this machine's time, in either direction."""
_TIMESTAMP = re.compile(r"[0-9]{1,12}")


def verify_signature(
    headers: Mapping[str, str], body: bytes, signing_secret: bytes, now: datetime
) -> None:
    """Raise CallbackRefused unless Slack signed this body within five minutes of ``now``."""
    timestamp = _require_header(headers, "x-slack-request-timestamp")
    signature = _require_header(headers, "x-slack-signature")
    if _TIMESTAMP.fullmatch(timestamp) is None:
        raise CallbackRefused("expected a number in X-Slack-Request-Timestamp, got none")
    if abs(now.timestamp() - int(timestamp)) > MAX_SIGNATURE_AGE:
        raise CallbackRefused(
            f"expected a signature's timestamp within {MAX_SIGNATURE_AGE} s of this machine's "
            "time, got another: the request is old, or the clock is wrong"
        )
    signed_text = b"v0:" + timestamp.encode() + b":" + body
    expected = "v0=" + hmac.new(signing_secret, signed_text, hashlib.sha256).hexdigest()
    if not hmac.compare_digest(expected.encode(), signature.encode("utf-8", "surrogateescape")):
        raise CallbackRefused("expected a signature made with this app's signing_secret")


def _require_header(headers: Mapping[str, str], name: str) -> str:
    values = [value for key, value in headers.items() if key.lower() == name]
    if len(values) != 1:  # a proxy between may have read another one
        raise CallbackRefused(f"expected {name} once, got it {len(values)} times")
    return values[0]
