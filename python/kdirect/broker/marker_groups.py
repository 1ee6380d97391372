"""Markers of several transactions that become visible as one (`kdirect.broker.attempts`).

Readers of committed records see a partition up to its last stable offset, which is the first offset
of the oldest transaction that has no marker yet.  So the leader appends the markers of a group in
descending order of the first offsets that their transactions have in the partition::

    offsets          10      11      12 ...  20       21       22
    records of       A       B       C       -        -        -
    markers                                  C        B        A
    last stable      10 ------------------------------10       23

Until the last marker of a group is in the log, nothing of it is visible; then all of it is.  Where
a marker cannot be appended, those that would come after it are not.  One may wait for room: the
next waits for it then.  A partition in which a transaction has no records may have its marker
first.

Over several partitions of one broker all markers are appended in one step of the event loop, so
that nobody sees some partitions of a group with it and others without.  Room in a head is made by
file work, on a thread: after a restart most heads have none.  So where a partition has no room, the
markers of the whole group wait until all have it (`make_ready`).  A partition whose head RDMA
producers share takes its markers in the order of their requests.  Over several brokers each leader
gets the group in one request.

On the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from kdirect import failpoints
from kdirect.broker.appends import resolve
from kdirect.broker.transaction_markers import CALL_S, FENCED, TransactionMarkers, request_row
from kdirect.broker.transactions import Markers
from kdirect.errors import KdirectError, NotCoordinatorError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode, error_kind
from kdirect.format.schema import build
from kdirect.log.kernel_transactions import unstable_transactions
from kdirect.model import TopicPartition

READY_S = 2.0  # how long the markers of a group wait for room in all of its partitions

log = logging.getLogger("kdirect.broker.transactions")

# Partitions that have no marker yet, of each transaction of a group.
Left: TypeAlias = dict[Markers, set[TopicPartition]]
# A marker to be appended: of whom, by a coordinator of which epoch, and who is told the code.
_Wanted: TypeAlias = tuple[Markers, int, "asyncio.Future[int]"]


class MarkerGroups:
    """See the module.  `peers`: the connections to other brokers, None where the broker is
    alone."""

    def __init__(self, markers: TransactionMarkers, peers: Any, node_id: int) -> None:
        self._markers = markers
        self._peers = peers
        self._node_id = node_id
        # Those that wait for their turn, or are not committed: they are not begun a second time.
        self._under_way: dict[tuple[Any, ...], asyncio.Future[int]] = {}

    # -- the leader's side -------------------------------------------------------------------------

    def append(
        self, tp: TopicPartition, wanted: Iterable[tuple[Markers, int]]
    ) -> dict[Markers, asyncio.Future[int]]:
        """Append markers of transactions, each with its coordinator's epoch, to a partition that
        this broker leads.  The codes, as of `TransactionMarkers.append`.  Several may wait for
        one marker: none of them cancels its future (`asyncio.shield`)."""
        told: dict[Markers, asyncio.Future[int]] = {}
        queue: deque[_Wanted] = deque()
        for markers, epoch in wanted:
            key = (tp, markers.producer_id, markers.epoch, markers.commit, epoch)
            future = self._under_way.get(key)
            if future is None:
                future = self._under_way[key] = asyncio.get_running_loop().create_future()
                future.add_done_callback(partial(self._done, key))
                queue.append((markers, epoch, future))
            told[markers] = future
        if len(queue) > 1:
            first = self._first_offsets(tp)
            queue = deque(sorted(queue, key=lambda one: place_in_group(one[0], first)))
        self._go_on(tp, queue)
        return told

    def _done(self, key: tuple[Any, ...], future: asyncio.Future[int]) -> None:
        del self._under_way[key]

    def _first_offsets(self, tp: TopicPartition) -> dict[int, int]:
        """By producer, where its open transaction begins."""
        try:
            kernel = self._markers.led(tp).kernel
        except (KdirectError, LookupError):
            return {}  # every append is told so
        return {
            found.producer_id: found.first_offset
            for found in unstable_transactions(kernel)
            if found.marker_offset < 0
        }

    def _go_on(self, tp: TopicPartition, queue: deque[_Wanted]) -> None:
        while queue:
            markers, epoch, future = queue.popleft()
            code, in_log = self._markers.append_noted(tp, markers, epoch)
            _hand_on(code, future)
            failpoints.reached("markers, one more")
            if not in_log.done():
                in_log.add_done_callback(lambda done: self._appended(tp, queue, done.result()))
                return
            if not in_log.result():
                self._appended(tp, queue, False)

    def _appended(self, tp: TopicPartition, queue: deque[_Wanted], ok: bool) -> None:
        """The marker before those that wait is in the log, or could not be appended."""
        if ok:
            self._go_on(tp, queue)
            return
        for _, _, future in queue:
            resolve(future, int(ErrorCode.NOT_LEADER_OR_FOLLOWER), None)
        queue.clear()

    def is_ready(self, wanted: Mapping[TopicPartition, int]) -> bool:
        """Whether all partitions can have so many markers in this step of the event loop."""
        return all(self._markers.is_ready(tp, count) for tp, count in wanted.items())

    async def make_ready(self, wanted: Mapping[TopicPartition, int]) -> None:
        """Wait until they can, for `READY_S` at most: a partition with no room on its disk must not
        keep all others waiting for good.  The next step of the event loop is the caller's."""
        clock = asyncio.get_running_loop().time
        until = clock() + READY_S
        while clock() < until:
            behind = {tp: n for tp, n in wanted.items() if not self._markers.is_ready(tp, n)}
            if not behind:
                return
            await asyncio.gather(*(self._markers.make_ready(tp, n) for tp, n in behind.items()))

    # -- the coordinator's side --------------------------------------------------------------------

    def append_here(self, group: Sequence[Markers], epoch: int) -> Left:
        """Append the markers of partitions that this broker leads; those partitions that have none
        yet."""
        by_partition = _by_partition({m: m.partitions for m in group})
        here = {
            tp: len(of_group)
            for tp, of_group in by_partition.items()
            if self._markers.leader_of(tp) == self._node_id
        }
        if not self.is_ready(here):
            return {markers: set(markers.partitions) for markers in group if markers.partitions}
        left: Left = {}
        for tp, of_group in by_partition.items():
            told: Mapping[Markers, asyncio.Future[int]] = {}
            if tp in here:
                told = self.append(tp, [(markers, epoch) for markers in of_group])
            for markers in of_group:
                future = told.get(markers)
                if future is None or not future.done() or future.result() != ErrorCode.NONE:
                    left.setdefault(markers, set()).add(tp)
        return left

    async def write(self, left: Left, epoch: int) -> Left:
        """Have markers written in partitions; those that have none yet.
        NotCoordinatorError: one has a marker of a newer coordinator."""
        by_leader: dict[int, Left] = {}
        for markers, tps in left.items():
            for tp in tps:
                if not self._markers.is_gone(tp):
                    of_leader = by_leader.setdefault(self._markers.leader_of(tp), {})
                    of_leader.setdefault(markers, set()).add(tp)
        answers = await asyncio.gather(
            *(self._send(leader, of, epoch) for leader, of in by_leader.items())
        )
        again: Left = {}
        for (markers, tp), code in (item for answer in answers for item in answer.items()):
            if code in FENCED:
                raise NotCoordinatorError(f"{tp} answers {error_kind(code).name} to a marker")
            if code != ErrorCode.NONE:
                again.setdefault(markers, set()).add(tp)
        return again

    async def _send(
        self, leader: int, wanted: Left, epoch: int
    ) -> dict[tuple[Markers, TopicPartition], int]:
        if leader == self._node_id:
            return await self._append_all(wanted, epoch)
        failed = {
            (markers, tp): int(ErrorCode.NOT_LEADER_OR_FOLLOWER)
            for markers, tps in wanted.items()
            for tp in tps
        }
        if leader < 0 or self._peers is None:
            return failed
        rows = [request_row(markers, epoch, sorted(tps)) for markers, tps in wanted.items()]
        request = build(p.WriteTxnMarkersRequest, markers=rows)
        try:
            answer = await self._peers.call(leader, request, timeout_s=CALL_S, version=1)
        except KdirectError as e:
            log.debug("markers of %d transactions at broker %d: %s", len(wanted), leader, e)
            return failed
        by_producer = {markers.producer_id: markers for markers in wanted}
        return failed | {
            (by_producer[row.producer_id], TopicPartition(topic.name, found.partition_index)): (
                found.error_code
            )
            for row in answer.markers
            if row.producer_id in by_producer
            for topic in row.topics
            for found in topic.partitions
        }

    async def _append_all(
        self, wanted: Left, epoch: int
    ) -> dict[tuple[Markers, TopicPartition], int]:
        by_partition = _by_partition(wanted)
        await self.make_ready({tp: len(of_group) for tp, of_group in by_partition.items()})
        futures = {
            (markers, tp): future
            for tp, of_group in by_partition.items()
            for markers, future in self.append(tp, [(m, epoch) for m in of_group]).items()
        }
        codes = await asyncio.gather(*map(asyncio.shield, futures.values()))
        return dict(zip(futures, codes, strict=True))


def place_in_group(markers: Markers, first_offsets: Mapping[int, int]) -> int:
    """By what the markers of a group are sorted for a partition in which open transactions begin at
    these offsets, by producer.  Where one without records comes does not matter."""
    return -first_offsets.get(markers.producer_id, 1 << 63)


def _by_partition(
    wanted: Mapping[Markers, Iterable[TopicPartition]],
) -> dict[TopicPartition, list[Markers]]:
    found: dict[TopicPartition, list[Markers]] = {}
    for markers, tps in wanted.items():
        for tp in tps:
            found.setdefault(tp, []).append(markers)
    return found


def _hand_on(code: asyncio.Future[int], future: asyncio.Future[int]) -> None:
    if code.done():
        resolve(future, code.result(), None)
    else:
        code.add_done_callback(lambda done: resolve(future, done.result(), None))
