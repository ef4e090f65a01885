"""What a hostile message is made of, read frame by frame: it ends nothing, and takes no memory."""

from __future__ import annotations

import functools
import struct

import pamqp.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import header, heartbeat
from pamqp.base import Frame
from pamqp.body import ContentBody
from pamqp.commands import Basic

from relay.amqp.connection import MAX_BODY_BYTES, SanitizingReader, sanitize_content_header
from tests.raw_amqp import property_bytes, table

_NESTED: bytes = functools.reduce(lambda inner, _: b"\x01nF" + table(inner), range(1500), b"")
_CONTENT = struct.Struct(">HHQ")


def content(properties: bytes, size: int = 2) -> bytes:
    return _CONTENT.pack(Basic.frame_id, 0, size) + properties


def decoded(payload: bytes) -> header.ContentHeader:
    """The header as aiormq reads it."""
    frame = pamqp.frame.unmarshal(struct.pack(">BHI", 2, 1, len(payload)) + payload + b"\xce")[2]
    assert isinstance(frame, header.ContentHeader)
    return frame


@pytest.mark.parametrize(
    "properties",
    [
        property_bytes(6, b"\x7f" + b"\xff" * 7),
        property_bytes(7, b"\x02\xff\xfe"),
        property_bytes(13, table(b"\x01tT" + b"\x7f" + b"\xff" * 7)),
        property_bytes(13, table(b"\x01\xffI\0\0\0\1")),
        property_bytes(13, table(_NESTED)),
        property_bytes(13, b"\xff\xff\xff\xff"),
        b"",
    ],
)
def test_a_header_that_cannot_be_decoded_loses_its_properties(properties: bytes) -> None:
    payload, left_out = sanitize_content_header(content(properties))
    assert decoded(payload).properties.message_id is None
    assert (decoded(payload).body_size, left_out) == (2, 0)


def test_a_header_that_can_be_decoded_stays_as_it_is() -> None:
    payload = content(
        Basic.Properties(message_id="m", user_id="drain", headers={"a": [1, {"b": True}]}).marshal()
    )
    assert sanitize_content_header(payload) == (payload, 0)


@given(st.binary(max_size=60))
def test_whatever_the_properties_are_the_header_can_be_decoded(properties: bytes) -> None:
    assert decoded(sanitize_content_header(content(properties))[0]).body_size == 2


async def frames(
    *sent: bytes, max_body_bytes: int = MAX_BODY_BYTES
) -> list[pamqp.frame.FrameTypes]:
    """What aiormq makes of these bytes, read as it reads."""
    reader = SanitizingReader(max_body_bytes)
    reader.feed_data(b"".join(sent))
    reader.feed_eof()
    frames_read = []
    while not reader.at_eof():
        raw = await reader.readexactly(1) + await reader.readexactly(6)
        raw += await reader.readexactly(struct.unpack(">BHI", raw)[2] + 1)
        frames_read.append(pamqp.frame.unmarshal(raw)[2])
    return frames_read


def message(channel: int, size: int, message_id: str) -> list[bytes]:
    deliver: Frame = Basic.Deliver("tag", 1, exchange="x", routing_key="k")
    parts = [b"x" * min(100_000, size - start) for start in range(0, size, 100_000)]
    return [
        pamqp.frame.marshal(deliver, channel),
        pamqp.frame.marshal(
            header.ContentHeader(0, size, Basic.Properties(message_id=message_id)), channel
        ),
        *(pamqp.frame.marshal(ContentBody(part), channel) for part in parts),
    ]


@pytest.mark.parametrize(
    ("size", "read"),
    [(0, 0), (1, 1), (MAX_BODY_BYTES, MAX_BODY_BYTES), (MAX_BODY_BYTES + 1, 0), (1_000_000, 0)],
)
async def test_a_body_that_is_too_large_is_not_read(size: int, read: int) -> None:
    """Header and whatever comes behind it are; the properties stay."""
    beat = heartbeat.Heartbeat().marshal()
    first, *rest = await frames(*message(1, size, "large"), beat, *message(1, 3, "small"))
    assert isinstance(first, Basic.Deliver)
    head = rest.pop(0)
    assert isinstance(head, header.ContentHeader)
    assert (head.body_size, head.properties.message_id) == (read, "large")
    if read:
        assert isinstance(body := rest.pop(0), ContentBody)
        assert len(body.value) == read
    small = [Basic.Deliver, header.ContentHeader, ContentBody]
    assert [type(frame) for frame in rest] == [heartbeat.Heartbeat, *small]


async def test_a_connection_can_have_a_larger_limit_for_bodies() -> None:
    beat = heartbeat.Heartbeat().marshal()
    sent = [*message(1, 200_000, "large"), *message(1, 200_001, "too large"), beat]
    read = await frames(*sent, max_body_bytes=200_000)
    sizes = [frame.body_size for frame in read if isinstance(frame, header.ContentHeader)]
    bodies = [len(frame.value) for frame in read if isinstance(frame, ContentBody)]
    assert (sizes, bodies) == ([200_000, 0], [100_000, 100_000])


async def test_each_channel_has_its_own_bodies() -> None:
    """Frames of two channels come in any order."""
    large, small = message(1, 150_000, "large"), message(2, 3, "small")
    frames_read = await frames(*large[:3], *small, *large[3:], *message(1, 4, "next"))
    bodies = [frame.value for frame in frames_read if isinstance(frame, ContentBody)]
    assert bodies == [b"xxx", b"xxxx"]


async def test_a_broker_that_speaks_another_version_is_understood_as_such() -> None:
    reader = SanitizingReader()
    reader.feed_data(b"AMQP\x00\x01\x00\x00")
    reader.feed_eof()
    assert await reader.readexactly(1) + await reader.readexactly(6) == b"AMQP\x00\x01\x00"
