"""Opening a TCP connection to a broker, and the words for why that failed."""

from __future__ import annotations

import errno
import os
import socket

from kdirect.errors import BrokerUnavailableError, ProtocolError


def dial(host: str, port: int, timeout_ms: float) -> socket.socket:
    """A connected, non-blocking socket.  BrokerUnavailableError says why there is none."""
    address = address_text(host, port)
    try:
        s = socket.create_connection((host, port), timeout=max(0.001, timeout_ms / 1000))
    except socket.gaierror as e:
        raise BrokerUnavailableError(
            f"the host name of {address} cannot be resolved ({e.strerror})",
            hint="correct bootstrap.servers, or the name service",
        ) from e
    except TimeoutError as e:
        raise BrokerUnavailableError(
            f"no broker answers at {address} within {timeout_ms:.0f} ms",
            hint="check the address and the network between, or raise connect.timeout.ms",
        ) from e
    except (OSError, OverflowError) as e:
        raise BrokerUnavailableError(
            f"no broker answers at {address} ({reason_of(e)})", hint=_start_hint(address)
        ) from e
    try:
        if s.getsockname() == s.getpeername():
            # On loopback an unused port of the ephemeral range may connect to itself.
            raise BrokerUnavailableError(
                f"no broker answers at {address}", hint=_start_hint(address)
            )
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        s.setblocking(False)
    except BaseException as e:
        s.close()
        if isinstance(e, OSError):
            raise BrokerUnavailableError(
                f"no broker answers at {address} ({reason_of(e)})", hint=_start_hint(address)
            ) from e
        raise
    return s


def _start_hint(address: str) -> str:
    return f"start one with `kdirect broker --listeners {address}`, or correct bootstrap.servers"


def address_text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reason_of(cause: BaseException) -> str:
    if isinstance(cause, socket.gaierror):
        return f"its name cannot be resolved: {cause.strerror}"  # its errno is no errno
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno).lower() if cause.errno != errno.EPIPE else "broken pipe"
    return str(cause) or type(cause).__name__


def not_a_frame(peer: str, start: bytes, size: int, allowed_bytes: int) -> ProtocolError:
    """The error for a peer whose answer begins with `start`, which as a frame has `size` bytes."""
    if start == b"HTTP":
        return ProtocolError(
            f"{peer} speaks HTTP, not Kafka's protocol",
            hint="give bootstrap.servers the broker's Kafka listener",
        )
    if start[:2] == b"\x15\x03":
        return ProtocolError(
            f"{peer} speaks TLS", hint="give bootstrap.servers a plaintext listener"
        )
    return ProtocolError(
        f"{peer} sent a response of {size} bytes; from 4 to {allowed_bytes} are allowed",
        hint="check that it is a Kafka broker; larger batches need a larger max.batch.bytes",
    )
