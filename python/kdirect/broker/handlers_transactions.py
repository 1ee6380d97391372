"""Requests about transactions: InitProducerId, AddPartitionsToTxn, AddOffsetsToTxn, EndTxn,
WriteTxnMarkers, DescribeTransactions, ListTransactions.

Turns requests into questions to the coordinator (`kdirect.broker.transaction_coordinator`), and its
codes into those that the version of a request knows: before version 2 of most of them there is no
PRODUCER_FENCED.  A producer without a transactional id gets its id from the registry of topics, or,
in a cluster, from the metadata store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from kdirect.broker import topic_patterns
from kdirect.broker.answers import Answer, later, respond
from kdirect.broker.connection import Connection
from kdirect.broker.failures import explain
from kdirect.broker.marker_groups import MarkerGroups
from kdirect.broker.services import Services
from kdirect.broker.topics import OFFSETS_TOPIC
from kdirect.broker.transaction_coordinator import TransactionCoordinator
from kdirect.broker.transactions import EPOCH_BUMPS, Markers, Reply
from kdirect.errors import KdirectError
from kdirect.format import end_transaction
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.record_fields import TEXT_BYTES
from kdirect.format.transaction_records import NO_EPOCH, NO_PRODUCER_ID, State
from kdirect.model import TopicPartition

FROM_BROKERS = 4  # the version of AddPartitionsToTxn from which on brokers send it
KNOWS_ABORTABLE = 5  # and from which on its sender knows TRANSACTION_ABORTABLE
BUMPS_EPOCH = 5  # the version of EndTxn by which each transaction gets a new epoch
KNOWS_FENCED = {"InitProducerId": 4, "AddPartitionsToTxn": 2, "AddOffsetsToTxn": 2, "EndTxn": 2}


class TransactionHandlers:
    """Handlers about transactions; one for the broker.  `take_id`: a producer id, once the next
    block of them was written down.  `group_partition(group)`: the partition of __consumer_offsets
    that keeps a group, once there is that topic."""

    def __init__(
        self,
        services: Services,
        coordinator: TransactionCoordinator,
        marker_groups: MarkerGroups,
        take_id: Callable[[], Awaitable[int]],
        group_partition: Callable[[str], Awaitable[TopicPartition]],
    ) -> None:
        self._services = services
        self._topics = services.topics
        self._environment = services.environment
        self._coordinator = coordinator
        self._machine = coordinator.machine
        self._marker_groups = marker_groups
        self._take_id = take_id
        self._group_partition = group_partition

    # -- InitProducerId ----------------------------------------------------------------------------

    def init_producer_id(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        # One without the other is nobody's; before version 3 a request has neither.
        if header.api_version >= 3 and (request.producer_id == NO_PRODUCER_ID) != (
            request.producer_epoch == NO_EPOCH
        ):
            return _initialized(header, Reply(ErrorCode.INVALID_REQUEST))
        if request.transactional_id is None:
            producer_id = self._topics.producer_id_nowait()
            if producer_id is None:
                return later(self._plain_later(header))
            return _initialized(header, Reply(ErrorCode.NONE, producer_id, 0))
        name = request.transactional_id
        # A record would not hold it; or others write under it, each in a transaction of its own.
        identities = self._coordinator.attempts.machine
        if not name or len(name.encode()) > TEXT_BYTES or identities.is_identity(name):
            return _initialized(header, Reply(ErrorCode.INVALID_REQUEST))
        longest = self._services.config["transaction.max.timeout.ms"]
        if not 0 < request.transaction_timeout_ms <= longest:
            return _initialized(header, Reply(ErrorCode.INVALID_TRANSACTION_TIMEOUT))
        return later(self._init(header, request))

    async def _plain_later(self, header: p.RequestHeader) -> Answer:
        """Answer once there is another block of ids."""
        try:
            reply = Reply(ErrorCode.NONE, await self._take_id(), 0)
        except KdirectError as e:
            reply = Reply(explain(e, "a new producer id")[0])
        return _initialized(header, reply)

    async def _init(self, header: p.RequestHeader, request: Any) -> Answer:
        name, expected = request.transactional_id, None
        if header.api_version >= 3 and request.producer_id >= 0 and request.producer_epoch >= 0:
            expected = (request.producer_id, request.producer_epoch)
        reply = await self._coordinator.ask(
            name,
            lambda new_id: self._machine.init(
                name, request.transaction_timeout_ms, expected, self._environment.time_ms(), new_id
            ),
        )
        return _initialized(header, reply)

    # -- partitions --------------------------------------------------------------------------------

    def add_partitions(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return later(self._add_partitions(header, request))

    async def _add_partitions(self, header: p.RequestHeader, request: Any) -> Answer:
        version = header.api_version
        if version < FROM_BROKERS:
            codes = await self._add(
                version,
                request.v3_and_below_transactional_id,
                request.v3_and_below_producer_id,
                request.v3_and_below_producer_epoch,
                _partitions(request.v3_and_below_topics),
            )
            rows = _topic_rows(codes)
            message = p.AddPartitionsToTxnResponse
            return respond(header, message, results_by_topic_v3_and_below=rows)
        found = await asyncio.gather(
            *(
                self._add(
                    version,
                    t.transactional_id,
                    t.producer_id,
                    t.producer_epoch,
                    _partitions(t.topics),
                    verify_only=t.verify_only,
                )
                for t in request.transactions
            )
        )
        results = [
            {"transactional_id": t.transactional_id, "topic_results": _topic_rows(codes)}
            for t, codes in zip(request.transactions, found, strict=True)
        ]
        return respond(
            header, p.AddPartitionsToTxnResponse, error_code=0, results_by_transaction=results
        )

    async def _add(
        self,
        version: int,
        name: str,
        producer_id: int,
        epoch: int,
        partitions: list[TopicPartition],
        *,
        verify_only: bool = False,
    ) -> dict[TopicPartition, int]:
        unknown = [tp for tp in partitions if not self._exists(tp)]
        if unknown:  # as Kafka: all of them, or none
            others = dict.fromkeys(partitions, int(ErrorCode.OPERATION_NOT_ATTEMPTED))
            return others | dict.fromkeys(unknown, int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
        if verify_only:
            codes = self.verify(name, producer_id, epoch, partitions)
        else:
            by_broker = version >= FROM_BROKERS
            reply = await self.add(
                name, producer_id, epoch, partitions, EPOCH_BUMPS if by_broker else 0
            )
            codes = dict.fromkeys(partitions, reply.code)
        codes = {tp: _told("AddPartitionsToTxn", version, code) for tp, code in codes.items()}
        if version < KNOWS_ABORTABLE:
            for tp, code in codes.items():
                if code == ErrorCode.TRANSACTION_ABORTABLE:
                    codes[tp] = ErrorCode.INVALID_TXN_STATE
        return codes

    def _exists(self, tp: TopicPartition) -> bool:
        topic = self._topics.find(tp.topic)
        return (
            topic is not None and not topic.deleting and 0 <= tp.partition < topic.partition_count
        )

    async def add(
        self,
        name: str,
        producer_id: int,
        epoch: int,
        partitions: Iterable[TopicPartition],
        version: int,
    ) -> Reply:
        """Add partitions to a transaction that this broker coordinates; `version` as in
        `Transactions.add`."""
        tps = list(partitions)
        return await self._coordinator.ask(
            name,
            lambda _: self._machine.add(
                name, producer_id, epoch, tps, version, self._environment.time_ms()
            ),
        )

    def verify(
        self, name: str, producer_id: int, epoch: int, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """Are partitions in a transaction that this broker coordinates?"""
        if code := self._coordinator.refusal(name):
            return dict.fromkeys(partitions, code)
        return dict(self._machine.verify(name, producer_id, epoch, partitions))

    def add_offsets(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        return later(self._add_offsets(header, request))

    async def _add_offsets(self, header: p.RequestHeader, request: Any) -> Answer:
        try:
            tp = await self._group_partition(request.group_id)
        except KdirectError as e:
            explain(e, f"the topic {OFFSETS_TOPIC}")
            code = int(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        else:
            name, pid, epoch = (
                request.transactional_id, request.producer_id, request.producer_epoch
            )  # fmt: skip
            # The second protocol does without this request: its client knows the first one.
            code = (await self.add(name, pid, epoch, [tp], 0)).code
        code = _told("AddOffsetsToTxn", header.api_version, code)
        return respond(header, p.AddOffsetsToTxnResponse, error_code=code)

    # -- the end -----------------------------------------------------------------------------------

    def end_transaction(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        name, epoch_bumps = request.transactional_id, header.api_version >= BUMPS_EPOCH
        found = self._coordinator.ask_nowait(
            name,
            lambda new_id: self._machine.end(
                name,
                request.producer_id,
                request.producer_epoch,
                request.committed,
                EPOCH_BUMPS if epoch_bumps else 0,
                self._environment.time_ms(),
                new_id,
            ),
        )
        return _ended(header, found) if isinstance(found, Reply) else later(_end(header, found))

    def write_markers(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        return later(self._write_markers(header, request))

    async def _write_markers(self, header: p.RequestHeader, request: Any) -> Answer:
        # All of them in one step of the event loop, once each has room: they may be one group.
        wanted: dict[TopicPartition, list[tuple[Markers, int]]] = {}
        asked: list[tuple[Markers, list[TopicPartition]]] = []
        for row in request.markers:
            tps = _partitions(row.topics, "partition_indexes")
            markers = Markers(
                "", row.producer_id, row.producer_epoch, row.transaction_result, frozenset(tps)
            )
            asked.append((markers, tps))
            for tp in tps:
                wanted.setdefault(tp, []).append((markers, row.coordinator_epoch))
        await self._marker_groups.make_ready({tp: len(of) for tp, of in wanted.items()})
        told = {tp: self._marker_groups.append(tp, of) for tp, of in wanted.items()}
        rows = []
        for markers, tps in asked:
            codes = await asyncio.gather(*(asyncio.shield(told[tp][markers]) for tp in tps))
            topics: dict[str, list[dict[str, int]]] = {}
            for tp, code in zip(tps, codes, strict=True):
                found = {"partition_index": tp.partition, "error_code": code}
                topics.setdefault(tp.topic, []).append(found)
            rows.append(
                {
                    "producer_id": markers.producer_id,
                    "topics": [{"name": n, "partitions": found} for n, found in topics.items()],
                }
            )
        return respond(header, p.WriteTxnMarkersResponse, markers=rows)

    # -- descriptions ------------------------------------------------------------------------------

    def describe_transactions(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        rows = [self._description(name) for name in request.transactional_ids]
        return respond(header, p.DescribeTransactionsResponse, transaction_states=rows)

    def _description(self, name: str) -> dict[str, Any]:
        row: dict[str, Any] = {
            "transactional_id": name,
            "transaction_state": "",
            "producer_id": 0,
            "producer_epoch": 0,
            "topics": [],
        }
        code = self._coordinator.refusal(name) if name else ErrorCode.INVALID_REQUEST
        entry = self._machine.entries.get(name)
        if not code and (entry is None or entry.record is None):
            code = ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
        if code or entry is None or entry.record is None:
            return {**row, "error_code": code}
        record = entry.record
        topics: dict[str, list[int]] = {}
        for tp in sorted(record.partitions):
            topics.setdefault(tp.topic, []).append(tp.partition)
        return {
            **row,
            "error_code": 0,
            "transaction_state": record.state.text,
            "transaction_timeout_ms": record.timeout_ms,
            "transaction_start_time_ms": record.start_ms,
            "producer_id": record.producer_id,
            "producer_epoch": record.epoch,
            "topics": [{"topic": n, "partitions": found} for n, found in topics.items()],
        }

    def list_transactions(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        pattern = (request.transactional_id_pattern or "") if header.api_version >= 2 else ""
        code = ErrorCode.NONE
        if self._coordinator.partitions.loading:
            code = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        elif pattern and topic_patterns.problem(pattern):
            code = ErrorCode.INVALID_REGULAR_EXPRESSION
        if code:
            return respond(
                header,
                p.ListTransactionsResponse,
                error_code=code,
                unknown_state_filters=[],
                transaction_states=[],
            )
        states = {state.text for state in State}
        wanted, ids = set(request.state_filters), set(request.producer_id_filters)
        longer_than = request.duration_filter if header.api_version >= 1 else -1
        now = self._environment.time_ms()
        entries = self._machine.entries
        names = topic_patterns.matching(pattern, entries) if pattern else entries
        rows = [
            {
                "transactional_id": name,
                "producer_id": entry.record.producer_id,
                "transaction_state": entry.record.state.text,
            }
            for name, entry in entries.items()
            if entry.record is not None
            and name in names
            and (not ids or entry.record.producer_id in ids)
            and (not wanted or entry.record.state.text in wanted)
            and (longer_than < 0 or now - entry.record.start_ms > longer_than)
        ]
        return respond(
            header,
            p.ListTransactionsResponse,
            error_code=0,
            unknown_state_filters=sorted(wanted - states),
            transaction_states=rows,
        )

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        """(API name, handler, whether later requests of the connection wait for its answer)."""
        return (
            ("InitProducerId", self.init_producer_id, True),
            ("AddPartitionsToTxn", self.add_partitions, True),
            ("AddOffsetsToTxn", self.add_offsets, True),
            ("EndTxn", self.end_transaction, True),
            ("WriteTxnMarkers", self.write_markers, False),
            ("DescribeTransactions", self.describe_transactions, True),
            ("ListTransactions", self.list_transactions, True),
        )


def _initialized(header: p.RequestHeader, reply: Reply) -> Answer:
    return respond(
        header,
        p.InitProducerIdResponse,
        error_code=_told("InitProducerId", header.api_version, reply.code),
        producer_id=reply.producer_id,
        producer_epoch=reply.epoch,
    )


def _ended(header: p.RequestHeader, reply: Reply) -> Answer:
    version, code = header.api_version, _told("EndTxn", header.api_version, reply.code)
    if version >= end_transaction.FIRST_VERSION:
        body = end_transaction.response_body(version, code, reply.producer_id, reply.epoch)
        return Answer([body])
    return respond(
        header,
        p.EndTxnResponse,
        error_code=code,
        producer_id=reply.producer_id,
        producer_epoch=reply.epoch,
    )


async def _end(header: p.RequestHeader, reply: Awaitable[Reply]) -> Answer:
    return _ended(header, await reply)


def _told(api: str, version: int, code: int) -> int:
    """The code in the words of a version."""
    if code == ErrorCode.PRODUCER_FENCED and version < KNOWS_FENCED[api]:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    return code


def _partitions(topics: Any, field: str = "partitions") -> list[TopicPartition]:
    found = [TopicPartition(t.name, i) for t in topics for i in getattr(t, field)]
    return list(dict.fromkeys(found))


def _topic_rows(codes: Mapping[TopicPartition, int]) -> list[dict[str, Any]]:
    topics: dict[str, list[dict[str, int]]] = {}
    for tp, code in codes.items():
        row = {"partition_index": tp.partition, "partition_error_code": code}
        topics.setdefault(tp.topic, []).append(row)
    return [{"name": n, "results_by_partition": rows} for n, rows in topics.items()]
