# cython: language_level=3, boundscheck=False, wraparound=False
"""Kafka's five codecs, with bounded memory.

It owns the framing that Kafka's clients put around each codec, and the choice of library.  Foreign
compression libraries are imported here and nowhere else; their exceptions do not leave this file.

- Nothing is decompressed before its size is known not to exceed the caller's limit.  The size is
  exact if the frame states it (snappy, zstd with content size).  Otherwise it is an upper bound
  from the number of blocks (lz4, zstd without content size), a count where that bound is too coarse
  (lz4: the lengths in its tokens), or the library's own output limit (gzip).  The zstandard library
  ignores its output limit if the frame states a size.  Here the stated size is therefore checked
  against the limit, and against what the frame's blocks can decompress to.
- `pieces` is for callers that do not need everything at once: it takes the memory of one piece.
- Input must be a private copy of the caller: these libraries may not survive bytes that change
  while they are read.
- lz4: one frame of independent blocks is written, because Kafka's Java client refuses linked ones.
  Linked blocks are read.  snappy: written raw, as librdkafka does; the Java client and librdkafka
  read both that and xerial's framing, and so does this file.
"""

import zlib

import cramjam
import zstandard

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from kdirect.errors import BatchTooLargeError, ConfigError, CorruptBatchError, FormatError

from kdirect.format.batch import CODEC_NAMES
from kdirect.format.wire cimport kd_get_le32
from kdirect.blocks cimport Block, take_block
from kdirect.format.layout cimport CODEC_GZIP, CODEC_LZ4, CODEC_NONE, CODEC_SNAPPY, CODEC_ZSTD

cdef enum:
    LZ4_MAGIC = 0x184D2204
    LZ4_BLOCK_MAX = 64 << 10
    LZ4_HEADER_BYTES = 7
    LZ4_FLAGS_INDEPENDENT = 0x60    # version 1, independent blocks, no checksums, no content size
    ZSTD_BLOCK_MAX = 128 << 10
    # largest window of a frame that is read piece by piece; zstd's levels up to 19 need no more
    ZSTD_WINDOW_MAX = 8 << 20
    PIECE_BYTES = 256 << 10
    INPUT_BYTES = 64 << 10          # how much gzip input is passed to the library at a time
    SNAPPY_MAX_RATIO = 32           # a copy element of 3 bytes decompresses to at most 64
    XERIAL_HEADER_BYTES = 16

cdef uint64_t ZSTD_MAGIC = 0xFD2FB528u
cdef uint64_t BROKEN = <uint64_t>-1

_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_LIMIT_HINT = (
    "raise max_decompressed_bytes (max.batch.bytes of a consumer, or of the broker that looks up a"
    " time) if the producer can be trusted")


def codec_of(name):
    """The number of the codec with this name, or ConfigError if there is none."""
    try:
        return CODEC_NAMES.index(name)
    except ValueError:
        raise ConfigError(f"compression {name!r} is unknown",
                          hint="use one of " + ", ".join(CODEC_NAMES)) from None


# -- sizes, counted before anything is decompressed ------------------------------------------------

cdef uint64_t _lz4_block_size(const uint8_t* p, const uint8_t* end) noexcept nogil:
    """Decompressed size of one lz4 block, counted from its tokens, or BROKEN."""
    cdef uint64_t total = 0, n
    cdef uint8_t token, more
    while p < end:
        token = p[0]
        p += 1
        n = token >> 4
        if n == 15:
            while True:
                if p >= end:
                    return BROKEN
                more = p[0]
                p += 1
                n += more
                if more != 255:
                    break
        if n > <uint64_t>(end - p):
            return BROKEN
        p += n
        total += n
        if p == end:
            return total
        if end - p < 2:
            return BROKEN
        p += 2
        n = token & 15
        if n == 15:
            while True:
                if p >= end:
                    return BROKEN
                more = p[0]
                p += 1
                n += more
                if more != 255:
                    break
        total += n + 4
    return total


