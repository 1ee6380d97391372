"""Connections to the other brokers of the cluster, on the event loop.

Owns: up to five connections to each broker, made when they are first needed: for Fetch of replicas,
and for that of remote storage's metadata, whose answers wait for records; for questions to the
controller, whose answers wait for the metadata store; for metadata that is written, whose answers
wait for replicas; and for all else, which is answered at once.  The answers of one connection come
in the order of its requests, so what waits does not hold up what does not.

- A request is answered once, or fails with `BrokerUnavailableError` (the broker is not registered,
  does not take connections, or the connection broke: the request may have been carried out),
  `TimedOutError`, or `ProtocolError`.
- A request that timed out ends its connection, for whatever follows it would wait, too.
- **A lost broker.**  A connection that breaks is made again at once.  If the other side refuses
  that, whoever listens for losses is told: a process that died refuses, whereas one that has closed
  an idle connection does not.  One that keeps silent is not lost by this rule; the session timeout
  is for those.
- Versions are not negotiated: all brokers of a cluster speak the highest versions of this build,
  or what the caller asks for.
"""

from __future__ import annotations

import asyncio
import enum
import ipaddress
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

from kdirect.errors import BrokerUnavailableError, ClosedError, ProtocolError, TimedOutError
from kdirect.format import protocol
from kdirect.member.metadata import Metadata
from kdirect.wire.dial import address_text, not_a_frame, reason_of
from kdirect.wire.environment import Environment

log = logging.getLogger("kdirect.member")

CONNECT_S = 3.0  # for one attempt to connect
MOST_RESPONSE_BYTES = 256 << 20
_SIZE = struct.Struct(">i")


async def connect(
    make: Callable[[], asyncio.BaseProtocol], host: str, port: int
) -> asyncio.BaseTransport:
    """A connection to the first address of a host that takes one.  OSError: none does, or there is
    no such host; ConnectionRefusedError only where every address refuses.

    (Where a name has several addresses, asyncio says with one OSError that all have failed, and a
    process that has died could not be told from a network that is down.)"""
    errors: list[OSError] = []
    for address in await _addresses(host, port):
        try:
            made, _ = await asyncio.get_running_loop().create_connection(make, address, port)
            return made
        except OSError as e:
            errors.append(e)
    raise next((e for e in errors if not isinstance(e, ConnectionRefusedError)), errors[0])


async def _addresses(host: str, port: int) -> list[str]:
    """Of a host, at least one.  OSError: there is no such host, or this cannot be one's name."""
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        pass  # a name
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except ValueError as e:  # UnicodeError, too
        raise OSError(f"{host[:80]!r} is no name of a host: {e}") from e
    return list(dict.fromkeys(str(row[4][0]) for row in found))


class Lane(enum.Enum):
    """What a connection is for; see the module."""

    PROMPT = "prompt"
    FETCH = "fetch"
    CONTROL = "control"
    TAIL = "tail"
    APPEND = "append"


_LANES = {
    protocol.FetchAsReplicaRequest.API_KEY: Lane.FETCH,
    protocol.AskControllerRequest.API_KEY: Lane.CONTROL,
    protocol.FetchRequest.API_KEY: Lane.TAIL,
    protocol.WriteRemoteMetadataRequest.API_KEY: Lane.APPEND,
}


