"""Requests for access to a head that wait for their answer.

Owns: those requests, in the order of their arrival at each partition, and the time after which one
is given up.  They are looked at again (`serve`) whenever the state of the head has changed.

All methods run on the broker's event loop.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from kdirect.broker.failures import access_refusal
from kdirect.broker.grants import Peer
from kdirect.broker.scheduler import Scheduler
from kdirect.errors import KdirectError, RefusedError
from kdirect.format import layout
from kdirect.log.partition import Partition
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.broker.rdma")

WAIT_S = 30.0


class WaitingRequest:
    """A request for access that is answered later: `answer(response)` or `answer(RefusedError)` is
    called once."""

    __slots__ = ("__weakref__", "answer", "partition", "peer", "request")

    def __init__(self, peer: Peer, partition: Partition, request: Any) -> None:
        self.peer = peer
        self.partition = partition
        self.request = request
        self.answer: Callable[[Any], None] | None = None

    def answer_with(self, outcome: Any) -> None:
        answer, self.answer = self.answer, None
        if answer is not None:
            answer(outcome)


class WaitingRequests:
    """See the module.  `ask(peer, partition, request)` returns the response, or None when the
    request goes on waiting; it raises what the request is refused for."""

    def __init__(self, scheduler: Scheduler, ask: Callable[[Peer, Partition, Any], Any]) -> None:
        self._scheduler = scheduler
        self._ask = ask
        self._waiting: dict[TopicPartition, deque[WaitingRequest]] = {}

    def add(self, peer: Peer, partition: Partition, request: Any) -> WaitingRequest:
        waiting = WaitingRequest(peer, partition, request)
        self._waiting.setdefault(partition.topic_partition, deque()).append(waiting)
        # By a weak reference: the timer outlives the answer, and must not keep a client that is
        # gone, with its memory and keys.
        self._scheduler.later(WAIT_S, self._give_up, weakref.ref(waiting))
        return waiting

    def _give_up(self, reference: weakref.ref[WaitingRequest]) -> None:
        waiting = reference()
        if waiting is not None and waiting.answer is not None:
            tp = waiting.partition.topic_partition
            self._waiting.get(tp, deque()).remove(waiting)
            waiting.answer_with(
                RefusedError(
                    layout.ERROR_ACCESS_CONTENDED,
                    f"{tp} has no head to grant; retry later or use TCP",
                )
            )

    def any_for_head(self, tp: TopicPartition) -> bool:
        """Does somebody wait for the head itself, not for the file after it?"""
        return any(w.request.ahead_of_file_id < 0 for w in self._waiting.get(tp, ()))

    def serve(self, tp: TopicPartition) -> None:
        """Look again at the requests for access that wait."""
        waiting = self._waiting.pop(tp, None)
        while waiting:
            one = waiting.popleft()
            if one.answer is None:
                continue
            if one.peer.closed:  # its queue pair was cut; its connection may still be there
                one.answer_with(
                    RefusedError(
                        layout.ERROR_UNKNOWN_CONNECTION,
                        "the queue pair that asked for access is closed; connect again",
                    )
                )
                continue
            try:
                response = self._ask(one.peer, one.partition, one.request)
            except KdirectError as e:
                one.answer_with(access_refusal(e))
            except Exception as e:
                # No descriptor is left, say; the others are to be looked at all the same.
                log.exception("access of %s to %s failed", one.peer.client, tp)
                one.answer_with(access_refusal(e))
            else:
                if response is None:
                    waiting.appendleft(one)
                    waiting.extend(self._waiting.pop(tp, ()))
                    self._waiting[tp] = waiting
                    return
                one.answer_with(response)

    def refuse(
        self, tp: TopicPartition, which: Callable[[WaitingRequest], bool], error: BaseException
    ) -> None:
        """Refuse those of the waiting requests for which `which` holds."""
        waiting = self._waiting.get(tp, deque())
        for one in [w for w in waiting if which(w)]:
            waiting.remove(one)
            one.answer_with(access_refusal(error))