cdef uint64_t _lz4_frame_bound(const uint8_t* data, size_t n, uint64_t* block_max) noexcept nogil:
    """Upper bound of the decompressed size of a frame of independent blocks, or BROKEN for any
    other frame.  `block_max` gets the bound of one block."""
    cdef size_t position
    cdef uint64_t total = 0
    cdef uint32_t size
    cdef uint8_t flags, kind
    block_max[0] = 0
    if n < LZ4_HEADER_BYTES or kd_get_le32(data) != LZ4_MAGIC:
        return BROKEN
    flags = data[4]
    kind = data[5] >> 4
    if flags >> 6 != 1 or flags & 1 or not flags & 0x20 or kind < 4 or kind > 7:
        return BROKEN
    position = LZ4_HEADER_BYTES + (8 if flags & 8 else 0)
    while True:
        if position > n or n - position < 4:
            return BROKEN
        size = kd_get_le32(data + position)
        position += 4
        if size == 0:
            block_max[0] = <uint64_t>1 << (2 * kind + 8)
            return total
        if (size & 0x7FFFFFFFu) > n - position:
            return BROKEN
        total += size & 0x7FFFFFFFu if size & 0x80000000u else <uint64_t>1 << (2 * kind + 8)
        position += (size & 0x7FFFFFFFu) + (4 if flags & 16 else 0)


cdef uint64_t _lz4_frame_size(const uint8_t* data, size_t n, size_t* frame_bytes) noexcept nogil:
    """Decompressed size of the lz4 frame at `data` and its own length, or BROKEN."""
    cdef size_t position
    cdef uint64_t total = 0, part
    cdef uint32_t size
    cdef uint8_t flags
    if n < LZ4_HEADER_BYTES or kd_get_le32(data) != LZ4_MAGIC:
        return BROKEN
    flags = data[4]
    if flags >> 6 != 1 or flags & 1:        # another version, or a dictionary
        return BROKEN
    position = LZ4_HEADER_BYTES + (8 if flags & 8 else 0)
    while True:
        if position > n or n - position < 4:
            return BROKEN
        size = kd_get_le32(data + position)
        position += 4
        if size == 0:
            break
        if (size & 0x7FFFFFFFu) > n - position:
            return BROKEN
        if size & 0x80000000u:
            size &= 0x7FFFFFFFu
            total += size
        else:
            part = _lz4_block_size(data + position, data + position + size)
            if part == BROKEN:
                return BROKEN
            total += part
        position += size + (4 if flags & 16 else 0)
    if flags & 4:
        position += 4
    if position > n:
        return BROKEN
    frame_bytes[0] = position
    return total


cdef uint64_t _zstd_frame_bound(const uint8_t* data, size_t n, size_t* frame_bytes) noexcept nogil:
    """Decompressed size of the zstd frame at `data`: exact if the frame states it, else an upper
    bound.  `frame_bytes` gets the length of the frame itself.  BROKEN for a malformed frame, and
    for a stated size that its blocks cannot reach."""
    cdef size_t position = 5
    cdef uint64_t total = 0, content = BROKEN
    cdef uint32_t header, size
    cdef uint8_t descriptor
    cdef int single, content_bytes, i, kind
    if n < 6:
        return BROKEN
    if kd_get_le32(data) != ZSTD_MAGIC:
        return BROKEN
    descriptor = data[4]
    single = (descriptor >> 5) & 1
    position += (0 if single else 1) + ((1 << (descriptor & 3)) >> 1)
    content_bytes = 1 << (descriptor >> 6) if descriptor >> 6 else single
    if n < position + content_bytes:
        return BROKEN
    if content_bytes:
        content = 256 if content_bytes == 2 else 0
        for i in range(content_bytes):
            content += <uint64_t>data[position + i] << (8 * i)
        position += content_bytes
    while True:
        if n - position < 3:
            return BROKEN
        header = data[position] | <uint32_t>data[position + 1] << 8 | <uint32_t>data[position
                                                                                     + 2] << 16
        position += 3
        kind = (header >> 1) & 3
        size = header >> 3
        if kind == 3:
            return BROKEN
        total += ZSTD_BLOCK_MAX if kind == 2 else size
        if kind == 1:
            size = 1
        if size > n - position:
            return BROKEN
        position += size
        if header & 1:
            break
    if descriptor & 4:
        if n - position < 4:
            return BROKEN
        position += 4
    frame_bytes[0] = position
    if content == BROKEN:
        return total
    return content if content <= total else BROKEN


cdef uint64_t _zstd_window(const uint8_t* data, uint64_t bound) noexcept nogil:
    """How many bytes are kept while the zstd frame at `data` is read piece by piece.  `bound` is
    what `_zstd_frame_bound` returned for the frame."""
    cdef uint64_t window
    if data[4] & 0x20:                  # a single segment
        return bound
    window = <uint64_t>1 << (10 + (data[5] >> 3))
    window += (window >> 3) * (data[5] & 7)
    return min(window, bound)


