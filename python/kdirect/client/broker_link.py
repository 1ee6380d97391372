"""What a producer has with one broker: a queue pair for its requests, one for messages, and whether
the broker answers at all.

Owns: for each broker that leads a partition the producer writes, the channel with its `AckRouter`,
the connection for Produce requests in SENDs, and the probe of a broker that was lost.  A broker
that goes takes down its own link only.  What may not enter: partitions, and what happens to their
requests (`kdirect.client.partition_writer`).

All but `BrokerLink.message_connection` is called with the producer's lock held.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from kdirect.client.lost_broker import Search, ask_leader
from kdirect.client.partition_writer import FIRST_PAUSE_S, LONGEST_PAUSE_S
from kdirect.client.producing_session import ProducingSession
from kdirect.client.two_sided import MessageConnection
from kdirect.errors import AccessDeniedError, KdirectError, NotLeaderError, TransportError
from kdirect.model import TopicPartition
from kdirect.wire.ack_router import AckRouter
from kdirect.wire.channel import Channel
from kdirect.wire.connection import Connection

log = logging.getLogger("kdirect.client")

NOTICES = 64  # receives beyond the window, for notices of revocation


class BrokerLink:
    """See the module.  `session` and the producer's `settings`; `address`: (host, port)."""

    def __init__(
        self, session: ProducingSession, settings: dict[str, Any], address: tuple[str, int]
    ) -> None:
        self.address = address
        self._session = session
        self._environment = session.environment
        self._settings = settings
        self._channel: Channel | None = None
        self._connection: Connection | None = None  # that controls it, or the last one
        self._router: AckRouter | None = None
        self._messages: MessageConnection | None = None
        self._messages_lock = threading.Lock()  # of the thread that opens it
        self._messages_refused = False
        self._closed = False
        self._search: Search[bool] | None = None  # while it is not known whether the broker answers
        self._sought: TopicPartition | None = None  # whose leader is asked for where it does not

    # -- the queue pair of one-sided requests ------------------------------------------------------

    @property
    def channel(self) -> Channel | None:
        """The queue pair, if there is one."""
        return self._channel

    @property
    def router(self) -> AckRouter | None:
        """That hands on the acknowledgements of the queue pair, if there is one."""
        return self._router

    @property
    def broken(self) -> bool:
        """Is there a queue pair that cannot be used any more?"""
        return self._channel is not None and (
            self._channel.closed or self._router is None or bool(self._router.broken)
        )

    @property
    def connection_closed(self) -> bool:
        """Has the connection ended that controls the queue pair, or controlled the last one?"""
        return self._connection is not None and self._connection.closed

    def open(self, tp: TopicPartition) -> tuple[Channel, AckRouter]:
        """The queue pair to this broker, which leads `tp`; opened when first needed."""
        if self._channel is None or self._router is None:
            window = self._settings["max.in.flight"]
            # A WRITE and a SEND for each request that is announced by a notice.
            requests = 2 * window if self._settings["rdma.notify"] == "send" else window
            channel = self._session.channel(tp, receives=window + NOTICES, sends=requests + NOTICES)
            if (channel.connection.host, channel.connection.port) != self.address:
                channel.close()
                raise NotLeaderError(f"{tp}: another broker leads it since its link was opened")
            self._channel, self._connection = channel, channel.connection
            self._router = AckRouter(
                channel.qp,
                channel.send_cq,
                channel.recv_cq,
                window + NOTICES,
                min(window, channel.max_in_flight),
                self._settings["spin.us"],
                self._environment.monotonic,
            )
        return self._channel, self._router

    def leader_epoch(self, tp: TopicPartition) -> int:
        """The leader epoch of `tp` that requests for access name; -1: not known."""
        return self._session.cluster.leader_epoch(tp)

    def forget_channel(self) -> Channel | None:
        """Take the queue pair out: the next `open` makes another one.  The caller closes it."""
        channel, self._channel, self._router = self._channel, None, None
        return channel

    def drain(self) -> None:
        """Take the acknowledgements that are here."""
        if self._router is not None and not self._router.broken:
            self._router.drain()

    # -- the connection of two-sided requests ------------------------------------------------------

    @property
    def messages_at_hand(self) -> MessageConnection | None:
        """The queue pair that carries Produce requests, if there is one."""
        messages = self._messages
        return None if messages is None or messages.closed else messages

    @property
    def messages_reached(self) -> bool:
        """Was there ever one?"""
        return self._messages is not None

    @property
    def messages_refused(self) -> bool:
        """The broker has no such path: requests go over TCP."""
        return self._messages_refused

    def message_connection(self, tp: TopicPartition) -> MessageConnection | None:
        """The queue pair that carries Produce requests, opened when first needed and again when it
        broke; None where the broker has none.  Waits up to request.timeout.ms.  May be called by
        any thread."""
        with self._messages_lock:
            messages = self.messages_at_hand
            if messages is None and not self._messages_refused:
                try:
                    messages = self._messages = self._session.messages(tp, self._settings)
                except (AccessDeniedError, TransportError) as e:
                    log.warning("%s is written over TCP: %s", tp, e)
                    self._messages_refused = True
                    return None
                if self._closed:  # meanwhile
                    messages.close()
            return messages

    # -- does the broker answer? -------------------------------------------------------------------

    @property
    def away_until(self) -> float:
        """When the broker, which did not answer, is asked again (monotonic seconds); in the past
        where it is being asked, or nobody asked yet."""
        return self._search.next_attempt if self._search is not None else 0.0

    def answers(self, tp: TopicPartition) -> bool:
        """Does the broker answer on a new connection?  Raises when it does not, and then the leader
        of `tp` was asked for again; False while that is not known.  To open a queue pair to one
        that does not answer would wait long."""
        self._sought = tp
        if self._search is None:
            self._search = Search(
                self._environment,
                self._connect,
                first_ms=FIRST_PAUSE_S * 1000,
                most_ms=LONGEST_PAUSE_S * 1000,
            )
        if not self._search.found():
            return False
        self._search = None
        return True

    def _connect(self) -> bool:
        """Connect once; where nobody answers, ask for the leader, which may be elsewhere now."""
        settings, sought = self._settings, self._sought
        try:
            self._environment.connect(
                *self.address, settings["client.id"], settings["connect.timeout.ms"]
            ).close()
        except KdirectError:
            if sought is not None:
                ask_leader(self._session.cluster, sought)
            raise
        return True

    def wait_probe(self, until: float) -> bool:
        """Wait for what `answers` does not know yet; False when nothing is asked."""
        return self._search is not None and self._search.wait(until)

    def close(self) -> None:
        """End both queue pairs."""
        self._closed = True
        channel = self.forget_channel()
        if channel is not None:
            channel.close()
        if self._messages is not None:
            self._messages.close()


