"""The frame parser: any cutting of the stream gives the same frames; broken sizes are declared, not
obeyed."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdirect.broker.frames import INITIAL_BYTES, FrameParser
from kdirect.errors import ProtocolError


def feed(parser: FrameParser, data: bytes) -> list[bytes]:
    """Receive `data` in as many pieces as the parser's room asks for; the frames, copied."""
    out = []
    view = memoryview(data)
    while view:
        room = parser.writable()
        n = min(len(room), len(view))
        room[:n] = view[:n]
        parser.received(n)
        view = view[n:]
        while (frame := parser.next_frame()) is not None:
            out.append(bytes(frame))
    return out


def framed(*frames: bytes) -> bytes:
    return b"".join(struct.pack(">i", len(f)) + f for f in frames)


@given(
    st.lists(st.binary(max_size=300), max_size=30),
    st.lists(st.integers(1, 400), min_size=1, max_size=50),
)
def test_frames_do_not_depend_on_how_the_stream_is_cut(frames, cuts):
    parser = FrameParser(1000)
    data = framed(*frames)
    out, at, i = [], 0, 0
    while at < len(data):
        n = cuts[i % len(cuts)]
        out += feed(parser, data[at : at + n])
        at += n
        i += 1
    assert out == frames
    assert parser.buffered == 0


@given(st.binary(max_size=600), st.integers(0, 500))
def test_any_bytes_give_frames_or_a_declared_error(data, limit):
    parser = FrameParser(limit)
    try:
        frames = feed(parser, data)
    except ProtocolError as e:
        assert "frame of" in str(e)
        assert parser.next_frame() is None  # and nothing more comes of it
    else:
        assert framed(*frames) == data[: len(data) - parser.buffered]


@pytest.mark.parametrize("size", [-1, -(2**31), 1001, 2**31 - 1])
def test_sizes_out_of_range(size):
    parser = FrameParser(1000)
    with pytest.raises(ProtocolError, match=str(size)):
        feed(parser, struct.pack(">i", size))


def test_a_promise_costs_nothing():
    """A prefix that announces 100 MB makes the buffer grow with the bytes that come, not with the
    promise."""
    parser = FrameParser(100 << 20)
    feed(parser, struct.pack(">i", 100 << 20) + b"x" * 1000)
    assert len(parser.writable()) <= INITIAL_BYTES


def test_large_frames_and_the_memory_after_them():
    big = bytes(range(256)) * 20000
    parser = FrameParser(16 << 20)
    assert feed(parser, framed(b"a", big, b"b")) == [b"a", big, b"b"]
    assert len(parser.writable()) == INITIAL_BYTES


def test_a_frame_stays_valid_until_the_next_room():
    parser = FrameParser(1000)
    room = parser.writable()
    data = framed(b"first", b"second") + b"\0\0"
    room[: len(data)] = data
    parser.received(len(data))
    first, second = parser.next_frame(), parser.next_frame()
    assert parser.next_frame() is None
    assert bytes(first) == b"first" and bytes(second) == b"second"