class Peers:
    """See the module.  `metadata_of`: the newest metadata, or None before there is any; it says
    where brokers are.  `listener`: name of the listener that brokers use among themselves.
    """

    def __init__(
        self,
        metadata_of: Callable[[], Metadata | None],
        listener: str,
        environment: Environment,
        *,
        client_id: str = "kdirect-broker",
    ) -> None:
        self._metadata_of = metadata_of
        self._listener = listener
        self._environment = environment
        self._client_id = client_id
        self._links: dict[tuple[int, Lane], _Link] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._told_of_losses: list[Callable[[int], None]] = []

    def listen_for_losses(self, call: Callable[[int], None]) -> None:
        """Call `call(node_id)` on the event loop when a broker's process takes no connections any
        more."""
        self._told_of_losses.append(call)

    async def call(
        self, node_id: int, message: Any, *, timeout_s: float, version: int | None = None
    ) -> Any:
        """The response to a request of `format.protocol`.  Errors as the module says."""
        deadline = self._environment.monotonic() + timeout_s
        lane = _LANES.get(message.API_KEY, Lane.PROMPT)
        link = await self._link(node_id, lane, timeout_s)
        try:
            left_s = max(0.0, deadline - self._environment.monotonic())
            return await asyncio.wait_for(link.request(message, version), left_s)
        except asyncio.TimeoutError as e:
            error = TimedOutError(
                f"broker {node_id} at {link.peer} did not answer {message.name} within"
                f" {timeout_s:g} s",
                hint="see its log",
            )
            link.end(error)
            raise error from e

    async def reach(self, node_id: int) -> None:
        """Connect to a broker, and so hear of its end although nothing is asked of it.
        Does nothing where there is a connection; errors as those of `call`."""
        await self._link(node_id, Lane.CONTROL, CONNECT_S)

    def close(self) -> None:
        """End all connections; what waits fails with ClosedError."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for link in list(self._links.values()):
            link.end(_closed())
        self._links.clear()

    # -- connections -------------------------------------------------------------------------------

    async def _link(self, node_id: int, lane: Lane, timeout_s: float) -> _Link:
        if self._closed:
            raise _closed()
        host, port = self._address(node_id)
        link = self._links.get((node_id, lane))
        if link is not None and (link.host, link.port) != (host, port):
            link.end(BrokerUnavailableError(f"broker {node_id} has moved to {host}:{port}"))
            link = None
        if link is None or link.error is not None:
            link = _Link(self, node_id, lane, host, port, self._client_id)
            self._links[node_id, lane] = link
            link.connected = self._spawn(link.connect(CONNECT_S))
        try:
            await asyncio.wait_for(asyncio.shield(link.connected), timeout_s)
        except asyncio.TimeoutError as e:
            raise BrokerUnavailableError(
                f"broker {node_id} does not answer at {link.peer} within {timeout_s:g} s",
                hint="check that it runs, and the network between",
            ) from e
        if link.error is not None:
            raise _again(link.error)
        return link

    def _address(self, node_id: int) -> tuple[str, int]:
        metadata = self._metadata_of()
        address = metadata.endpoint(node_id, self._listener) if metadata is not None else None
        if address is None:
            raise BrokerUnavailableError(
                f"broker {node_id} is not registered with a listener {self._listener}",
                hint="start it, or see its log",
            )
        return address

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _broke(self, link: _Link) -> None:
        """A connection that served was ended by the other side, or by the network."""
        if self._links.get((link.node_id, link.lane)) is link:
            del self._links[link.node_id, link.lane]
        if not self._closed:
            self._spawn(self._look_for(link))

    async def _look_for(self, lost: _Link) -> None:
        """Connect again; tell if that is refused."""
        try:
            await self._link(lost.node_id, lost.lane, CONNECT_S)
        except BrokerUnavailableError as e:
            log.info("the connection to broker %d was lost: %s", lost.node_id, e.message)
            refused = isinstance(e.__cause__, ConnectionRefusedError | ConnectionResetError)
            if refused and not self._closed:
                for call in self._told_of_losses:
                    call(lost.node_id)
        except ClosedError:
            pass


def _closed() -> ClosedError:
    return ClosedError("the connections to other brokers were closed")


def _again(error: BaseException) -> BaseException:
    """A copy, for each who waits raises one of its own."""
    if isinstance(error, BrokerUnavailableError | ClosedError | TimedOutError | ProtocolError):
        made = type(error)(error.message, hint=error.hint)
        made.__cause__ = error.__cause__
        return made
    return error


class _Link(asyncio.Protocol):
    """One connection.  `error`: why it has ended."""

    connected: asyncio.Task[Any]

    def __init__(
        self, peers: Peers, node_id: int, lane: Lane, host: str, port: int, client_id: str
    ) -> None:
        self.node_id = node_id
        self.lane = lane
        self.host = host
        self.port = port
        self.peer = address_text(host, port)
        self.error: BaseException | None = None
        self._peers = peers
        self._client_id = client_id
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[tuple[int, int, int, asyncio.Future[Any]]] = deque()
        self._correlation_id = 0
        self._received = bytearray()

    async def connect(self, timeout_s: float) -> None:
        """Connect, or set `error`."""
        try:
            await asyncio.wait_for(connect(lambda: self, self.host, self.port), timeout_s)
        except (OSError, asyncio.TimeoutError) as e:
            error = BrokerUnavailableError(
                f"broker {self.node_id} does not take connections at {self.peer}: {reason_of(e)}",
                hint="check that it runs, and the network between",
            )
            error.__cause__ = e
            self.end(error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self.error is not None:
            transport.abort()
            return
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def request(self, message: Any, version: int | None) -> asyncio.Future[Any]:
        """Send it; the future has the response."""
        assert self._transport is not None
        if version is None:
            version = protocol.version_range(message)[1]
        self._correlation_id = self._correlation_id % 0x7FFFFFFF + 1
        answer = asyncio.get_running_loop().create_future()
        frame = protocol.encode_request(message, version, self._correlation_id, self._client_id)
        self._waiting.append((self._correlation_id, message.API_KEY, version, answer))
        self._transport.write(frame)
        return answer

    # -- what arrives ------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._received += data
        start = 0
        try:
            while self.error is None and len(self._received) - start >= 4:
                (size,) = _SIZE.unpack_from(self._received, start)
                if not 4 <= size <= MOST_RESPONSE_BYTES:
                    head = bytes(self._received[start : start + 4])
                    raise not_a_frame(self.peer, head, size, MOST_RESPONSE_BYTES)
                if len(self._received) - start - 4 < size:
                    break
                # A copy, for fields of type records are views of it.
                self._take(bytes(memoryview(self._received)[start + 4 : start + 4 + size]))
                start += 4 + size
        except ProtocolError as e:
            log.error("broker %d at %s: %s", self.node_id, self.peer, e)
            self.end(e)
            return
        if start:
            del self._received[:start]

    def _take(self, payload: bytes) -> None:
        if not self._waiting:
            raise ProtocolError(f"{self.peer} has sent a response that nobody waits for")
        correlation_id, api_key, version, answer = self._waiting[0]
        found, response = protocol.decode_response(api_key, version, payload)
        if found != correlation_id:
            raise ProtocolError(
                f"{self.peer} has answered request {found} in place of {correlation_id}"
            )
        self._waiting.popleft()
        if not answer.done():
            answer.set_result(response)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.error is not None:
            return
        why = reason_of(exc) if exc is not None else "the other side has closed it"
        error = BrokerUnavailableError(
            f"the connection to broker {self.node_id} at {self.peer} was lost: {why}",
            hint="see its log",
        )
        self.end(error)
        self._peers._broke(self)

    def end(self, error: BaseException) -> None:
        """End the connection; what waits fails with a copy of `error`."""
        if self.error is None:
            self.error = error
        if self._transport is not None:
            self._transport.abort()
        while self._waiting:
            answer = self._waiting.popleft()[3]
            if not answer.done():
                answer.set_exception(_again(error))
