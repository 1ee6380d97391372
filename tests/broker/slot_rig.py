"""A member of a group that writes its commit slot byte by byte."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.format.batch import crc32c
from kdirect.format.schema import build
from kdirect.model import TopicPartition
from kdirect.wire.channel import Channel
from kdirect.wire.connection import Connection
from tests.support import wait_until

RING_ENTRIES = 16


class Answered(NamedTuple):
    """One entry of the ring of acknowledgements."""

    order: int
    error: int
    flags: int


def connect(servers: str) -> Connection:
    host, _, port = servers.rpartition(":")
    return Connection(host, int(port), timeout_ms=10_000)


class SlotMember:
    """Joins a group with a connection of its own, and opens a queue pair over it."""

    def __init__(self, servers: str, group: str = "g", session_ms: int = 30_000) -> None:
        self.group = group
        self.connection = connect(servers)
        self.channel = Channel(self.connection, "shm", receives=RING_ENTRIES)
        for _ in range(RING_ENTRIES):
            self.channel.qp.post_recv(0)
        self.session_ms = session_ms
        self.member_id, self.generation = "", -1
        self.slot: Any = None
        self.sequence = self.read = 0

    def join(self, timeout_ms: int = 10_000) -> None:
        """Join, alone or as the leader, and sync."""
        while True:
            answer = self.connection.request(
                build(
                    p.JoinGroupRequest,
                    group_id=self.group,
                    session_timeout_ms=self.session_ms,
                    rebalance_timeout_ms=timeout_ms,
                    member_id=self.member_id,
                    group_instance_id=None,
                    protocol_type="consumer",
                    protocols=[{"name": "range", "metadata": b""}],
                )
            )
            self.member_id, self.generation = answer.member_id, answer.generation_id
            if not answer.error_code:
                break
        sync = build(
            p.SyncGroupRequest,
            group_id=self.group,
            generation_id=self.generation,
            member_id=self.member_id,
            group_instance_id=None,
            protocol_type="consumer",
            protocol_name="range",
            assignments=[{"member_id": self.member_id, "assignment": b"a"}],
        )
        assert self.connection.request(sync).error_code == 0

    def ask(self, topics: dict[str, list[int]], **changed: Any) -> Any:
        """The answer to a request for a slot, which counts if it is one."""
        self.ring = self.channel.remote_writable_memory(RING_ENTRIES * layout.ACK_BYTES)
        fields: dict[str, Any] = {
            "connection_id": self.channel.connection_id,
            "group_id": self.group,
            "generation_id_or_member_epoch": self.generation,
            "member_id": self.member_id,
            "group_instance_id": None,
            "topics": [{"name": name, "partitions": numbers} for name, numbers in topics.items()],
            "ack_address": self.ring.address,
            "ack_rkey": self.ring.rkey,
            "ack_entries": RING_ENTRIES,
            **changed,
        }
        answer = self.connection.request(build(p.GetCommitSlotRequest, **fields))
        if not answer.error_code:
            self.slot = answer
            self.cells = self.channel.local_memory(answer.cells * answer.cell_bytes)
            self.sequence = self.read = 0
        return answer

    def write(self, entries: list[tuple[int, int]], **changed: Any) -> None:
        """WRITE a commit of [(index, offset)]; `changed`: what it says instead of what is right."""
        slot, sequence = self.slot, self.sequence
        fields = {
            "sequence": sequence,
            "generation": self.generation,
            "count": len(entries),
            "token": slot.token,
            "order": sequence & 0xFFFF,
            "file_id": slot.file_id,
            **changed,
        }
        body = struct.pack(
            "<IiIQ", fields["sequence"], fields["generation"], fields["count"], fields["token"]
        ) + b"".join(struct.pack("<qIi", offset, index, -1) for index, offset in entries)
        data = struct.pack("<I", fields.get("guard", crc32c(body))) + body
        length = fields.get("length", len(data))
        at = sequence % slot.cells * slot.cell_bytes
        memoryview(self.cells.memory)[at : at + len(data)] = data
        imm = fields["file_id"] << layout.IMM_FILE_ID_SHIFT | fields["order"]
        self.sequence += 1
        self.channel.qp.post_write_imm(
            sequence, self.cells, at, length, slot.address + at, slot.rkey, imm
        )

    def answers(self, count: int = 1, timeout_ms: float = 10_000) -> list[Answered]:
        """The next answers and notices, so many if they come."""
        out: list[Answered] = []
        self.channel.send_cq.poll(16)
        while len(out) < count and self.channel.recv_cq.wait(timeout_ms, 0):
            for completion in self.channel.recv_cq.poll(16):
                if not completion.ok:
                    return out
                self.channel.qp.post_recv(0)
                assert completion.imm_data is not None
                assert completion.imm_data >> layout.IMM_FILE_ID_SHIFT == self.slot.file_id
                for _ in range(completion.imm_data & 0xFFFF):
                    at = self.read % RING_ENTRIES * layout.ACK_BYTES
                    entry = bytes(memoryview(self.ring.memory)[at : at + layout.ACK_BYTES])
                    sequence, _, order, error, flags = struct.unpack_from("<IHHhH", entry)
                    assert sequence == self.read
                    self.read += 1
                    out.append(Answered(order, error, flags))
        return out

    def commit(self, entries: list[tuple[int, int]], **changed: Any) -> int:
        """WRITE a commit and wait for its error code."""
        order = self.sequence & 0xFFFF
        self.write(entries, **changed)
        (answer,) = self.answers()
        assert answer.order == order and not answer.flags
        return answer.error

    def is_cut(self) -> bool:
        """Has the broker ended the queue pair?"""
        wait_until(lambda: self.channel.qp.state != 3, "the end of the queue pair")
        return True

    def close(self) -> None:
        self.channel.close()
        self.connection.close()


def tcp_commit(
    connection: Connection,
    group: str,
    offsets: dict[TopicPartition, int],
    generation: int = -1,
    member_id: str = "",
) -> list[int]:
    """Commit over TCP: the error codes."""  # fmt: skip
    r = p.OffsetCommitRequest
    answer = connection.request(
        r(
            group_id=group,
            generation_id_or_member_epoch=generation,
            member_id=member_id,
            group_instance_id=None,
            retention_time_ms=-1,
            topics=[
                r.OffsetCommitRequestTopic(
                    name=tp.topic,
                    partitions=[
                        r.OffsetCommitRequestTopic.OffsetCommitRequestPartition(
                            partition_index=tp.partition,
                            committed_offset=offset,
                            committed_leader_epoch=-1,
                            committed_metadata="",
                        )
                    ],
                )
                for tp, offset in offsets.items()
            ],
        )
    )
    return [x.error_code for t in answer.topics for x in t.partitions]


def fetched(connection: Connection, group: str) -> dict[TopicPartition, int]:
    """What a group has committed, over TCP."""
    answer = connection.request(
        build(
            p.OffsetFetchRequest,
            group_id=group,
            topics=None,
            groups=[{"group_id": group, "topics": None}],
        )
    )
    topics = answer.groups[0].topics if answer.groups else answer.topics
    return {
        TopicPartition(t.name, x.partition_index): x.committed_offset
        for t in topics
        for x in t.partitions
    }