cdef uint64_t _snappy_size(const uint8_t* data, size_t n) noexcept nogil:
    """The decompressed size that a raw snappy block states at its start, or BROKEN."""
    cdef uint64_t size = 0
    cdef size_t i
    for i in range(5):
        if i >= n:
            return BROKEN
        size |= <uint64_t>(data[i] & 0x7F) << (7 * i)
        if data[i] < 0x80:
            if size > n * <uint64_t>SNAPPY_MAX_RATIO or size > 0xFFFFFFFFu:
                return BROKEN
            return size
    return BROKEN


# -- decompression ---------------------------------------------------------------------------------

cdef object _broken(str name):
    return FormatError(f"{name} data is broken")


cdef object _too_large(str name, uint64_t limit):
    return BatchTooLargeError(f"{name} data decompresses to more than {limit} bytes",
                              hint=_LIMIT_HINT)


def records_fault(where, error, hint=""):
    """The error to raise for the batch at `where` whose records raised the FormatError `error`:
    BatchTooLargeError if that is one, else CorruptBatchError.  `hint` is used if `error` has
    none."""
    kind = BatchTooLargeError if isinstance(error, BatchTooLargeError) else CorruptBatchError
    return kind(f"{where}: {error.message}", hint=error.hint or hint)


# Contexts of zstd, each used by one thread at a time.  Making one costs more than a small batch.
cdef list _idle_zstd = []


cdef class Decompressor:
    """Decompresses the records of one batch at a time.  Used by one thread at a time."""

    cpdef object run(self, int codec, bytes data, uint64_t limit):
        """Decompress `data` to a bytes-like object of at most `limit` bytes.

        Raises BatchTooLargeError if it would be longer, and FormatError if `data` is broken or
        `codec` unknown.  The caller owns the result: nothing here keeps it or writes to it
        again."""
        if codec == CODEC_ZSTD:
            tool = _idle_zstd.pop() if _idle_zstd else zstandard.ZstdDecompressor()
            try:
                return _run_zstd(tool, data, limit)
            finally:
                _idle_zstd.append(tool)
        if codec == CODEC_LZ4:
            return _run_lz4(data, limit)
        if codec == CODEC_SNAPPY:
            return _run_snappy(data, limit)
        if codec == CODEC_GZIP:
            return _run_gzip(data, limit)
        raise FormatError(f"codec {codec} is unknown")

    def pieces(self, int codec, bytes data not None, uint64_t limit):
        """Decompress `data` piece by piece: an iterator of bytes-like objects, each valid until the
        next one is taken.  Raises the errors of `run`.  Output beyond `limit` is noticed no later
        than with the piece that begins after `limit`."""
        if codec == CODEC_ZSTD:
            return _zstd_pieces(data, limit)
        if codec == CODEC_LZ4:
            return _lz4_pieces(data, limit)
        if codec == CODEC_SNAPPY:
            return _snappy_pieces(data, limit)
        if codec == CODEC_GZIP:
            return _gzip_pieces(data, limit)
        raise FormatError(f"codec {codec} is unknown")


cdef object _run_lz4(bytes data, uint64_t limit):
    cdef size_t used = 0
    cdef const uint8_t* p = data
    cdef uint64_t block_max = 0
    cdef uint64_t capacity = _lz4_frame_bound(p, len(data), &block_max)
    if capacity == BROKEN or capacity > limit:
        # Linked blocks, or a bound that is too coarse: count the bytes.
        capacity = _lz4_frame_size(p, len(data), &used)
        if capacity == BROKEN:
            raise _broken("lz4")
        if capacity > limit:
            raise _too_large("lz4", limit)
        if capacity == 0:
            return b""
    try:
        if block_max:
            return _lz4_blocks(data, capacity, block_max)
        return _arrow_codec("lz4").decompress(data if used == <size_t>len(data) else data[:used],
                                              capacity)
    except FormatError:
        raise
    except (cramjam.DecompressionError, OSError, ValueError) as e:
        raise _broken("lz4") from e


cdef object _arrow_codec(str name, level=None):
    import pyarrow  # now: it would be a third of the start of a broker, which seldom needs it
    return pyarrow.Codec(name, compression_level=level)


