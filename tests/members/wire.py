"""Requests to one broker of several, version by version, as clients of Kafka send them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kdirect.format import protocol as p
from kdirect.format.batch import encode_single_bytes
from kdirect.format.schema import build
from kdirect.model import TopicPartition
from tests.broker.conftest import Raw

RECORD = encode_single_bytes(b"k", b"v")


def ask(broker: Any, message: Any, version: int) -> Any:
    """The answer of this broker, on a connection of its own."""
    connection = Raw(broker.bootstrap_servers, timeout_s=30)
    try:
        return connection.call(message, version)
    finally:
        connection.close()


def create(
    broker: Any,
    name: str,
    *,
    partitions: int = -1,
    factor: int = -1,
    assignment: Mapping[int, Iterable[int]] | None = None,
    validate_only: bool = False,
    **configs: Any,
) -> Any:
    """The row of CreateTopics' answer."""
    topic = {
        "name": name,
        "num_partitions": partitions,
        "replication_factor": factor,
        "assignments": [
            {"partition_index": index, "broker_ids": list(brokers)}
            for index, brokers in (assignment or {}).items()
        ],
        "configs": [
            {"name": key.replace("_", "."), "value": str(value)} for key, value in configs.items()
        ],
    }
    request = build(
        p.CreateTopicsRequest, topics=[topic], timeout_ms=20_000, validate_only=validate_only
    )
    return ask(broker, request, 7).topics[0]


def metadata(broker: Any, topics: list[str] | None = None, version: int = 12) -> Any:
    names = None if topics is None else [{"topic_id": None, "name": name} for name in topics]
    request = build(p.MetadataRequest, topics=names, allow_auto_topic_creation=False)
    return ask(broker, request, version)


def partition_row(broker: Any, tp: TopicPartition) -> Any:
    """Metadata's row of one partition."""
    rows = metadata(broker, [tp.topic]).topics[0].partitions
    return next(row for row in rows if row.partition_index == tp.partition)


def produce(
    broker: Any,
    tp: TopicPartition,
    records: bytes = RECORD,
    *,
    acks: int = -1,
    version: int = 10,
    timeout_ms: int = 10_000,
    topic_id: Any = None,
) -> Any:
    """(the partition's row, the whole answer) of Produce."""
    request = produce_request(tp, records, acks=acks, timeout_ms=timeout_ms)
    request.topic_data[0].topic_id = topic_id
    answer = ask(broker, request, version)
    return answer.responses[0].partition_responses[0], answer


def produce_request(
    tp: TopicPartition,
    records: bytes = RECORD,
    *,
    acks: int = -1,
    timeout_ms: int = 10_000,
    transactional_id: str | None = None,
) -> Any:
    data = [{"index": tp.partition, "records": records}]
    return build(
        p.ProduceRequest,
        transactional_id=transactional_id,
        acks=acks,
        timeout_ms=timeout_ms,
        topic_data=[{"name": tp.topic, "partition_data": data}],
    )


def fetch(
    broker: Any,
    tp: TopicPartition,
    offset: int = 0,
    *,
    epoch: int = -1,
    last_epoch: int = -1,
    rack: str = "",
    version: int = 12,
    max_wait_ms: int = 0,
) -> Any:
    """The partition's row of Fetch."""
    request = fetch_request(
        tp, offset, epoch=epoch, last_epoch=last_epoch, rack=rack, max_wait_ms=max_wait_ms
    )
    return ask(broker, request, version).responses[0].partitions[0]


def fetch_by_id(broker: Any, tp: TopicPartition, topic_id: Any, *, version: int = 17) -> Any:
    """(the partition's row, the whole answer) of a Fetch that names the topic by its id."""
    request = fetch_request(tp)
    request.topics[0].topic_id = topic_id
    answer = ask(broker, request, version)
    return answer.responses[0].partitions[0], answer


def fetch_request(
    tp: TopicPartition,
    offset: int = 0,
    *,
    epoch: int = -1,
    last_epoch: int = -1,
    rack: str = "",
    max_wait_ms: int = 0,
) -> Any:
    one = {
        "partition": tp.partition,
        "current_leader_epoch": epoch,
        "fetch_offset": offset,
        "last_fetched_epoch": last_epoch,
        "log_start_offset": -1,
        "partition_max_bytes": 1 << 20,
    }
    return build(
        p.FetchRequest,
        replica_id=-1,
        max_wait_ms=max_wait_ms,
        min_bytes=1,
        max_bytes=1 << 20,
        isolation_level=0,
        session_id=0,
        session_epoch=-1,
        topics=[{"topic": tp.topic, "partitions": [one]}],
        forgotten_topics_data=[],
        rack_id=rack,
    )


def list_offset(
    broker: Any, tp: TopicPartition, timestamp: int = -1, *, epoch: int = -1, version: int = 7
) -> Any:
    one = {
        "partition_index": tp.partition,
        "current_leader_epoch": epoch,
        "timestamp": timestamp,
    }
    request = build(
        p.ListOffsetsRequest,
        replica_id=-1,
        isolation_level=0,
        topics=[{"name": tp.topic, "partitions": [one]}],
    )
    return ask(broker, request, version).topics[0].partitions[0]


def epoch_end(broker: Any, tp: TopicPartition, epoch: int, *, current: int = -1) -> Any:
    one = {"partition": tp.partition, "current_leader_epoch": current, "leader_epoch": epoch}
    request = build(
        p.OffsetForLeaderEpochRequest,
        replica_id=-1,
        topics=[{"topic": tp.topic, "partitions": [one]}],
    )
    return ask(broker, request, 4).topics[0].partitions[0]
