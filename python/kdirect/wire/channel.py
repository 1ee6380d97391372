"""A client's queue pair to one broker, with the requests that open, use and end access.

Owns: one protection domain, one queue pair, its two completion queues and the local memory
registered for it.  Retries and choices of transport are made above; bytes are moved by
`read_work`, `file_stream` and `direct_write`.

Life: a channel belongs to the process that made it and to one control connection; the broker frees
what was granted over it when either ends.  A channel whose queue pair broke is closed and replaced,
never repaired.

A channel has no lock.  It has one owner, and so have its queue pair, its completion queues and all
that was made with them (`SlotTable`, `FileStream`, `FileWriter`, `AckRouter`).  Only the owner's
thread touches them, or the thread that holds the owner's lock:

- a producer's channel: the lock of the `Producer`, which its callers and its own thread take;
- that of a producer's messages: the `MessageConnection`, whose locks let one thread send and one
  receive;
- a consumer's: the one thread from which the `Consumer` is used (its group's thread has a
  connection of its own);
- a reader's: the thread that iterates the `Reader`, until the reader is parked;
- the one that watches watermarks: the lock of `Watermarks`;
- parked readers, and the channel that proved the transport: nobody touches them until they are
  taken out again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from kdirect.errors import (
    AccessDeniedError,
    ClosedError,
    KdirectError,
    OffsetOutOfRangeError,
    ProtocolError,
    QueuePairError,
    TieredOffsetError,
    TransportError,
)
from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.format.batch import crc32c
from kdirect.model import TopicPartition
from kdirect.rdma.contract import Access, Memory, MemoryRegion
from kdirect.wire.broker_errors import read_error
from kdirect.wire.connection import Connection, Pending
from kdirect.wire.environment import SYSTEM, Environment

PING_TIMEOUT_MS = 5000
PING_BYTES = 64


def access_error(code: int, message: str | None, what: str) -> KdirectError:
    """The exception for an answer to an access request."""
    text = f"{what}: {message}" if message else what
    if code in (
        layout.ERROR_ACCESS_HELD,
        layout.ERROR_ACCESS_CONTENDED,
        layout.ERROR_ACCESS_DISABLED,
        layout.ERROR_NO_FREE_SLOT,
        TieredOffsetError.code,  # a Fetch brings what is in remote storage
    ):
        error = AccessDeniedError(text)
        error.held = code == layout.ERROR_ACCESS_HELD
        error.tiered = code == TieredOffsetError.code
        return error
    if code == layout.ERROR_UNKNOWN_CONNECTION:
        return QueuePairError(text)
    if code == layout.ERROR_TRANSPORT_UNAVAILABLE:
        return TransportError(text)
    if code == 1:
        return OffsetOutOfRangeError(
            text, hint="records were deleted (retention), or the offset was never written"
        )
    return read_error(code, what, message)


def granted(tp: TopicPartition, answer: Any) -> Any:
    """The answer to a request for write access, if it is a grant; the exception that it means if
    not."""
    if answer.error_code:
        raise access_error(answer.error_code, answer.error_message, f"write access to {tp}")
    return answer


class Channel:
    """See the module.  `receives` is how many acknowledgements may be under way (0: a reader);
    `message_bytes` the size of the largest SEND where it is for messages
    (`kdirect.client.two_sided`), which have no access; `device_options` go to
    `open_device`."""

    def __init__(
        self,
        connection: Connection,
        transport: str,
        *,
        receives: int = 0,
        sends: int = 256,
        message_bytes: int = 0,
        environment: Environment = SYSTEM,
        device_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.connection = connection
        self.transport = transport
        self._pid = os.getpid()
        self._closed = False
        self.device = environment.open_device(transport, **(device_options or {}))
        self.domain = self.device.alloc_pd()
        try:
            self.send_cq = self.device.create_cq(depth=max(sends, 16))
            self.recv_cq = self.device.create_cq(depth=max(receives, 16))
            self.qp = self.domain.create_qp(
                self.send_cq,
                self.recv_cq,
                max_send_wr=sends,
                max_recv_wr=max(receives, 1),
                max_send_bytes=message_bytes or 4096,
            )
            answer = self.request(
                p.OpenQueuePairRequest(
                    transport=transport,
                    address=self.qp.address,
                    max_recv=max(receives, 1),
                    message_bytes=message_bytes,
                )
            )
            if answer.error_code:
                raise access_error(
                    answer.error_code,
                    answer.error_message,
                    f"opening a {transport} queue pair to {connection.peer}",
                )
            self.connection_id: int = answer.connection_id
            self.max_in_flight: int = answer.max_in_flight
            self.qp.connect(bytes(answer.address), active=True)
            self._ping(answer)
        except BaseException:
            self.close()
            raise

    def _ping(self, answer: Any) -> None:
        """Prove the path with a real data READ before anybody trusts it (handshakes may pass where
        no RDMA byte flows)."""
        region = self.local_memory(PING_BYTES)
        self.qp.post_read(1, region, 0, PING_BYTES, answer.ping_address, answer.ping_rkey)
        if not self.send_cq.wait(PING_TIMEOUT_MS, 20):
            raise TransportError(
                f"{self.transport}: a READ of {PING_BYTES} bytes from {self.connection.peer}"
                f" did not complete in {PING_TIMEOUT_MS} ms",
                hint="no RDMA data flows on this path; use transport=tcp",
            )
        (completion,) = self.send_cq.poll(1)
        if not completion.ok:
            raise TransportError(
                f"{self.transport}: a READ from {self.connection.peer} failed: {completion}",
                hint="use transport=tcp",
            )
        if crc32c(memoryview(region.memory)[:PING_BYTES]) != answer.ping_crc:
            raise TransportError(
                f"{self.transport}: a READ from {self.connection.peer} brought other bytes than"
                " the broker holds",
                hint="this is not the broker's memory; use transport=tcp",
            )
        region.deregister()

    def request(self, message: Any, timeout_ms: float | None = None) -> Any:
        """Send an access request over the control connection."""
        self.check()
        return self.connection.request(message, timeout_ms)

    def check(self) -> None:
        """ClosedError unless this process may use the channel."""
        if self._closed:
            raise ClosedError("the channel is closed", hint="open a new one")
        if self._pid != os.getpid():
            raise ClosedError(
                "the channel belongs to the process that was forked from",
                hint="connect again in this process",
            )

    def local_memory(self, length: int) -> MemoryRegion:
        """`length` bytes of new memory that READs may fill and WRITEs may send."""
        return self.domain.register(Memory.anonymous(length), Access.LOCAL_WRITE)

    def remote_writable_memory(self, length: int) -> MemoryRegion:
        """`length` bytes of new memory that the broker may WRITE into (an acknowledgement ring)."""
        return self.domain.register(
            Memory.anonymous(length), Access.LOCAL_WRITE | Access.REMOTE_WRITE
        )

    def consume_access(
        self,
        targets: list[tuple[TopicPartition, int, int]],
        epoch_of: Callable[[TopicPartition], int] = lambda tp: -1,
        *,
        of_replica: bool = False,
        committed_only: bool = False,
    ) -> Any:
        """Ask for read access to [(partition, offset, finished file id or -1)], in the leader
        epochs that `epoch_of` tells (-1: any), also where the broker only follows if `of_replica`,
        with lists of aborted transactions if `committed_only`; the response, one grant each, in
        order."""
        items = [
            p.GetConsumeAccessRequest.ConsumeTarget(
                topic=tp.topic,
                partition=tp.partition,
                offset=offset,
                finished_file_id=finished,
                current_leader_epoch=epoch_of(tp),
            )
            for tp, offset, finished in targets
        ]
        answer = self.request(
            p.GetConsumeAccessRequest(
                connection_id=self.connection_id,
                partitions=items,
                of_replica=of_replica,
                committed_only=committed_only,
            )
        )
        if answer.error_code:
            raise access_error(answer.error_code, answer.error_message, "read access")
        if len(answer.partitions) != len(items):
            raise ProtocolError(
                f"{self.connection.peer} granted {len(answer.partitions)} of {len(items)}"
                " partitions asked for"
            )
        return answer

    @property
    def lists_aborted(self) -> bool:
        """Does the broker grant lists of aborted transactions?"""
        return self.connection.version_for(p.GetConsumeAccessRequest) >= 3

    @property
    def grants_ahead(self) -> bool:
        """Does the broker grant the file after the present one?"""
        return self.connection.version_for(p.GetProduceAccessRequest) >= 1

    def produce_access(
        self, tp: TopicPartition, *args: Any, timeout_ms: float | None = None, **more: Any
    ) -> Any:
        """As `ask_produce_access`; waits for the grant.  AccessDeniedError and others when it is
        refused."""
        return granted(tp, self.request(self._access_request(tp, *args, **more), timeout_ms))

    def ask_produce_access(self, tp: TopicPartition, *args: Any, **more: Any) -> Pending:
        """Ask for write access without waiting for the answer, which goes through `granted`; see
        `_access_request`."""
        self.check()
        return self.connection.submit(self._access_request(tp, *args, **more))

    def _access_request(
        self,
        tp: TopicPartition,
        min_bytes: int,
        ring: MemoryRegion,
        entries: int,
        *,
        mode: int = layout.PRODUCE_AUTO,
        max_in_flight: int = 0,
        finished: int = -1,
        end: tuple[int, int] = (-1, -1),
        ack_offset: int = 0,
        ahead_of: int = -1,
        acks: int = -1,
        leader_epoch: int = -1,
        enters: bool = False,
    ) -> Any:
        """Write access to the head file of `tp`, for at most `max_in_flight` requests at a time,
        whose acknowledgements come into `entries` entries of `ring` from byte `ack_offset` on.
        `finished`: a file granted before that this producer is done with; `end`: (order, position)
        of its first reservation beyond it.  `ahead_of`: the granted file after which comes the one
        that is asked for.  `acks`: 1, the leader's; -1, of all in-sync replicas.  `leader_epoch`:
        that of `tp` as far as is known.  `enters`: what is granted exclusively is written only
        where an answer to EnterTransaction says."""
        return p.GetProduceAccessRequest(
            connection_id=self.connection_id,
            topic=tp.topic,
            partition=tp.partition,
            mode=mode,
            min_bytes=min_bytes,
            ack_address=ring.address + ack_offset,
            ack_rkey=ring.rkey,
            ack_entries=entries,
            max_in_flight=max_in_flight,
            finished_file_id=finished,
            end_order=end[0],
            end_position=end[1],
            ahead_of_file_id=ahead_of,
            acks=acks,
            current_leader_epoch=leader_epoch,
            enters=enters,
        )

    def release(self, file_ids: list[int], timeout_ms: float | None = None) -> None:
        """Give granted files back."""
        if file_ids and not self._closed:
            self.request(
                p.ReleaseAccessRequest(connection_id=self.connection_id, file_ids=file_ids),
                timeout_ms,
            )

    @property
    def closed(self) -> bool:
        return self._closed or self.connection.closed

    def close(self) -> None:
        """Disconnect and free; the broker ends the grants when it sees the queue pair go."""
        if self._closed:
            return
        self._closed = True
        if self._pid != os.getpid():
            return
        for name in ("qp", "domain", "send_cq", "recv_cq"):
            part = getattr(self, name, None)
            if part is not None:
                part.close()
