"""Where things are: bootstrap servers, metadata, leaders, and the connections to them.

Owns: the connections to each broker (shared ones, and a pool of private ones), and which of them is
asked, again and again, for what.  The client's view of the cluster (nodes, topics, leaders) is
`cluster_metadata`'s.  What may not enter either: records, and messages other than Metadata and
FindCoordinator.

Invariants:

- All state belongs to one process: after a fork the child starts with nothing and opens its own
  connections.
- Metadata may be out of date: whoever gets NOT_LEADER or UNKNOWN_TOPIC calls `forget` and asks
  again.
- A broker that cannot be reached is tried again, with growing waits, for `connect.timeout.ms` and
  no longer.
- A shared connection has a purpose, its channel: `control` (access requests, metadata, admin) or
  `data` (produce over TCP).  So a record on its way never holds up a request, and closing a stuck
  data connection revokes no grant.
- A cluster with one broker is reached at the address that answered first, whatever address its
  metadata names: the broker may know itself by a name that this host cannot reach.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from kdirect.errors import (
    BrokerError,
    BrokerUnavailableError,
    KdirectError,
    TimedOutError,
)
from kdirect.format import protocol
from kdirect.model import TopicPartition
from kdirect.wire.broker_errors import broker_error
from kdirect.wire.cluster_metadata import ClusterMetadata
from kdirect.wire.connection import Connection
from kdirect.wire.metadata import Node
from kdirect.wire.process_state import ProcessState
from kdirect.wire.servers import error_of_all

T = TypeVar("T")

GROUP, TRANSACTION = 0, 1  # what a coordinator is asked about, as Kafka numbers it
IDLE_CONNECTIONS = 4  # private connections to each broker that wait for their next use
# For an answer that another broker could give, too, before that one is asked; twice as long each
# time, so that an answer of brokers that are merely slow is waited for in the end.
FIRST_PATIENCE_MS = 1000.0


class Cluster(ClusterMetadata):
    """Thread-safe, and usable in forked children.  Nothing is opened before the first call that
    needs it.

    `settings`: rows of the client table (`kdirect.options.CLIENT`) by name.
    """

    # -- connections -------------------------------------------------------------------------------

    def control_connection(self, timeout_ms: float | None = None) -> Connection:
        """A shared connection to any broker, opened when there is none.  BrokerUnavailableError
        after `timeout_ms`, or after `connect.timeout.ms`, whichever is shorter."""
        state = self._state()
        control = state.control
        if control is not None and control.alive():
            return control
        backoff = self.backoff(self._connect_ms(timeout_ms))
        while True:
            errors: list[KdirectError] = []
            with state.lock:
                known = dict.fromkeys(
                    [*self.bootstrap, *((n.host, n.port) for n in state.nodes.values())]
                )
                # Those that were silent when they were last asked come last.
                addresses = sorted(known, key=state.silent.__contains__)
            for i, (host, port) in enumerate(addresses):
                # Each has a share of the time, so that a silent one leaves some to those after it.
                share_ms = backoff.remaining_ms() / (len(addresses) - i)
                try:
                    state.control = self._shared(state, host, port, "control", share_ms)
                    return state.control
                except KdirectError as e:
                    errors.append(e)
            # What is no broker will not become one; what does not answer may.
            if not any(e.retriable for e in errors) or not backoff.wait():
                raise error_of_all(errors)

    def connection_for(
        self,
        tp: TopicPartition,
        channel: str = "control",
        timeout_ms: float | None = None,
        *,
        closest: bool = False,
    ) -> Connection:
        """The shared connection of `channel` to the leader of `tp`; or with `closest` to the
        broker that it is read at.  UnknownTopicError when there
        is no such partition; BrokerUnavailableError when its leader cannot be reached, BrokerError
        (LEADER_NOT_AVAILABLE) when it has none, both after `connect.timeout.ms`.  With a
        `timeout_ms` that is shorter, asking where the leader is and connecting take no longer than
        that."""
        return self._to_leader(
            tp,
            lambda node, left_ms: self._connection_to(node, channel, left_ms),
            timeout_ms,
            closest,
        )

    def connection_at_hand(self, tp: TopicPartition, channel: str = "control") -> Connection | None:
        """What `connection_for` returns, where that takes no answer of anybody: the leader is known
        and connected.  None otherwise."""
        state = self._state()
        topic = self._known(tp.topic)
        if topic is None:
            return None
        try:
            node = self._leader_in(topic, tp)
        except KdirectError:
            return None
        connection = state.shared.get((*self._address_of(node), channel))
        return connection if connection is not None and connection.alive() else None

    def has_reached(self, channel: str) -> bool:
        """Was there a shared connection of `channel` to any broker?"""
        return channel in self._state().reached

    def connection_to(self, node: Node) -> Connection:
        """The shared control connection to `node`; one attempt."""
        return self._connection_to(node, "control", self.settings["connect.timeout.ms"])

    def controller_connection(self) -> Connection:
        """The shared connection to the broker that creates topics; to any broker where the cluster
        names none."""
        state = self._state()
        control = self.control_connection()
        if not state.nodes:
            self.refresh([])
        controller = state.nodes.get(state.controller)
        return control if controller is None else self.connection_to(controller)

    def coordinator_connection(self, group: str) -> Connection:
        """The shared connection to the coordinator of `group`.  Forget it with `forget_coordinator`
        when it says NOT_COORDINATOR."""
        return self.connection_to(self._coordinator(group, GROUP))

    def lease_coordinator(
        self, key: str, kind: int = GROUP, timeout_ms: float | None = None
    ) -> Connection:
        """A private connection to the coordinator of a group (joining waits for other members), or
        of a transactional id (`kind` TRANSACTION).  Ends as a `lease` does."""
        node = self._coordinator(key, kind, timeout_ms)
        return self._private(node, self._connect_ms(timeout_ms))

    def _coordinator(self, key: str, kind: int, timeout_ms: float | None = None) -> Node:
        state = self._state()
        node = state.coordinators.get((kind, key))
        if not state.nodes:
            self.refresh([])  # how many brokers there are decides about the address
        if node is None:

            def find(connection: Connection, left_ms: float) -> Any:
                response = connection.request(
                    protocol.FindCoordinatorRequest(key=key, key_type=kind), left_ms
                )
                if response.error_code:
                    raise broker_error(
                        response.error_code,
                        f"coordinator of {'group' if kind == GROUP else 'transactions'} {key!r}",
                        response.error_message,
                    )
                return response

            found = self.ask_any(find, timeout_ms)
            node = Node(found.node_id, found.host, found.port)
            state.coordinators[kind, key] = node
        return node

    def forget_coordinator(self, key: str, kind: int = GROUP) -> None:
        self._state().coordinators.pop((kind, key), None)

    def lease(
        self, tp: TopicPartition, timeout_ms: float | None = None, *, closest: bool = False
    ) -> Connection:
        """A private connection to the leader of `tp`, for requests that wait at the broker and
        would hold up others.  Give it back with `give_back`, or close it.  Raises, and takes
        `timeout_ms` and `closest`, as `connection_for` does."""
        return self._to_leader(tp, self._private, timeout_ms, closest)

    def give_back(self, connection: Connection) -> None:
        """The end of a lease: keeps the connection for the next one if it is sound and idle, closes
        it otherwise."""
        state = self._state()
        with state.lock:
            idle = state.idle.setdefault((connection.host, connection.port), [])
            if (
                len(idle) < IDLE_CONNECTIONS
                and not connection.closed
                and not connection.statistics()["in_flight"]
            ):
                idle.append(connection)
                return
        connection.close()

    def call(
        self,
        connect: Callable[[], Connection],
        use: Callable[[Connection], T],
        timeout_ms: float | None = None,
        *,
        topics: Iterable[str] = (),
    ) -> T:
        """`use(connect())`, again after a retriable error until `timeout_ms` (default
        `request.timeout.ms`) is over; then that error.  Errors of `connect` are not retried: it has
        waited already.  `topics` are forgotten before each further attempt."""
        backoff = self.backoff(self.timeout_ms if timeout_ms is None else timeout_ms)
        while True:
            connection = connect()
            try:
                return use(connection)
            except KdirectError as e:
                if not e.retriable or not backoff.wait():
                    raise
                for topic in topics:
                    self.forget(topic)

    def ask_any(self, use: Callable[[Connection, float], T], timeout_ms: float | None = None) -> T:
        """`use(connection, milliseconds)` with a connection to any broker, again after retriable
        errors as `call` does.  A broker that does not answer does not use the whole time up where
        there are others: they are asked then."""
        state = self._state()
        deadline = self.backoff(self.timeout_ms if timeout_ms is None else timeout_ms)
        patience_ms = FIRST_PATIENCE_MS

        def ask(connection: Connection) -> T:
            nonlocal patience_ms
            left_ms = deadline.remaining_ms()
            if state.several or len(self.bootstrap) > 1:
                left_ms, patience_ms = min(left_ms, patience_ms), 2 * patience_ms
            address = connection.host, connection.port
            try:
                answer = use(connection, left_ms)
            except TimedOutError:
                state.silent.add(address)
                if state.control is connection:
                    state.control = None  # the next to be asked is another, if there is one
                raise
            state.silent.discard(address)
            return answer

        return self.call(lambda: self.control_connection(timeout_ms), ask, timeout_ms)

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all connections of this process; later calls are a ClosedError."""
        self._closed_in = os.getpid()
        state = self._processes.pop(os.getpid(), None)
        if state is not None:
            with state.lock:
                connections = [
                    *state.shared.values(),
                    *(c for idle in state.idle.values() for c in idle),
                ]
            for connection in connections:
                connection.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def statistics(self) -> dict[str, int]:
        """Counts of this process."""
        state = self._state()
        with state.lock:
            return {
                "connects": state.connects,
                "metadata_refreshes": state.refreshes,
                "connections": len(state.shared),
                "idle_connections": sum(map(len, state.idle.values())),
            }

    # -- within ------------------------------------------------------------------------------------

    def _shared(
        self, state: ProcessState, host: str, port: int, channel: str, timeout_ms: float
    ) -> Connection:
        address = (host, port, channel)
        connection = state.shared.get(address)
        if connection is not None and connection.alive():
            return connection
        with state.lock:
            connecting = state.connecting.setdefault(address, threading.Lock())
        if not connecting.acquire(timeout=max(0.0, timeout_ms / 1000)):
            raise TimedOutError(
                f"no connection to {host}:{port} within {timeout_ms:.0f} ms",
                hint="another thread still tries; try again",
            )
        try:
            connection = state.shared.get(address)
            if connection is None or connection.closed:
                connection = state.shared[address] = self._open(state, host, port, timeout_ms)
                state.reached.add(channel)
            return connection
        finally:
            connecting.release()

    def _open(self, state: ProcessState, host: str, port: int, timeout_ms: float) -> Connection:
        connection = self.environment.connect(
            host,
            port,
            self.client_id,
            max(1.0, min(timeout_ms, self.timeout_ms)),
            max_response_bytes=self.max_response_bytes,
        )
        connection.timeout_ms = self.timeout_ms
        with state.lock:
            state.connects += 1
        return connection

    def leader_address(self, tp: TopicPartition, *, closest: bool = False) -> tuple[str, int]:
        """(host, port) at which the leader of `tp` is reached, or with `closest` the broker that it
        is read at; raises as `leader` does."""
        topic = self.topic(tp.topic)
        return self._address_of((self._reader_in if closest else self._leader_in)(topic, tp))

    def leader_address_at_hand(
        self, tp: TopicPartition, *, closest: bool = False
    ) -> tuple[str, int] | None:
        """What `leader_address` returns, where nobody has to be asked; None otherwise."""
        topic = self._known(tp.topic)
        if topic is None:
            return None
        try:
            return self._address_of((self._reader_in if closest else self._leader_in)(topic, tp))
        except KdirectError:
            return None

    def reader_at_hand(self, tp: TopicPartition) -> Node | None:
        """The broker that `tp` is read at, where nobody has to be asked; None otherwise."""
        topic = self._known(tp.topic)
        try:
            return None if topic is None else self._reader_in(topic, tp)
        except KdirectError:
            return None

    def _address_of(self, node: Node) -> tuple[str, int]:
        state = self._state()
        if len(state.nodes) == 1 and not state.several and state.control is not None:
            return state.control.host, state.control.port
        return node.host, node.port

    def _connection_to(self, node: Node, channel: str, timeout_ms: float) -> Connection:
        return self._shared(self._state(), *self._address_of(node), channel, timeout_ms)

    def _private(self, node: Node, timeout_ms: float) -> Connection:
        state = self._state()
        address = self._address_of(node)
        while True:
            with state.lock:
                idle = state.idle.get(address)
                connection = idle.pop() if idle else None
            if connection is None:
                return self._open(state, *address, timeout_ms)
            if connection.alive():
                return connection
            connection.close()

    def _connect_ms(self, timeout_ms: float | None) -> float:
        most: float = self.settings["connect.timeout.ms"]
        return most if timeout_ms is None else min(most, timeout_ms)

    def _to_leader(
        self,
        tp: TopicPartition,
        connect: Callable[[Node, float], Connection],
        timeout_ms: float | None = None,
        closest: bool = False,
    ) -> Connection:
        choose = self._reader_in if closest else self._leader_in
        backoff = self.backoff(self._connect_ms(timeout_ms))
        before: KdirectError | None = None  # what was wrong with the leader that was tried last
        while True:
            node = None
            try:
                left_ms = None if timeout_ms is None else backoff.remaining_ms()
                node = choose(self.topic(tp.topic, timeout_ms=left_ms), tp)
                return connect(node, backoff.remaining_ms())
            except (BrokerUnavailableError, TimedOutError, BrokerError) as e:
                # Errors of the metadata request itself (no node yet) have been waited for in
                # `control_connection`.
                if (
                    not e.retriable
                    or (node is None and not isinstance(e, BrokerError))
                    or not backoff.wait()
                ):
                    if node is None and before is not None:
                        raise before from e  # the time ended while metadata was asked for again
                    if (
                        node is None
                        or (node.host, node.port) in self.bootstrap
                        or self._address_of(node) != (node.host, node.port)
                    ):
                        raise
                    hint = (
                        f"{e.hint}; the brokers name this address as leader of {tp}:"
                        " check their advertised.listeners"
                    )
                    raise type(e)(e.message, hint=hint) from e
                if node is not None:
                    before = e
                    if closest:
                        self.leave_replica(tp)
                self.forget(tp.topic)
