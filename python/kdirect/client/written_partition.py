"""One partition that a producer writes: its machine, what sends to it, and the link it had last.

Owns: what is asked of these together (`in_flight`, `path`).  What may not enter: I/O, and decisions
(`kdirect.client.partition_writer`).
"""

from __future__ import annotations

from kdirect.client.broker_link import BrokerLink
from kdirect.client.direct_append import DirectAppender
from kdirect.client.partition_writer import PartitionWriter, State
from kdirect.client.request_append import RequestAppender
from kdirect.errors import BufferFullError, DeliveryError
from kdirect.model import TopicPartition


class WrittenPartition:
    """A partition that is written: the machine that decides, and the appender that sends."""

    __slots__ = ("_silence", "appender", "link", "tp", "writer")

    def __init__(self, tp: TopicPartition, writer: PartitionWriter) -> None:
        self.tp = tp
        self.writer = writer
        self.appender: DirectAppender | RequestAppender | None = None
        self.link: BrokerLink | None = None  # of the last DirectAppender
        # The appender that had no room, what it had had acknowledged by then, and since when.
        self._silence: tuple[object, int, float] = (None, 0, 0.0)

    @property
    def in_flight(self) -> int:
        """Records not answered."""
        sent = self.appender.in_flight if self.appender is not None else 0
        return sent + self.writer.backlog_records if self.writer.backlog else sent

    def is_silent(self, now: float, timeout_s: float) -> bool:
        """There is no room for another request.  Was there none for so long, and nothing that was
        sent was acknowledged?  Who waits for no single answer learns by this that none comes."""
        appender = self.appender
        if not isinstance(appender, DirectAppender) or not appender.in_flight:
            return False
        acknowledged = appender.requests_acknowledged
        if self._silence[:2] != (appender, acknowledged):
            self._silence = appender, acknowledged, now
        return now - self._silence[2] >= timeout_s

    def overdue(self) -> DeliveryError:
        """The error of requests whose delivery timeout is over; it says why the broker has refused
        them, if it has."""
        appender = self.appender
        return self.writer.overdue(
            appender.refusal if isinstance(appender, RequestAppender) else None
        )

    @property
    def unsent(self) -> bool:
        """Is there a request that is not on its way to the broker?"""
        appender = self.appender
        return bool(self.writer.backlog) or (
            isinstance(appender, RequestAppender) and appender.unsent
        )

    @property
    def path(self) -> str:
        """How the partition is written: exclusive, shared, two-sided, tcp, lost or idle."""
        if self.appender is not None:
            return self.appender.path
        return "lost" if self.writer.state in (State.LOST, State.REOPENING) else "idle"


def no_room(tp: TopicPartition, waited_ms: float | None = None) -> BufferFullError:
    """The error of a request for which there was no room."""
    after = f" after {waited_ms:.0f} ms" if waited_ms else ""
    return BufferFullError(
        f"{tp}: no room for another request{after}",
        hint="the broker takes them more slowly than they come, or is stopped; raise max.block.ms"
        " to wait longer",
    )
