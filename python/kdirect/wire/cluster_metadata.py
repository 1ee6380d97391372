"""What a client knows of its cluster: brokers, topics and leaders, no older than it may be.

Owns: what Metadata has told, for each process by itself, and when it is asked again.  Who is asked,
and over which connection, is `kdirect.wire.cluster`'s, which stands on this; its docstring has the
invariants of both.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kdirect.errors import BrokerError, ClosedError, KdirectError, UnknownTopicError
from kdirect.format import protocol
from kdirect.format.error_codes import ErrorCode
from kdirect.model import TopicPartition, check_topic_name
from kdirect.options import CLIENT
from kdirect.wire.backoff import Backoff
from kdirect.wire.broker_errors import broker_error
from kdirect.wire.closest import ClosestReplicas
from kdirect.wire.connection import MAX_RESPONSE_BYTES, Connection
from kdirect.wire.environment import SYSTEM, Environment
from kdirect.wire.metadata import Node, TopicMetadata, topic_metadata
from kdirect.wire.process_state import ProcessState
from kdirect.wire.servers import parse_servers


class ClusterMetadata:
    """See the module."""

    ask_any: Callable[..., Any]  # of `Cluster`: one request to any broker

    def __init__(self, settings: Mapping[str, Any], environment: Environment = SYSTEM) -> None:
        self.environment = environment
        self.settings = CLIENT.resolve(settings)
        self.bootstrap = parse_servers(self.settings["bootstrap.servers"])
        self.client_id: str = self.settings["client.id"]
        self.timeout_ms: int = self.settings["request.timeout.ms"]
        self.max_response_bytes = max(MAX_RESPONSE_BYTES, 2 * self.settings["max.batch.bytes"])
        self._closest = ClosestReplicas(self.settings["client.rack"], environment)
        self._processes: dict[int, ProcessState] = {}
        self._closed_in: int | None = None

    # -- what is known -----------------------------------------------------------------------------

    def _state(self) -> ProcessState:
        pid = os.getpid()
        state = self._processes.get(pid)
        if state is None:
            if self._closed_in == pid:
                raise ClosedError("the cluster client is closed", hint="make a new one")
            # setdefault is atomic; no lock, because a lock held by another thread at a fork stays
            # locked in the child.
            state = self._processes.setdefault(pid, ProcessState(threading.RLock()))
        return state

    def backoff(self, timeout_ms: float, attempts: int = 0) -> Backoff:
        """Waits after `attempts` that have failed already."""
        first, most = (
            self.settings["reconnect.backoff.ms"],
            self.settings["reconnect.backoff.max.ms"],
        )
        first = min(first << min(attempts, 20), most)
        return Backoff(timeout_ms, first, most, self.environment)

    def topics(self, *, internal: bool = False) -> dict[str, int]:
        """Partition counts of all topics, asked from the broker now; the brokers' own topics only
        with `internal`."""
        return {
            t.name: len(t.partitions)
            for t in self.refresh(None).values()
            if internal or not t.internal
        }

    def topic(
        self,
        name: str,
        *,
        refresh: bool = False,
        create: bool = False,
        timeout_ms: float | None = None,
    ) -> TopicMetadata:
        """Metadata of one topic, no older than `metadata.max.age.ms`.  UnknownTopicError names it.
        With `create` the broker is asked to make a topic that is missing, if it does so on demand,
        and its partitions are waited for."""
        known = self._known(name)
        if known is not None and not refresh:
            return known
        backoff = self.backoff(self.timeout_ms)
        found = self.refresh([name], create=create, timeout_ms=timeout_ms).get(name)
        while create and found is not None and not found.partitions and backoff.wait():
            found = self.refresh([name]).get(name)
        if found is None:
            raise self._unknown(name)
        return found

    def _known(self, name: str) -> TopicMetadata | None:
        """Metadata that is no older than `metadata.max.age.ms`."""
        held = self._state().topics.get(name)
        if (
            held is None
            or self.environment.monotonic() - held[0] >= self.settings["metadata.max.age.ms"] / 1000
        ):
            return None
        return held[1]

    def partitions(self, topic: str, *, refresh: bool = False, create: bool = False) -> list[int]:
        """Partition numbers of `topic`, ascending; `create` as for `topic`."""
        return [p.partition for p in self.topic(topic, refresh=refresh, create=create).partitions]

    def leader(self, tp: TopicPartition, timeout_ms: float | None = None) -> Node:
        """UnknownTopicError, or BrokerError LEADER_NOT_AVAILABLE (retriable)."""
        return self._leader_in(self.topic(tp.topic, timeout_ms=timeout_ms), tp)

    def _reader_in(self, topic: TopicMetadata, tp: TopicPartition) -> Node:
        """The broker that `tp` is read at (`kdirect.wire.closest`)."""
        leader = self._leader_in(topic, tp)
        partition = topic.partition(tp.partition)
        return self._closest.choose(tp, partition, leader, self._state().nodes)

    def leave_replica(self, tp: TopicPartition) -> bool:
        """What was read failed its reader: where it was not the leader, it is the leader for a
        while.  Was it another replica?"""
        if self._closest.rack is None:
            return False
        state = self._state()
        held = state.topics.get(tp.topic)
        topic = held[1] if held is not None else state.forgotten.get(tp.topic)
        try:
            elsewhere = topic is None or (
                self._reader_in(topic, tp).node_id != topic.partition(tp.partition).leader
            )
        except KdirectError:
            elsewhere = True
        if elsewhere:
            self._closest.avoid(tp)
        return elsewhere

    @property
    def rack(self) -> str | None:
        """`client.rack`: partitions are read from replicas there, where they have any."""
        return self._closest.rack

    def _leader_in(self, topic: TopicMetadata, tp: TopicPartition) -> Node:
        node = self._state().nodes.get(topic.partition(tp.partition).leader)
        if node is None:
            self.forget(tp.topic)
            raise broker_error(
                ErrorCode.LEADER_NOT_AVAILABLE,
                f"partition {tp} has no leader",
                "its broker is down or is being elected",
                hint="wait, or start the broker that holds it",
            )
        return node

    def leaders(
        self, tps: Iterable[TopicPartition], *, closest: bool = False
    ) -> tuple[dict[Node, list[TopicPartition]], dict[TopicPartition, KdirectError]]:
        """`tps` grouped by leader, or with `closest` by the brokers that they are read at; and for
        each of those that have no leader or are unknown, the error that `leader` would raise.

        Metadata is asked for at most once for each topic, however many of its partitions have no
        leader.
        """
        tps = list(tps)
        state = self._state()
        missing = list(dict.fromkeys(tp.topic for tp in tps if tp.topic not in state.topics))
        if len(missing) > 1:
            # An error of one topic is no other's: below, those that are missing are asked for again
            # one by one.
            with contextlib.suppress(UnknownTopicError, BrokerError):
                self.refresh(missing)
        topics: dict[str, TopicMetadata | KdirectError] = {}
        found: dict[Node, list[TopicPartition]] = {}
        failed: dict[TopicPartition, KdirectError] = {}
        elsewhere = closest and self._closest.rack is not None
        latest, those = None, []  # a Node's hash is costly, and most partitions follow their like
        for tp in tps:
            try:
                topic = topics.get(tp.topic)
                if topic is None:
                    topic = topics[tp.topic] = self.topic(tp.topic)
                if isinstance(topic, KdirectError):
                    # A copy, for a consumer notes on it which partition it concerns.
                    failed[tp] = copy.copy(topic)
                    continue
                node = state.nodes.get(topic.partition(tp.partition).leader)
                if node is None or node is not latest or elsewhere:
                    latest = (self._reader_in if elsewhere else self._leader_in)(topic, tp)
                    those = found.setdefault(latest, [])
                those.append(tp)
            except (UnknownTopicError, BrokerError) as e:
                failed[tp] = e
                topics.setdefault(tp.topic, e)
        return found, failed

    def forget(self, topic: str) -> None:
        """Ask for the leaders of `topic` before they are used again."""
        state = self._state()
        held = state.topics.pop(topic, None)
        if held is not None:
            state.forgotten[topic] = held[1]

    def leader_epoch(self, tp: TopicPartition) -> int:
        """The leader epoch of `tp` in what is known, without asking; -1: not known."""
        held = self._state().topics.get(tp.topic)
        if held is None:
            return -1
        try:
            return held[1].partition(tp.partition).leader_epoch
        except UnknownTopicError:
            return -1

    def topic_id(self, topic: str) -> str | None:
        """The id of a topic that is known or was, without asking."""
        state = self._state()
        held = state.topics.get(topic)
        known = held[1] if held is not None else state.forgotten.get(topic)
        return known.topic_id if known is not None else None

    def refresh(
        self, topics: list[str] | None, *, create: bool = False, timeout_ms: float | None = None
    ) -> dict[str, TopicMetadata]:
        """Ask the broker: about `topics`, about all (None), or about the brokers only ([]).
        Returns the topics that exist; with `create` a broker that creates topics on demand makes
        those that do not.  `timeout_ms` bounds connecting and answer together."""
        state = self._state()
        request = protocol.MetadataRequest
        for name in topics or ():
            check_topic_name(name)
        names = None if topics is None else [request.MetadataRequestTopic(name=n) for n in topics]

        def ask(connection: Connection, left_ms: float) -> Any:
            response = connection.request(
                request(topics=names, allow_auto_topic_creation=create), left_ms
            )
            if response.error_code:
                raise broker_error(response.error_code, f"metadata from {connection.peer}")
            return response

        response = self.ask_any(ask, timeout_ms)
        return self._learn(state, topics, response)

    def _learn(
        self, state: ProcessState, topics: list[str] | None, response: Any
    ) -> dict[str, TopicMetadata]:
        """Keep what the answer to a request about `topics` says; the topics that exist."""
        now = self.environment.monotonic()
        found: dict[str, TopicMetadata] = {}
        failed: dict[str, int] = {}
        for t in response.topics:
            if t.error_code in (ErrorCode.NONE, ErrorCode.LEADER_NOT_AVAILABLE):
                found[t.name] = topic_metadata(t)
            else:
                failed[t.name] = t.error_code
        with state.lock:
            state.refreshes += 1
            state.nodes = {
                b.node_id: Node(b.node_id, b.host, b.port, b.rack) for b in response.brokers
            }
            state.several |= len(state.nodes) > 1
            state.controller = response.controller_id
            state.cluster_id = response.cluster_id
            known = dict(state.topics)
            if topics is None:
                state.topics.clear()
            for name in topics or ():
                state.topics.pop(name, None)
            for name, t in found.items():
                before = state.forgotten.pop(name, None) or known.get(name, (0.0, None))[1]
                found[name] = newest = t.newest(before)
                state.topics[name] = (now, newest)
        for name, code in failed.items():
            if topics is not None and code not in (
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                ErrorCode.UNKNOWN_TOPIC_ID,
            ):
                raise broker_error(code, f"topic {name!r}")
        return found

    @property
    def has_several_brokers(self) -> bool:
        """Are there, or were there, as far as is known?"""
        return self._state().several

    @property
    def nodes(self) -> list[Node]:
        """The brokers, by node id."""
        state = self._state()
        if not state.nodes:
            self.refresh([])
        return [state.nodes[i] for i in sorted(state.nodes)]

    @property
    def cluster_id(self) -> str | None:
        state = self._state()
        if not state.nodes:
            self.refresh([])
        return state.cluster_id

    def _unknown(self, name: str) -> UnknownTopicError:
        servers = ",".join(f"{h}:{p}" for h, p in self.bootstrap)
        return UnknownTopicError(
            f"topic {name!r} does not exist on {servers}", hint="create it first, or check the name"
        )
