"""Which datapath carries an encoded request to its partition, and what happens when access ends.

Owns: one path a partition (`DirectPath` over RDMA, `TcpPath` over Kafka's protocol, `LostPath`
while neither can be had), the producer's queue pair, and recovery: requests that were not
acknowledged are repeated, in order.  A request whose acknowledgement was lost with its connection
may have been committed and is sent again; with `enable.idempotence`, the default, it was stamped
when it was first sent (`kdirect.client.idempotence`), and the broker drops what it has.  What may
not enter: records, columns, the choice of partitions.

`rdma.produce` says how RDMA is used: exclusively, shared, or as the broker likes.  Where the broker
refuses (it is switched off, the partition is written over another transport) records travel over
TCP, and RDMA is tried again after a second.

The face to the layer above is `ProducePaths`: `send` takes an encoded request and may wait for room
(`room_ms`), never for its answer; a request sent with a `tag` is answered by exactly one `Outcome`
from `outcomes`, in order within its partition; errors of requests without a tag are raised by
`flush`.  No call waits longer than it is told: while a broker is away its requests are kept on a
`LostPath`, and each call tries once to bring them on their way again.  Where the new path takes
fewer at a time than the one that ended, the rest are its `backlog`: every look at outcomes sends as
many as there is room for, nothing newer overtakes them, and they fail when the delivery timeout is
over.  Callers hold one lock around every call.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from typing import Any

from kdirect.client.ack_router import AckRouter
from kdirect.client.direct_write import FileWriter
from kdirect.client.idempotence import ProducerIdentity
from kdirect.client.paths import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    NO_ROOM_BUFFER,
    NO_ROOM_FILE,
    RELEASE_WAIT_MS,
    SENT,
    SENT_AND_ASK,
    DirectPath,
    LostPath,
    Outcome,
    Path,
    Request,
    TcpPath,
    full,
    left_ms,
)
from kdirect.client.session import Session
from kdirect.client.two_sided import MessageConnection
from kdirect.errors import (
    AccessDeniedError,
    BufferFullError,
    ConfigError,
    DeliveryError,
    KdirectError,
    QueuePairError,
    TimedOutError,
    TransportError,
)
from kdirect.format import layout
from kdirect.model import TopicPartition
from kdirect.wire.attempt import Attempt
from kdirect.wire.channel import Channel
from kdirect.wire.connection import Connection

log = logging.getLogger("kdirect.client")

NOTICES = 64  # receives beyond the window, for notices of revocation
DIRECT_RETRY_S = 1.0
DIRECT_TURN_S = 0.1  # how long requests under way over TCP may hold up the return to RDMA
DIRECT_ATTEMPTS = 5
EXCLUSIVE_WAIT_S = 1.0  # for an exclusive holder that is about to leave, or was lost
REFUSED_WAIT_MS = 1000  # for the answers to what was sent behind a refused request
MODES = {
    "exclusive": layout.PRODUCE_EXCLUSIVE,
    "shared": layout.PRODUCE_SHARED,
    "auto": layout.PRODUCE_AUTO,
    "off": -1,
}


class ProducePaths:
    """See the module.  `settings` are resolved CLIENT options."""

    def __init__(self, session: Session, settings: dict[str, Any]) -> None:
        self.session = session
        self.settings = settings
        self.timeout_ms: int = settings["delivery.timeout.ms"]
        self.errors: list[KdirectError] = []
        self._paths: dict[TopicPartition, Path] = {}
        self._direct_retry: dict[TopicPartition, float] = {}
        self.mode = MODES[settings["rdma.produce"]] if settings["produce.path"] == "rdma" else -1
        self._messages: MessageConnection | None = None
        self._messages_lock = threading.Lock()  # of who opens it
        self.messages_refused = False  # requests in SENDs go over TCP
        self._idempotent = _idempotent(settings)
        self._producer_id: tuple[int, int] | None = None
        self._identities: dict[TopicPartition, ProducerIdentity] = {}
        self._router: AckRouter | None = None
        self._channel: Channel | None = None
        self._outcomes: deque[Outcome] = deque()
        self._asked: dict[tuple[str, int], Attempt[None]] = {}  # brokers that were lost
        self._away: dict[
            tuple[str, int], tuple[float, float]
        ] = {}  # brokers that did not answer: when to ask again, for how long (s)
        self._retired: dict[str, int] = {}
        self._closed = False

    # -- sending -----------------------------------------------------------------------------------

    def send(
        self,
        tp: TopicPartition,
        data: Any,
        records: int,
        tag: Any = None,
        room_ms: float | None = None,
    ) -> None:
        """Send one request of whole batches, through whatever it takes.  Waits for room, not for
        the answer: BufferFullError when there is none within `room_ms` (None: the delivery
        timeout).  DeliveryError when the request can never be taken.  Neither has an outcome."""
        deadline = time.monotonic() + (self.timeout_ms if room_ms is None else room_ms) / 1000
        while True:
            path = self._paths.get(tp) or self.open(tp)
            if path.backlog and not self.send_backlog(path, deadline):
                left_ms(tp, deadline)
                continue
            if path.accept(self, data, records, tag, deadline):
                break
        if isinstance(path, TcpPath):
            self._maybe_direct_again(path)

    def try_record(
        self,
        tp: TopicPartition,
        value: bytes | None,
        key: bytes | None,
        timestamp_ms: int,
        tag: Any = None,
        room_ms: int = 60000,
    ) -> bool:
        """Send one record at once as a batch of its own, where the path is RDMA; False: not taken,
        use `send`.  BufferFullError when there is no room within `room_ms`."""
        path = self._paths.get(tp) or self.open(tp)
        if path.__class__ is not DirectPath or path.backlog:
            return False
        writer: FileWriter = path.writer  # type: ignore[union-attr]
        if path.tags and not path.remember(self, room_ms):  # type: ignore[union-attr]
            return False
        while (code := writer.try_record(value, key, timestamp_ms)) != SENT:
            if code == SENT_AND_ASK:
                path.ask_next()  # type: ignore[union-attr]
                break
            try:
                if code == NO_ROOM_FILE and path.take_next(time.monotonic() + room_ms / 1000):  # type: ignore[union-attr]
                    continue
                # Wait for a quarter of the window, so that a full one costs one sleep and not one a
                # record.
                if code != NO_ROOM_BUFFER or not writer.in_flight:
                    return False
                if not writer.wait_acknowledged(
                    writer.acknowledged + (writer.in_flight >> 2), room_ms
                ):
                    return False
            except TimedOutError:
                raise full(tp, room_ms) from None
        if tag is not None:
            path.tags.append((writer.appended - 1, tag))  # type: ignore[union-attr]
        return True

    def record_sync(
        self, tp: TopicPartition, value: bytes | None, key: bytes | None, timestamp_ms: int
    ) -> int | None:
        """As `try_record`, then wait for the acknowledgement: the record's offset, -1 where the
        broker did not say.  None: not taken, use `send` and `finish`."""
        path = self._paths.get(tp) or self.open(tp)
        if path.__class__ is not DirectPath or path.backlog:
            return None
        writer: FileWriter = path.writer  # type: ignore[union-attr]
        if writer.in_flight:
            return None
        code = writer.try_record(value, key, timestamp_ms)
        if code == NO_ROOM_FILE:
            try:
                if path.take_next(time.monotonic() + self.timeout_ms / 1000):  # type: ignore[union-attr]
                    code = writer.try_record(value, key, timestamp_ms)
            except (TimedOutError, BufferFullError):
                return None
        if code == SENT_AND_ASK:
            path.ask_next()  # type: ignore[union-attr]
        elif code != SENT:
            return None
        try:
            if writer.wait_acknowledged(writer.appended - 1, self.timeout_ms):
                return int(writer.last_offset_base)
        except TimedOutError as e:
            self.expire(tp)
            self.errors.pop()
            raise DeliveryError(e.message, hint=e.hint, maybe_committed=True) from e
        return self.finish(tp)

    # -- answers -----------------------------------------------------------------------------------

    def outcomes(self) -> list[Outcome]:
        """Take the outcomes that are known, without waiting for more, and bring on its way again
        what was lost: whoever looks for outcomes need not call anything else to have them."""
        if self._router is not None and not self._router.broken:
            self._router.drain()
        for tp, path in list(self._paths.items()):
            if self._paths.get(tp) is not path:
                continue  # it ended with the queue pair of one before
            path.collect(self)
            if path.lost:
                path.bring_on(self)
            elif path.backlog:
                self.send_backlog(path, 0.0)
            elif path.__class__ is DirectPath and path.leaving and not path.in_flight:
                self._retire(tp)
        taken = list(self._outcomes)
        self._outcomes.clear()
        return taken

    @property
    def in_flight(self) -> int:
        """Records sent and not answered."""
        return sum(path.in_flight for path in self._paths.values())

    def settle(self, timeout_ms: float) -> bool:
        """Wait until everything sent is answered, at most about `timeout_ms`; True when it is.
        Errors become outcomes, or wait for `raise_errors`."""
        deadline = time.monotonic() + timeout_ms / 1000
        return all(self._settle(tp, deadline) for tp in list(self._paths))

    def _settle(self, tp: TopicPartition, deadline: float) -> bool:
        while (path := self._paths.get(tp)) is not None and path.in_flight:
            if not path.settle(self, deadline) and time.monotonic() >= deadline:
                return False
        return True

    def flush(self) -> None:
        """Wait until everything sent is answered, for the delivery timeout; what is not by then has
        failed.  Raises the first error of a request without a tag."""
        if not self.settle(self.timeout_ms):
            for tp in list(self._paths):
                self.expire(tp)
        self.raise_errors()

    def finish(self, tp: TopicPartition) -> int:
        """Wait for the answers of one partition, as `flush` does; the base offset of its last
        request."""
        if not self._settle(tp, time.monotonic() + self.timeout_ms / 1000):
            self.expire(tp)
        self.raise_errors()
        path = self._paths.get(tp)
        return path.last_offset if path is not None else -1

    def expire(self, tp: TopicPartition) -> None:
        """Give up everything of `tp` that is not answered: it may have been committed all the same."""
        path = self._paths.get(tp)
        if path is None or not path.in_flight:
            return
        self._give_up(
            path,
            DeliveryError(
                f"{tp}: not delivered within {self.timeout_ms} ms",
                hint="the broker is down or overloaded; raise delivery.timeout.ms to wait longer",
                maybe_committed=True,
            ),
        )

    def _give_up(self, path: Path, error: DeliveryError) -> None:
        """End a path whose requests are not waited for any more."""
        path.collect(self)
        pending = path.take_failures(self) if isinstance(path, DirectPath) else deque()
        pending.extend(path.take_pending(self))
        self.renew(path.tp)  # what is given up leaves a gap in the sequence
        if isinstance(path, DirectPath):
            self._drop_channel()  # a broker that is silent would not answer a release; it sees the queue pair go
        if self._paths.get(path.tp) is path:
            self._retire(path.tp)
        for _, _, tag in pending:
            self.fail(error, tag)

    def raise_errors(self) -> None:
        if self.errors:
            errors, self.errors = self.errors, []
            if len(errors) > 1:
                log.error(
                    "%d more requests failed: %s",
                    len(errors) - 1,
                    "; ".join(map(str, errors[1:10])),
                )
            raise errors[0]

    def fail(self, error: DeliveryError, tag: Any) -> None:
        """One request failed for good."""
        if tag is None:
            self.errors.append(error)
        else:
            self._outcomes.append(Outcome(tag, -1, error))

    # -- paths -------------------------------------------------------------------------------------

    def open(self, tp: TopicPartition, timeout_ms: float | None = None) -> Path:
        """The path of `tp`, opened now if it is not yet.  TimedOutError when the broker does not
        grant access within `timeout_ms`."""
        path = self._paths.get(tp)
        if path is not None:
            return path
        if (
            self.mode >= 0
            and self.session.transport != "tcp"
            and time.monotonic() >= self._direct_retry.get(tp, 0.0)
        ):
            direct = self._open_direct(tp, timeout_ms)
            if direct is not None:
                self._paths[tp] = direct
                return direct
            self._direct_retry[tp] = time.monotonic() + DIRECT_RETRY_S
        tcp = self._paths[tp] = TcpPath(self, tp)
        return tcp

    def path(self, tp: TopicPartition) -> Path | None:
        """The path of `tp`, if it has one."""
        return self._paths.get(tp)

    def is_direct(self, tp: TopicPartition, timeout_ms: float | None = None) -> bool:
        """Can `tp` be written by RDMA now?  Opens its path; tries again where it was refused a
        while ago.  TimedOutError when that is not known in time."""
        path = self.open(tp, timeout_ms)
        if isinstance(path, TcpPath):
            self._maybe_direct_again(path, timeout_ms)
            path = self.open(tp, timeout_ms)
        if not isinstance(path, DirectPath):
            return False
        path.leaving = False
        return True

    def give_back(self, tp: TopicPartition) -> None:
        """End RDMA access to `tp`, if there is any, once everything under way is answered.  Does
        not wait for that."""
        path = self._paths.get(tp)
        if not isinstance(path, DirectPath):
            return
        if path.in_flight:
            path.leaving = True
        else:
            self._retire(tp)

    def release(self) -> None:
        """Give all access back, for nothing is under way; waits for the broker a moment."""
        held = [
            p
            for p in self._paths.values()
            if isinstance(p, DirectPath) and p.writer.granted and not p.ended and not p.in_flight
        ]
        if held:
            try:
                held[0].channel.release([p.writer.file_id for p in held], RELEASE_WAIT_MS)
            except KdirectError as e:
                log.debug("release of %d partitions: %s", len(held), e)

    def _open_direct(self, tp: TopicPartition, timeout_ms: float | None) -> DirectPath | None:
        """Access to `tp`, or None when TCP has to do for now: it is refused, or the path is lost
        (for a moment, or for good, as with a broker that came back without RDMA).
        AccessDeniedError when it was asked for exclusively and somebody else has it."""
        attempt = 0
        exclusive_until = time.monotonic() + (
            EXCLUSIVE_WAIT_S if timeout_ms is None else min(EXCLUSIVE_WAIT_S, timeout_ms / 1000)
        )
        while True:
            try:
                return DirectPath(self, tp, timeout_ms)
            except AccessDeniedError as e:
                if not (e.held and self.mode == layout.PRODUCE_EXCLUSIVE):
                    log.info("%s is written over TCP: %s", tp, e)
                    return None
                if time.monotonic() >= exclusive_until:
                    raise
                time.sleep(0.01)
            except (TransportError, QueuePairError) as e:
                self._drop_channel()
                attempt += 1
                if attempt == DIRECT_ATTEMPTS:
                    log.warning("%s is written over TCP: %s", tp, e)
                    return None
                time.sleep(0.001 * 4 ** (attempt - 1))

    # -- idempotence -------------------------------------------------------------------------------

    def identity(self, tp: TopicPartition) -> ProducerIdentity | None:
        """Under which this producer writes `tp`; None without idempotence."""
        identity = self._identities.get(tp)
        if identity is None and self._idempotent:
            if self._producer_id is None:
                self._producer_id = self.session.new_producer_id()
                if self._producer_id is None:
                    log.warning(
                        "the broker gives out no producer ids: what is repeated may be there twice"
                    )
                    self._idempotent = False
                    return None
            identity = self._identities[tp] = ProducerIdentity(
                *self._producer_id, self.session.new_producer_id
            )
        return identity

    def renew(self, tp: TopicPartition) -> None:
        """A request of `tp` will never be delivered: go on behind the gap."""
        identity = self._identities.get(tp)
        if identity is not None:
            identity.renew()

    def ack_router(self, tp: TopicPartition) -> tuple[Channel, AckRouter]:
        """The producer's queue pair, opened when first needed and again when it broke."""
        if self._channel is not None and (
            self._channel.closed or self._router is None or self._router.broken
        ):
            self._drop_channel()
        if self._channel is None:
            window = self.settings["max.in.flight"]
            requests = (
                2 * window if self.settings["rdma.notify"] == "send" else window
            )  # a WRITE and a SEND each
            channel = self.session.channel(tp, receives=window + NOTICES, sends=requests + NOTICES)
            self._channel = channel
            self._router = AckRouter(
                channel.qp,
                channel.send_cq,
                channel.recv_cq,
                window + NOTICES,
                min(window, channel.max_in_flight),
                self.settings["spin.us"],
            )
        assert self._router is not None
        return self._channel, self._router

    @property
    def messages_at_hand(self) -> MessageConnection | None:
        """The queue pair that carries Produce requests, if there is one."""
        messages = self._messages
        return None if messages is None or messages.closed else messages

    @property
    def messages_reached(self) -> bool:
        """Was there ever one?"""
        return self._messages is not None

    def message_connection(self, tp: TopicPartition) -> MessageConnection | None:
        """The queue pair that carries Produce requests, opened when first needed and again when it
        broke; None where the broker has none. May be called by any thread."""
        with self._messages_lock:
            messages = self.messages_at_hand
            if messages is None and not self.messages_refused:
                try:
                    messages = self._messages = self.session.messages(tp, self.settings)
                except (AccessDeniedError, TransportError) as e:
                    log.warning("%s is written over TCP: %s", tp, e)
                    self.messages_refused = True
                    return None
                if self._closed:  # meanwhile
                    messages.close()
            return messages

    def _drop_channel(self) -> None:
        """End the queue pair, and with it the access to every partition.  What they have under way
        is repeated over the next one."""
        channel, self._channel, self._router = self._channel, None, None
        if channel is None:
            return
        ended = [
            path
            for path in self._paths.values()
            if isinstance(path, DirectPath) and path.channel is channel
        ]
        pending = []
        for path in ended:
            path.collect(self)
            again = path.take_failures(self)
            again.extend(path.take_pending(self))
            pending.append(again)
        channel.close()
        for path, again in zip(ended, pending, strict=True):
            self._retire(path.tp)
            if again:
                self._paths[path.tp] = LostPath(
                    path, again, time.monotonic() + self.timeout_ms / 1000
                )

    def answers(self, connection: Connection) -> bool:
        """Does the broker of `connection` answer on another?  Opening a path to one that does not
        would wait long.  Raises when it does not; False while that is not known."""
        address = connection.host, connection.port
        asked = self._asked.get(address)
        if asked is None:
            client_id, timeout_ms = connection.client_id, self.settings["connect.timeout.ms"]
            asked = self._asked[address] = Attempt(
                lambda: Connection(*address, client_id, timeout_ms).close()
            )
        if not asked.done:
            return False
        del self._asked[address]
        pause = self._away.pop(address, (0.0, FIRST_PAUSE_S))[1]
        try:
            asked.result()
        except KdirectError:
            self._away[address] = (time.monotonic() + pause, min(2 * pause, LONGEST_PAUSE_S))
            raise
        return True

    def await_answer(self, connection: Connection, until: float) -> bool:
        """Wait for what `answers` does not know yet; False when nothing is asked."""
        asked = self._asked.get((connection.host, connection.port))
        if asked is not None:
            asked.wait(until - time.monotonic())
        return asked is not None

    def away_until(self, connection: Connection) -> float:
        """When to look again for a broker that did not answer; its partitions do it by turns, not
        each."""
        return self._away.get((connection.host, connection.port), (0.0, 0.0))[0]

    def wait_router(self, tp: TopicPartition, deadline: float) -> None:
        """The window is taken by other partitions of this queue pair: wait for any acknowledgement."""
        assert self._router is not None
        for _ in range(
            1000
        ):  # or only for completions of WRITEs that are acknowledged already, which come at once
            if self._router.drain() != 0 or not self._router.sends_under_way:
                return
        self._router.wait(min(100, left_ms(tp, deadline)))

    def _maybe_direct_again(self, path: TcpPath, timeout_ms: float | None = None) -> None:
        key = path.tp
        if (
            self.mode >= 0
            and self.session.transport != "tcp"
            and time.monotonic() >= self._direct_retry.get(key, float("inf"))
        ):
            if path.settle(
                self,
                time.monotonic()
                + (DIRECT_TURN_S if timeout_ms is None else min(DIRECT_TURN_S, timeout_ms / 1000)),
            ):
                self._retire(key)
                self.open(key, timeout_ms)
            else:
                self._direct_retry[key] = time.monotonic() + DIRECT_RETRY_S

    def _retire(self, key: TopicPartition) -> None:
        path = self._paths.pop(key)
        for name, value in path.statistics().items():
            self._retired[name] = self._retired.get(name, 0) + value
        path.close()

    def recover(self, path: DirectPath) -> None:
        """Access ended, a request was refused, or the queue pair broke.  Take what was not
        committed, and bring it on its way again, in order.  A request that was refused for good is
        reported and left out."""
        if self._paths.get(path.tp) is not path:
            return  # it ended with the queue pair of another
        router, writer = path.router, path.writer
        if not path.ended:
            router.drain()
        refused = bool(writer.failures) and not path.ended
        answered = writer.wait_answers(REFUSED_WAIT_MS) if refused else not writer.in_flight
        path.collect(self)
        again = path.take_failures(self)
        if refused and answered and not writer.revoked:  # the grant goes on
            path.go_on()
            self.resend(path.tp, again, time.monotonic() + self.timeout_ms / 1000)
            return
        pending = path.take_pending(self)
        if again:
            again.extend(pending)
            pending = again
        # Whichever is noticed first: the queue pair's end, or the control connection's, with which
        # the broker takes its grants back.
        if router.broken:
            log.warning(
                "%s: the RDMA connection broke (%s); %d requests are repeated",
                path.tp,
                router.broken,
                len(pending),
            )
        elif path.channel.closed:
            why = path.channel.connection.error or "closed with its queue pair"
            log.warning(
                "%s: the connection to its leader ended (%s); %d requests are repeated",
                path.tp,
                why,
                len(pending),
            )
        elif pending:
            log.info("%s: access ended; %d requests are repeated", path.tp, len(pending))
        self._retire(path.tp)
        if pending or path.ended:
            lost = self._paths[path.tp] = LostPath(
                path, pending, time.monotonic() + self.timeout_ms / 1000
            )
            lost.revive(self)

    def resend(self, tp: TopicPartition, pending: deque[Request], deadline: float) -> None:
        """Send again, before anything else of `tp`, what was not delivered: as much as there is
        room for now.  The rest is sent as room comes, and has failed at the `deadline`."""
        if not pending:
            return
        path = self._paths[tp]
        path.backlog.extendleft(reversed(pending))
        path.backlog_deadline = min(path.backlog_deadline, deadline)
        pending.clear()
        self.send_backlog(path, 0.0)

    def send_backlog(self, path: Path, until: float) -> bool:
        """Send what is repeated on `path`, in order, and wait for room `until` then (monotonic
        seconds).

        True when all of it is on its way; False when there is no room for the rest, or the path has
        ended and the next one has the rest."""
        backlog, tp = path.backlog, path.tp
        if backlog and time.monotonic() >= path.backlog_deadline:
            self.expire(tp)
            return False
        while backlog:
            data, records, tag = backlog[0]
            try:
                sent = path.accept(self, data, records, tag, until)
            except BufferFullError:
                return False
            except KdirectError as e:
                if not isinstance(e, DeliveryError):
                    e = DeliveryError(
                        f"{tp}: not delivered again: {e.message}", hint=e.hint, maybe_committed=True
                    )
                backlog.popleft()
                self.fail(e, tag)
                continue
            if sent:
                backlog.popleft()
            elif self._paths.get(tp) is not path:
                return False
        path.backlog_deadline = math.inf
        return True

    # -- the end -----------------------------------------------------------------------------------

    def abort(self) -> None:
        """Give access back without waiting; what is not acknowledged may or may not be committed,
        and has failed."""
        if self._closed:
            return
        self._closed = True
        error = DeliveryError(
            "the producer was closed before the broker answered",
            hint="flush before closing",
            maybe_committed=True,
        )
        for path in list(self._paths.values()):
            path.collect(self)
            pending = path.take_failures(self) if isinstance(path, DirectPath) else deque()
            pending.extend(path.take_pending(self))
            for _, _, tag in pending:
                self.fail(error, tag)
        self._drop_channel()  # first, for a path that is closed while it lasts asks the broker to end its access, and waits
        for path in list(self._paths.values()):
            self._retire(path.tp)
        if self._messages is not None:
            self._messages.close()

    def statistics(self) -> dict[str, int]:
        """Records and bytes acknowledged, by path: `rdma_records`, `rdma_bytes`, `rdma_requests`,
        `tcp_records`, `tcp_bytes`, `tcp_requests`, and `send_...` for those in SENDs."""
        out = dict(self._retired)
        for path in self._paths.values():
            for name, value in path.statistics().items():
                out[name] = out.get(name, 0) + value
        return out


def _idempotent(settings: dict[str, Any]) -> bool:
    wanted = settings["enable.idempotence"]
    waits = settings["acks"] in ("all", "-1")
    if wanted and not waits:
        raise ConfigError(
            f"enable.idempotence with acks={settings['acks']}",
            hint="use acks=all, or switch enable.idempotence off",
        )
    return waits if wanted is None else bool(wanted)