class BrokerLinks:
    """The links of one producer, by the address of the broker."""

    def __init__(self, session: ProducingSession, settings: dict[str, Any]) -> None:
        self._session = session
        self._settings = settings
        self._links: dict[tuple[str, int], BrokerLink] = {}

    def __iter__(self) -> Any:
        return iter(list(self._links.values()))

    def to_leader(self, tp: TopicPartition) -> BrokerLink:
        """The link to the broker that leads `tp`; raises as `Cluster.leader_address` does.  May be
        called by any thread."""
        return self._at(self._session.cluster.leader_address(tp))

    def moved(self, tp: TopicPartition, link: BrokerLink) -> BrokerLink | None:
        """The link to the leader of `tp`, where that is known to be at another address than `link`
        leads to; or None."""
        address = self._session.cluster.leader_address_at_hand(tp)
        return None if address is None or address == link.address else self._at(address)

    def _at(self, address: tuple[str, int]) -> BrokerLink:
        found = self._links.get(address)
        if found is None:
            link = BrokerLink(self._session, self._settings, address)
            found = self._links.setdefault(address, link)
        return found

    def at_hand(self, tp: TopicPartition) -> BrokerLink | None:
        """The link to the leader of `tp`, where that takes no answer of anybody; or None."""
        address = self._session.cluster.leader_address_at_hand(tp)
        return self._links.get(address) if address is not None else None

    @property
    def messages_reached(self) -> bool:
        """Was there ever a queue pair for messages?"""
        return any(link.messages_reached for link in self)

    @property
    def messages_refused(self) -> bool:
        """Has some broker no path for messages?"""
        return any(link.messages_refused for link in self)
