"""What clients of a round of failure have noted, and the judgement of it: what was acknowledged and
what was seen is compared with the log as it is in the end, and the files of replicas with each
other."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import kdirect
from kdirect.format import layout


@dataclass
class Notes:
    """What clients have noted.  Values are ``producer:number``; a producer counts for each
    partition by itself.  Those of VerifiableProducer are ``producer.number``, and it counts over
    all partitions.

    `sent`: (producer, partition) -> how many; `progress`: partition -> how many were acknowledged;
    `acknowledged`: (partition, offset) -> value;
    `failed`: values with the error; `seen`: (partition, offset) -> value, as a consumer read them
    while faults went on; `final`: partition -> (offset, value) of its whole log in the end."""

    sent: Counter[tuple[int, int]] = field(default_factory=Counter)
    progress: Counter[int] = field(default_factory=Counter)
    acknowledged: dict[tuple[int, int], bytes] = field(default_factory=dict)
    failed: list[tuple[bytes, str]] = field(default_factory=list)
    seen: dict[tuple[int, int], bytes] = field(default_factory=dict)
    contradictions: list[str] = field(default_factory=list)
    final: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)


def judge(notes: Notes, idempotent: bool) -> list[str]:
    """What is wrong, in sentences; empty where nothing is."""
    wrong = list(notes.contradictions)
    logs = {partition: dict(records) for partition, records in notes.final.items()}
    for what, noted in (("acknowledged", notes.acknowledged), ("read", notes.seen)):
        for (partition, offset), value in noted.items():
            there = logs.get(partition, {}).get(offset)
            if there != value:
                wrong.append(
                    f"{value!r} was {what} at {partition}@{offset}, where"
                    f" {'nothing' if there is None else repr(there)} is now"
                )
    for partition, records in notes.final.items():
        wrong += _order(partition, records, idempotent)
        offsets = [offset for offset, _ in records]
        if offsets != list(range(len(offsets))):
            wrong.append(f"the offsets of partition {partition} have gaps or repetitions")
        if not any(number == partition for number, _ in notes.seen):
            wrong.append(f"the consumer has read nothing of partition {partition}")
    wrong += _missing(notes)
    wrong += [f"{value!r} could not be delivered: {why}" for value, why in notes.failed]
    return wrong


def _missing(notes: Notes) -> list[str]:
    """Each record that was sent is there: the end of a round waits for all acknowledgements, and
    those of repeated records may name no offset."""
    wrong = []
    for (producer, partition), count in notes.sent.items():
        there = {value for _, value in notes.final.get(partition, ())}
        gone = [n for n in range(count) if b"%d:%d" % (producer, n) not in there]
        if gone:
            wrong.append(
                f"{len(gone)} of the {count} records of producer {producer} are not in partition"
                f" {partition}, the first is number {gone[0]}"
            )
    return wrong


def _order(partition: int, records: list[tuple[int, bytes]], idempotent: bool) -> list[str]:
    """Each idempotent producer's records are there once, in the order in which they were sent.  A
    plain one may repeat records, and send what came after them to a new leader meanwhile."""
    wrong = []
    last: dict[bytes, int] = {}
    for offset, value in records if idempotent else ():
        counts_over_all = b"." in value
        producer, _, text = value.partition(b"." if counts_over_all else b":")
        number, before = int(text), last.get(producer, -1)
        if number <= before:
            wrong.append(f"{value!r} at {partition}@{offset} comes after number {before}")
        if number > before + 1 and not counts_over_all:
            wrong.append(f"{value!r} at {partition}@{offset} comes before those sent before it")
        last[producer] = number
    return wrong


# -- logs on disk ----------------------------------------------------------------------------------


def batches(directory: Path) -> list[tuple[int, str]]:
    """(base offset, digest) of each batch in the files of one replica."""
    found = []
    for path in sorted(directory.glob("*.log")):
        data = path.read_bytes()
        at = 0
        while at + layout.BATCH_HEADER_BYTES <= len(data):
            base = int.from_bytes(data[at : at + 8], "big")
            length = int.from_bytes(data[at + 8 : at + 12], "big") + 12
            if length <= 12 or at + length > len(data):
                break
            found.append((base, hashlib.sha256(data[at : at + length]).hexdigest()))
            at += length
    return found


def differing_replicas(cluster: kdirect.Cluster, topic: str, partitions: int) -> list[str]:
    """Where the files of the replicas do not hold the same batches.  To be asked when every replica
    is in sync and nothing is produced."""
    wrong = []
    for number in range(partitions):
        logs = {
            node_id: batches(cluster.log_dirs(node_id)[0] / f"{topic}-{number}")
            for node_id in cluster.node_ids
        }
        first, *others = cluster.node_ids
        for other in others:
            for ours, theirs in zip(logs[first], logs[other], strict=False):
                if ours != theirs:
                    wrong.append(
                        f"{topic}-{number}: broker {first} has {ours} where broker {other} has"
                        f" {theirs}"
                    )
                    break
            else:
                if len(logs[first]) != len(logs[other]):
                    wrong.append(
                        f"{topic}-{number}: {len(logs[first])} batches at broker {first},"
                        f" {len(logs[other])} at broker {other}"
                    )
    return wrong
