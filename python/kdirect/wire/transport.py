"""Which transport reaches each broker, and new queue pairs over it.

Owns: one `BrokerTransport` for each broker that a session uses, with the transport that a data
READ has proven there.  Two brokers may be reached by different transports: one shares this host's
memory, another one lies across a network without RDMA.  What may not enter: what is read or
written over a queue pair, and what follows when one breaks.

Thread-safe.  A queue pair that was handed out belongs to whoever asked for it
(`kdirect.wire.channel`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from kdirect.errors import KdirectError, RdmaError, TransportError
from kdirect.format import layout
from kdirect.model import TopicPartition
from kdirect.wire.channel import Channel
from kdirect.wire.cluster import Cluster
from kdirect.wire.connection import Connection
from kdirect.wire.environment import Environment

log = logging.getLogger("kdirect.client")

# What `transport=auto` tries, in this order, before Kafka's protocol.
DIRECT_TRANSPORTS = ("verbs", "shm")
_WHY = {
    "verbs": "a READ from the broker {peer} was proven over {device}",
    "shm": "the broker {peer} shares this host's memory; a READ of it was proven",
}


class BrokerTransport:
    """The way to one broker.  Made by `Transports`; the choice is made at the first question."""

    def __init__(
        self, settings: Mapping[str, Any], environment: Environment, address: tuple[str, int]
    ) -> None:
        self.address = address
        self._settings = settings
        self._environment = environment
        self._lock = threading.Lock()
        self._name: str | None = None
        self._reason = ""
        self._proven: Channel | None = None  # the queue pair of the proof, for the first reader

    def name(self, connection: Connection) -> str:
        """`verbs`, `shm` or `tcp`: the first that a data READ over `connection`'s broker proved.

        TransportError when the setting `transport` names one that cannot be had."""
        with self._lock:
            if self._name is None:
                self._choose(connection)
            assert self._name is not None
            return self._name

    @property
    def chosen(self) -> str | None:
        """What `name` chose; None before its first call."""
        return self._name

    @property
    def reason(self) -> str:
        """Why that transport; empty before it was chosen."""
        return self._reason

    def channel(self, connection: Connection, **sizes: int) -> Channel:
        """A new queue pair to this broker, controlled by `connection`.  Raises as `Channel` does;
        TransportError where the broker is reached over TCP only."""
        name = self.name(connection)
        if not sizes:
            with self._lock:
                proven, self._proven = self._proven, None
            if proven is not None and not proven.closed:
                return proven
        return self._open(connection, name, **sizes)

    def device_options(self, connection: Connection, name: str) -> dict[str, Any]:
        """The arguments of `open_device` for transport `name` to the broker of `connection`."""
        if name != "verbs":
            return {}
        named = self._settings["rdma.bind.address"]
        return {
            "bind_address": named or connection.local_address,
            "device": self._settings["rdma.device"] or "",
            "gid_index": self._settings["rdma.gid.index"],
            "strict": bool(named),
        }

    def close(self) -> None:
        """Close what was proven and not used."""
        with self._lock:
            proven, self._proven = self._proven, None
        if proven is not None:
            proven.close()

    def _open(self, connection: Connection, name: str, **sizes: int) -> Channel:
        return Channel(
            connection,
            name,
            environment=self._environment,
            device_options=self.device_options(connection, name),
            **sizes,
        )

    def _choose(self, connection: Connection) -> None:
        wanted = self._settings["transport"]
        if wanted == "tcp":
            self._name, self._reason = "tcp", "transport=tcp is set"
            return
        failures: list[tuple[str, KdirectError]] = []
        if connection.supports(layout.API_OPEN_QUEUE_PAIR):
            for name in DIRECT_TRANSPORTS if wanted == "auto" else (wanted,):
                if self._prove(connection, name, failures):
                    return
        else:
            no_rdma = TransportError(
                f"{connection.peer} is no kdirect broker, or offers no RDMA (rdma.transports)",
                hint="use transport=tcp",
            )
            failures.append((wanted, no_rdma))
        if wanted != "auto":
            why = failures[0][1]
            raise TransportError(
                f"transport={wanted} cannot be had: {why.message}",
                hint=why.hint or "use transport=auto or tcp",
            )
        self._name = "tcp"
        self._reason = "no RDMA path: " + "; ".join(
            str(e) if name == "auto" else f"{name}: {e}" for name, e in failures
        )
        log.warning("transport tcp: %s", self._reason)

    def _prove(
        self, connection: Connection, name: str, failures: list[tuple[str, KdirectError]]
    ) -> bool:
        """Open a queue pair over transport `name`, which READs and checks; note a failure."""
        try:
            channel = self._open(connection, name)
        except (RdmaError, TransportError) as e:
            log.debug("transport %s: %s", name, e)
            # Kept for its text alone: its frames hold this list, and all that the caller has open.
            failures.append((name, e.with_traceback(None)))
            return False
        self._proven = channel
        reason = _WHY[name].format(
            peer=connection.peer, device=getattr(channel.device, "choice", "")
        )
        self._reason = "; ".join([reason, *(f"not {other}: {e}" for other, e in failures)])
        self._name = name
        log.info("transport %s: %s", name, self._reason)
        return True


class Transports:
    """The transports of a session, a `BrokerTransport` for each broker it has used."""

    def __init__(
        self, settings: Mapping[str, Any], cluster: Cluster, environment: Environment
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._environment = environment
        self._lock = threading.Lock()
        self._brokers: dict[tuple[str, int], BrokerTransport] = {}
        self._first: BrokerTransport | None = None

    def to(self, connection: Connection) -> BrokerTransport:
        """The transport to the broker that `connection` leads to."""
        return self._at((connection.host, connection.port))

    def first(self) -> BrokerTransport:
        """The transport to the broker that answered first, chosen.  Where that broker ends while a
        READ is being proven, another one is asked."""
        if self._first is None:

            def choose(connection: Connection, _left_ms: float) -> BrokerTransport:
                chosen = self.to(connection)
                chosen.name(connection)
                return chosen

            self._first = self._cluster.ask_any(choose)
        return self._first

    def name(self, tp: TopicPartition, *, closest: bool = False) -> str:
        """The transport to the leader of `tp`, or with `closest` to the broker that it is read at.
        Asks that broker at the first call only."""
        if self._settings["transport"] == "tcp":
            return "tcp"
        known = self._at(self._cluster.leader_address(tp, closest=closest)).chosen
        if known is not None:
            return known
        connection = self._cluster.connection_for(tp, closest=closest)
        return self.to(connection).name(connection)

    def channel(self, tp: TopicPartition, *, closest: bool = False, **sizes: int) -> Channel:
        """A new queue pair to the broker that leads `tp`, or with `closest` to the one that it is
        read at."""
        connection = self._cluster.connection_for(tp, closest=closest)
        return self.to(connection).channel(connection, **sizes)

    def _at(self, address: tuple[str, int]) -> BrokerTransport:
        with self._lock:
            found = self._brokers.get(address)
            if found is None:
                found = BrokerTransport(self._settings, self._environment, address)
                self._brokers[address] = found
            return found

    def close(self) -> None:
        with self._lock:
            for transport in self._brokers.values():
                transport.close()
