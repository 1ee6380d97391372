"""What becomes of one request: the one type that every handler returns.

A handler decides what is sent.  The dispatcher adds the response header; the connection decides
when the answer is sent and in which order.  An `Answer` is in one of three states:

======== =========== ============================================================
buffers  awaited     meaning
======== =========== ============================================================
buffers  None        send these now
None     coroutine   send later: the coroutine returns an Answer that has buffers
                     or none, and awaits nothing more
None     None        send nothing (a Produce with ``acks=0``)
======== =========== ============================================================

Whoever drops an answer that waits closes its coroutine.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

from kdirect.format import protocol as p
from kdirect.format.schema import build


class Answer:
    """See the module.  `buffers`: the bytes of the response after its header, as objects with the
    buffer protocol, in order.  `header` and `blocking` are the dispatcher's: the encoded response
    header, and whether later requests of the connection wait for this answer."""

    __slots__ = ("awaited", "blocking", "buffers", "header")

    def __init__(
        self,
        buffers: Sequence[Any] | None,
        awaited: Coroutine[Any, Any, Answer] | None = None,
    ) -> None:
        self.buffers = buffers
        self.awaited = awaited
        self.header = b""
        self.blocking = False


def nothing() -> Answer:
    """No answer is sent."""
    return Answer(None)


def later(awaited: Coroutine[Any, Any, Answer]) -> Answer:
    """The answer that `awaited` returns, sent once it has."""
    return Answer(None, awaited)


def encoded(header: p.RequestHeader, message: Any) -> Answer:
    """A response message, in the version of the request."""
    return Answer([message.encode(version=header.api_version)])


def respond(header: p.RequestHeader, message: Any, **fields: Any) -> Answer:
    """A response of class `message` with these fields, in the version of the request."""
    return Answer([build(message, **fields).encode(version=header.api_version)])
