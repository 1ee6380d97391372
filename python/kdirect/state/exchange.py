"""How executors reach each other: channels over RDMA, or the same buffers over TCP.

Owns: the channels of one executor to and from all others, how their addresses are written into a
message, the order in which they connect, and which kind of exchange a job gets.  What may not
enter: what a buffer says, and when one is sent.

Each ordered pair of executors has a channel of its own.  Connecting takes two steps, because a
receiving end has to expect its sender before it connects: all `listen`, and when all have done so
all `connect`.  An exchange belongs to the process and the thread that made it.
"""

from __future__ import annotations

import base64
import binascii
import logging
import selectors
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kdirect.errors import KdirectError, StateExchangeError, TransportError
from kdirect.rdma import open_device
from kdirect.rdma.channel import ChannelSet, Receiver, Sender
from kdirect.rdma.contract import Access, Memory
from kdirect.rdma.layout import DEFAULT_SLOT_BYTES, DEFAULT_SLOTS, FOOTER_BYTES
from kdirect.rdma.shm_link import place
from kdirect.state.tcp_channel import TcpDoor, TcpReceiver, TcpSender

log = logging.getLogger("kdirect.state")

FLUSH_TIMEOUT_S = 30.0
COMPLETION_TIMEOUT_MS = 30_000
Address = dict[str, Any]


class SendingEnd(Protocol):
    """What both kinds of senders offer; see `kdirect.rdma.channel.Sender`."""

    @property
    def sent(self) -> int:
        """Buffers sent."""

    @property
    def completed(self) -> int:
        """Buffers whose source is the owner's again."""

    @property
    def may_send(self) -> bool:
        """Is there room for a buffer?"""

    def send_from(self, *args: Any, **header: Any) -> bool:
        """Send bytes: of which source of the exchange, position, length."""

    def buffer(self) -> memoryview | None:
        """Memory of the channel's own to fill, for `send`."""

    def send(self, *args: Any, **header: Any) -> bool:
        """Send as many bytes of `buffer`."""

    def refresh(self) -> None:
        """Bring the numbers up to date."""


