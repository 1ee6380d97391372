"""The queue pairs of RDMA clients: opened over the client's TCP connection (KafkaDirect §4.2.2).

Owns: the protection domain, queue pair, slot region and ping memory of each client (`Peer`), and
the two-sided connections.  What may not enter: what clients are granted (`read_access`,
`produce_access`).

Memory: everything that is registered here is in the client's own protection domain, and ends with
it, after the queue pair is closed and the worker has forgotten it.

All methods run on the broker's event loop, except where said.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from kdirect.broker.closing import end_all
from kdirect.broker.connection import ConnectionContext
from kdirect.broker.engine import Engine
from kdirect.broker.grants import Peer, WrittenFile
from kdirect.broker.head_access import DEREGISTER_MS
from kdirect.broker.scheduler import LoopScheduler, Scheduler
from kdirect.broker.two_sided import (
    LEAST_MESSAGE_BYTES,
    MAX_RECEIVES,
    MessageConnection,
    MessageService,
)
from kdirect.errors import RefusedError
from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.format.batch import crc32c
from kdirect.format.error_codes import ErrorCode
from kdirect.format.schema import build
from kdirect.rdma.contract import Access, Memory
from kdirect.wire.environment import Environment

log = logging.getLogger("kdirect.broker.rdma")

PING_BYTES = 64
MAX_CLIENT_RECEIVES = 1 << 16
MAX_SEND_REQUESTS = 4096


class Ping(NamedTuple):
    """Random bytes that a client READs, as a proof that its transport reaches this broker."""

    region: Any
    crc: int


def _ping(domain: Any) -> Ping:
    # Written before the client has the key, and never again; it ends with the domain.
    memory = Memory.anonymous(PING_BYTES, "kdirect-ping")
    proof = os.urandom(PING_BYTES)
    memoryview(memory)[:PING_BYTES] = proof
    return Ping(domain.register(memory, Access.REMOTE_READ, 0, PING_BYTES), crc32c(proof))


class QueuePairs:
    """See the module.  `context` takes the requests of two-sided clients, where there is one."""

    def __init__(
        self, config: Mapping[str, Any], scheduler: Scheduler, environment: Environment
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._environment = environment
        self._transports = frozenset(config["rdma.transports"])
        self._max_in_flight = int(config["rdma.max.in.flight"])
        self._slots_per_consumer = int(config["rdma.slots.per.consumer"])
        self.context: ConnectionContext | None = None
        self._services: dict[str, MessageService] = {}  # of two-sided clients, by transport
        self._peers: dict[int, Peer] = {}
        self._by_qp: dict[tuple[str, int], Peer] = {}
        self._open: set[Peer] = set()  # whose queue pair is not closed
        self._no_more = False
        self._lock = threading.Lock()  # held while one is opened: afterwards `close` finds it
        self._next_connection_id = int.from_bytes(os.urandom(4), "big")

    # -- looking up --------------------------------------------------------------------------------

    def __iter__(self) -> Any:
        return iter(list(self._peers.values()))

    def find(self, transport: str, qp_num: int) -> Peer | None:
        return self._by_qp.get((transport, qp_num))

    def peer_of(self, connection: Hashable, connection_id: int) -> Peer:
        peer = self._peers.get(connection_id)
        if peer is None or peer.connection is not connection:
            raise RefusedError(
                layout.ERROR_UNKNOWN_CONNECTION,
                f"queue pair {connection_id} is not open on this connection; open it again",
            )
        return peer

    # -- opening -----------------------------------------------------------------------------------

    def check(self, request: Any) -> None:
        """RefusedError for a queue pair that no engine would open."""
        if request.transport not in self._transports:
            offered = ", ".join(sorted(self._transports)) or "none"
            raise RefusedError(
                layout.ERROR_TRANSPORT_UNAVAILABLE,
                f"transport {request.transport!r} is not offered here; offered: {offered}",
            )
        if not 1 <= request.max_recv <= MAX_CLIENT_RECEIVES:
            raise RefusedError(
                ErrorCode.INVALID_REQUEST,
                f"MaxRecv {request.max_recv} is out of range; give 1 to {MAX_CLIENT_RECEIVES}",
            )

    def open(self, connection: Any, request: Any, engine: Engine) -> Any:
        """A queue pair as the client wants it; the response."""
        with self._lock:
            if self._no_more:
                raise RefusedError(layout.ERROR_TRANSPORT_UNAVAILABLE, "the broker is stopping")
            if request.message_bytes:
                return self._open_two_sided(connection, request, engine)
            return self._open_one_sided(connection, request, engine)

    def _open_one_sided(self, connection: Hashable, request: Any, engine: Engine) -> Any:
        domain = engine.device.alloc_pd()
        try:
            # One more than the client may use: a notice of revocation is not an answer to a
            # request.
            qp = domain.create_qp(
                engine.send_cq,
                engine.recv_cq,
                max_send_wr=min(request.max_recv, MAX_SEND_REQUESTS),
                max_recv_wr=self._max_in_flight,
                max_send_bytes=4096,
            )
            ping = _ping(domain)
            # The client READs its slots; kernels write those that are attached to them, which each
            # grant ends (`ReadAccess.release`) before the domain is closed.
            slot_memory = Memory.anonymous(
                self._slots_per_consumer * layout.SLOT_BYTES, "kdirect-slots"
            )
            slot_region = domain.register(slot_memory, Access.REMOTE_READ)
            qp.connect(bytes(request.address), active=False)
            # Entry i is the transport's while receive i is posted, then the worker's, which copies
            # it and posts the receive again.  It ends with the domain, after the worker has
            # forgotten the queue pair.
            notices = Memory.anonymous(self._max_in_flight * layout.NOTICE_BYTES, "kdirect-notices")
            engine.worker.add_peer(
                qp, self._max_in_flight, domain.register(notices, Access.LOCAL_WRITE)
            )
        except BaseException:
            domain.close()
            raise
        peer = Peer(
            connection_id=self._new_connection_id(),
            connection=connection,
            client=str(getattr(connection, "client_id", None) or "?"),
            engine=engine,
            domain=domain,
            qp=qp,
            max_in_flight=self._max_in_flight,
            ping=ping.region,
            slot_memory=slot_memory,
            slot_region=slot_region,
        )
        self._peers[peer.connection_id] = peer
        self._by_qp[engine.transport, qp.qp_num] = peer
        self._open.add(peer)
        log.debug("queue pair %d opened for %s over %s", qp.qp_num, peer.client, request.transport)
        return self._opened(peer.connection_id, qp, self._max_in_flight, ping)

    def _open_two_sided(self, connection: Any, request: Any, engine: Engine) -> Any:
        """A queue pair for requests in SENDs."""
        context = self.context
        if context is None or self._loop() is None or not self._config["rdma.produce"]:
            raise RefusedError(
                layout.ERROR_ACCESS_DISABLED, "requests in SENDs are not taken here; use TCP"
            )
        count = self._receives_of(request, context)
        service = self._services.get(engine.transport)
        if service is None:
            service = self._services[engine.transport] = MessageService(
                engine.device, self._loop(), context.turns, self._environment
            )
        domain = engine.device.alloc_pd()
        try:
            link = MessageConnection(
                context,
                connection,
                service,
                domain,
                message_bytes=request.message_bytes,
                count=count,
            )
            ping = _ping(domain)
            link.open(bytes(request.address))
        except BaseException:
            domain.close()
            raise
        return self._opened(self._new_connection_id(), link.qp, count, ping)

    def _loop(self) -> Any:
        return self._scheduler.loop if isinstance(self._scheduler, LoopScheduler) else None

    def _receives_of(self, request: Any, context: ConnectionContext) -> int:
        """How many messages a two-sided client may have under way.  RefusedError."""
        memory = int(self._config["rdma.message.memory.bytes"])
        most = min(memory, int(self._config["socket.request.max.bytes"]))
        if not LEAST_MESSAGE_BYTES <= request.message_bytes <= most:
            raise RefusedError(
                layout.ERROR_ACCESS_DISABLED,
                f"messages of {request.message_bytes} bytes are not taken:"
                f" {LEAST_MESSAGE_BYTES} to {most} are; lower batch.bytes, or raise"
                " rdma.message.memory.bytes on the broker",
            )
        count: int = max(1, min(request.max_recv, MAX_RECEIVES, memory // request.message_bytes))
        bound = context.memory.limit
        if 0 <= bound < context.memory.used + count * request.message_bytes:
            raise RefusedError(
                layout.ERROR_ACCESS_DISABLED,
                f"{count * request.message_bytes} bytes for requests in SENDs would be over"
                f" queued.max.request.bytes ({bound}); use TCP",
            )
        return count

    def _new_connection_id(self) -> int:
        self._next_connection_id += 1
        return self._next_connection_id

    def _opened(self, connection_id: int, qp: Any, max_in_flight: int, ping: Ping) -> Any:
        return build(
            p.OpenQueuePairResponse,
            connection_id=connection_id,
            address=qp.address,
            max_in_flight=max_in_flight,
            ping_address=ping.region.address,
            ping_rkey=ping.region.rkey,
            ping_crc=ping.crc,
        )

    # -- closing -----------------------------------------------------------------------------------

    def open_no_more(self) -> None:
        """The broker stops.  Any thread."""
        with self._lock:
            self._no_more = True

    def forget(self, peer: Peer) -> bool:
        """Nobody finds the peer any more; `end` is to follow.  False: it was forgotten before.
        Any thread."""
        peer.closed = True
        if self._peers.pop(peer.connection_id, None) is None:
            return False
        self._by_qp.pop((peer.engine.transport, peer.qp.qp_num), None)
        return True

    def end(self, peer: Peer, written: Sequence[tuple[WrittenFile, Any]] = ()) -> None:
        """Close a queue pair and what belongs to it.  On a thread; where another one is about it,
        it waits.  `written`: see `close_domain`."""
        with peer.ending:
            if peer in self._open:
                try:
                    close_domain(peer, written)
                finally:
                    self._open.discard(peer)

    def close_two_sided(self, connection: Any) -> None:
        """Close the two-sided queue pairs that were opened over a TCP connection."""
        for service in self._services.values():
            for link in list(service.links.values()):
                if link.control is connection:
                    link.close("")

    def close(self) -> None:
        """Once there are no clients, but for what a thread has not closed yet.  Any thread."""
        services = list(self._services.values())
        self._services.clear()
        end_all(
            "the clients' queue pairs",
            *(partial(self.end, peer) for peer in list(self._open)),
            *(service.close for service in services),
        )


def close_domain(peer: Peer, written: Sequence[tuple[WrittenFile, Any]]) -> None:
    """End everything that a client has left.  On a thread.  `written`: the heads that it may be
    inside a copy into, with its keys to them.  That can be asked only until its queue pair is
    closed.  The client is waited for once: 1,000 keys of a client that hangs would take 20 s."""

    def end_keys() -> None:
        hangs = False
        for access, region in written:
            wait_ms = 0 if hangs else DEREGISTER_MS
            if region is not None and not access.end_file_key(region, wait_ms):
                hangs = True

    # The worker forgets closed queue pairs when it is asked to.
    steps = end_keys, peer.qp.close, peer.domain.close, peer.engine.worker.reap
    end_all(f"the queue pair of {peer.client}", *steps)