cdef object _lz4_blocks(bytes data, uint64_t capacity, uint64_t block_max):
    """Decompress the independent blocks of a frame that `_lz4_frame_bound` accepted, one after the
    other into one block of memory."""
    cdef const uint8_t* p = data
    cdef size_t position = LZ4_HEADER_BYTES + (8 if p[4] & 8 else 0)
    cdef uint64_t filled = 0
    cdef uint32_t size
    cdef Block block = take_block(capacity + 1)
    source, out = memoryview(data), memoryview(block)
    decompress = cramjam.lz4.decompress_block_into
    while True:
        size = kd_get_le32(p + position)
        position += 4
        if size == 0:
            return out[:filled]
        if size & 0x80000000u:
            size &= 0x7FFFFFFFu
            if size > capacity - filled:
                raise _broken("lz4")
            memcpy(block.data + filled, p + position, size)
            filled += size
        else:
            room = min(block_max, capacity - filled)
            filled += <uint64_t>decompress(source[position:position + size],
                                           out[filled:filled + room], output_len=room)
        position += size + (4 if p[4] & 16 else 0)


def _lz4_pieces(bytes data, uint64_t limit):
    cdef uint64_t block_max = 0
    cdef size_t position
    cdef uint32_t size
    cdef uint64_t total = 0
    cdef int checksum_bytes
    # its blocks refer to the ones before them
    if _lz4_frame_bound(data, len(data), &block_max) == BROKEN:
        yield _run_lz4(data, limit)
        return
    position = LZ4_HEADER_BYTES + (8 if data[4] & 8 else 0)
    checksum_bytes = 4 if data[4] & 16 else 0
    block = take_block(min(block_max, limit + 1))
    source, out = memoryview(data), memoryview(block)[:min(block_max, limit + 1)]
    while True:
        size = int.from_bytes(source[position:position + 4], "little")
        position += 4
        if size == 0:
            return
        if size & 0x80000000u:
            size &= 0x7FFFFFFFu
            piece = source[position:position + size]
        else:
            try:
                room = len(out)
                filled = cramjam.lz4.decompress_block_into(source[position:position + size], out,
                                                           output_len=room)
            except (cramjam.DecompressionError, OSError, ValueError) as e:
                # The library does not say whether the block is broken or lacks room.  The lengths
                # in its tokens do.
                if _lz4_stands_for(data, position, size) > limit - total:
                    raise _too_large("lz4", limit) from e
                raise _broken("lz4") from e
            piece = out[:filled]
        total += <uint64_t>len(piece)
        if total > limit:
            raise _too_large("lz4", limit)
        yield piece
        position += size + checksum_bytes


cdef uint64_t _lz4_stands_for(bytes data, size_t position, uint32_t size):
    """Decompressed size of the lz4 block at `position`; 0 if it is broken."""
    cdef const uint8_t* p = data
    cdef uint64_t n = _lz4_block_size(p + position, p + position + size)
    return 0 if n == BROKEN else n


cdef list _zstd_frames(bytes data):
    """For each frame that holds data: (position, bytes, bound of its decompressed size, bytes that
    are kept while it is read piece by piece)."""
    cdef size_t used = 0, position = 0, n = len(data)
    cdef uint64_t bound
    cdef const uint8_t* p = data
    cdef list frames = []
    while position < n:
        # a skippable frame holds no data
        if n - position >= 8 and kd_get_le32(p + position) >> 4 == <uint32_t>0x184D2A5:
            if kd_get_le32(p + position + 4) > n - position - 8:
                raise _broken("zstd")
            position += 8 + kd_get_le32(p + position + 4)
            continue
        bound = _zstd_frame_bound(p + position, n - position, &used)
        if bound == BROKEN:
            raise _broken("zstd")
        frames.append((position, used, bound, _zstd_window(p + position, bound)))
        position += used
    if not frames:
        raise _broken("zstd")
    return frames


cdef object _run_zstd(object tool, bytes data, uint64_t limit):
    cdef uint64_t total = 0
    cdef list parts = []
    for position, used, bound, _ in _zstd_frames(data):
        part = _zstd_frame(tool, data, position, used, bound, limit - total, limit)
        total += <uint64_t>len(part)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


