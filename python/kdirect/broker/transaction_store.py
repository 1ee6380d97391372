"""Transactional ids, kept in ``__transaction_state``.

Law of the room: owns the table of what is in the log, and knows what its records mean.  What they
lead to is decided by `kdirect.broker.transactions`; how a table is kept in a topic is the business
of `kdirect.broker.state_topic`: the log first, memory then.

Threads: called on the event loop.  `open` and `load_partition` are file work, and called before the
broker serves; `read_partition` is file work, and touches nothing that others use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from kdirect.broker.appends import Appends
from kdirect.broker.state_replication import StateReplication
from kdirect.broker.state_topic import COMPACTED, Row, StateTopic, one_batch
from kdirect.broker.topics import TRANSACTIONS_TOPIC, Registry, Topic
from kdirect.errors import BatchTooLargeError
from kdirect.format import transaction_records as records
from kdirect.format.attempt_records import attempt_id
from kdirect.format.group_records import partition_of
from kdirect.format.plain_batch import encode_records
from kdirect.format.transaction_records import TransactionRecord
from kdirect.log.partition import Partition

# A commit of many attempts is one record batch, of some 350 bytes for each of them and what their
# partitions take: enough for a job of twenty thousand tasks.
COMMIT_BYTES = 16 << 20


class LoadedTransaction(NamedTuple):
    """A transactional id as it was last written to the log."""

    name: str
    record: TransactionRecord


@dataclass(slots=True)
class TransactionTable:
    """What records of ``__transaction_state`` say, of one partition or of several."""

    records: dict[str, TransactionRecord] = field(default_factory=dict)

    def apply(self, key: bytes | None, value: bytes | None) -> None:
        """Take one record.  FormatError."""
        name = None if key is None else records.parse_transaction_key(key)
        if name is None:
            return
        if value is None:
            self.records.pop(name, None)
        else:
            self.records[name] = records.parse_transaction_value(value)


class TransactionStore:
    """The transactional ids that this broker coordinates.  `config` maps broker properties to
    values; `admin(work)` runs work that changes topics, on the thread for it."""

    def __init__(
        self,
        topics: Registry,
        config: Mapping[str, Any],
        appends: Appends,
        admin: Callable[..., Coroutine[Any, Any, Any]],
    ) -> None:
        segment_bytes = config["transaction.state.log.segment.bytes"]
        self._state = StateTopic(
            TRANSACTIONS_TOPIC,
            self,
            what="the states of transactions",
            partitions=config["transaction.state.log.num.partitions"],
            configs={
                **COMPACTED,
                "compression.type": "uncompressed",
                "max.message.bytes": str(
                    max(config["message.max.bytes"], min(COMMIT_BYTES, segment_bytes))
                ),
                "segment.bytes": str(segment_bytes),
                "unclean.leader.election.enable": "false",
            },
            topics=topics,
            appends=appends,
            admin=admin,
        )
        self._table = TransactionTable()
        self._count = config["transaction.state.log.num.partitions"]
        self._min_in_sync = config["transaction.state.log.min.isr"]

    def join_cluster(self, replication: StateReplication) -> None:
        """From now on changes are committed by replicas.  Before anything is loaded."""
        self._state.replication = replication

    @property
    def own_configs(self) -> Mapping[str, str]:
        """Those of them that do not depend on the cluster."""
        return self._state.configs

    @property
    def topic_configs(self) -> Mapping[str, str]:
        """Properties of the topic, for whoever creates it in a cluster."""
        return {**self.own_configs, "min.insync.replicas": str(self._min_in_sync)}

    def create_topic(self) -> Topic:
        """``__transaction_state``, created when it is first asked for.  File work."""
        return self._state.create()

    # -- loading -----------------------------------------------------------------------------------

    def open(self) -> int:
        """How many partitions there are to be loaded; 0: there is no topic.  File work."""
        return self._state.partition_count if self._state.open() else 0

    def load_partition(self, index: int) -> list[LoadedTransaction]:
        """Read one partition back.  CorruptLogError names a record that cannot be read."""
        self._state.load(index)
        return self._loaded(index)

    def read_partition(
        self, partition: Partition, is_wanted: Callable[[], bool]
    ) -> TransactionTable:
        """What the records of one partition say, for `install`.  It stops early once nobody wants
        it.  CorruptLogError as `load_partition`."""
        table = TransactionTable()
        self._state.read(partition, table.apply, is_wanted)
        return table

    def install(self, partition: Partition, table: TransactionTable) -> list[LoadedTransaction]:
        """This broker coordinates the ids of one partition: take what was read of it."""
        self._table.records.update(table.records)
        self._state.install(partition)
        return self._loaded(partition.topic_partition.partition)

    def _loaded(self, index: int) -> list[LoadedTransaction]:
        found = self._table.records.items()
        return [LoadedTransaction(*item) for item in found if self.index_of(item[0]) == index]

    def unload_partition(self, index: int) -> None:
        """Forget, in memory, the ids that one partition keeps: another broker coordinates them."""
        self._state.unload(index)

    @property
    def partition_count(self) -> int:
        """0 while there is no topic."""
        return self._state.partition_count

    def attempt_id(self, identity: str, slot: int) -> str:
        """The transactional id of an attempt, which the partition of its identity keeps."""
        self.index_of(identity)
        return attempt_id(identity, slot, self._count)

    def index_of(self, name: str) -> int:
        """The partition that keeps a transactional id, in the topic that there is, or was last, or
        that will be made."""
        self._count = self._state.partition_count or self._count
        return partition_of(name, self._count)

    # -- the table ---------------------------------------------------------------------------------

    def apply(self, key: bytes | None, value: bytes | None) -> None:
        """See `kdirect.broker.state_topic.Table`."""
        self._table.apply(key, value)

    def forget_partition(self, index: int) -> None:
        """See `kdirect.broker.state_topic.Table`."""
        found = self._table.records
        for name in [name for name in found if self.index_of(name) == index]:
            del found[name]

    # -- changing ----------------------------------------------------------------------------------

    def save(self, name: str, record: TransactionRecord | None) -> asyncio.Future[Partition | None]:
        """Write what a transactional id is from now on, None: nothing is known of it; see
        `StateTopic.change`.  FormatError: a text is too long."""
        value = None if record is None else records.transaction_value(record)
        rows: list[Row] = [(records.transaction_key(name), value)]

        def remember() -> None:
            if record is None:
                self._table.records.pop(name, None)
            else:
                self._table.records[name] = record

        return self._state.change(partial(partition_of, name), rows, remember)

    def save_many(
        self, changed: Sequence[tuple[str, TransactionRecord]]
    ) -> asyncio.Future[Partition | None]:
        """The same of several ids that one partition keeps, as one record batch: all of it is in
        the log, or nothing.  FormatError as `save`; BatchTooLargeError, which is one, too."""
        rows = [
            (records.transaction_key(name), records.transaction_value(record))
            for name, record in changed
        ]
        index_of = partial(partition_of, changed[0][0])
        if count := self._state.partition_count:
            most = self._state.partition(index_of(count)).kernel.max_message_bytes
            size = len(encode_records(rows, 0))
            if size > most:
                raise BatchTooLargeError(
                    f"{len(rows)} records of {TRANSACTIONS_TOPIC} have {size} bytes as one batch;"
                    f" {most} are allowed",
                    hint=f"raise max.message.bytes of {TRANSACTIONS_TOPIC}, or write with fewer"
                    " tasks",
                )

        def remember() -> None:
            self._table.records.update(changed)

        return self._state.change(index_of, [*rows], remember, encode=one_batch)
