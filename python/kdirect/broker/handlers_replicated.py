"""Requests about records in a cluster: `DataHandlers` of a member.

What differs from a broker that is alone, and where `Replicas` is asked:

- Leadership is checked with the client's leader epoch.  An error of Produce names the leader and
  where it is reached, where the version has a place for both (KIP-951).  Fetch could only name it
  by a number: Kafka does not, for a client may not know that broker yet.
- Produce to a partition that this broker is about to lead waits until it does
  (`kdirect.broker.coming_leaderships`).
- Produce with acks=all is refused below min.insync.replicas, and answered when the records are
  committed: one future a partition, no thread.  With acks=1 it is answered when this broker has
  them.
- Consumers read below the high watermark, from followers as well (version 11 and later, KIP-392).
  The leader sends a consumer with a rack to a replica there; a follower that is asked above its
  high watermark does not know (OFFSET_NOT_AVAILABLE); one that is asked for what is in remote
  storage only sends the consumer to the leader.  A reader whose last epoch ended elsewhere
  is told where its log diverges (version 12).
- A leader that was just elected does not tell "latest" until its high watermark is not below one
  that was told before.
- DeleteRecords is answered when all replicas that live have deleted them.

Other brokers do not fetch by these requests; they have their own (`Replicas.answer`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from kdirect.broker.answers import Answer, later, respond
from kdirect.broker.appends import resolve
from kdirect.broker.coming_leaderships import ComingLeaderships
from kdirect.broker.connection import Connection
from kdirect.broker.failures import code_of, explain
from kdirect.broker.handlers_data import (
    Arrival,
    DataHandlers,
    OneAppend,
    failed_append,
)
from kdirect.broker.handlers_lookups import EARLIEST_LOCAL, Reader
from kdirect.broker.picture import CATCH_UP_S, Picture
from kdirect.broker.services import Replicas, Services
from kdirect.errors import (
    KdirectError,
    LeaderNotAvailableError,
    NotLeaderError,
    OffsetNotAvailableError,
    ReplicaNotAvailableError,
    UnknownTopicError,
)
from kdirect.format import protocol as p
from kdirect.format.datapath import Fetched, NodeEndpoint, Produced, produce_response
from kdirect.format.error_codes import ErrorCode
from kdirect.log.config import NEVER
from kdirect.log.partition import Partition
from kdirect.model import EARLIEST_OFFSET, TopicPartition

FROM_FOLLOWERS = 11  # the version of Fetch from which on a client may read from followers
NOT_AVAILABLE = 5  # the version of ListOffsets from which on clients know OFFSET_NOT_AVAILABLE
_MOVED = frozenset(
    (
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.FENCED_LEADER_EPOCH,
    )
)


class ReplicatedDataHandlers(DataHandlers):
    """See the module.  A member has one, used on its event loop; reading may be on a thread.
    `coming` is to be told of leaderships and of each picture of the cluster."""

    def __init__(self, services: Services, replicas: Replicas, picture: Picture) -> None:
        super().__init__(services)
        self._picture = picture
        self._replicas = replicas
        self._membership: Any = services.membership
        self._node_id = services.cluster.node_id
        self.coming = ComingLeaderships(self._node_id, lambda: self._membership.metadata)

    # -- who leads ---------------------------------------------------------------------------------

    def _led(self, name: str, index: int, epoch: int) -> Partition:
        try:
            return self._replicas.leader(TopicPartition(name, index), epoch)
        except ReplicaNotAvailableError as e:  # clients know it as an answer to Fetch
            raise NotLeaderError(e.message, hint=e.hint) from e

    def _leader(self, tp: TopicPartition) -> tuple[int, int]:
        """(broker, leader epoch) as this broker's picture shows them."""
        view = self._services.cluster.partition(tp)
        return view.leader, view.leader_epoch

    # -- Produce -----------------------------------------------------------------------------------

    def _to_append(self, append: OneAppend, name: str) -> Partition:
        tp = TopicPartition(name, append.index)
        if self._membership.metadata.generation < 0:
            raise NotLeaderError(f"this broker does not know yet who leads {tp}")
        try:
            partition = self._replicas.leader(tp)
        except ReplicaNotAvailableError as e:  # clients know it as an answer to Fetch
            raise NotLeaderError(e.message, hint=e.hint) from e
        if append.acks == -1:
            self._replicas.may_append(tp)
        # Of now: what is appended late is asked for late, when this broker may have led, lost its
        # records and led again.
        append.leader_epoch = partition.leader_epoch
        return partition

    def _held(
        self, append: OneAppend, name: str, records: Any, arrival: Arrival, error: Exception
    ) -> bool:
        # A topic that is in the picture may be unknown to the replicas, until they see it as well.
        if not records or not isinstance(error, NotLeaderError | UnknownTopicError):
            return False
        pending = asyncio.get_running_loop().create_future()
        go_on = partial(self._go_on, append, name, bytes(records), pending)
        tp = TopicPartition(name, append.index)
        if not self.coming.hold(tp, arrival.connection, arrival.timeout_ms / 1000, go_on):
            return False
        append.size = len(records)
        self._wait_for(append, name, records, pending)
        return True

    def _go_on(
        self,
        append: OneAppend,
        name: str,
        records: bytes,
        pending: asyncio.Future[Any],
        error: BaseException | None,
    ) -> None:
        """An append that has waited for this broker to lead is made now, or fails; one of a
        transaction may be made."""
        try:
            if error is not None:
                raise error
            append.partition = partition = self._to_append(append, name)
            if append.transaction is not None:  # `_verified` appends it, in the producer's order
                resolve(pending, None, None)
                return
            now_ms = self._services.environment.time_ms()
            appended = self._services.appender.append(partition, records, now_ms)
        except Exception as e:
            resolve(pending, None, e)
        else:
            appended.add_done_callback(partial(_pass_on, pending))

    def _append_failed(self, append: OneAppend, name: str, error: BaseException) -> None:
        super()._append_failed(append, name, error)
        self._name_leader(append, name)

    def _name_leader(self, append: OneAppend, name: str) -> None:
        if append.produced.error in _MOVED:
            leader = self._leader(TopicPartition(name, append.index))
            append.done = append.produced._replace(leader=leader)

    def _grown(self, append: OneAppend, partition: Partition, result: Any, *, is_new: bool) -> None:
        tp = partition.topic_partition
        # A duplicate may be older than what the kernel remembers the offsets of.
        known = result.last_offset >= 0 and not result.error
        append.end_offset = result.last_offset + 1 if known else partition.log_end_offset
        if is_new:
            self._replicas.appended(tp)
            if partition.high_watermark >= append.end_offset:  # there is no other replica
                self._services.waiters.notify(tp, append.size)
        append.gated = _waits_for_disk(partition) or (
            append.acks == -1 and partition.high_watermark < append.end_offset
        )

    async def _wait_for_gate(
        self, topics: list[tuple[str, list[OneAppend]]], timeout_ms: int
    ) -> None:
        gated = [(name, x) for name, appends in topics for x in appends if x.gated and x.partition]
        waits = [self._wait_of(name, x, timeout_ms) for name, x in gated]
        if len(waits) > 1:
            await asyncio.wait(waits)
        for (name, append), wait in zip(gated, waits, strict=True):
            try:
                await wait
            except Exception as e:
                code, message = explain(e, f"replication of {name}-{append.index}")
                append.done = failed_append(append.index, code, message, append.start_offset)
                self._name_leader(append, name)

    def _wait_of(self, name: str, append: OneAppend, timeout_ms: int) -> asyncio.Future[None]:
        """What the answer of one append waits for."""
        partition = append.partition
        assert partition is not None
        flushed = self._services.flusher.begin(partition) if _waits_for_disk(partition) else None
        if append.acks != -1:
            return flushed or _done()  # another flush may have come first
        tp = TopicPartition(name, append.index)
        timeout_s = max(timeout_ms, 0) / 1000
        replicas = self._replicas
        committed = replicas.committed(tp, append.end_offset, append.leader_epoch, timeout_s)
        if flushed is None:
            return committed
        # Where replicas move the high watermark, it does not wait for `flush.messages`.
        return asyncio.ensure_future(_both(flushed, committed))

    def _produced(
        self,
        connection: Connection,
        version: int,
        answers: list[tuple[str | bytes, list[Produced]]],
    ) -> Answer:
        leaders = {x.leader[0] for _, rows in answers for x in rows if x.leader is not None}
        nodes = self._endpoints(connection, leaders) if leaders and version >= 10 else ()
        return Answer([produce_response(version, answers, nodes)])

    def _endpoints(self, connection: Connection, leaders: set[int]) -> Sequence[NodeEndpoint]:
        services = self._services
        own = services.listeners.address_for(connection.listener, connection.local[0])
        listener = services.config.listeners[connection.listener].name
        return [
            NodeEndpoint(*node)
            for node in services.cluster.nodes(own, listener)
            if node.node_id in leaders
        ]

    # -- Fetch -------------------------------------------------------------------------------------

    def _to_read(self, reader: Reader, name: str, x: Any) -> Partition | Fetched:
        tp = TopicPartition(name, x.partition)
        replicas = self._replicas
        if reader.version < FROM_FOLLOWERS:
            return replicas.leader(tp, x.current_leader_epoch)
        partition = replicas.readable(tp, x.current_leader_epoch)
        if self._membership.metadata.leader_of(tp) != self._node_id:
            if x.fetch_offset > partition.high_watermark:
                raise OffsetNotAvailableError(
                    f"offset {x.fetch_offset} of {tp} is above the high watermark of this replica"
                )
            if partition.log_start_offset <= x.fetch_offset < partition.local_log_start_offset:
                return self._ask_leader(tp, x, partition)
        elif reader.rack:
            preferred = replicas.preferred_replica(tp, reader.rack, x.fetch_offset)
            if preferred >= 0:
                return self._without_records(x, partition)._replace(preferred=preferred)
        last_epoch = getattr(x, "last_fetched_epoch", -1)
        if last_epoch >= 0:
            diverging = replicas.diverging(tp, last_epoch, x.fetch_offset)
            if diverging is not None:
                return self._without_records(x, partition)._replace(diverging=diverging)
        return partition

    def _unread(self, name: str, x: Any, error: BaseException) -> Fetched:
        found = super()._unread(name, x, error)
        if found.error in _MOVED:
            found = found._replace(leader=self._leader(TopicPartition(name, x.partition)))
        return found

    def _ask_leader(self, tp: TopicPartition, x: Any, partition: Partition) -> Fetched:
        """The offset is in remote storage only, which leaders read."""
        leader = self._membership.metadata.leader_of(tp)
        if leader < 0:
            raise LeaderNotAvailableError(f"{tp} has no leader that reads remote storage")
        return self._without_records(x, partition)._replace(preferred=leader)

    def _without_records(self, x: Any, partition: Partition) -> Fetched:
        return Fetched(
            x.partition,
            0,
            partition.high_watermark,
            partition.last_stable_offset,
            partition.log_start_offset,
            (),
            0,
        )

    # -- offsets -----------------------------------------------------------------------------------

    def _find_offset(
        self, reader: Reader, partition: Partition, timestamp: int
    ) -> tuple[int, int] | None:
        tp = partition.topic_partition
        # Asked first: on a thread, an older high watermark may be read just before it is known.
        knows = self._replicas.knows_high_watermark(tp)
        found = super()._find_offset(reader, partition, timestamp)
        if knows or timestamp in (EARLIEST_OFFSET, EARLIEST_LOCAL):
            return found
        if found is not None and timestamp >= 0:
            return found  # it is below what was committed before
        text = f"the new leader of {tp} does not know yet how far records are committed"
        if reader.version < NOT_AVAILABLE:
            raise LeaderNotAvailableError(text)
        raise OffsetNotAvailableError(text)

    def _epoch_end(self, name: str, x: Any) -> dict[str, Any]:
        out = {"error_code": 0, "partition": x.partition, "leader_epoch": -1, "end_offset": -1}
        try:
            self._led(name, x.partition, x.current_leader_epoch)
            epoch, end = self._replicas.epoch_end(TopicPartition(name, x.partition), x.leader_epoch)
        except Exception as e:
            return {**out, "error_code": explain(e, f"epoch lookup in {name}-{x.partition}")[0]}
        return {**out, "leader_epoch": epoch, "end_offset": end}

    # -- deletion of records -----------------------------------------------------------------------

    def delete_records(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return later(self._delete_everywhere(header, request))

    async def _delete_everywhere(self, header: p.RequestHeader, request: Any) -> Answer:
        """Delete here, then wait until the other replicas that live have followed."""
        timeout_s = max(request.timeout_ms, 0) / 1000
        deadline = asyncio.get_running_loop().time() + timeout_s
        named = [
            TopicPartition(t.name, x.partition_index) for t in request.topics for x in t.partitions
        ]
        await self._lead_soon(named, timeout_s)
        topics = await self._services.files.admin(self._deleted_here, request)
        rows = [(topic["name"], row) for topic in topics for row in topic["partitions"]]
        await asyncio.gather(*(self._followed(name, row, deadline) for name, row in rows))
        return respond(header, p.DeleteRecordsResponse, topics=topics)

    async def _lead_soon(self, named: Iterable[TopicPartition], timeout_s: float) -> None:
        """Wait for what this broker leads, by what the controller knows, and does not lead yet: the
        client has learned it from another broker."""
        missing = [tp for tp in named if not self._leads(tp)]
        if not missing:
            return
        await self._picture.catch_up(
            lambda m: all(m.leader_of(tp) == self._node_id for tp in missing),
            min(timeout_s, CATCH_UP_S),
        )
        waiting = (self.coming.until_led(tp, timeout_s) for tp in missing if not self._leads(tp))
        await asyncio.gather(*waiting)

    def _leads(self, tp: TopicPartition) -> bool:
        try:
            self._replicas.leader(tp)
        except KdirectError:
            return False
        return True

    def _deleted_here(self, request: Any) -> list[dict[str, Any]]:
        return [
            {"name": t.name, "partitions": [self._delete_before(t.name, x) for x in t.partitions]}
            for t in request.topics
        ]

    async def _followed(self, name: str, row: dict[str, Any], deadline: float) -> None:
        if row["error_code"]:
            return
        tp = TopicPartition(name, row["partition_index"])
        left = max(0.0, deadline - asyncio.get_running_loop().time())
        try:
            row["low_watermark"] = await asyncio.wait_for(self._replicas.low_watermark(tp), left)
        except asyncio.TimeoutError:
            row.update(error_code=int(ErrorCode.REQUEST_TIMED_OUT), low_watermark=-1)
        except Exception as e:
            row.update(error_code=code_of(e), low_watermark=-1)


def _done() -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_result(None)
    return future


def _pass_on(pending: asyncio.Future[Any], appended: asyncio.Future[Any]) -> None:
    """Whoever waits for `pending` gets what became of the append."""
    if not appended.cancelled():
        error = appended.exception()
        resolve(pending, None if error is not None else appended.result(), error)


async def _both(flushed: asyncio.Future[None], committed: asyncio.Future[None]) -> None:
    """The one that fails first says so."""
    try:
        await asyncio.wait((flushed, committed), return_when=asyncio.FIRST_EXCEPTION)
        for future in (flushed, committed):
            if future.done():
                future.result()
    finally:
        committed.cancel()


def _waits_for_disk(partition: Partition) -> bool:
    """Do the topic's settings want the records on disk, and are they not?"""
    config = partition.config
    if not config.flush_before_ack and config.flush_messages == NEVER:
        return False
    partition.acknowledgements_wait()  # notes that flush.messages was reached
    return partition.gate.waits_for_disk(partition.log_end_offset)
