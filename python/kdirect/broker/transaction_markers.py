"""Markers: how the end of a transaction gets into the partitions that have its records.

Two sides of one thing.  The leader of a partition appends a marker and answers once it is
committed, as a Produce with acks=all; what a transaction has committed of a group's offsets becomes
visible then (`completed`).  The coordinator sends markers to the leaders, those of its own
partitions without a request, and tries what failed again; a partition that no longer exists needs
none.

On the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from kdirect.broker.appends import resolve
from kdirect.broker.failures import explain
from kdirect.broker.services import Services
from kdirect.broker.transactions import Markers
from kdirect.errors import KdirectError, NotCoordinatorError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode, error_kind
from kdirect.format.schema import build
from kdirect.log.kernel_transactions import marker_batch
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.broker.transactions")

CALL_S = 5.0
FIRST_PAUSE_S = 0.02  # between tries to end a transaction
LONGEST_PAUSE_S = 1.0
COMMIT_S = 5.0
TURN_S = 0.002  # until a look at appends that are under way is repeated
FENCED = (ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.TRANSACTION_COORDINATOR_FENCED)


class TransactionMarkers:
    """See the module.  `peers`: the connections to other brokers, None where the broker is alone.
    `may_append(tp)`: a code, NONE: a marker may be appended in a partition of this broker.
    `completed(tp, markers)`: it is committed there; a code, NONE: what follows from it has
    happened."""

    def __init__(self, services: Services, peers: Any) -> None:
        self._services = services
        self._peers = peers
        self._node_id = services.cluster.node_id
        self.may_append: Callable[[TopicPartition], int] = lambda tp: 0
        self.completed: Callable[[TopicPartition, Markers], int] = lambda tp, markers: 0
        # Those that are appended and not committed, so that nobody appends them a second time.
        self._under_way: dict[tuple[Any, ...], asyncio.Future[int]] = {}

    # -- the leader's side -------------------------------------------------------------------------

    def append(
        self, tp: TopicPartition, markers: Markers, coordinator_epoch: int
    ) -> asyncio.Future[int]:
        """Append a marker to a partition that this broker leads; the code, once it is committed.
        It is done already where nothing has to be waited for.  Several may wait for one marker:
        none of them cancels the future (`asyncio.shield`)."""
        key = (tp, markers.producer_id, markers.epoch, markers.commit, coordinator_epoch)
        found = self._under_way.get(key)
        if found is not None:
            return found
        return self._begin(key, tp, markers, None)

    def append_noted(
        self, tp: TopicPartition, markers: Markers, coordinator_epoch: int
    ) -> tuple[asyncio.Future[int], asyncio.Future[bool]]:
        """As `append`; and whether the marker is in the log, as soon as that is known."""
        in_log: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        key = (tp, markers.producer_id, markers.epoch, markers.commit, coordinator_epoch)
        found = self._under_way.get(key)
        if found is None:
            return self._begin(key, tp, markers, in_log), in_log
        found.add_done_callback(lambda done: resolve(in_log, done.result() == ErrorCode.NONE, None))
        return found, in_log

    def _begin(
        self,
        key: tuple[Any, ...],
        tp: TopicPartition,
        markers: Markers,
        in_log: asyncio.Future[bool] | None,
    ) -> asyncio.Future[int]:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._append(tp, markers, key[-1], future, in_log)
        if not future.done():
            self._under_way[key] = future
            future.add_done_callback(lambda done: self._under_way.pop(key))
        elif in_log is not None:
            resolve(in_log, future.result() == ErrorCode.NONE, None)
        return future

    def _append(
        self,
        tp: TopicPartition,
        markers: Markers,
        coordinator_epoch: int,
        future: asyncio.Future[int],
        in_log: asyncio.Future[bool] | None,
    ) -> None:
        if code := self.may_append(tp):
            future.set_result(code)
            return
        try:
            partition = self.led(tp)
            now = self._services.environment.time_ms()
            batch = marker_batch(
                markers.producer_id, markers.epoch, coordinator_epoch, markers.commit, now
            )
            told = partial(self._appended, tp, partition, partition.leader_epoch, markers, future)
            appended = self._services.appender.append_marker(partition, batch, now)
            if in_log is not None:
                _note(appended, in_log)
            if appended.done():
                told(appended)
            else:
                appended.add_done_callback(told)
        except Exception as e:
            resolve(future, _code(e, tp), None)
            if in_log is not None:
                resolve(in_log, False, None)

    def is_ready(self, tp: TopicPartition, count: int) -> bool:
        """Whether so many markers can be appended at once, or will never be.  Those of a partition
        that RDMA producers hold get their turn from whoever holds it."""
        *heads, queues, held, working = self._services.appender.busy
        try:
            return (
                tp in held
                or any(tp in table for table in heads)
                or (
                    (tp not in queues and tp not in working)
                    and self.led(tp).has_marker_room(count, self._services.environment.time_ms())
                )
            )
        except (KdirectError, LookupError):
            return True  # the append is told why

    async def make_ready(self, tp: TopicPartition, count: int) -> None:
        """Make room for so many markers, or let those finish that are before them."""
        if any(tp in table for table in self._services.appender.busy):
            await asyncio.sleep(TURN_S)
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            partition = self.led(tp)
            work = partial(partition.make_marker_room, count)
            self._services.files.for_partition(partition, work, partial(resolve, done))
            await done
        except Exception as e:  # whatever it is: the appends are told, and the group goes on
            log.debug("no room for %d markers in %s: %s", count, tp, e)
            await asyncio.sleep(TURN_S)  # a full disk is not asked again at once

    def led(self, tp: TopicPartition) -> Partition:
        """A partition that this broker leads.  KdirectError: another one does, or none may append
        now."""
        replicas = self._services.replicas
        if replicas is None:
            return self._services.topics.partition(tp.topic, tp.partition)
        partition = replicas.leader(tp)
        replicas.may_append(tp)
        return partition

    def _appended(
        self,
        tp: TopicPartition,
        partition: Partition,
        epoch: int,
        markers: Markers,
        future: asyncio.Future[int],
        appended: asyncio.Future[Any],
    ) -> None:
        """It is in the log, or could not be appended."""
        services = self._services
        if appended.cancelled():  # the broker stops: whoever asked asks another one
            resolve(future, int(ErrorCode.NOT_LEADER_OR_FOLLOWER), None)
            return
        error = appended.exception()
        if error is not None or appended.result().error:
            code = _code(error, tp) if error is not None else int(appended.result().error)
            resolve(future, code, None)
            return

        def committed(done: asyncio.Future[None] | None) -> None:
            if done is not None and done.cancelled():
                resolve(future, int(ErrorCode.NOT_LEADER_OR_FOLLOWER), None)
                return
            failure = None if done is None else done.exception()
            if failure is not None:
                resolve(future, _code(failure, tp), None)
                return
            services.waiters.notify(tp)  # the last stable offset has moved
            resolve(future, self.completed(tp, markers), None)

        waits = None
        if services.replicas is not None:
            end = partition.log_end_offset
            services.replicas.appended(tp)
            if partition.acknowledgements_wait() and partition.gate.waits_for_disk(end):
                services.flusher.begin(partition)
            if partition.high_watermark < end:
                try:
                    waits = services.replicas.committed(tp, end, epoch, COMMIT_S)
                except KdirectError as e:
                    resolve(future, _code(e, tp), None)
                    return
        elif partition.acknowledgements_wait():
            waits = services.flusher.begin(partition)
        if waits is None:
            committed(None)
        else:
            waits.add_done_callback(committed)

    # -- the coordinator's side --------------------------------------------------------------------

    def append_here(self, markers: Markers, epoch: int) -> set[TopicPartition]:
        """Append the markers of partitions that this broker leads; those partitions that have none
        yet."""
        left = set()
        for tp in markers.partitions:
            if self.leader_of(tp) == self._node_id:
                told = self.append(tp, markers, epoch)
                if told.done() and told.result() == ErrorCode.NONE:
                    continue
            left.add(tp)
        return left

    async def write(
        self, markers: Markers, epoch: int, partitions: Iterable[TopicPartition]
    ) -> set[TopicPartition]:
        """Have markers written in partitions; those that have none yet.
        NotCoordinatorError: one has a marker of a newer coordinator."""
        left: set[TopicPartition] = set()
        by_leader: dict[int, list[TopicPartition]] = {}
        for tp in partitions:
            if self.is_gone(tp):
                continue
            by_leader.setdefault(self.leader_of(tp), []).append(tp)
        answers = await asyncio.gather(
            *(self._send(leader, markers, epoch, tps) for leader, tps in by_leader.items())
        )
        for tp, code in (item for answer in answers for item in answer.items()):
            if code in FENCED:
                raise NotCoordinatorError(f"{tp} answers {error_kind(code).name} to a marker")
            if code != ErrorCode.NONE:
                left.add(tp)
        return left

    def is_gone(self, tp: TopicPartition) -> bool:
        """Was its topic deleted?  One that was created again may have fewer partitions."""
        membership: Any = self._services.membership
        knows = membership is None or membership.metadata.generation >= 0
        topic = self._services.topics.find(tp.topic) if knows else None
        return knows and (topic is None or tp.partition >= topic.partition_count)

    def leader_of(self, tp: TopicPartition) -> int:
        """The broker that leads a partition; -1: none does."""
        if self._services.replicas is None:
            return self._node_id
        return int(self._services.cluster.partition(tp).leader)

    async def _send(
        self, leader: int, markers: Markers, epoch: int, tps: list[TopicPartition]
    ) -> dict[TopicPartition, int]:
        if leader == self._node_id:
            appended = (asyncio.shield(self.append(tp, markers, epoch)) for tp in tps)
            codes = await asyncio.gather(*appended)
            return dict(zip(tps, codes, strict=True))
        failed = dict.fromkeys(tps, int(ErrorCode.NOT_LEADER_OR_FOLLOWER))
        if leader < 0 or self._peers is None:
            return failed
        request = build(p.WriteTxnMarkersRequest, markers=[request_row(markers, epoch, tps)])
        try:
            answer = await self._peers.call(leader, request, timeout_s=CALL_S, version=1)
        except KdirectError as e:
            log.debug("markers of %s at broker %d: %s", markers.transactional_id, leader, e)
            return failed
        return failed | {
            TopicPartition(topic.name, row.partition_index): row.error_code
            for marker in answer.markers
            for topic in marker.topics
            for row in topic.partitions
        }


def _note(appended: asyncio.Future[Any], in_log: asyncio.Future[bool]) -> None:
    """Tell whether an append has put its marker into the log, once it has come to an end."""

    def told(done: asyncio.Future[Any]) -> None:
        failed = done.cancelled() or done.exception() is not None or done.result().error
        resolve(in_log, not failed, None)

    if appended.done():
        told(appended)
    else:
        appended.add_done_callback(told)


def request_row(markers: Markers, epoch: int, tps: list[TopicPartition]) -> dict[str, Any]:
    topics: dict[str, list[int]] = {}
    for tp in tps:
        topics.setdefault(tp.topic, []).append(tp.partition)
    return {
        "producer_id": markers.producer_id,
        "producer_epoch": markers.epoch,
        "transaction_result": markers.commit,
        "topics": [{"name": n, "partition_indexes": found} for n, found in topics.items()],
        "coordinator_epoch": epoch,
    }


def _code(error: BaseException, tp: TopicPartition) -> int:
    return explain(error, f"a marker in {tp}")[0]
