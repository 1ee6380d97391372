"""Records of ``__remote_log_metadata`` and transaction indexes beside Kafka's own classes: each
side reads what the other writes, and both write the same bytes.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import uuid

import pytest

from kdirect.format.ids import encode_id
from kdirect.format.remote_metadata import (
    PartitionDeleteState,
    RemotePartitionDelete,
    RemoteSegment,
    RemoteSegmentUpdate,
    SegmentState,
    pack_record,
    parse_record,
)
from kdirect.format.segment_files import (
    AbortedTransaction,
    pack_transaction_index,
    parse_transaction_index,
)
from tests.java.conftest import Java

pytestmark = pytest.mark.slow
PARTITION = {"topic_id": uuid.uuid4(), "topic": "flights.raw_1-x", "partition": 12}
STAMP = {"broker_id": 3, "event_timestamp_ms": 1_712_345_678_901}
CUSTOMS = (None, b"", b"x", bytes(range(256)) * 2)
SEGMENT = RemoteSegment(
    **PARTITION,
    **STAMP,
    segment_id=uuid.uuid4(),
    base_offset=1 << 40,
    end_offset=(1 << 40) + 1000,
    max_timestamp_ms=1_712_345_678_000,
    leader_epochs=((0, 1 << 40),),
    size=(1 << 31) - 1,
    custom=None,
    state=SegmentState.COPY_SEGMENT_STARTED,
)
RECORDS = [
    *(
        dataclasses.replace(SEGMENT, state=state, custom=custom, txn_index_empty=empty)
        for state in SegmentState
        for custom in CUSTOMS
        for empty in (False, True)
    ),
    *(
        dataclasses.replace(
            SEGMENT, leader_epochs=tuple((3 * i, (1 << 40) + 2 * i) for i in range(count))
        )
        for count in (2, 126, 127, 128, 500)  # the length of an array takes a second byte
    ),
    dataclasses.replace(SEGMENT, topic="t" * 249, base_offset=0, end_offset=1, size=0),
    dataclasses.replace(SEGMENT, end_offset=(1 << 63) - 1, broker_id=-1, max_timestamp_ms=-1),
    *(
        RemoteSegmentUpdate(**PARTITION, **STAMP, segment_id=uuid.uuid4(), custom=c, state=s)
        for s in SegmentState
        for c in CUSTOMS
    ),
    *(RemotePartitionDelete(**PARTITION, **STAMP, state=s) for s in PartitionDeleteState),
]
KINDS = {
    RemoteSegment: "RemoteLogSegmentMetadata",
    RemoteSegmentUpdate: "RemoteLogSegmentMetadataUpdate",
    RemotePartitionDelete: "RemotePartitionDeleteMetadata",
}


@pytest.fixture(scope="module")
def broker_java(broker_jars):
    """The classes of Kafka's broker."""
    made = Java(broker_jars)
    yield made
    made.close()


def described(record) -> str:
    """The record in the JSON of Kafka's schemas."""
    partition = {
        "name": record.topic,
        "id": encode_id(record.topic_id),
        "partition": record.partition,
    }
    out = {"brokerId": record.broker_id, "eventTimestampMs": record.event_timestamp_ms}
    if isinstance(record, RemotePartitionDelete):
        out |= {"topicIdPartition": partition, "remotePartitionDeleteState": int(record.state)}
        return json.dumps(out)
    out["remoteLogSegmentId"] = {"topicIdPartition": partition, "id": encode_id(record.segment_id)}
    out["remoteLogSegmentState"] = int(record.state)
    out["customMetadata"] = record.custom and base64.b64encode(record.custom).decode()
    if record.custom == b"":
        out["customMetadata"] = ""
    if isinstance(record, RemoteSegment):
        out["startOffset"] = record.base_offset
        out["endOffset"] = record.end_offset - 1
        out["maxTimestampMs"] = record.max_timestamp_ms
        out["segmentSizeInBytes"] = record.size
        out["segmentLeaderEpochs"] = [
            {"leaderEpoch": epoch, "offset": start} for epoch, start in record.leader_epochs
        ]
        if record.txn_index_empty:
            out["txnIndexEmpty"] = True
    return json.dumps(out)


def test_records_are_kafkas(broker_java):
    jvm, remote = broker_java.gateway.jvm, broker_java.kafka.server.log.remote
    storage = remote.metadata.storage
    mapper = jvm.com.fasterxml.jackson.databind.ObjectMapper()
    serde = storage.serialization.RemoteLogMetadataSerde()
    versioned = broker_java.kafka.server.common.ApiMessageAndVersion
    for record in RECORDS:
        kind = KINDS[type(record)]
        # What Kafka makes of the same facts.
        converter = getattr(storage.generated, f"{kind}RecordJsonConverter")
        message = converter.read(mapper.readTree(described(record)), 0)
        transform = getattr(storage.serialization, f"{kind}Transform")()
        theirs = transform.fromApiMessageAndVersion(versioned(message, 0))
        written = serde.serialize(theirs)
        assert parse_record(written) == record
        # What Kafka makes of our bytes.
        ours = pack_record(record)
        assert ours == written
        read = serde.deserialize(ours)
        assert read.getClass().getSimpleName() == kind
        assert read.equals(theirs) and read.toString() == theirs.toString()
        assert serde.serialize(read) == ours


def test_transaction_indexes_are_kafkas(broker_java, tmp_path):
    jvm, log = broker_java.gateway.jvm, broker_java.kafka.storage.internals.log
    entries = [
        AbortedTransaction(1, 100, 120, 110),
        AbortedTransaction((1 << 63) - 1, 0, 121, 121),
        AbortedTransaction(7, 1 << 40, (1 << 62) + 5, 1 << 41),
    ]
    path = tmp_path / "00000000000000000100.txnindex"
    index = log.TransactionIndex(100, jvm.java.io.File(str(path)))
    for entry in entries:
        index.append(log.AbortedTxn(*entry))
    index.close()
    assert path.read_bytes() == pack_transaction_index(entries)
    assert list(parse_transaction_index(path.read_bytes())) == entries

    ours = tmp_path / "ours.txnindex"
    ours.write_bytes(pack_transaction_index(entries))
    index = log.TransactionIndex(100, jvm.java.io.File(str(ours)))
    index.sanityCheck()
    found = [
        AbortedTransaction(t.producerId(), t.firstOffset(), t.lastOffset(), t.lastStableOffset())
        for t in index.allAbortedTxns()
    ]
    index.close()
    assert found == entries
