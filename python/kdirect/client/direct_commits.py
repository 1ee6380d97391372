"""Commits of offsets by WRITEs into the coordinator's memory, where there is a transport
(KafkaDirect §5.4 leaves them to future work).

Owns: the queue pair to the coordinator, and the member's commit slot there.  What may not enter:
when to commit, and what is committed over TCP (`kdirect.client.commits`).

A slot is for one generation of the group (of a member of KIP-848: one epoch) and the partitions
that were assigned when it was asked for.  It is asked
for at the second commit of a generation, so that a consumer which commits once needs no queue pair.
Whatever goes wrong, a commit that did not succeed here is made once more over TCP: what it sets is
the same, and TCP says what is the matter.  The slot is given up then, and another one asked for
only after a commit over TCP, so that no commit overtakes an earlier one.

One thread at a time, the consumer's.
"""

from __future__ import annotations

import logging
from typing import Any

from kdirect.client.commit_writer import CommitWriter
from kdirect.client.connections import Handle
from kdirect.client.group_member import GroupMember
from kdirect.client.reading import Reading
from kdirect.errors import KdirectError
from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.model import TopicPartition
from kdirect.wire.channel import Channel, access_error

log = logging.getLogger("kdirect.client")

# More than there may be answers under way: one for each cell, and a notice that the slot ends.
RING_ENTRIES = 4 * layout.OFFSETS_CELLS


class DirectCommit:
    """One commit that was posted: `done`, then `succeeded` says whether it counts for certain."""

    __slots__ = ("_number", "_outcome", "_writer")

    def __init__(self, writer: CommitWriter, number: int) -> None:
        self._writer = writer
        self._number = number
        self._outcome: bool | None = None

    @property
    def done(self) -> bool:
        """The answer is here, or there will be none: `succeeded` does not wait."""
        return self._outcome is not None or self._writer.is_answered(self._number)

    def succeeded(self, timeout_ms: float) -> bool:
        """Wait for the answer for so long.  False: it was refused, or nobody knows."""
        if self._outcome is None:
            self._outcome = self._writer.wait(self._number, timeout_ms) == 0
            if not self._outcome:  # what comes after it must not overtake it
                self._writer.end()
        return self._outcome

    def made_over_tcp(self) -> None:
        """It did not succeed here, and was made once more."""
        self._outcome = True