cdef object _zstd_frame(object tool, bytes data, size_t position, size_t used, uint64_t bound,
                        uint64_t left, uint64_t limit):
    """Decompress one frame at once.  `left` bytes of `limit` are not used yet."""
    cdef bint stated = _zstd_states_size(data, position)
    if stated and bound > left:
        raise _too_large("zstd", limit)
    try:
        part = tool.decompress(data if used == <size_t>len(data)
                               else data[position:position + used],
                               max_output_size=max(<uint64_t>1, min(bound, left)))
    except zstandard.ZstdError as e:
        if bound > left:
            raise _too_large("zstd", limit) from e
        raise _broken("zstd") from e
    except MemoryError:
        raise _too_large("zstd", limit) from None
    if <uint64_t>len(part) > left:      # at least 1 is passed above: 0 means no limit there
        raise _too_large("zstd", limit)
    return part


cdef bint _zstd_states_size(bytes data, size_t position):
    cdef const uint8_t* p = data
    return (p[position + 4] >> 6) != 0 or (p[position + 4] & 0x20) != 0


def _zstd_pieces(bytes data, uint64_t limit):
    cdef uint64_t total = 0
    source = memoryview(data)
    # Not from the list of idle ones: a caller may stop in the middle of the pieces.
    tool = zstandard.ZstdDecompressor()
    for position, used, bound, window in _zstd_frames(data):
        if window > ZSTD_WINDOW_MAX:
            part = _zstd_frame(tool, data, position, used, bound, limit - total, limit)
            total += <uint64_t>len(part)
            yield part
            continue
        if bound > limit - total and _zstd_states_size(data, position):
            raise _too_large("zstd", limit)
        try:
            for part in tool.read_to_iter(source[position:position + used], read_size=INPUT_BYTES,
                                          write_size=PIECE_BYTES):
                total += <uint64_t>len(part)
                if total > limit:
                    raise _too_large("zstd", limit)
                yield part
        except zstandard.ZstdError as e:
            raise _broken("zstd") from e


cdef list _snappy_chunks(bytes data, uint64_t limit):
    """For each chunk: (position, bytes, decompressed size).  Together the chunks decompress to at
    most `limit` bytes."""
    cdef const uint8_t* p = data
    cdef size_t n = len(data), position = 0, chunk
    cdef uint64_t size, total = 0
    cdef list chunks = []
    if n >= XERIAL_HEADER_BYTES and data.startswith(_XERIAL_MAGIC):
        position = XERIAL_HEADER_BYTES
        while position < n:
            if n - position < 4:
                raise _broken("snappy")
            chunk = <uint32_t>p[position] << 24 | <uint32_t>p[position
                    + 1] << 16 | <uint32_t>p[position + 2] << 8 | p[position + 3]
            position += 4
            if chunk > n - position:
                raise _broken("snappy")
            size = _snappy_size(p + position, chunk)
            if size == BROKEN:
                raise _broken("snappy")
            if size > limit - total:
                raise _too_large("snappy", limit)
            chunks.append((position, chunk, size))
            total += size
            position += chunk
    else:
        total = _snappy_size(p, n)
        if total == BROKEN:
            raise _broken("snappy")
        if total > limit:
            raise _too_large("snappy", limit)
        chunks.append((0, n, total))
    return chunks


def _snappy_pieces(bytes data, uint64_t limit):
    source = memoryview(data)
    for begin, length, expected in _snappy_chunks(data, limit):
        block = take_block(expected)
        out = memoryview(block)[:expected]
        try:
            got = cramjam.snappy.decompress_raw_into(source[begin:begin + length],
                                                     out) if expected else 0
        except (cramjam.DecompressionError, OSError, ValueError) as e:
            raise _broken("snappy") from e
        if got != expected:
            raise _broken("snappy")
        yield out


cdef object _run_snappy(bytes data, uint64_t limit):
    cdef size_t n = len(data), position = 0
    cdef list chunks = _snappy_chunks(data, limit)
    cdef uint64_t total = 0
    cdef Block block
    for _, _, expected in chunks:
        total += <uint64_t>expected
    if total == 0:
        return b""
    block = take_block(total)
    out = memoryview(block)[:total]
    source = memoryview(data)
    position = 0
    try:
        for begin, length, expected in chunks:
            whole = length == n
            got = cramjam.snappy.decompress_raw_into(data if whole
                                                     else source[begin:begin + length],
                                                     out if whole
                                                     else out[position:position + expected])
            if got != expected:
                raise _broken("snappy")
            position += expected
    except (cramjam.DecompressionError, OSError, ValueError) as e:
        if isinstance(e, FormatError):
            raise
        raise _broken("snappy") from e
    return out


