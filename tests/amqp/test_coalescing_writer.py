"""The stream to the broker: few and large pieces, in order, and nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from typing_extensions import override  # in typing from Python 3.12

from relay.amqp.frame_streams import CoalescingWriter, SanitizingReader


class Wire(asyncio.WriteTransport):
    """A transport of the test's own, which notes each piece."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []
        self.ended = False

    @override
    def write(self, data: bytes | bytearray | memoryview) -> None:
        """A piece goes out."""
        self.pieces.append(bytes(data))

    @override
    def is_closing(self) -> bool:
        """Whether it is over."""
        return self.ended

    @override
    def close(self) -> None:
        """It is over."""
        self.ended = True

    @override
    def write_eof(self) -> None:
        """It is over on our side."""
        self.ended = True


@pytest.fixture
async def wire() -> Wire:
    """Where pieces go."""
    return Wire()


@pytest.fixture
async def stream(wire: Wire) -> AsyncIterator[CoalescingWriter]:
    """What writes there."""
    reader = SanitizingReader()
    stream = CoalescingWriter(wire, asyncio.StreamReaderProtocol(reader), reader)
    yield stream
    stream.close()


async def test_what_is_written_in_one_turn_of_the_loop_goes_out_in_one_piece(
    stream: CoalescingWriter, wire: Wire
) -> None:
    for turn in range(2):
        stream.write(b"a%d" % turn)
        stream.write(bytearray(b"b"))
        assert len(wire.pieces) == turn
        await asyncio.sleep(0)
    assert wire.pieces == [b"a0b", b"a1b"]


async def test_who_waits_for_the_stream_to_take_it_has_it_written_before(
    stream: CoalescingWriter, wire: Wire
) -> None:
    stream.write(b"greeting")
    await stream.drain()
    assert wire.pieces == [b"greeting"]


@pytest.mark.parametrize("end", [CoalescingWriter.close, CoalescingWriter.write_eof])
async def test_a_farewell_goes_out_before_the_stream_ends(
    stream: CoalescingWriter, wire: Wire, end: object
) -> None:
    stream.write(b"farewell")
    assert callable(end)
    end(stream)
    assert wire.pieces == [b"farewell"]
    assert wire.ended
    await asyncio.sleep(0)
    assert wire.pieces == [b"farewell"]


async def test_what_is_written_after_the_end_is_dropped(
    stream: CoalescingWriter, wire: Wire
) -> None:
    """A socket whose end was written raises an error for it, and nobody would catch that."""
    stream.write_eof()
    stream.write(b"too late")
    await asyncio.sleep(0)
    assert wire.pieces == []
