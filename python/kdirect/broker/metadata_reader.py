"""What this broker reads of ``__remote_log_metadata``: the partitions that it needs, each from its
leader, below the high watermark, in order.

Owns: one Fetch that is under way at each leader, and how far each partition was read.  It begins
with the first record after each start of the broker: the topic is rewritten when most of it is
dead, so it is short.

**What was read is no part of the log any more** when an unclean election has taken it away, or when
the partition was rewritten before this broker had come so far.  Then all of the partition is
forgotten (`forget`) and read again from its beginning.

On the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from kdirect.broker.metadata_writer import Call
from kdirect.broker.topics import REMOTE_METADATA_TOPIC
from kdirect.errors import FormatError, KdirectError
from kdirect.format import protocol as p
from kdirect.format.batch import iterate_batches
from kdirect.format.error_codes import ErrorCode
from kdirect.format.remote_metadata import parse_record
from kdirect.format.schema import build
from kdirect.model import TopicPartition
from kdirect.storage.segment_states import Record

log = logging.getLogger("kdirect.storage")

MAX_WAIT_MS = 1000  # a partition that is needed meanwhile waits for so long
ANSWER_S = 10.0
AGAIN_S = 0.2
RESPONSE_BYTES = 4 << 20
PARTITION_BYTES = 1 << 20
TURN = 500  # records; then others have their turn


class Position:
    """How far a partition was read.  `is_level`: to the end, as its leader last told.  `turn`:
    number of the newest request, whose answer alone counts: two leaders may have been asked."""

    __slots__ = ("epoch", "is_level", "offset", "turn")

    def __init__(self) -> None:
        self.offset = 0
        self.epoch = -1  # of the last record
        self.is_level = False
        self.turn = 0


class _Piece(NamedTuple):
    records: list[tuple[int, Record | None]]  # with their offsets; None: it cannot be read
    next_offset: int
    epoch: int


class MetadataReader:
    """See the module.  `told(index, record)` is called for each record, None for one that cannot be
    read; `level(index)` when the end was reached; `on_thread` awaits what decodes.  Life:
    construct, `want`, `look` at each change of the cluster, `close`."""

    def __init__(
        self,
        membership: Any,
        call: Call,
        *,
        on_thread: Callable[..., Awaitable[Any]],
        told: Callable[[int, Record | None], None],
        forget: Callable[[int], None],
        level: Callable[[int], None],
    ) -> None:
        self._membership = membership
        self._call = call
        self._on_thread = on_thread
        self._told = told
        self._forget = forget
        self._level = level
        self._positions: dict[int, Position] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._closed = False

    def want(self, index: int) -> None:
        """Read this partition from now on."""
        if index not in self._positions:
            self._positions[index] = Position()
            self.look()

    def position(self, index: int) -> Position:
        return self._positions.get(index) or Position()

    def look(self) -> None:
        """Partitions may have other leaders."""
        if self._closed:
            return
        for leader in {self._leader(index) for index in self._positions}:
            if leader >= 0 and leader not in self._tasks:
                self._tasks[leader] = asyncio.ensure_future(self._read(leader))

    def close(self) -> None:
        self._closed = True
        for task in self._tasks.values():
            task.cancel()

    def _leader(self, index: int) -> int:
        leader: int = self._membership.metadata.leader_of(_tp(index))
        return leader

    # -- one leader --------------------------------------------------------------------------------

    async def _read(self, leader: int) -> None:
        """As long as it leads a partition that is needed."""
        try:
            while not self._closed:
                wanted = [index for index in self._positions if self._leader(index) == leader]
                if not wanted:
                    return
                turns = {index: self._next_turn(index) for index in wanted}
                try:
                    response = await self._call(leader, self._request(wanted), ANSWER_S)
                    await self._take(response, turns)
                except (KdirectError, OSError) as e:
                    log.debug("broker %d does not tell metadata: %s", leader, e)
                    await self._membership.news(AGAIN_S)
                except Exception:
                    log.exception("metadata of broker %d was not read", leader)
                    await asyncio.sleep(1)
        finally:
            self._tasks.pop(leader, None)

    def _next_turn(self, index: int) -> int:
        position = self._positions[index]
        position.turn += 1
        return position.turn

    def _request(self, wanted: Sequence[int]) -> Any:
        rows = [
            {
                "partition": index,
                "current_leader_epoch": -1,
                "fetch_offset": self._positions[index].offset,
                "last_fetched_epoch": self._positions[index].epoch,
                "log_start_offset": -1,
                "partition_max_bytes": PARTITION_BYTES,
            }
            for index in wanted
        ]
        return build(
            p.FetchRequest,
            replica_id=-1,
            max_wait_ms=MAX_WAIT_MS,
            min_bytes=1,
            max_bytes=RESPONSE_BYTES,
            isolation_level=0,
            session_id=0,
            session_epoch=-1,
            topics=[{"topic": REMOTE_METADATA_TOPIC, "partitions": rows}],
            forgotten_topics_data=[],
            rack_id="",
        )

    async def _take(self, response: Any, turns: dict[int, int]) -> None:
        """What was answered; where a partition cannot be had now, it is asked for again soon."""
        refused = response.error_code != 0
        for topic in response.responses:
            for row in topic.partitions:
                position = self._positions[row.partition_index]
                if position.turn != turns[row.partition_index]:
                    continue
                if _is_lost(row):
                    self._begin_again(row.partition_index, max(row.log_start_offset, 0))
                elif row.error_code != 0:
                    refused = True
                else:
                    await self._take_records(row.partition_index, position, row)
        if refused:
            await self._membership.news(AGAIN_S)

    def _begin_again(self, index: int, start: int) -> None:
        """Read from `start` on what was read up to the present position, or is not there."""
        turn = self._positions[index].turn + 1  # what is on its way is of the old reading
        position = self._positions[index] = Position()
        position.offset, position.turn = start, turn
        log.info("reading %s from offset %d on", _tp(index), start)
        self._forget(index)

    async def _take_records(self, index: int, position: Position, row: Any) -> None:
        if row.records:
            turn, data = position.turn, bytes(row.records)
            piece: _Piece = await self._on_thread(_decode, data, index, position.offset)
            for i, (offset, record) in enumerate(piece.records):
                if position.turn != turn:
                    return
                position.offset = offset + 1
                self._told(index, record)
                if i % TURN == TURN - 1:
                    await asyncio.sleep(0)
            position.offset, position.epoch = piece.next_offset, piece.epoch
        position.is_level = position.offset >= row.high_watermark
        if position.is_level:
            self._level(index)


def _is_lost(row: Any) -> bool:
    """Is what was read no part of the log any more?"""
    if row.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
        return True
    diverging = getattr(row, "diverging_epoch", None)
    return diverging is not None and int(diverging.end_offset) >= 0


def _decode(data: bytes, index: int, offset: int) -> _Piece:
    """On a thread."""
    # Not before it is needed: it brings Arrow.
    from kdirect.format.codec import decode_records

    rows, _, following = decode_records(data, REMOTE_METADATA_TOPIC, index, offset)
    epoch = -1
    for batch in iterate_batches(data, check_crc=False):
        epoch = batch.leader_epoch
    records: list[tuple[int, Record | None]] = []
    faults: list[tuple[int, FormatError]] = []
    for row in rows:
        record = None
        if row.value is not None:
            try:
                record = parse_record(row.value)
            except FormatError as e:
                faults.append((row.offset, e))
        records.append((row.offset, record))
    if faults:
        log.error(
            "%d records of %s are left out, and it is not rewritten while they are there; the"
            " first, at offset %d: %s",
            len(faults),
            _tp(index),
            *faults[0],
        )
    return _Piece(records, following, epoch)


def _tp(index: int) -> TopicPartition:
    return TopicPartition(REMOTE_METADATA_TOPIC, index)


__all__ = ["MetadataReader", "Position"]
