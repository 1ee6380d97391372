"""The addresses that a broker listens on, and the ones that it names to clients.

Owns: which listener got which address, and what is advertised for it.  No I/O: the server opens
the sockets and reports them with `add`.  Pure but for that list, so any thread may ask.
"""

from __future__ import annotations

import socket

from kdirect.broker.config import Listener, format_address

ANY_ADDRESS = ("", "0.0.0.0", "::")
_MAPPED_IPV4 = "::ffff:"  # how an IPv6 socket spells an IPv4 address


class Listeners:
    """The listeners of one broker, in the order of the property `listeners`.  `advertised` are
    those of `advertised.listeners`; the last one stands for all that are missing."""

    def __init__(self, advertised: tuple[Listener, ...]) -> None:
        self._advertised = advertised
        self._bound: list[tuple[Listener, str, int]] = []  # listener, host, port it got

    def add(self, listener: Listener, host: str, port: int) -> None:
        """The next listener is open at `host` and `port`."""
        self._bound.append((listener, host, port))

    def address_for(self, index: int, local_host: str) -> tuple[str, int]:
        """(host, port) to give to a client that came through listener `index` and reached this
        host as `local_host`."""
        if self._advertised:
            chosen = self._advertised[min(index, len(self._advertised) - 1)]
            return chosen.host, chosen.port or self._bound[index][2]
        listener, host, port = self._bound[index]
        if listener.host in ANY_ADDRESS:
            return local_host.removeprefix(_MAPPED_IPV4) or host, port
        return listener.host, port

    def registered(self, index: int) -> tuple[str, int]:
        """(host, port) of listener `index` for other brokers and for clients of the cluster: the
        name of this host, where it listens on all addresses and advertises none."""
        return self.address_for(index, socket.gethostname())

    @property
    def bootstrap_servers(self) -> str:
        """``host:port`` of every listener, separated by commas."""
        out = []
        for index, (listener, host, port) in enumerate(self._bound):
            if self._advertised:
                chosen = self._advertised[min(index, len(self._advertised) - 1)]
                host, port = chosen.host, chosen.port or port
            elif listener.host in ANY_ADDRESS:
                host = "127.0.0.1"
            out.append(format_address(host, port))
        return ",".join(out)
