"""One blocking TCP connection to a broker: frames, correlation ids, versions, errors.

Owns: the socket, the buffer that responses are read into, the requests that wait for an answer, and
the one mapping from what a peer does wrong to `kdirect.errors` (what an answer's error code means
is `broker_errors`').  No metadata, no retries and no leaders may enter here: they are `cluster.py`.

Invariants:

- A broker answers the requests of one connection in the order they were sent, so the waiting
  requests are a queue and a response whose correlation id is not that of its head ends the
  connection.
- At most one thread reads and one thread writes the socket.  A thread that waits for an answer
  while nobody reads becomes the reader and hands other threads what belongs to them.
- A request that timed out is abandoned, the connection stays: its answer is dropped when it comes.
  Grants of the broker live as long as their connection, so one slow answer must not revoke them.
- Requests leave in the order they were submitted.  `submit_later` never waits: what the socket does
  not take now leaves with the next call that comes by, whatever it is for.
- A connection belongs to the process that opened it; in a forked child every call is a ClosedError.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kdirect.errors import (
    BrokerUnavailableError,
    ClosedError,
    KdirectError,
    ProtocolError,
    TimedOutError,
)
from kdirect.format import protocol
from kdirect.format.error_codes import ErrorCode
from kdirect.wire.bell import Bell
from kdirect.wire.broker_errors import broker_error
from kdirect.wire.dial import address_text, dial, not_a_frame, reason_of
from kdirect.wire.versions import API_VERSIONS_VERSION, choose_version

CLIENT_SOFTWARE_NAME = "kdirect"
CLIENT_SOFTWARE_VERSION = "0.1.0"
READ_BUFFER_BYTES = 65536
MAX_RESPONSE_BYTES = 256 << 20

_UNSUPPORTED_VERSION = struct.pack(">h", ErrorCode.UNSUPPORTED_VERSION)


class Pending:
    """A request that was sent.  `result` may be called by any thread, once or more."""

    __slots__ = (
        "_abandoned",
        "_connection",
        "_error",
        "_payload",
        "_response",
        "api_key",
        "correlation_id",
        "name",
        "version",
    )

    def __init__(
        self, connection: Connection, api_key: int, version: int, correlation_id: int, name: str
    ) -> None:
        self._connection = connection
        self.api_key = api_key
        self.version = version
        self.correlation_id = correlation_id
        self.name = name
        self._payload: bytes | bytearray | None = None
        self._response: Any = None
        self._error: KdirectError | None = None
        self._abandoned = False

    def wait(self, timeout_ms: float) -> bool:
        """Wait for the answer or the failure without giving the request up at the end; True when it
        is here."""
        self._connection._arrival(self, self._connection._monotonic() + timeout_ms / 1000)
        return self.done

    @property
    def done(self) -> bool:
        """The answer, or the failure, is here: `result` does not block."""
        return self._payload is not None or self._error is not None or self._response is not None

    def result(self, timeout_ms: float | None = None) -> Any:
        """The response.  TimedOutError after `timeout_ms` (None: the connection's), and the answer
        is then dropped when it comes; BrokerUnavailableError when the connection broke,
        ProtocolError when the answer is malformed."""
        return self._connection._await(self, timeout_ms)


class Connection:
    """Connects and exchanges ApiVersions in the constructor.  Thread-safe.

    BrokerUnavailableError: nothing answers there; TimedOutError: something does but keeps silent;
    ProtocolError: it does not speak Kafka's protocol.  `timeout_ms` bounds the connecting and is
    the default for each request.
    """

    def __init__(
        self,
        host: str,
        port: int,
        client_id: str = "kdirect",
        timeout_ms: float = 30000,
        *,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        self._prepare(host, port, client_id, timeout_ms, max_response_bytes)
        deadline = self._monotonic() + timeout_ms / 1000
        self._socket = dial(host, port, timeout_ms)
        try:
            self._poll_in = select.poll()
            self._poll_in.register(self._socket, select.POLLIN)
            self._poll_out = select.poll()
            self._poll_out.register(self._socket, select.POLLOUT)
            self._poll_both = select.poll()
            self._poll_both.register(self._socket, select.POLLIN | select.POLLOUT)
            self._exchange_versions(deadline)
        except BaseException:
            self.close()
            raise

    def _prepare(
        self,
        host: str,
        port: int,
        client_id: str,
        timeout_ms: float,
        max_response_bytes: int,
        monotonic: Callable[[], float] = time.monotonic,
        wait_on: Callable[[threading.Condition, float], bool] = threading.Condition.wait,
    ) -> None:
        """All but the socket.  `monotonic` is the clock (seconds) of waits, and `wait_on` how a
        thread waits for another one: both as `Environment` has them."""
        self._monotonic = monotonic
        self._wait_on = wait_on
        self.host = host
        self.port = port
        self.client_id = client_id
        self.timeout_ms = timeout_ms
        self.max_response_bytes = max_response_bytes
        self._pid = os.getpid()
        self._versions: dict[int, tuple[int, int]] = {}
        self.features: dict[str, int] = {}  # the finalized ones of the cluster, with their levels
        self._chosen: dict[int, int] = {}
        self._send_lock = threading.Lock()
        self._wake = threading.Condition(
            threading.Lock()
        )  # guards all that follows but the read buffer, which is the reader's
        self._pending: deque[Pending] = deque()
        self._unsent: deque[tuple[memoryview, Pending, bool]] = (
            deque()
        )  # the rest of a frame, its request, is it answered
        self._correlation_id = 0
        self._reading = False
        # Threads between entry to and exit from calls on the socket, which the last one closes.
        self._in_syscalls = 0
        self._error: KdirectError | None = None
        self._requests = self._responses = self._bytes_sent = self._bytes_received = (
            self._abandoned
        ) = 0
        self._buffer = bytearray(READ_BUFFER_BYTES)
        self._start = self._end = 0
        self._large: bytearray | None = None
        self._large_filled = 0

    # -- what the broker can do --------------------------------------------------------------------

    @property
    def peer(self) -> str:
        """host:port as it was asked for."""
        return address_text(self.host, self.port)

    @property
    def local_address(self) -> str:
        """The IP address of this host from which the broker is reached."""
        return str(self._socket.getsockname()[0])

    @property
    def closed(self) -> bool:
        return self._error is not None or self._pid != os.getpid()

    @property
    def error(self) -> str:
        """Why the connection ended; empty while it serves."""
        return self._error.message if self._error is not None else ""

    @property
    def is_kdirect(self) -> bool:
        """The broker knows all of kdirect's access requests."""
        return self._versions.keys() >= protocol.ACCESS_API_KEYS

    def supports(self, api_key: int) -> bool:
        return api_key in self._versions

    def speaks(self, message: Any, version: int) -> bool:
        """Do both sides speak this version of `message`, or a later one?"""
        return self.supports(message.API_KEY) and self.version_for(message) >= version

    def offers(self, message: Any, version: int) -> bool:
        """Does the broker speak this version of `message`, also where clients choose a lower one
        (`kdirect.wire.versions`)?"""
        low, high = self._versions.get(message.API_KEY, (0, -1))
        return low <= version <= high

    def version_for(self, message: Any) -> int:
        """The highest version of `message` that both sides speak; ProtocolError names both ranges
        when there is none."""
        api_key = message.API_KEY
        version = self._chosen.get(api_key)
        if version is None:
            version = choose_version(message, self._versions.get(api_key), self.peer)
            self._chosen[api_key] = version
        return version

    def _exchange_versions(self, deadline: float) -> None:
        for version in (API_VERSIONS_VERSION, 0):
            message = protocol.ApiVersionsRequest(
                client_software_name=CLIENT_SOFTWARE_NAME,
                client_software_version=CLIENT_SOFTWARE_VERSION,
            )
            try:
                pending = self._submit(message, version, deadline)
                pending.wait((deadline - self._monotonic()) * 1000)
                payload = pending._payload
                if version and payload is not None and payload[4:6] == _UNSUPPORTED_VERSION:
                    continue  # brokers differ in the rest of this answer, so it is not read
                response = pending.result(0)
            except TimedOutError as e:
                raise TimedOutError(
                    f"{self.peer} accepts connections but does not answer",
                    hint="check that bootstrap.servers names a broker that is not overloaded",
                ) from e
            except BrokerUnavailableError as e:
                raise BrokerUnavailableError(
                    f"{self.peer} closed the connection at the first request",
                    hint="check that bootstrap.servers names a plaintext listener of a broker",
                ) from e
            if response.error_code:
                raise broker_error(response.error_code, f"ApiVersions to {self.peer}")
            self._versions = {k.api_key: (k.min_version, k.max_version) for k in response.api_keys}
            finalized = getattr(response, "finalized_features", None) or ()
            self.features = {f.name: f.max_version_level for f in finalized}
            return

    # -- requests ----------------------------------------------------------------------------------

    def request(self, message: Any, timeout_ms: float | None = None) -> Any:
        """Send `message` and return its response (None for a produce with acks=0) within
        `timeout_ms`.  Errors as in `Pending.result`."""
        timeout_ms = self.timeout_ms if timeout_ms is None else timeout_ms
        deadline = self._monotonic() + timeout_ms / 1000
        pending = self._submit(message, None, deadline)
        return self._await(pending, timeout_ms, deadline) if message.expect_response() else None

    def submit(
        self,
        message: Any,
        timeout_ms: float | None = None,
        *,
        most: int | None = None,
        at: int | None = None,
    ) -> Pending:
        """Send `message` without waiting for the answer.  An error raised here means that the
        broker did not get the whole request and did not act on it.  For acks=0 the Pending is done
        when the request has left.  `most`: the highest version to use; `at`: the one to use, which
        the broker `offers`."""
        return self._submit(
            message,
            at if at is not None else self._version_up_to(message, most),
            self._monotonic() + (self.timeout_ms if timeout_ms is None else timeout_ms) / 1000,
        )

    def submit_later(self, message: Any, *, most: int | None = None) -> Pending:
        """As `submit`, but never waits for a socket that is full: the rest leaves with later calls,
        of `poll` or `Pending.wait`."""
        return self._submit(message, self._version_up_to(message, most), None)

    def _version_up_to(self, message: Any, most: int | None) -> int | None:
        return None if most is None else min(most, self.version_for(message))

    def alive(self) -> bool:
        """False when the connection is closed, or when a look at the socket shows that the broker
        closed it while it lay idle."""
        if self.closed:
            return False
        if not self._pending:
            self._read_one(self._monotonic(), None)
        return not self.closed

    def poll(self) -> None:
        """Take in the responses that have arrived, and send what the socket takes, without
        blocking."""
        self._check()
        self._send_rest()
        while self._pending and self._read_one(self._monotonic(), None):
            pass

    def _submit(self, message: Any, version: int | None, deadline: float | None) -> Pending:
        self._check_process()
        if version is None:
            version = self.version_for(message)
        with self._send_lock:
            self._correlation_id = self._correlation_id % 0x7FFFFFFF + 1
            try:
                frame = protocol.encode_request(
                    message, version, self._correlation_id, self.client_id
                )
            except (ValueError, TypeError, struct.error) as e:
                raise ProtocolError(
                    f"{message.name} cannot be encoded: {e}",
                    hint="a field has a value its type cannot hold",
                ) from e
            pending = Pending(self, message.API_KEY, version, self._correlation_id, message.name)
            with self._wake:
                if self._error is not None:
                    raise self._copy_of_error()
                self._in_syscalls += 1
                if message.expect_response():
                    self._pending.append(pending)
                self._unsent.append((memoryview(frame), pending, message.expect_response()))
            self._requests += 1
            try:
                self._push(0.0 if deadline is None else deadline)
            except BaseException as e:
                if deadline is None and isinstance(e, TimedOutError):
                    return pending  # the rest is sent later
                # An interrupted frame cannot be taken back: what follows it would be read as its
                # rest.
                error = e if isinstance(e, KdirectError) else self._lost("sending", e)
                with self._wake:
                    whole = (
                        bool(self._unsent)
                        and self._unsent[-1][1] is pending
                        and len(self._unsent[-1][0]) == len(frame)
                    )
                    if whole:
                        self._unsent.pop()
                    if pending in self._pending:
                        self._pending.remove(pending)
                    if not whole or not isinstance(error, TimedOutError):
                        self._fail(error)
                if error is e or not isinstance(e, Exception):
                    raise
                raise error from e
            finally:
                self._leave()
        return pending

    def _push(self, deadline: float) -> None:
        """Send what is not sent, in order.  TimedOutError at the deadline; what is left stays.
        Called with `_send_lock` held."""
        while self._unsent and self._error is None:
            view, pending, answered = self._unsent[0]
            sent = self._send_some(view, deadline)
            self._bytes_sent += sent
            if sent < len(view):
                self._unsent[0] = (view[sent:], pending, answered)
                continue
            self._unsent.popleft()
            if not answered:
                pending._response = True  # all that there will be

    def _send_rest(self) -> None:
        """Send what the socket takes now of what is left, unless another thread is at it."""
        if (
            not self._unsent
            or self._error is not None
            or not self._send_lock.acquire(blocking=False)
        ):
            return
        with self._wake:
            self._in_syscalls += 1
        try:
            self._push(0.0)
        except TimedOutError:
            pass
        except (KdirectError, OSError) as e:
            with self._wake:
                self._fail(e if isinstance(e, KdirectError) else self._lost("sending", e))
        finally:
            self._send_lock.release()
            self._leave()

    def _send_some(self, view: memoryview, deadline: float) -> int:
        while True:
            try:
                return self._socket.send(view)
            except (BlockingIOError, InterruptedError):
                pass
            remaining = deadline - self._monotonic()
            if remaining <= 0:
                raise TimedOutError(
                    f"the broker at {self.peer} does not take requests",
                    hint="it is overloaded or stopped; see its log",
                )
            self._poll_out.poll(remaining * 1000 + 1)

    # -- answers -----------------------------------------------------------------------------------

    def _arrival(self, pending: Pending, deadline: float) -> None:
        """Wait until the answer of `pending`, or its failure, is here, or until the deadline."""
        self._check_process()
        while not pending.done and (
            self._read_one(deadline, pending) or pending.done or self._monotonic() < deadline
        ):
            pass

    def _await(
        self, pending: Pending, timeout_ms: float | None, deadline: float | None = None
    ) -> Any:
        timeout_ms = self.timeout_ms if timeout_ms is None else timeout_ms
        self._arrival(
            pending, self._monotonic() + timeout_ms / 1000 if deadline is None else deadline
        )
        if not pending.done:
            with self._wake:
                if not pending.done:
                    pending._abandoned = True
                    self._abandoned += 1
                    raise TimedOutError(
                        f"the broker at {self.peer} did not answer {pending.name} within"
                        f" {timeout_ms:.0f} ms",
                        hint="see the broker's log, or raise request.timeout.ms",
                    )
        payload = pending._payload
        if payload is not None:  # decoded by who asked for it, so that the reader goes on reading
            try:
                _, pending._response = protocol.decode_response(
                    pending.api_key, pending.version, payload
                )
            except ProtocolError as e:
                error = ProtocolError(
                    f"the broker at {self.peer} sent a malformed answer to {pending.name}:"
                    f" {e.message}",
                    hint="check that it is a Kafka broker",
                )
                pending._error = error
                with self._wake:
                    self._fail(error)
                raise error from e
            pending._payload = None
        if pending._error is not None:
            raise type(pending._error)(
                pending._error.message, hint=pending._error.hint
            ) from pending._error
        return pending._response

    def _read_one(self, deadline: float, wanted: Pending | None) -> bool:
        """Wait until one response was taken in, by this thread or another, or until the deadline.
        False: nothing came."""
        with self._wake:
            if self._error is not None or (wanted is not None and wanted.done):
                return False
            if self._reading:
                if wanted is None:
                    return False
                taken = self._responses
                self._wait_on(self._wake, max(0.0, deadline - self._monotonic()))
                return self._responses != taken
            self._reading = True
            self._in_syscalls += 1
        payload = error = None
        try:
            payload = self._read_frame(deadline)
        except KdirectError as e:
            error = e
        except OSError as e:
            error = self._lost("answering", e)
        finally:
            with self._wake:
                self._reading = False
                if payload is not None:
                    self._dispatch(payload)
                elif error is not None:
                    self._fail(error)
                self._wake.notify_all()
            self._leave()
        return payload is not None

    def _dispatch(self, payload: bytes | bytearray) -> None:
        self._responses += 1
        correlation_id = struct.unpack_from(">i", payload)[0]
        if not self._pending:
            self._fail(
                ProtocolError(
                    f"the broker at {self.peer} sent a response that nobody asked for"
                    f" (correlation id {correlation_id})",
                    hint="check that it is a Kafka broker",
                )
            )
        elif self._pending[0].correlation_id != correlation_id:
            expected = self._pending[0]
            self._fail(
                ProtocolError(
                    f"the broker at {self.peer} answered {expected.name} with correlation id"
                    f" {correlation_id} instead of {expected.correlation_id}",
                    hint="check that it is a Kafka broker",
                )
            )
        else:
            pending = self._pending.popleft()
            if pending._abandoned:
                self._abandoned -= 1
            else:
                pending._payload = payload

    def _read_frame(self, deadline: float) -> bytes | bytearray | None:
        """The next frame without its length, or None at the deadline; what has come of it until
        then is kept."""
        while True:
            if self._large is None and self._end - self._start >= 4:
                size = struct.unpack_from(">i", self._buffer, self._start)[0]
                if size < 4 or size > self.max_response_bytes:
                    raise self._not_a_frame(size)
                start = self._start + 4
                have = self._end - start
                if have >= size:
                    self._start = start + size
                    payload = bytes(memoryview(self._buffer)[start : start + size])
                    if self._start == self._end:
                        self._start = self._end = 0
                    return payload
                # The rest of a frame goes to its own memory, without a copy: a fetched batch is
                # handed on from there.
                self._large = bytearray(size)
                self._large[:have] = memoryview(self._buffer)[start : self._end]
                self._large_filled = have
                self._start = self._end = 0
            if self._large is not None:
                target = memoryview(self._large)[self._large_filled :]
            else:
                if self._start:  # less than four bytes are left
                    left = bytes(memoryview(self._buffer)[self._start : self._end])
                    self._buffer[: len(left)] = left
                    self._start, self._end = 0, len(left)
                target = memoryview(self._buffer)[self._end :]
            self._send_rest()
            left_ms = max(0.0, (deadline - self._monotonic()) * 1000)
            events = (self._poll_both if self._unsent else self._poll_in).poll(left_ms)
            if not events:
                return None
            if events[0][1] == select.POLLOUT:
                target.release()
                if left_ms <= 0 or self._error is not None:
                    return None
                continue
            try:
                count = self._socket.recv_into(target)
            except (BlockingIOError, InterruptedError):
                continue
            finally:
                target.release()
            if count == 0:
                raise self._lost("answering", None)
            self._bytes_received += count
            if self._large is None:
                self._end += count
            else:
                self._large_filled += count
                if self._large_filled == len(self._large):
                    large, self._large = self._large, None
                    return large

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the socket; requests that wait fail with ClosedError.  In a forked child only its
        copy of the descriptor is closed."""
        if self._pid != os.getpid():
            self._socket.close()
            return
        with self._wake:
            self._fail(ClosedError(f"the connection to {self.peer} is closed"))

    def abort(self, error: KdirectError) -> None:
        """Close the connection as broken: requests that wait fail with `error`."""
        self._check_process()
        with self._wake:
            self._fail(error)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Connection {self.peer}{' closed' if self.closed else ''}>"

    def statistics(self) -> dict[str, int]:
        """Counts since the connection was opened; `abandoned` counts timed-out requests whose
        answer is still to come."""
        return {
            "requests": self._requests,
            "responses": self._responses,
            "bytes_sent": self._bytes_sent,
            "bytes_received": self._bytes_received,
            "in_flight": len(self._pending),
            "abandoned": self._abandoned,
        }

    def _fail(self, error: KdirectError) -> None:
        """End the connection: everyone who waits gets `error`.  Called with `_wake` held."""
        if self._error is None:
            self._error = error
            while self._pending:
                self._pending.popleft()._error = error
            for _, pending, answered in list(self._unsent):
                if not answered:
                    pending._error = error
            try:
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes threads that sleep in poll
            except OSError:
                pass
            if self._in_syscalls == 0:
                self._socket.close()
        self._wake.notify_all()

    def _enter(self, poller: select.poll) -> bool:
        """Have `poller` tell of what this connection waits for, until `_leave`; False when it has
        ended."""
        with self._wake:
            if self._error is not None:
                return False
            poller.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            self._in_syscalls += 1
        return True

    def _leave(self) -> None:
        with self._wake:
            self._in_syscalls -= 1
            if self._error is not None and self._in_syscalls == 0:
                self._socket.close()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError(
                f"the connection to {self.peer} belongs to process {self._pid}, not to this fork"
                f" of it ({os.getpid()})",
                hint="open a new one in this process",
            )

    def _check(self) -> None:
        self._check_process()
        with self._wake:
            if self._error is not None:
                raise self._copy_of_error()

    def _copy_of_error(self) -> KdirectError:
        error = self._error
        assert error is not None
        return type(error)(error.message, hint=error.hint)

    def _lost(self, doing: str, cause: BaseException | None) -> BrokerUnavailableError:
        why = f" ({reason_of(cause)})" if cause is not None else ""
        return BrokerUnavailableError(
            f"the broker at {self.peer} closed the connection while {doing}{why}",
            hint="it stopped, or refuses the request; see its log",
        )

    def _not_a_frame(self, size: int) -> ProtocolError:
        start = bytes(memoryview(self._buffer)[self._start : self._start + 4])
        return not_a_frame(self.peer, start, size, self.max_response_bytes)


def wait_for_any(
    connections: Sequence[Connection], timeout_ms: float, bell: Bell | None = None
) -> bool:
    """Wait until one of these has something to read, takes more of what is to be sent, or ends, or
    `bell` was rung: then True.  Only for the one thread that reads them all, when it has taken in
    what was there."""
    poller, entered = select.poll(), []
    try:
        for connection in connections:
            if not connection._enter(poller):
                return False
            entered.append(connection)
        if bell is not None:
            poller.register(bell, select.POLLIN)
        told = poller.poll(timeout_ms)
        return bell is not None and any(fd == bell.fileno() for fd, _ in told) and bell.hush()
    finally:
        for connection in entered:
            connection._leave()