class DirectCommits:
    """See the module."""

    def __init__(self, session: Handle, membership: GroupMember, reading: Reading) -> None:
        self._session = session
        self._membership = membership
        self._reading = reading
        settings = session.settings
        self._enabled = settings["transport"] != "tcp"
        self._spin_us: int = settings["spin.us"]
        self._timeout_ms: float = settings["request.timeout.ms"]
        self._monotonic = session.environment.monotonic
        self._channel: Channel | None = None
        self._writer: CommitWriter | None = None
        self._generation = -1  # of the last commit
        self._rebalances = -1  # before it
        self._refused = -1  # a generation in which no slot could be had
        self.commits = 0
        self._in_cells: list[DirectCommit | None] = [None] * layout.OFFSETS_CELLS

    def deadline(self) -> float:
        """Until when a commit that begins now may take, in both ways together (monotonic s)."""
        return self._monotonic() + self._timeout_ms / 1000

    def left_ms(self, until: float) -> float:
        """What is left of the time of a commit."""
        return max(0.0, (until - self._monotonic()) * 1000)

    def share_ms(self, until: float) -> float:
        """What an answer here may take of it: half of what is left, so that TCP has as much."""
        return self.left_ms(until) / 2

    def begin(
        self, offsets: dict[TopicPartition, int], until: float | None = None
    ) -> DirectCommit | None:
        """Post a commit; None where it has to be made over TCP.  What has to be answered first
        takes a part of the time `until` then (default: `deadline`)."""
        until = self.deadline() if until is None else until
        generation = self._membership.generation
        writer = self._writer
        if writer is None or writer.ended or self._is_another(generation):
            writer = self._next_writer(generation, until)
            if writer is None:
                return None
        cell = writer.posted % layout.OFFSETS_CELLS
        before = self._in_cells[cell]
        if before is not None:
            before.succeeded(
                self.share_ms(until)
            )  # its answer, before the cell holds another commit
        number = writer.post(offsets)
        if number < 0:
            return None
        self.commits += 1
        commit = self._in_cells[cell] = DirectCommit(writer, number)
        return commit

    def _is_another(self, generation: int) -> bool:
        """Is it another generation, or are other partitions assigned, than at the last commit?"""
        return (generation, self._membership.rebalances) != (self._generation, self._rebalances)

    def _next_writer(self, generation: int, until: float) -> CommitWriter | None:
        """The slot of this generation, asked for; None while there is none."""
        if not self._enabled or generation < 0 or not self._membership.is_member:
            return None
        first = self._is_another(generation)
        self._generation, self._rebalances = generation, self._membership.rebalances
        failed = self._writer is not None and self._writer.ended
        self._drop_writer()
        if first or self._refused == generation:
            return None
        if failed:  # TCP says what is the matter, then another slot is asked for
            self._generation = -1
            return None
        self._in_cells = [None] * layout.OFFSETS_CELLS
        try:
            self._writer = self._open(generation, until)
        except KdirectError as e:
            log.debug("group %s commits over TCP: %s", self._membership.group_id, e)
            self.close()
        if self._writer is None:
            self._refused = generation
        return self._writer

    def _open(self, generation: int, until: float) -> CommitWriter | None:
        partitions = self._reading.partitions
        membership = self._membership
        connection = membership.coordinator()
        if not 0 < len(partitions) <= layout.OFFSETS_MOST_PARTITIONS or not connection.supports(
            layout.API_GET_COMMIT_SLOT
        ):
            return None
        channel = self._channel
        if channel is None or channel.closed or channel.connection is not connection:
            self.close()
            channel = self._channel = self._session.channel_over(
                connection, receives=RING_ENTRIES, sends=2 * layout.OFFSETS_CELLS
            )
            if channel is None:
                return None
            for _ in range(RING_ENTRIES):
                channel.qp.post_recv(0)
        ring = channel.remote_writable_memory(RING_ENTRIES * layout.ACK_BYTES)
        indexes: dict[str, list[int]] = {}
        for tp in partitions:
            indexes.setdefault(tp.topic, []).append(tp.partition)
        order = [TopicPartition(name, i) for name, numbers in indexes.items() for i in numbers]
        r = p.GetCommitSlotRequest
        answer: Any = channel.request(
            r(
                connection_id=channel.connection_id,
                group_id=membership.group_id,
                generation_id_or_member_epoch=generation,
                member_id=membership.member_id,
                group_instance_id=membership.instance_id,
                topics=[
                    r.CommitTopic(name=name, partitions=numbers)
                    for name, numbers in indexes.items()
                ],
                ack_address=ring.address,
                ack_rkey=ring.rkey,
                ack_entries=RING_ENTRIES,
            ),
            self.share_ms(until),
        )
        if answer.error_code:
            raise access_error(answer.error_code, answer.error_message, "a commit slot")
        return CommitWriter(
            channel,
            answer,
            {tp: i for i, tp in enumerate(order)},
            generation,
            ring,
            RING_ENTRIES,
            spin_us=self._spin_us,
            monotonic=self._session.environment.monotonic,
        )

    def _drop_writer(self) -> None:
        """Leave the slot; the coordinator ends it with the next request for one, or with the queue
        pair."""
        writer, self._writer = self._writer, None
        if writer is not None and (writer.under_way or writer.ended):
            self.close()

    def close(self) -> None:
        """End the queue pair, and the slot with it."""
        channel, self._channel = self._channel, None
        self._writer = None
        if channel is not None:
            channel.close()
