"""The RDMA consume path to one broker: grants, slots and moves from file to file (KafkaDirect
§4.4.2).

Owns: for each partition that one consumer reads there, which file it reads.  One slot READ
refreshes all partitions; a data READ brings bytes of one; a request to the broker is made only to
enter a file: at the start, after a sealed file was read to its end, when a head has grown beyond
what was granted of it, and when access was lost.  The bytes and the offsets are the cursors'
(`kdirect.client.cursor`).

Invariants: never a READ past the last readable position; a file that was read to its end is
released with the request for the next.

Where the owner reads from other brokers too, it lets this one take its time.  A request that is not
answered within ANSWER_WAIT_S goes on where nobody waits for it, and `enter` refuses its partitions
with an AccessDeniedError that is `undecided` until the answer is there.  Their cursors are gone at
once, and their slots left, so that nothing is READ meanwhile through what the broker gives back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from kdirect.client.aborted_reads import AbortedReads, ListReads
from kdirect.client.cursor import DirectCursor
from kdirect.client.file_stream import FileStream
from kdirect.client.slot_table import SlotTable
from kdirect.errors import AccessDeniedError, KdirectError, ProtocolError
from kdirect.format import layout
from kdirect.model import TopicPartition
from kdirect.wire.attempt import Attempt
from kdirect.wire.channel import Channel, access_error
from kdirect.wire.environment import Environment
from kdirect.wire.location import Location

ANSWER_WAIT_S = 0.05

Target = tuple[TopicPartition, int, int]  # offset, id of the file that was read to its end or -1


class DirectFetcher:
    """Reads partitions that one broker leads over one channel, or with `of_replica` those that it
    only follows, too; `epoch_of` tells their leader epochs as far as these are known.  It has no
    lock: its owner's thread uses it, or a thread that holds its owner's lock
    (`kdirect.wire.channel`).
    """

    def __init__(
        self,
        channel: Channel,
        settings: Mapping[str, Any],
        epoch_of: Callable[[TopicPartition], int] = lambda tp: -1,
        *,
        of_replica: bool = False,
    ) -> None:
        self.channel = channel
        self._of_replica = of_replica
        self._epoch_of = epoch_of
        self.access_requests = 0
        self._committed_only = settings["isolation.level"] == "read_committed"
        self._lists = ListReads(channel)
        self._stream_settings = {
            "min_read_bytes": settings["fetch.min.read.bytes"],
            "max_read_bytes": settings["fetch.max.read.bytes"],
            "buffer_bytes": settings["fetch.buffer.bytes"],
            "max_batch_bytes": settings["max.batch.bytes"],
        }
        # Where others go on while this broker is asked; None: whoever enters waits for the answer.
        self.besides: Environment | None = None
        self._asked: tuple[list[Target], Attempt[Any]] | None = None  # the request that goes on
        self._slots: SlotTable | None = None
        self._cursors: dict[TopicPartition, DirectCursor] = {}
        self._retired_reads = 0
        self._retired_read_bytes = 0
        self._retired_wait_ns = 0

    def __contains__(self, tp: TopicPartition) -> bool:
        return tp in self._cursors

    @property
    def partitions(self) -> tuple[TopicPartition, ...]:
        return tuple(self._cursors)

    def cursor(self, tp: TopicPartition) -> DirectCursor:
        """The cursor of a partition that is read."""
        return self._cursors[tp]

    def stream(self, tp: TopicPartition) -> FileStream:
        """The bytes under that cursor."""
        return self._cursors[tp].stream

    def assign(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Enter the files that hold these offsets (-1: the latest, as a slot without data).  One
        request for all.

        A partition that is read already is entered again.  Raises the first refusal of `enter`; the
        others stay granted.
        """
        for error in self.enter(offsets).values():
            raise error

    def enter(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, KdirectError]:
        """`assign`, but returns what was refused, by partition: OffsetOutOfRangeError,
        UnknownTopicError, AccessDeniedError (no free slot, for one; `undecided`: enter it again
        later), ProtocolError for a grant that cannot be.  What was refused is not read any
        more.  Raises when the request fails as a whole; then no partition of `offsets` is read."""
        try:
            targets, answer = self._answered(offsets)
            if answer is not None and self._slots is None:
                self._slots = self._slot_table(answer)
        except KdirectError:
            for tp in offsets:  # a cursor that cannot be moved must not read on where it was
                self._forget(tp)
            raise
        # All slots are left before one is entered, which may be the former slot of another.
        for tp in offsets:
            if tp in self._cursors:
                self._leave_slot(self._cursors[tp])
        refused: dict[TopicPartition, KdirectError] = {}
        grants = answer.partitions if answer is not None else []
        for (tp, offset, _), grant in zip(targets, grants, strict=True):
            if offsets.get(tp) != offset:  # it was moved, or released, while the broker was asked
                if not grant.error_code:
                    self.channel.release([grant.file_id])
                continue
            error = self._take_grant(tp, offset, grant)
            if error is not None:
                refused[tp] = error
        for tp in offsets.keys() - {tp for tp, offset, _ in targets if offsets.get(tp) == offset}:
            self._forget(tp)
            refused[tp] = undecided = AccessDeniedError(f"{tp}: its broker has not answered yet")
            undecided.undecided = True
        return refused

    def _answered(self, offsets: Mapping[TopicPartition, int]) -> tuple[list[Target], Any]:
        """What was asked for and the broker's answer; nothing and None while there is none.  An
        answer that was not waited for is that of an earlier request."""
        if self._asked is None:
            targets = []
            for tp, offset in offsets.items():
                cursor = self._cursors.get(tp)
                targets.append((tp, offset, cursor.stream.file_id if cursor is not None else -1))
            self.access_requests += 1
            ask = partial(
                self.channel.consume_access,
                targets,
                self._epoch_of,
                of_replica=self._of_replica,
                committed_only=self._committed_only,
            )
            if self.besides is None:
                return targets, ask()
            self._asked = targets, self.besides.spawn(ask)
            self._asked[1].wait(ANSWER_WAIT_S)
        targets, attempt = self._asked
        if not attempt.done:
            return [], None
        self._asked = None
        return targets, attempt.result()

    def _take_grant(self, tp: TopicPartition, offset: int, grant: Any) -> KdirectError | None:
        """Enter the granted file; why not, if that cannot be."""
        if grant.error_code:
            self._forget(tp)
            return access_error(
                grant.error_code, grant.error_message, f"reading {tp} from offset {offset}"
            )
        try:
            self._enter(tp, offset, grant)
        except ProtocolError as e:
            self._forget(tp)
            return e
        return None

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
        """Have the cursor of `tp` read the granted file from `offset` on."""
        cursor = self._cursors.get(tp)
        if cursor is None:
            cursor = self._cursors[tp] = self._new_cursor(tp)
        stream = cursor.stream
        again = stream.outgrown and cursor.segment_base_offset == grant.segment_base_offset
        if again and 0 < grant.length <= stream.length:
            raise ProtocolError(
                f"{tp}: {grant.length} bytes of a file were granted again, though more were"
                " announced to be readable",
                hint="broker and client are of different versions",
            )
        if cursor.next_offset != offset:
            stream.follow(-1)
        cursor.next_offset = offset
        cursor.segment_base_offset = grant.segment_base_offset
        cursor.has_data = grant.length != 0
        cursor.slots = self._slots
        if grant.slot_index >= 0:
            assert self._slots is not None
            self._slots.activate(grant.slot_index)  # refuses one that cannot be
            cursor.slot_index = grant.slot_index
        cursor.judge(None)
        if not cursor.has_data:
            stream.open(Location(self.channel, 0, 0, 0), grant.file_id, 0, 0, False)
            self._take_offsets(stream, grant)
            return
        committed_only = self._committed_only
        limit = grant.last_stable_position if committed_only else grant.last_readable_position
        start = min(grant.start_position, limit) if offset >= 0 else limit
        location = Location(self.channel, grant.address, grant.rkey, grant.length)
        stream.open(location, grant.file_id, start, limit, grant.slot_index < 0)
        if committed_only:
            cursor.judge(self._aborted(tp, grant, start))
        self._take_offsets(stream, grant)
        end = grant.last_stable_offset if committed_only else grant.high_watermark
        next_offset, first_epoch = grant.start_offset, grant.first_epoch
        if start != grant.start_position:
            # The batch that holds `offset` may not be read yet: the first one that may lies below
            # it, and the grant does not tell the epoch of that one.
            next_offset, first_epoch = end, 0
        if 0 <= next_offset < grant.segment_base_offset:
            next_offset = grant.segment_base_offset  # nothing of this file may be read yet
        stream.expect(
            grant.segment_base_offset,
            next_offset,
            grant.dense_from,
            end,
            first_epoch,
            grant.last_epoch,
        )

    def _aborted(self, tp: TopicPartition, grant: Any, position: int) -> AbortedReads:
        """What was aborted in the granted file, for who reads from `position` on."""
        place = grant.aborted_address, grant.aborted_rkey, grant.aborted_length
        grows = grant.slot_index >= 0
        return AbortedReads(str(tp), self._lists, place, grant.file_id if grows else 0, position)

    def _new_cursor(self, tp: TopicPartition) -> DirectCursor:
        return DirectCursor(
            tp,
            0,
            self,
            FileStream(str(tp), **self._stream_settings),
            committed_only=self._committed_only,
            max_batch_bytes=self._stream_settings["max_batch_bytes"],
        )

    def _take_offsets(self, stream: FileStream, grant: Any) -> None:
        stream.set_offsets(
            grant.high_watermark,
            grant.last_stable_offset,
            grant.log_start_offset,
            grant.leader_epoch,
        )

    def _leave_slot(self, cursor: DirectCursor) -> None:
        if cursor.slot_index >= 0 and self._slots is not None:
            self._slots.deactivate(cursor.slot_index)
            cursor.slot_index = -1

    def refresh(self) -> None:
        """Bring the news of all partitions with one slot READ."""
        if self._slots is None:
            return
        self._slots.refresh()
        for cursor in self._cursors.values():
            if cursor.slot_index >= 0 and not cursor.stream.sealed:
                cursor.stream.take_slot(self._slots, cursor.slot_index, self._committed_only)

    def news(self) -> list[TopicPartition] | None:
        """`refresh`, but of the slots alone that have changed since the last call, whose partitions
        are returned.  None if one of them has come to an end (see `stale`)."""
        if self._slots is None or not (changed := self._slots.changed(fresh=True)):
            return []
        of_slot = {cursor.slot_index: cursor for cursor in self._cursors.values()}
        out = []
        for index in changed:
            cursor = of_slot.get(index)
            if cursor is None:
                continue
            stream = cursor.stream
            if not stream.sealed:
                stream.take_slot(self._slots, index, self._committed_only)
            if stream.sealed or stream.outgrown or stream.revoked:
                return None
            out.append(cursor.tp)
        return out

    def changed(self, *, fresh: bool) -> list[int]:
        """The slots that changed since the last call: see `SlotTable.changed`."""
        return self._slots.changed(fresh=fresh) if self._slots is not None else []

    def watermarks(self, tp: TopicPartition) -> tuple[int, int]:
        """(log start offset, high watermark, or last stable offset with read_committed) as of the
        last refresh."""
        stream = self._cursors[tp].stream
        return (
            stream.log_start_offset,
            stream.last_stable_offset if self._committed_only else stream.high_watermark,
        )

    def stale(self) -> list[TopicPartition]:
        """Partitions whose slot says that their head file was sealed, that it has outgrown its
        grant, or that access ended."""
        return [
            x.tp
            for x in self._cursors.values()
            if x.stream.sealed or x.stream.outgrown or x.stream.revoked
        ]

    def _forget(self, tp: TopicPartition) -> int:
        """Stop reading `tp`; the id of its file, -1 if it was not read."""
        cursor = self._cursors.pop(tp, None)
        if cursor is None:
            return -1
        self._leave_slot(cursor)
        self._retired_reads += cursor.stream.reads
        self._retired_read_bytes += cursor.stream.read_bytes
        self._retired_wait_ns += cursor.stream.wait_ns
        cursor.forgotten()
        file_id: int = cursor.stream.file_id
        return file_id

    def release(self, tps: Iterable[TopicPartition]) -> None:
        """Stop reading these partitions, as far as they are read."""
        ids = [i for i in map(self._forget, tps) if i >= 0]
        if ids and not self.channel.closed:
            self.channel.release(ids)

    def close(self) -> None:
        """End the channel, and with it all grants."""
        for tp in list(self._cursors):
            self._forget(tp)
        self.channel.close()

    def statistics(self) -> dict[str, int]:
        """reads and read_bytes of data, slot_reads and slot_read_bytes, torn slot reads, READs of
        lists of aborted transactions and batches left out by them, access requests, buffer_bytes
        now held."""
        streams = [x.stream for x in self._cursors.values()]
        return {
            "reads": self._retired_reads + sum(s.reads for s in streams),
            "read_bytes": self._retired_read_bytes + sum(s.read_bytes for s in streams),
            "read_wait_us": (self._retired_wait_ns + sum(s.wait_ns for s in streams)) // 1000,
            "slot_reads": self._slots.reads if self._slots else 0,
            "slot_read_bytes": self._slots.read_bytes if self._slots else 0,
            "torn_slot_reads": self._slots.torn if self._slots else 0,
            "aborted_reads": self._lists.reads,
            "aborted_batches": self._lists.skipped,
            "access_requests": self.access_requests,
            "buffer_bytes": sum(s.buffer_bytes for s in streams),
        }
