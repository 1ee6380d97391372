"""The RDMA consume path: grants, slots and moves from file to file (KafkaDirect §4.4.2).

Owns: for each partition of one consumer, which file it reads and where it stands.  One slot READ
refreshes all partitions; a data READ brings bytes of one; a request to the broker is made only to
enter a file: at the start, after a sealed file was read to its end, when a head has grown beyond
what was granted of it, and when access was lost. Decoding is not done here: callers take a window
of whole and partial batches and say what they consumed.

Invariants: never a READ past the last readable position; bytes of a window belong to the caller
until the next `fill` of the same partition; a file that was read to its end is released with the
request for the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kdirect.client.direct_read import FileStream, SlotTable
from kdirect.client.partition_feed import Feed
from kdirect.errors import KdirectError, OffsetOutOfRangeError, ProtocolError, UnknownTopicError
from kdirect.format import layout
from kdirect.format.codec import ArrowDecoder
from kdirect.model import LATEST_OFFSET, TopicPartition
from kdirect.wire.channel import Channel, access_error

# What Feed.advance returns.
NOTHING, MOVED, ENDED = range(3)


class DirectFetcher:
    """Reads the partitions of one consumer, reader or session over one channel.  It has no lock:
    its owner's thread uses it, or a thread that holds its owner's lock (`kdirect.wire.channel`).
    """

    def __init__(self, channel: Channel, settings: Mapping[str, Any]) -> None:
        self.channel = channel
        self._committed_only = settings["isolation.level"] == "read_committed"
        self._stream_settings = {
            "min_read_bytes": settings["fetch.min.read.bytes"],
            "max_read_bytes": settings["fetch.max.read.bytes"],
            "buffer_bytes": settings["fetch.buffer.bytes"],
            "max_batch_bytes": settings["max.batch.bytes"],
        }
        self._slots: SlotTable | None = None
        self._positions: dict[TopicPartition, Feed] = {}
        self._retired_reads = 0
        self._retired_read_bytes = 0
        self.access_requests = 0

    def __contains__(self, tp: TopicPartition) -> bool:
        return tp in self._positions

    @property
    def partitions(self) -> tuple[TopicPartition, ...]:
        return tuple(self._positions)

    def assign(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Enter the files that hold these offsets (-1: the latest, as a slot without data).  One
        request for all.

        A partition read before is entered anew.  Raises the first refusal of `enter`; the others
        stay granted.
        """
        for error in self.enter(offsets).values():
            raise error

    def enter(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, KdirectError]:
        """`assign`, but returns what was refused, by partition: OffsetOutOfRangeError,
        UnknownTopicError, AccessDeniedError (no free slot, for one), ProtocolError for a grant that
        cannot be.  What was refused is not read any more.  Raises when the request fails as a
        whole; then no partition of `offsets` is read."""
        targets = []
        for tp, offset in offsets.items():
            position = self._positions.get(tp)
            targets.append((tp, offset, position.stream.file_id if position is not None else -1))
        self.access_requests += 1
        try:
            answer = self.channel.consume_access(targets)
            if self._slots is None:
                self._slots = self._slot_table(answer)
        except KdirectError:
            for tp in offsets:  # where one stood before is not where it shall stand
                self._forget(tp)
            raise
        for tp in offsets:  # all of them before one is entered, whose slot may have been another's
            if tp in self._positions:
                self._leave_slot(self._positions[tp])
        refused: dict[TopicPartition, KdirectError] = {}
        for (tp, offset, _), grant in zip(targets, answer.partitions, strict=True):
            if grant.error_code:
                self._forget(tp)
                refused[tp] = access_error(
                    grant.error_code, grant.error_message, f"reading {tp} from offset {offset}"
                )
                continue
            try:
                self._enter(tp, offset, grant)
            except ProtocolError as e:
                self._forget(tp)
                refused[tp] = e
        return refused

    def _slot_table(self, answer: Any) -> SlotTable:
        """The local side of the slot region that a consume answer names."""
        channel, count = self.channel, answer.slot_count
        if not 0 < count <= 1 << 20:
            raise ProtocolError(f"{channel.connection.peer} announced {count} metadata slots")
        return SlotTable(
            channel.qp,
            channel.send_cq,
            channel.local_memory(count * layout.SLOT_BYTES),
            answer.slot_address,
            answer.slot_rkey,
            count,
        )

    def _enter(self, tp: TopicPartition, offset: int, grant: Any) -> None:
        position = self._positions.get(tp)
        if position is None:
            stream = FileStream(
                str(tp),
                self.channel.qp,
                self.channel.send_cq,
                self.channel.local_memory,
                **self._stream_settings,
            )
            position = self._positions[tp] = Feed(
                tp,
                stream,
                committed_only=self._committed_only,
                max_batch_bytes=self._stream_settings["max_batch_bytes"],
            )
        assert self._slots is not None
        again = (
            position.stream.outgrown and position.segment_base_offset == grant.segment_base_offset
        )
        if again and 0 < grant.length <= position.stream.length:
            raise ProtocolError(
                f"{tp}: {grant.length} bytes of a file were granted again, though more were announced to be readable",
                hint="broker and client are of different versions",
            )
        position.segment_base_offset = grant.segment_base_offset
        position.has_data = grant.length != 0
        position.slots = self._slots
        if grant.slot_index >= 0:
            self._slots.activate(grant.slot_index)  # refuses one that cannot be
            position.slot_index = grant.slot_index
        sealed = grant.slot_index < 0
        limit = grant.last_stable_position if self._committed_only else grant.last_readable_position
        if position.has_data:
            start = min(grant.start_position, limit) if offset >= 0 else limit
            position.stream.open(
                grant.file_id, grant.address, grant.rkey, grant.length, start, limit, sealed
            )
        else:
            position.stream.open(grant.file_id, 0, 0, 0, 0, 0, False)
        position.stream.set_offsets(
            grant.high_watermark,
            grant.last_stable_offset,
            grant.log_start_offset,
            grant.leader_epoch,
        )
        if position.has_data:
            end = grant.last_stable_offset if self._committed_only else grant.high_watermark
            expected = grant.start_offset if start == grant.start_position else end
            position.stream.expect(
                grant.segment_base_offset,
                expected,
                grant.dense_from,
                end,
                grant.first_epoch,
                grant.last_epoch,
            )

    def _leave_slot(self, position: Feed) -> None:
        if position.slot_index >= 0 and self._slots is not None:
            self._slots.deactivate(position.slot_index)
            position.slot_index = -1

    def refresh(self) -> None:
        """Bring the news of all partitions with one slot READ."""
        if self._slots is None:
            return
        self._slots.refresh()
        for position in self._positions.values():
            if position.slot_index >= 0 and not position.stream.sealed:
                position.stream.take_slot(self._slots, position.slot_index, self._committed_only)

    def fill(self, tp: TopicPartition, next_offset: int) -> bool:
        """READ more bytes of `tp`, whose next wanted record is `next_offset`.  False when nothing
        more is readable now.

        Refreshes the slots when this partition's known bytes are used up, and moves on to the next
        file when a sealed one is done.
        """
        for _ in range(4):
            position = self._positions[tp]
            stream = position.stream
            if position.has_data and position.slot_index >= 0:
                moved = position.advance()
                if moved != ENDED:
                    return moved == MOVED
            elif position.has_data:
                if stream.fill():
                    return True
                if stream.unread > 0:
                    return False  # no room: the caller must consume first
            elif position.slot_index >= 0 and not stream.sealed and not stream.revoked:
                stream.look(self._slots, position.slot_index, self._committed_only)
            if stream.revoked:
                raise UnknownTopicError(
                    f"{tp} was deleted or moved while it was read",
                    hint="look the topic up again and open a new reader",
                )
            if not (stream.sealed or stream.outgrown) and (
                position.has_data or stream.high_watermark <= next_offset
            ):
                return False
            if position.has_data and stream.buffered and not stream.outgrown:
                raise ProtocolError(
                    f"{tp}: {stream.buffered} bytes behind position {stream.position} of a sealed file are no whole batch",
                    hint="the segment is damaged; run recovery by restarting the broker",
                )
            self.assign({tp: next_offset})
        return False

    def slot_that_tells(self, tp: TopicPartition, next_offset: int) -> int:
        """After a `fill` of `tp`, or a `Feed.load`, that found nothing: the slot that changes
        before there can be anything; -1 when none."""
        position = self._positions.get(tp)
        if (
            position is None
            or position.stream.outgrown
            or position.stream.sealed
            or position.stream.revoked
            or position.stream.buffered
        ):
            return -1
        nothing = (
            position.stream.unread == 0
            if position.has_data
            else position.stream.high_watermark <= next_offset
        )
        return position.slot_index if nothing else -1

    def changed(self, *, fresh: bool) -> list[int]:
        """The slots that changed since the last call: see `SlotTable.changed`."""
        return self._slots.changed(fresh=fresh) if self._slots is not None else []

    def window(self, tp: TopicPartition) -> tuple[int, int]:
        """(address, length) of the whole batches of `tp` that were READ and not consumed; see
        `FileStream.window`."""
        return self._positions[tp].stream.window()

    def decode(self, tp: TopicPartition, decoder: ArrowDecoder) -> int:
        """Feed `decoder` with the window of `tp`; the bytes consumed, 0 when the window or the room
        in the decoder is used up."""
        return self._positions[tp].stream.decode(decoder)  # type: ignore[no-any-return]

    def feed(self, tp: TopicPartition) -> Feed:
        return self._positions[tp]

    def stream(self, tp: TopicPartition) -> FileStream:
        return self._positions[tp].stream

    def watermarks(self, tp: TopicPartition) -> tuple[int, int]:
        """(log start offset, high watermark, or last stable offset with read_committed) as of the
        last refresh."""
        stream = self._positions[tp].stream
        return (
            stream.log_start_offset,
            stream.last_stable_offset if self._committed_only else stream.high_watermark,
        )

    def stale(self) -> list[TopicPartition]:
        """Partitions whose slot says that their head file was sealed, that it has outgrown its
        grant, or that access ended."""
        return [
            x.tp
            for x in self._positions.values()
            if x.stream.sealed or x.stream.outgrown or x.stream.revoked
        ]

    def check_offset(self, tp: TopicPartition, offset: int) -> None:
        """OffsetOutOfRangeError when `offset` is below the log start that the slot shows."""
        start = self._positions[tp].stream.log_start_offset
        if offset < start:
            raise OffsetOutOfRangeError(
                f"offset {offset} of {tp} is gone: the log starts at {start}",
                hint="records were deleted (retention)",
            )

    def _forget(self, tp: TopicPartition) -> int:
        position = self._positions.pop(tp, None)
        if position is None:
            return -1
        self._leave_slot(position)
        position.has_data = False  # whoever still holds the feed gets nothing from it
        self._retired_reads += position.stream.reads
        self._retired_read_bytes += position.stream.read_bytes
        file_id = position.stream.file_id
        position.stream.close()
        return file_id

    def release(self, tps: list[TopicPartition]) -> None:
        """Stop reading these partitions."""
        ids = [i for i in map(self._forget, tps) if i >= 0]
        if ids and not self.channel.closed:
            self.channel.release(ids)

    def close(self) -> None:
        """End the channel, and with it all grants."""
        for tp in list(self._positions):
            self._forget(tp)
        self.channel.close()

    def statistics(self) -> dict[str, int]:
        """reads and read_bytes of data, slot_reads and slot_read_bytes, torn slot reads, access
        requests, buffer_bytes now held."""
        streams = [x.stream for x in self._positions.values()]
        return {
            "reads": self._retired_reads + sum(s.reads for s in streams),
            "read_bytes": self._retired_read_bytes + sum(s.read_bytes for s in streams),
            "slot_reads": self._slots.reads if self._slots else 0,
            "slot_read_bytes": self._slots.read_bytes if self._slots else 0,
            "torn_slot_reads": self._slots.torn if self._slots else 0,
            "access_requests": self.access_requests,
            "buffer_bytes": sum(s.buffer_bytes for s in streams),
        }


__all__ = ["LATEST_OFFSET", "DirectFetcher"]
