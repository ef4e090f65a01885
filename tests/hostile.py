"""Bodies that are no decision: the one table, given to every entrance for decisions.

HTTP, the signed callback, RabbitMQ and the fleet refuse each with its place, and record nothing.
The chats get the first of them beside their own.
"""

from __future__ import annotations

import gzip
from typing import Any

from hypothesis import strategies as st

ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.just("x" * 10_000),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)

NO_OBJECTS = (
    b"",
    b" ",
    b"{",
    b"[]",
    b"null",
    b"true",
    b'"approve"',
    b"1",
    b"1e999",
    b"NaN",
    b'{"eventId": NaN}',
    b"\x00",
    b"\xff\xfe",
    b"\xff\xfe{\x00}\x00",
    b"\xef\xbb\xbf{}",
    b'{"eventId": "\xff"}',
    b'{"eventId": "\\ud800"}',
    b"[" * 60_000,
    b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    b"{" + b" " * 65_000,
    b"1" * 60_000,
    b"{'eventId': 1}",
    b'{"eventId":1}//',
    b"eventId=x&decision=approve&revision=r",
    b"<approve/>",
    '{"eventId":"a"}'.encode("utf-16"),
    gzip.compress(b"{}", mtime=0),  # the same in each worker
)

REPEATED_KEYS = (
    b'{"eventId": "E", "decision": "hold", "decision": "approve", "revision": "r"}',
    b'{"eventId": "E", "decision": "approve", "revision": "r", "\\u0065ventId": "F"}',
    b'{"data": {"decision": "hold", "decision": "approve"}}',
)
"""Readers of JSON disagree on which of two values counts (RFC 8259, section 4)."""

MISSING: Any = ...
_NO_TEXT: tuple[Any, ...] = (1, 1.5, True, [], {"$ne": ""}, ["x"])
WRONG_FIELDS: tuple[tuple[str, Any], ...] = (
    *((name, value) for name in ("eventId", "decision", "revision") for value in _NO_TEXT),
    *((name, value) for name in ("eventId", "decision", "revision") for value in (None, "")),
    *((name, MISSING) for name in ("eventId", "decision", "revision")),
    *((name, value) for name in ("reason", "scope") for value in _NO_TEXT),
    *(("decision", value) for value in ("Approve", "approve ", "deny", "granted")),
    *(("eventId", value) for value in ("a\nb", "a\n", "a\r\nb", "a\x00", "a\x85", "x" * 257)),
    ("revision", "x" * 129),
    ("reason", "x" * 1001),
    ("scope", "x" * 81),
    *(("ticket", value) for value in ("", "a\nb", "x" * 65, *_NO_TEXT)),
    ("votes", 2),
    ("principal", "client:operator"),
    ("channel", "local"),
    ("__proto__", {}),
)
"""A field, and a value that makes a whole decision wrong. Types are not converted, and an unknown
field can be a misspelled one."""


def with_wrong_field(decision: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    changed = {**decision, name: value}
    if value is MISSING:
        del changed[name]
    return changed