class ReceivingEnd(Protocol):
    """What both kinds of receivers offer; see `kdirect.rdma.channel.Receiver`."""

    @property
    def address(self) -> int:
        """Where the payload lies."""

    @property
    def payload(self) -> memoryview:
        """The payload."""

    @property
    def length(self) -> int:
        """Of the payload."""

    @property
    def attempt(self) -> int:
        """Of the sender; so are `batch`, `epoch`, `sequence`, `flags` and `kind`."""

    @property
    def batch(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def sequence(self) -> int: ...

    @property
    def flags(self) -> int: ...

    @property
    def kind(self) -> int: ...

    def poll(self) -> bool:
        """Is a buffer here?"""

    def release(self) -> None:
        """Give the buffer back."""


class Exchange(Protocol):
    """The channels of one executor to and from all others."""

    @property
    def kind(self) -> str:
        """rdma or tcp."""

    @property
    def senders(self) -> Mapping[int, SendingEnd]:
        """By the peer that they lead to."""

    @property
    def receivers(self) -> Mapping[int, ReceivingEnd]:
        """By the peer that they come from."""

    @property
    def sources(self) -> Sequence[Any]:
        """What `SendingEnd.send_from` takes, in the order of `add_source`."""

    @property
    def completion_wakes(self) -> bool:
        """Does `wait` end, too, when a sender's `completed` can be brought up to date?"""

    def address(self) -> Address:
        """What the others need to know, to be carried by the coordinator."""

    def listen(self, addresses: Sequence[Address]) -> None:
        """Expect all senders."""

    def connect(self, addresses: Sequence[Address]) -> None:
        """Connect all senders; all others are listening."""

    def add_source(self, memory: Memory) -> None:
        """Let senders send from this memory: it is the next of `sources`."""

    def wait(self, timeout_ms: int) -> bool:
        """Sleep until a buffer wakes, a sender has room again, or a channel ends."""

    def flush(self) -> None:
        """Wait until every source is the owner's again."""

    def close(self) -> None:
        """End all channels."""


def peer_name(executor: int) -> str:
    """How errors name an executor."""
    return f"executor {executor}"


class RdmaExchange:
    """Channels over a provider of the verbs contract: `shm` on one host, `verbs` between hosts."""

    kind = "rdma"
    completion_wakes = False  # a WRITE completes without an event

    def __init__(
        self,
        executor: int,
        executors: int,
        *,
        provider: str,
        device_options: Mapping[str, Any] | None = None,
        slots: int = DEFAULT_SLOTS,
        slot_bytes: int = DEFAULT_SLOT_BYTES,
    ) -> None:
        self.provider = provider
        self._executor = executor
        device = open_device(provider, **(device_options or {}))
        others = [i for i in range(executors) if i != executor]
        self._channels = ChannelSet(
            device, most=max(1, 2 * len(others)), slots=slots, slot_bytes=slot_bytes
        )
        self.senders: dict[int, Sender] = {}
        self.receivers: dict[int, Receiver] = {}
        try:
            for i in others:
                self.senders[i] = self._channels.sender(peer_name(i))
                self.receivers[i] = self._channels.receiver(peer_name(i))
        except BaseException as e:
            self._channels.close()
            if isinstance(e, OSError):
                raise TransportError(
                    f"the channels of executor {executor} cannot be made over {provider}: {e}",
                    hint="raise the limit of open files (ulimit -n), or use fewer executors",
                ) from e
            raise
        self.sources: list[Any] = []

    def address(self) -> Address:
        boot_id, namespace = place()
        return {
            "exchange": self.provider,
            "place": [boot_id.hex(), namespace],  # where shm reaches, and nowhere else
            "senders": {str(i): _text(s.offer) for i, s in self.senders.items()},
            "receivers": {str(i): _text(r.offer) for i, r in self.receivers.items()},
        }

    def listen(self, addresses: Sequence[Address]) -> None:
        for i, receiver in self.receivers.items():
            self._reach(receiver, i, self._offer(addresses, i, "senders"))

    def connect(self, addresses: Sequence[Address]) -> None:
        for i, sender in self.senders.items():
            self._reach(sender, i, self._offer(addresses, i, "receivers"))

    def _reach(self, end: Sender | Receiver, peer: int, offer: bytes) -> None:
        """Connect; StateExchangeError where the peer has gone since it gave its address."""
        try:
            end.connect(offer)
        except TransportError as e:
            raise StateExchangeError(
                f"{peer_name(peer)} cannot be reached: {e.message}", hint=e.hint
            ) from e

    def _offer(self, addresses: Sequence[Address], peer: int, ends: str) -> bytes:
        address = addresses[peer]
        _check_kind(address, self.provider, peer)
        try:
            return base64.b64decode(address[ends][str(self._executor)], validate=True)
        except (KeyError, TypeError, ValueError, binascii.Error) as e:
            raise StateExchangeError(f"{peer_name(peer)} gave no address for this executor") from e

    def add_source(self, memory: Memory) -> None:
        self.sources.append(self._channels.register(memory))

    def wait(self, timeout_ms: int) -> bool:
        return bool(self._channels.wait(timeout_ms))

    def flush(self) -> None:
        for sender in self.senders.values():
            if not sender.wait_completed(COMPLETION_TIMEOUT_MS):
                sender.refresh()
                raise StateExchangeError(
                    f"{sender.end.peer}: a WRITE did not complete within"
                    f" {COMPLETION_TIMEOUT_MS // 1000} s",
                    hint="look at the fabric: kdirect doctor",
                )

    def close(self) -> None:
        self._channels.close()


class TcpExchange:
    """The same buffers over sockets, where `exchange=tcp` is asked for or nothing else works."""

    kind = "tcp"
    completion_wakes = True  # the kernel takes what is left

    def __init__(
        self,
        executor: int,
        executors: int,
        *,
        host: str,
        token: str,
        slot_bytes: int = DEFAULT_SLOT_BYTES,
    ) -> None:
        self._executor = executor
        self._host = host
        self._token = token
        payload = slot_bytes - FOOTER_BYTES
        others = [i for i in range(executors) if i != executor]
        self.senders = {i: TcpSender(peer_name(i), payload) for i in others}
        self.receivers = {i: TcpReceiver(peer_name(i), payload) for i in others}
        self._door = TcpDoor(host, token, self.receivers)
        self.sources: list[Any] = []

    def address(self) -> Address:
        return {"exchange": "tcp", "host": self._host, "port": self._door.port}

    def listen(self, addresses: Sequence[Address]) -> None:
        """The door is open since the beginning."""

    def connect(self, addresses: Sequence[Address]) -> None:
        for i, sender in self.senders.items():
            _check_kind(addresses[i], "tcp", i)
            try:
                host, port = str(addresses[i]["host"]), int(addresses[i]["port"])
            except (KeyError, TypeError, ValueError) as e:
                raise StateExchangeError(f"{peer_name(i)} gave no address") from e
            sender.connect(host, port, self._executor, self._token)
        # The senders of the others come when they are ready: `wait` lets them in.
        self._door.admit()

    def add_source(self, memory: Memory) -> None:
        self.sources.append(memory)

    def wait(self, timeout_ms: int) -> bool:
        reading = [r for r in self.receivers.values() if r.fileno() >= 0]
        writing = [s for s in self.senders.values() if s.waits_to_write]
        moved = False
        for sender in writing:
            moved |= sender.poll()
        at_door = self._door.waits_on
        ready = _ready([*reading, *at_door], writing, 0 if moved else timeout_ms / 1000)
        for sender in writing:
            if sender in ready:
                sender.poll()
        if at_door:
            self._door.admit()
        return bool(ready) or moved

    def flush(self) -> None:
        while writing := [s for s in self.senders.values() if s.completed < s.sent]:
            if not _ready([], writing, FLUSH_TIMEOUT_S):
                raise StateExchangeError(f"{writing[0].peer} does not read")
            for sender in writing:
                sender.poll()

    def close(self) -> None:
        self._door.close()
        for sender in self.senders.values():
            sender.close()
        for receiver in self.receivers.values():
            receiver.close()


def _ready(readers: Sequence[Any], writers: Sequence[Any], timeout_s: float) -> list[Any]:
    """Those that can read or write; whatever the numbers of their descriptors are."""
    with selectors.PollSelector() as selector:
        for reader in readers:
            selector.register(reader, selectors.EVENT_READ)
        for writer in writers:
            selector.register(writer, selectors.EVENT_WRITE)
        return [key.fileobj for key, _ in selector.select(timeout_s)]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _check_kind(address: Address, kind: str, peer: int) -> None:
    if address.get("exchange") != kind:
        raise StateExchangeError(
            f"{peer_name(peer)} uses exchange {address.get('exchange')!r}, this one {kind!r}",
            hint="give all executors of a job the same option exchange",
        )


def probe(provider: str, device_options: Mapping[str, Any] | None = None) -> None:
    """Try what channels over `provider` need on this host: a device, and memory registered with it.
    TransportError says what is missing."""
    try:
        domain = open_device(provider, **(device_options or {})).alloc_pd()
        try:
            memory = Memory.anonymous(DEFAULT_SLOT_BYTES)
            region = domain.register(memory, Access.LOCAL_WRITE | Access.REMOTE_WRITE)
            region.deregister()
        finally:
            domain.close()
    except TransportError:
        raise
    except (KdirectError, OSError) as e:
        raise TransportError(f"{provider} cannot be used here: {e}", hint="kdirect doctor") from e


def choose(
    wanted: str, provider: str, device_options: Mapping[str, Any] | None = None
) -> tuple[str, str]:
    """The kind of exchange (`rdma` or `tcp`) for the option `exchange` (auto, rdma or tcp), and
    why.  TransportError when rdma is asked for and cannot be had."""
    if wanted == "tcp":
        return "tcp", "exchange=tcp is set"
    try:
        probe(provider, device_options)
    except TransportError as e:
        if wanted == "rdma":
            raise TransportError(
                f"exchange=rdma cannot be had over {provider}: {e.message}",
                hint=e.hint or "run `kdirect doctor`, or use exchange=auto or tcp",
            ) from e
        log.warning("exchange tcp: no RDMA path: %s: %s", provider, e)
        return "tcp", f"no RDMA path: {provider}: {e}"
    return "rdma", f"memory could be registered with {provider}"
