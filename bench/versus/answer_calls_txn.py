"""What is asked of both brokers about transactions: of ids that they know, and that they do not.

Owns: the calls of transactional producers and of what looks at them, in an order that takes one
transactional id through a committed and an aborted transaction; what each API refuses is asked
while it can be refused.  The topic is that of `versus.answer_calls`, whose calls come before."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from versus.answer_calls import Call, Told, one

T = "in-transactions"  # a topic of two partitions
ID = "tx"
OLD, FUTURE = -1, 1  # epochs, counted from the producer's own
GROUP = "tg"


def _keep_topic(answer: Any, told: Told) -> None:
    told["transactions_topic_id"] = answer.topics[0].topic_id


def _keep_producer(answer: Any, told: Told) -> None:
    told["producer_id"], told["epoch"] = answer.producer_id, answer.producer_epoch


def _producer(told: Told) -> Any:
    return told["producer_id"]


def _another(told: Told) -> Any:
    return told["producer_id"] + 100_000


def _epoch(more: int = 0) -> Callable[[Told], Any]:
    return lambda told: told["epoch"] + more


def _init(name: str | None, timeout: int = 60_000, **more: Any) -> dict[str, Any]:
    return {"transactional_id": name, "transaction_timeout_ms": timeout, **more}


def _of(name: str = ID, producer: Any = _producer, epoch: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "transactional_id": name,
        "producer_id": producer,
        "producer_epoch": _epoch(epoch),
        **more,
    }


def _added(name: str = ID, producer: Any = _producer, epoch: int = 0, *, topics: Any) -> Any:
    """AddPartitionsToTxn as clients send it."""
    rows = [{"name": topic, "partitions": list(partitions)} for topic, *partitions in topics]
    return {
        "v3_and_below_transactional_id": name,
        "v3_and_below_producer_id": producer,
        "v3_and_below_producer_epoch": _epoch(epoch),
        "v3_and_below_topics": rows,
    }


def _verified(name: str = ID, producer: Any = _producer, epoch: int = 0, *, topics: Any) -> Any:
    """AddPartitionsToTxn as brokers send it, to look whether partitions are in a transaction."""
    rows = [{"name": topic, "partitions": list(partitions)} for topic, *partitions in topics]
    of = {**_of(name, producer, epoch), "verify_only": True, "topics": rows}
    return {"transactions": [of]}


def _batch(sequence: int, epoch: int = 0, producer: Any = _producer) -> Callable[[Told], bytes]:
    """A transactional batch of one record."""

    def made(told: Told) -> bytes:
        from kafka.record.default_records import DefaultRecordBatchBuilder

        builder = DefaultRecordBatchBuilder(
            magic=2,
            compression_type=0,
            is_transactional=1,
            producer_id=producer(told),
            producer_epoch=told["epoch"] + epoch,
            base_sequence=sequence,
            batch_size=99999,
        )
        # The time is now: Kafka would begin a segment with the first marker otherwise.
        now = int(time.time() * 1000)
        builder.append(0, timestamp=now, key=None, value=b"x", headers=[])
        return bytes(builder.build())

    return made


def _written(partition: int, data: Any, name: str | None = ID) -> dict[str, Any]:
    rows = [{"index": partition, "records": data}]
    topic = {
        "name": T,
        "topic_id": lambda told: told["transactions_topic_id"],
        "partition_data": rows,
    }
    return {"transactional_id": name, "acks": -1, "timeout_ms": 5000, "topic_data": [topic]}


def _committed(*who: Any, topic: str = T, partition: int = 0, **more: Any) -> dict[str, Any]:
    row = {"partition_index": partition, "committed_offset": 1, "committed_metadata": ""}
    group = more.pop("group_id", GROUP)
    return {**_of(*who), "group_id": group, "topics": one(topic, "partitions", **row), **more}


def _marker(producer: Any, epoch: Any, topic: str = T, partition: int = 0, **more: Any) -> Any:
    row = {
        "producer_id": producer,
        "producer_epoch": epoch,
        "transaction_result": True,
        "topics": [{"name": topic, "partition_indexes": [partition]}],
        "coordinator_epoch": 0,
        **more,
    }
    return {"markers": [row]}


_WHO: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("unknown", ("nobody",)),
    ("no name", ("",)),
    ("another producer", (ID, _another)),
    ("an old epoch", (ID, _producer, OLD)),
    ("an epoch of the future", (ID, _producer, FUTURE)),
)

_BEGIN = (
    Call(
        "CreateTopics",
        "of transactions",
        {
            "topics": [
                {
                    "name": T,
                    "num_partitions": 2,
                    "replication_factor": 1,
                    "assignments": [],
                    "configs": [],
                }
            ],
            "timeout_ms": 10_000,
        },
        7,
        7,
    ),
    Call("Metadata", "of transactions", {"topics": [{"name": T}]}, 12, 12, keep=_keep_topic),
    *(
        Call(
            "FindCoordinator",
            f"of a transaction, {case}",
            {"key": key, "key_type": 1, "coordinator_keys": [key]},
            low=1,
        )
        for case, key in (("named", ID), ("no name", ""))
    ),
    *(
        Call("InitProducerId", case, fields)
        for case, fields in (
            ("idempotent", _init(None, 1000)),
            ("idempotent, no time", _init(None, 0)),
            ("empty id", _init("", 99)),
            ("transactional", _init("tx-{v}")),
            ("transactional, again", _init("tx-{v}")),
            ("no time", _init("tx-{v}", 0)),
            ("negative time", _init("tx-{v}", -1)),
            ("too much time", _init("tx-{v}", 1 << 30)),
        )
    ),
    *(
        Call("InitProducerId", case, _init(name, producer_id=producer, producer_epoch=epoch), low=3)
        for case, name, producer, epoch in (
            ("another producer", "tx-{v}", 1_000_000, 0),
            ("a producer of a new id", "new-tx-{v}", 1_000_000, 3),
            ("an epoch of nobody", "tx-{v}", -1, 3),
            ("a producer of no epoch", "tx-{v}", 5, -1),
            ("idempotent, of a producer", None, 5, 1),
        )
    ),
    Call("InitProducerId", "the test's", _init(ID), 5, 5),
    Call("InitProducerId", "the test's", _init(ID), 5, 5, keep=_keep_producer),
)

_REFUSED = (
    *(
        Call("AddPartitionsToTxn", case, _added(*who, topics=[(T, 0)]), high=3)
        for case, who in _WHO
    ),
    *(Call("AddOffsetsToTxn", case, {**_of(*who), "group_id": GROUP}) for case, who in _WHO),
    *(Call("EndTxn", case, {**_of(*who), "committed": True}) for case, who in _WHO),
    *(Call("TxnOffsetCommit", case, _committed(*who)) for case, who in _WHO),
    Call("AddPartitionsToTxn", "unknown topic", _added(topics=[(T, 0), ("nope", 0)]), high=3),
    Call("AddPartitionsToTxn", "unknown partition", _added(topics=[(T, 0, 9)]), high=3),
    Call("EndTxn", "before it began", {**_of(), "committed": True}, high=4),
    Call("DescribeTransactions", "before it began", {"transactional_ids": [ID]}),
    Call("Produce", "before it began", _written(0, _batch(0)), 9, 11),
    Call("AddOffsetsToTxn", "no group", {**_of(), "group_id": ""}),  # begins a transaction
    Call("AddPartitionsToTxn", "none", _added(topics=[]), high=3),
)

_OPEN = (
    Call("AddPartitionsToTxn", "one", _added(topics=[(T, 0)]), high=3),
    Call("AddPartitionsToTxn", "there already", _added(topics=[(T, 0)]), high=3),
    *(
        Call("AddPartitionsToTxn", f"verified, {case}", _verified(*who, topics=[(T, 0)]), low=4)
        for case, who in (("there", ()), *_WHO)
    ),
    Call("AddPartitionsToTxn", "verified, not there", _verified(topics=[(T, 1)]), low=4),
    Call("AddPartitionsToTxn", "verified, unknown topic", _verified(topics=[("nope", 1)]), low=4),
    Call("AddPartitionsToTxn", "verified, nothing", {"transactions": []}, low=4),
    Call("Produce", "in a transaction", _written(0, _batch(0)), 9, 9),
    Call("Produce", "the same again", _written(0, _batch(0)), 9, 11),
    Call("Produce", "a gap in sequence", _written(0, _batch(7)), 9, 11),
    Call("Produce", "an old epoch", _written(0, _batch(1, OLD)), 9, 11),
    Call("Produce", "an epoch of the future", _written(0, _batch(0, FUTURE)), 9, 11),
    Call("Produce", "not in the transaction", _written(1, _batch(0)), 9, 11),
    Call("Produce", "another producer", _written(0, _batch(0, 0, _another)), 9, 11),
    Call("Produce", "no transactional id", _written(0, _batch(1), None), 9, 11),
    Call("AddOffsetsToTxn", "one", {**_of(), "group_id": GROUP}),
    Call("TxnOffsetCommit", "one", _committed()),
    Call("TxnOffsetCommit", "unknown topic", _committed(topic="nope")),
    Call("TxnOffsetCommit", "unknown partition", _committed(partition=9)),
    Call("TxnOffsetCommit", "no group", _committed(group_id="")),
    Call("TxnOffsetCommit", "a generation", _committed(generation_id=3, member_id="m"), low=3),
    Call("TxnOffsetCommit", "a member", _committed(member_id="m"), low=3),
    Call(
        "TxnOffsetCommit",
        "a long text",
        {
            **_committed(),
            "topics": one(
                T,
                "partitions",
                partition_index=0,
                committed_offset=1,
                committed_metadata="x" * 5000,
            ),
        },
    ),
    Call("DescribeTransactions", "open", {"transactional_ids": [ID]}),
    Call("DescribeTransactions", "twice", {"transactional_ids": [ID, ID]}),
    Call("DescribeTransactions", "unknown", {"transactional_ids": ["nobody"]}),
    Call("DescribeTransactions", "no name", {"transactional_ids": [""]}),
    Call("DescribeTransactions", "nothing", {"transactional_ids": []}),
    *(
        Call(
            "ListTransactions",
            case,
            {"state_filters": [], "producer_id_filters": [], **fields},
            low,
        )
        for case, fields, low in (
            ("all", {}, 0),
            ("open", {"state_filters": ["Ongoing"]}, 0),
            ("no state", {"state_filters": ["x", "Ongoing"]}, 0),
            ("of a producer", {"producer_id_filters": [_producer]}, 0),
            ("of no producer", {"producer_id_filters": [-1]}, 0),
            ("of an hour", {"duration_filter": 3_600_000}, 1),
            ("of some time", {"duration_filter": 0}, 1),
            ("by pattern", {"transactional_id_pattern": "t.$"}, 2),
            ("by a bad pattern", {"transactional_id_pattern": "("}, 2),
            ("by no pattern", {"transactional_id_pattern": ""}, 2),
        )
    ),
    Call("DescribeProducers", "open", {"topics": [{"name": T, "partition_indexes": [0]}]}),
    Call("DescribeProducers", "none", {"topics": [{"name": T, "partition_indexes": [1]}]}),
    Call("DescribeProducers", "unknown", {"topics": [{"name": "nope", "partition_indexes": [0]}]}),
    Call(
        "DescribeProducers",
        "unknown partition",
        {"topics": [{"name": T, "partition_indexes": [9]}]},
    ),
    Call("DescribeProducers", "nothing", {"topics": []}),
)


def _stable(group: str) -> dict[str, Any]:
    topics = [{"name": T, "partition_indexes": [0]}]
    row = {"group_id": group, "member_id": None, "member_epoch": -1, "topics": topics}
    return {"group_id": group, "topics": topics, "groups": [row], "require_stable": True}


def _read(isolation: int) -> dict[str, Any]:
    row = {
        "partition": 0,
        "fetch_offset": 0,
        "current_leader_epoch": -1,
        "last_fetched_epoch": -1,
        "log_start_offset": -1,
        "partition_max_bytes": 1 << 20,
    }
    return {
        "replica_id": -1,
        "max_wait_ms": 1,
        "min_bytes": 0,
        "max_bytes": 1 << 20,
        "isolation_level": isolation,
        "session_id": 0,
        "session_epoch": -1,
        "topics": [{"topic": T, "partitions": [row]}],
        "forgotten_topics_data": [],
        "rack_id": "",
    }


def _ends(isolation: int) -> dict[str, Any]:
    row = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": -1}
    topics = [{"name": T, "partitions": [row]}]
    return {"replica_id": -1, "isolation_level": isolation, "topics": topics}


def _looks(when: str) -> tuple[Call, ...]:
    """What readers see."""
    return (
        *(Call("Fetch", f"isolation {level}, {when}", _read(level), 4, 12) for level in (0, 1)),
        *(Call("ListOffsets", f"isolation {level}, {when}", _ends(level), 2) for level in (0, 1)),
        Call("OffsetFetch", f"stable, {when}", _stable(GROUP), 7),
        Call("OffsetFetch", f"not stable, {when}", {**_stable(GROUP), "require_stable": False}, 7),
    )


_ENDS = (
    Call("EndTxn", "commit", {**_of(), "committed": True}, 0, 0),
    Call("EndTxn", "commit again", {**_of(), "committed": True}, 0, 4, after_s=0.5),
    Call("EndTxn", "abort what is committed", {**_of(), "committed": False}, 0, 4),
    *_looks("committed"),
    Call("DescribeTransactions", "committed", {"transactional_ids": [ID]}),
    Call("DescribeProducers", "committed", {"topics": [{"name": T, "partition_indexes": [0]}]}),
    # The second protocol of KIP-890: partitions are added as they are written to, and each end has
    # a new epoch.
    Call("InitProducerId", "of the second protocol", _init(ID), 5, 5, keep=_keep_producer),
    Call("EndTxn", "commit of nothing", {**_of(), "committed": True}, 5, 5),
    Call("EndTxn", "abort of nothing", {**_of(), "committed": False}, 5, 5, keep=_keep_producer),
    Call("Produce", "adds its partition", _written(0, _batch(0)), 12, 12),
    Call("Produce", "the same again, second protocol", _written(0, _batch(0)), 12),
    Call("Produce", "a gap in sequence, second protocol", _written(0, _batch(7)), 12),
    Call("Produce", "an old epoch, second protocol", _written(0, _batch(1, OLD)), 12),
    Call("Produce", "an epoch of the future, second protocol", _written(0, _batch(0, FUTURE)), 12),
    Call("Produce", "another producer, second protocol", _written(0, _batch(0, 0, _another)), 12),
    Call("TxnOffsetCommit", "adds its group", _committed(group_id="tg-2"), 5),
    Call("DescribeTransactions", "of the second protocol", {"transactional_ids": [ID]}),
    *_looks("open"),
    *(
        Call("EndTxn", f"second protocol, {case}", {**_of(*who), "committed": False}, 5)
        for case, who in _WHO
    ),
    Call("EndTxn", "abort", {**_of(), "committed": False}, 5, 5, keep=_keep_producer),
    Call("EndTxn", "abort again", {**_of(epoch=OLD), "committed": False}, 5, 5, after_s=0.5),
    Call("EndTxn", "commit what is aborted", {**_of(epoch=OLD), "committed": True}, 5, 5),
    Call("Produce", "after its end", _written(0, _batch(1, OLD)), 12),
    *_looks("aborted"),
    Call("DescribeProducers", "aborted", {"topics": [{"name": T, "partition_indexes": [0]}]}),
    Call(
        "ListTransactions",
        "aborted",
        {"state_filters": ["CompleteAbort"], "producer_id_filters": []},
    ),
)

_MARKERS = (
    Call("WriteTxnMarkers", "none", {"markers": []}),
    Call("WriteTxnMarkers", "unknown topic", _marker(_producer, _epoch(), "nope")),
    Call("WriteTxnMarkers", "unknown partition", _marker(_producer, _epoch(), T, 9)),
    Call("WriteTxnMarkers", "an old epoch", _marker(_producer, _epoch(-2))),
    Call("WriteTxnMarkers", "an unknown producer", _marker(_another, 0, T, 1)),
    Call(
        "WriteTxnMarkers", "an old coordinator", _marker(_producer, _epoch(), coordinator_epoch=-2)
    ),
)

TRANSACTIONS = (*_BEGIN, *_REFUSED, *_OPEN, *_ENDS, *_MARKERS)