cdef object _run_gzip(bytes data, uint64_t limit):
    try:
        member = zlib.decompressobj(31)
        first = member.decompress(data, limit + 1)
    except zlib.error as e:
        raise _broken("gzip") from e
    if <uint64_t>len(first) > limit:
        raise _too_large("gzip", limit)
    if not member.eof:
        raise _broken("gzip")
    if not member.unused_data:
        return first
    return b"".join(_gzip_pieces(data, limit))      # there are several members


def _gzip_pieces(bytes data, uint64_t limit):
    # The input is passed in pieces, too: each time the library finds the end of a member, it copies
    # the input after that.
    cdef size_t position = 0, n = len(data)
    cdef uint64_t total = 0
    member, rest = None, b""
    try:
        while True:
            if not rest and position < n:
                rest = data[position:position + INPUT_BYTES]
                position += <size_t>len(rest)
            if member is None:
                if not rest:
                    break
                member = zlib.decompressobj(31)
            part = member.decompress(rest, PIECE_BYTES)
            total += <uint64_t>len(part)
            if total > limit:
                raise _too_large("gzip", limit)
            if part:
                yield part
            if member.eof:
                member, rest = None, member.unused_data
                continue
            rest = member.unconsumed_tail
            if not part and not rest and position == n:
                raise _broken("gzip")
    except zlib.error as e:
        raise _broken("gzip") from e
    if n == 0:
        raise _broken("gzip")


# -- compression -----------------------------------------------------------------------------------

cdef object _sized(buffer):
    # A pyarrow.Buffer that was shrunk still exports its first length through the buffer protocol.
    return memoryview(buffer)[:buffer.size]


cdef class Compressor:
    """Compresses the records of one batch at a time with one codec.  Used by one thread at a time.

    `level`: gzip 1 to 9, lz4 1 to 17, zstd -131072 to 22, snappy none; None: the library's own."""

    def __init__(self, str name not None, level=None):
        self.codec = codec_of(name)
        self.level = level
        if level is not None:
            levels = {CODEC_GZIP: (1, 9), CODEC_LZ4: (1, 17), CODEC_ZSTD: (-131_072, 22)}
            low, high = levels.get(self.codec, (0, 0))
            if not high:
                raise ConfigError(f"compression {name!r} has no level", hint="leave the level out")
            if not low <= level <= high:
                raise ConfigError(f"compression level {level!r} of {name} is out of range",
                                  hint=f"give {low} to {high}")
        if self.codec == CODEC_ZSTD:
            self._tool = zstandard.ZstdCompressor(level=3 if level is None else level)
        elif self.codec == CODEC_LZ4:
            self._tool = _arrow_codec("lz4", level)
        elif self.codec == CODEC_SNAPPY:
            self._tool = _arrow_codec("snappy")
        else:
            self._tool = None

    cpdef object run(self, data):
        """`data` (a contiguous buffer) compressed, as a bytes-like object."""
        if self.codec == CODEC_ZSTD:
            return self._tool.compress(data)
        if self.codec == CODEC_SNAPPY:
            return _sized(self._tool.compress(data))
        if self.codec == CODEC_LZ4:
            return self._run_lz4(data)
        if self.codec == CODEC_GZIP:
            tool = zlib.compressobj(6 if self.level is None else self.level, zlib.DEFLATED, 31)
            return tool.compress(data) + tool.flush()
        return data

    cdef object _run_lz4(self, data):
        # The library links blocks as soon as there are two.  A piece of up to 64 KiB is one block,
        # so a longer frame is put together from the blocks of such pieces after the header of the
        # first (which announces blocks of up to 64 KiB, as Kafka's own does).
        cdef list parts
        view = memoryview(data).cast("B")
        if len(view) <= LZ4_BLOCK_MAX:
            return self._run_lz4_piece(data)
        parts = []
        for position in range(0, len(view), LZ4_BLOCK_MAX):
            frame = self._run_lz4_piece(view[position:position + LZ4_BLOCK_MAX])
            parts.append(frame[LZ4_HEADER_BYTES if parts else 0:len(frame) - 4])
        parts.append(b"\0\0\0\0")
        return b"".join(parts)

    cdef object _run_lz4_piece(self, data):
        frame = _sized(self._tool.compress(data))
        if frame[4] != LZ4_FLAGS_INDEPENDENT:
            import pyarrow
            raise FormatError(f"pyarrow {pyarrow.__version__} wrote an lz4 frame with flags"
                              f" {frame[4]:#x}; Kafka's Java client may not read it",
                              hint="use another codec, or another version of pyarrow")
        return frame
