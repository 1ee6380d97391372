"""One partition written by Kafka's Produce requests, over TCP or, with `produce.path=send`, in
SENDs.

Owns: the tags of the requests that a `TcpAppender` has under way, and the route of requests in
SENDs.  Retries and order are the `TcpAppender`'s, so this appender never ends by itself.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from kdirect.client.broker_link import BrokerLink, BrokerLinks
from kdirect.client.direct_append import REQUEST_SENT, Answers, Sending
from kdirect.client.idempotence import ProducerIdentity
from kdirect.client.partition_writer import Returned
from kdirect.client.tcp_append import Append, LeaderRoute, TcpAppender
from kdirect.client.transaction import Transaction
from kdirect.errors import BufferFullError, DeliveryError, KdirectError, TimedOutError
from kdirect.model import TopicPartition
from kdirect.wire.connection import Connection

log = logging.getLogger("kdirect.client")


class MessageRoute(LeaderRoute):
    """How requests in SENDs come to the leader of a partition: over the queue pair for messages to
    that broker, or over TCP where the broker has none."""

    def __init__(self, links: BrokerLinks, cluster: Any, tp: TopicPartition) -> None:
        super().__init__(cluster, tp)
        self._links = links

    def connection_at_hand(self) -> Connection | None:
        link: BrokerLink | None = self._links.at_hand(self._tp)
        if link is None:
            return None
        return super().connection_at_hand() if link.messages_refused else link.messages_at_hand

    @property
    def was_reached(self) -> bool:
        links = self._links
        return links.messages_reached or (links.messages_refused and super().was_reached)

    def connect(self, timeout_ms: float | None = None) -> Connection:
        """As `BrokerLink.message_connection`, which waits up to `request.timeout.ms`."""
        link = self._links.to_leader(self._tp)
        return link.message_connection(self._tp) or super().connect(timeout_ms)


class RequestAppender:
    """See the module.  Outcomes are appended to `outcomes` as (tag, base offset, error)."""

    broken = False

    def __init__(
        self,
        cluster: Any,
        links: BrokerLinks,
        tp: TopicPartition,
        settings: dict[str, Any],
        identity: ProducerIdentity | None,
        outcomes: list[Any],
        errors: list[KdirectError],
        *,
        two_sided: bool,
        transaction: Transaction | None = None,
    ) -> None:
        self.tp = tp
        self.two_sided = two_sided
        self.last_offset = -1
        self.in_flight = 0  # records not answered
        self.requests = 0
        self._batch_bytes: int = settings["batch.bytes"]
        self._monotonic = cluster.environment.monotonic
        self._appender = TcpAppender(
            cluster,
            tp,
            settings["acks"],
            settings["delivery.timeout.ms"],
            identity=identity,
            transaction=transaction,
            route=MessageRoute(links, cluster, tp) if two_sided else None,
        )
        self._outcomes = outcomes
        self._errors = errors
        self._sent: deque[tuple[Append, int, Any]] = deque()
        self._records = self._bytes = 0

    @property
    def path(self) -> str:
        """How the partition is written."""
        return "two-sided" if self.two_sided else "tcp"

    @property
    def connected(self) -> bool:
        """Has this appender a connection to its broker?"""
        return self._appender.connected

    @property
    def refusal(self) -> KdirectError | None:
        """See `TcpAppender.refusal`."""
        return self._appender.refusal

    @property
    def unsent(self) -> bool:
        """See `TcpAppender.unsent`."""
        return self._appender.unsent

    def submit(
        self, data: Any, records: int, tag: Any, deadline: float, *, patient: bool = True
    ) -> Sending:
        """Send a request; waits for room until the deadline, or as `TcpAppender.submit` if not
        `patient`.  DeliveryError when it can never be taken."""
        if self.two_sided and len(data) > self._batch_bytes:
            raise DeliveryError(
                f"a batch of {len(data)} bytes is too large for a message"
                f" (batch.bytes {self._batch_bytes})",
                hint="raise batch.bytes, by which the broker's buffers are sized, or use"
                " produce.path=rdma or tcp",
                maybe_committed=False,
            )
        room_ms = max(0.0, (deadline - self._monotonic()) * 1000)
        try:
            append = self._appender.submit(data, room_ms, patient=patient)
        except BufferFullError:
            return Sending.FULL
        self._sent.append((append, records, tag))
        self.in_flight += records
        self._records += records
        self._bytes += len(data)
        self.requests += 1
        self._take_answers()
        return REQUEST_SENT

    def wait_answered(self, deadline: float) -> Answers:
        """Wait for every answer until the deadline."""
        while self._sent:
            try:
                self._appender.flush(max(0.0, (deadline - self._monotonic()) * 1000))
            except TimedOutError:
                self._take_answers()
                return Answers.NOT_YET if self._sent else Answers.ALL
            except DeliveryError:
                pass  # its outcome tells of it
            self._take_answers()
        return Answers.ALL

    def collect(self) -> bool:
        """Make outcomes of what is answered.  True: this appender goes on."""
        if self._sent and not self._sent[0][0].done:
            self._appender.poll()
        self._take_answers()
        return True

    def _take_answers(self) -> None:
        while self._sent and self._sent[0][0].done:
            append, records, tag = self._sent.popleft()
            append.seen = True
            self.in_flight -= records
            if append.error is not None:
                if tag is None:
                    self._errors.append(append.error)
                else:
                    self._outcomes.append((tag, -1, append.error))
                continue
            self.last_offset = append.base_offset
            if tag is not None:
                self._outcomes.append((tag, append.base_offset, None))

    def take_back(self, *, wait: bool = False) -> Returned:
        """The requests not answered, which are not this appender's any more."""
        self._take_answers()
        pending = [(bytes(a.data), records, tag) for a, records, tag in self._sent]
        self._sent.clear()
        self.in_flight = 0
        self._appender.abandon()
        return Returned(unanswered=pending)

    def statistics(self) -> dict[str, int]:
        """What was sent; see docs/metrics.md."""
        way = "send" if self.two_sided else "tcp"
        return {
            f"{way}_records": self._records,
            f"{way}_bytes": self._bytes,
            f"{way}_requests": self.requests,
        }

    def close(self) -> None:
        """Flush, then refuse more."""
        try:
            self._appender.close()
        except KdirectError as e:
            log.warning("%s: closing with requests unanswered: %s", self.tp, e)
