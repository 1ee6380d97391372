"""Was what a consumer has read cut off its log since (KIP-320)?

After an unclean election the leader may lack records that were read, and have others at their
offsets: the offset of a reader does not show it, the leader epoch of the last batch that it read
does.  Over Fetch the leader compares (`last_fetched_epoch`); here is what is asked when a
partition is to be READ in another leader epoch: OffsetForLeaderEpoch.

Owns: the leader epoch of the last batch that was read of each partition, while it is between two
paths, of whatever kind, and that question.  What may not enter: what follows from the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kdirect.client.cursor import Cursor
from kdirect.errors import KdirectError, NotLeaderError, TruncatedLogError
from kdirect.format import protocol
from kdirect.model import TopicPartition
from kdirect.wire.broker_errors import read_error
from kdirect.wire.cluster import Cluster
from kdirect.wire.connection import Pending

log = logging.getLogger("kdirect.client")

ANSWER_MS = 2000  # for one answer; the reading thread waits for it


def truncated(
    tp: TopicPartition, offset: int, epoch: int, end: tuple[int, int]
) -> TruncatedLogError:
    """The error for a reader at `offset` whose last batch is of leader epoch `epoch`; `end`: the
    (epoch, offset) where the leader's log leaves that history."""
    diverges_at = min(end[1], offset)
    error = TruncatedLogError(
        f"{tp} was cut: it was read up to offset {offset}, in leader epoch {epoch}, but its"
        f" leader's log has other records from offset {diverges_at} on, after leader epoch"
        f" {end[0]}",
        hint="an unclean election lost records (unclean.leader.election.enable)",
    )
    error.diverges_at = diverges_at
    return error


class ReadEpochs:
    """See the module.  One thread at a time."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        # (offset, leader epoch of the batch before it)
        self._epochs: dict[TopicPartition, tuple[int, int]] = {}

    def note(self, cursor: Cursor) -> None:
        """The partition of `cursor` loses its path, and is to be read on where it is."""
        if (epoch := cursor.last_epoch) >= 0:
            self._epochs[cursor.tp] = cursor.next_offset, epoch

    def before(self, tp: TopicPartition, offset: int) -> int:
        """The leader epoch of the batch that was read before `offset`; -1: not known."""
        noted, epoch = self._epochs.get(tp, (-1, -1))
        return epoch if noted == offset else -1

    def forget(self, tp: TopicPartition) -> None:
        """It is to be read elsewhere than after what was read last, or not at all."""
        self._epochs.pop(tp, None)

    def check(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, KdirectError]:
        """Of partitions that have just got a path, to be read on at these offsets, those that may
        not be: TruncatedLogError where the log was cut below, NotLeaderError where its leader does
        not tell."""
        known = self._cluster.leader_epoch
        asked = {
            tp: epoch
            for tp, offset in offsets.items()
            if 0 <= (epoch := self.before(tp, offset)) < known(tp)
        }
        if not asked:
            return {}
        groups, failed = self._cluster.leaders(asked)
        cut: dict[TopicPartition, KdirectError] = {}
        sent: list[tuple[list[TopicPartition], Pending]] = []
        for node, tps in groups.items():
            try:
                connection = self._cluster.connection_to(node)
                sent.append((tps, connection.submit(self._request(tps, asked))))
            except KdirectError as e:
                failed |= dict.fromkeys(tps, e)
        for tps, pending in sent:
            try:
                answer = pending.result(ANSWER_MS)
            except KdirectError as e:
                failed |= dict.fromkeys(tps, e)
                continue
            for name, x in ((t.topic, x) for t in answer.topics for x in t.partitions):
                tp = TopicPartition(name, x.partition)
                if tp not in asked:
                    continue
                if x.error_code:
                    failed[tp] = read_error(x.error_code, f"leader epochs of {tp}")
                    continue
                epoch, end = x.leader_epoch, x.end_offset
                if epoch >= 0 and (epoch < asked[tp] or end < offsets[tp]):
                    cut[tp] = truncated(tp, offsets[tp], asked[tp], (epoch, end))
        return cut | {tp: NotLeaderError(e.message, hint=e.hint) for tp, e in failed.items()}

    def _request(self, tps: list[TopicPartition], epochs: Mapping[TopicPartition, int]) -> Any:
        r = protocol.OffsetForLeaderEpochRequest
        topics: dict[str, list[Any]] = {}
        for tp in tps:
            topics.setdefault(tp.topic, []).append(
                r.OffsetForLeaderTopic.OffsetForLeaderPartition(
                    partition=tp.partition,
                    current_leader_epoch=self._cluster.leader_epoch(tp),
                    leader_epoch=epochs[tp],
                )
            )
        return r(
            replica_id=-1,
            topics=[r.OffsetForLeaderTopic(topic=n, partitions=x) for n, x in topics.items()],
        )
