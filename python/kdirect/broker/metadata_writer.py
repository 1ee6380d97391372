"""Metadata records of remote segments on their way to the leaders of ``__remote_log_metadata``.

Law: a record is written when its partition's leader says that it is committed.  One request is
under way for each partition, so records arrive in the order in which they were given.  Until a
leader answers it is looked for again and asked again, so a record may be in the log twice, which
means the same (`kdirect.storage.segment_states`).  After `WRITE_S` nobody knows: whoever gave the
record decides what follows.

On the event loop, except `write`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kdirect.broker.remote_metadata import metadata_partition
from kdirect.broker.scheduler import soon
from kdirect.broker.topics import REMOTE_METADATA_TOPIC
from kdirect.errors import KdirectError, NotLeaderError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode, error_kind
from kdirect.format.remote_metadata import pack_record
from kdirect.format.schema import build
from kdirect.model import TopicPartition
from kdirect.storage.segment_states import Record

log = logging.getLogger("kdirect.storage")

WRITE_S = 15.0
CALL_S = 8.0  # more than a leader waits for its replicas
AGAIN_S = 0.2
MOST_AT_ONCE = 256  # records of one request

Done = Callable[[bool], None]
# `call(broker, request, timeout)`: the response; this broker may be asked, too.
Call = Callable[[int, Any, float], Coroutine[Any, Any, Any]]


class MetadataWriter:
    """See the module.  `membership` as in `kdirect.member`; `create_topic()` returns when the topic
    is there; KdirectError.  Life: construct on the event loop, `close`."""

    def __init__(
        self,
        membership: Any,
        call: Call,
        create_topic: Callable[[], Coroutine[Any, Any, Any]],
    ) -> None:
        self._membership = membership
        self._call = call
        self._create_topic = create_topic
        self._loop = asyncio.get_running_loop()
        self._unplaced: list[tuple[Record, Done]] = []  # there is no topic yet
        self._waiting: dict[int, deque[tuple[Record, Done]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._creating = False
        self._closed = False

    def write(self, record: Record, done: Done, /) -> None:
        """See `kdirect.storage.remote_logs.MetadataLog`.  Any thread."""
        if self._closed:
            done(False)
        else:
            soon(self._loop, self._enqueue, record, done)

    def close(self) -> None:
        """Nothing is written any more.  Any thread."""
        self._closed = True
        soon(self._loop, self._cancel)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    @property
    def partition_count(self) -> int:
        """0 while there is no topic."""
        topic = self._membership.metadata.topic(REMOTE_METADATA_TOPIC)
        return 0 if topic is None else len(topic.partitions)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("metadata of remote segments was not written", exc_info=task.exception())

    def _enqueue(self, record: Record, done: Done) -> None:
        if self._closed:
            done(False)
            return
        count = self.partition_count
        if not count:
            self._unplaced.append((record, done))
            if not self._creating:
                self._creating = True
                self._spawn(self._create())
            return
        index = metadata_partition((record.topic_id, record.partition), count)
        queue = self._waiting.get(index)
        if queue is None:
            self._waiting[index] = deque([(record, done)])
            self._spawn(self._write_all(index))
        else:
            queue.append((record, done))

    async def _create(self) -> None:
        try:
            await self._create_topic()
        except KdirectError as e:
            log.error("%s could not be created: %s", REMOTE_METADATA_TOPIC, e)
        finally:
            self._creating = False
            unplaced, self._unplaced = self._unplaced, []
            for record, done in unplaced:
                if self.partition_count:
                    self._enqueue(record, done)
                else:
                    done(False)

    # -- writing -----------------------------------------------------------------------------------

    async def _write_all(self, index: int) -> None:
        queue = self._waiting[index]
        try:
            while queue:
                some = [queue.popleft() for _ in range(min(len(queue), MOST_AT_ONCE))]
                written = False
                try:
                    written = await self._write(index, [record for record, _ in some])
                finally:
                    for _, done in some:
                        done(written)
        finally:
            del self._waiting[index]
            for _, done in queue:
                done(False)

    async def _write(self, index: int, records: Sequence[Record]) -> bool:
        """Are they committed?"""
        tp = TopicPartition(REMOTE_METADATA_TOPIC, index)
        deadline = self._loop.time() + WRITE_S
        why = "it has no leader"
        while (left_s := deadline - self._loop.time()) > 0:
            metadata = self._membership.metadata
            leader = metadata.leader_of(tp)
            if metadata.is_live(leader):
                request = build(
                    p.WriteRemoteMetadataRequest,
                    broker_id=metadata.node_id,
                    incarnation=metadata.incarnation,
                    partition=index,
                    records=[pack_record(record) for record in records],
                )
                try:
                    response = await self._ask(tp, leader, request, min(left_s, CALL_S))
                except (KdirectError, OSError) as e:
                    why = str(e)
                else:
                    if response.error_code == 0:
                        return True
                    kind = error_kind(response.error_code).name
                    why = f"broker {leader} says {kind}: {response.error_message}"
                    if response.error_code == ErrorCode.INVALID_RECORD:
                        break
            await self._membership.news(AGAIN_S)
        log.warning("%d records were not written to %s: %s", len(records), tp, why)
        return False

    async def _ask(self, tp: TopicPartition, leader: int, request: Any, timeout_s: float) -> Any:
        """The answer of a leader, for as long as it is one: it may be silent.  KdirectError."""
        call = asyncio.ensure_future(self._call(leader, request, timeout_s))
        try:
            while not call.done():
                news = asyncio.ensure_future(self._membership.news(timeout_s))
                await asyncio.wait({call, news}, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                if not call.done() and self._membership.metadata.leader_of(tp) != leader:
                    raise NotLeaderError(f"broker {leader} leads {tp} no more")
            return call.result()
        finally:
            call.cancel()


__all__ = ["Call", "MetadataWriter"]
