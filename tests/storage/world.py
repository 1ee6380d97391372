"""A broker with one tiered partition, its metadata topic and its store, in virtual time.

The machine under test is `RemoteLog`.  Everything that it asks for is carried out here by chance:
late, twice reported, half, or not at all; the broker dies at any moment, and an older leadership
may go on for a while.  After every step the promises of tiered storage are checked against what
really is in the store (`World.check`); in the end the faults stop, and everything has to settle
(`World.heal`).
"""

from __future__ import annotations

import random
import uuid
from typing import NamedTuple

from kdirect.format.remote_metadata import (
    RemotePartitionDelete,
    RemoteSegment,
    RemoteSegmentUpdate,
    SegmentState,
)
from kdirect.format.segment_object import TailPlace, parse_custom_metadata
from kdirect.storage import remote_events as e
from kdirect.storage.copy_rules import LocalLog, LocalSegment, TierConfig
from kdirect.storage.remote_log import RemoteLog

TOPIC_ID = uuid.UUID(int=7)
RECORD_BYTES = 100
LOOK_MS = 500


def bytes_here(local: LocalLog, start: int) -> int:
    """Bytes of the local log from `start` on."""
    total = local.active_bytes
    for segment in local.sealed:
        missing = segment.end_offset - max(start, segment.base_offset)
        total += segment.size * max(0, missing) // (segment.end_offset - segment.base_offset)
    return total


class Stored(NamedTuple):
    """An object: the records that are in it, as (offset, serial number)."""

    records: tuple[tuple[int, int], ...]
    tail: TailPlace


class Local(NamedTuple):
    """A local segment."""

    base: int
    records: tuple[tuple[int, int], ...]
    newest_ms: int

    @property
    def end(self) -> int:
        return self.base + len(self.records)


class Leadership:
    """One machine with what it has under way: (due at, effect)."""

    def __init__(self, world: World, number: int) -> None:
        self.machine = world.kind(
            "t",
            TOPIC_ID,
            0,
            broker_id=number,
            leader_epoch=number if world.in_cluster else 0,
            fences=world.in_cluster,
            new_id=lambda: uuid.UUID(int=world.rng.getrandbits(128)),
        )
        self.under_way: list[tuple[int, object]] = []
        self.look_at = 0
        self.forgotten = False
        self.is_over = False
        self.kept: tuple[LocalLog, list[Local]] | None = None  # its log, when another one leads
        self.stable = 0  # of the last look
        self.answers: dict[uuid.UUID, e.Found] = {}  # of the last look at an object
        self.put: set[uuid.UUID] = set()  # uploads that it has begun


class World:
    def __init__(self, seed: int, kind: type[RemoteLog] = RemoteLog) -> None:
        self.kind = kind
        self.rng = rng = random.Random(seed)
        self.in_cluster = rng.random() < 0.6
        self.now = 1_000_000
        self.serial = 0
        self.sealed: list[Local] = []
        self.active: list[tuple[int, int]] = []
        self.active_base = 0
        self.epochs: list[tuple[int, int]] = [(0, 0)]
        self.log_start = 0
        self.truth: dict[int, int] = {}  # offset -> serial number of the record that the log has
        self.remote_end = -1  # what the partition was told by `Tiered`
        self.store: dict[uuid.UUID, Stored] = {}
        self.keys_ever: set[uuid.UUID] = set()
        self.metadata: list[object] = []  # committed, in order
        self.faults = rng.choice((0.0, 0.05, 0.3))
        self.away_until = 0
        self.more = random.Random(~seed)  # of what came later: older seeds stay what they were
        self.late: list[tuple[int, RemoteSegment, Stored]] = []  # uploads that nobody waits for
        self.removals: list[tuple[int, Leadership, uuid.UUID]] = []  # by who had given them up
        self.late_records: list[
            tuple[int, Leadership, object]
        ] = []  # committed although nobody knew
        self.gave_up: dict[uuid.UUID, Leadership] = {}
        self.lost: set[uuid.UUID] = set()  # what may be stored after nobody knows of it any more
        self.deleted = False
        self.config = TierConfig(
            retention_ms=rng.choice((-1, -1, 20_000, 120_000)),
            retention_bytes=rng.choice((-1, -1, 3000, 20_000)),
            copy_lag_ms=rng.choice((0, 0, 5000, -1)),
            copy_lag_bytes=rng.choice((0, 0, 2000, -1)),
        )
        self.leaders: list[Leadership] = []
        self.counts: dict[str, int] = {}
        self.lead()

    # -- the log -----------------------------------------------------------------------------------

    @property
    def leader(self) -> Leadership:
        return self.leaders[-1]

    @property
    def end(self) -> int:
        return self.active_base + len(self.active)

    @property
    def local_start(self) -> int:
        return max(self.log_start, self.sealed[0].base if self.sealed else self.active_base)

    def produce(self, count: int) -> None:
        for _ in range(count):
            self.serial += 1
            self.truth[self.end] = self.serial
            self.active.append((self.end, self.serial))

    def roll(self) -> None:
        if self.active:
            self.sealed.append(Local(self.active_base, tuple(self.active), self.now))
            self.active_base, self.active = self.end, []

    def delete_local(self) -> None:
        """Local retention: the oldest segments, as far as they are tiered or below the start."""
        for _ in range(self.rng.randint(1, 3)):
            if self.sealed and self.sealed[0].end <= max(self.remote_end, self.log_start):
                self.count("local_deleted")
                del self.sealed[0]

    def move_log_start(self, offset: int) -> None:
        assert offset <= max(self.stable, self.local_start)
        if offset > self.log_start:
            self.log_start = offset
            while self.sealed and self.sealed[0].end <= offset:
                del self.sealed[0]

    @property
    def stable(self) -> int:
        return self.end - self.unstable if self.end - self.unstable > self.log_start else self.end

    unstable = 0

    def switch(self) -> None:
        """The topic is tiered no longer, or again: see `Partition.reconfigure`."""
        self.count("switched")
        off = not self.config.deletes_all
        self.config = self.config._replace(deletes_all=off)
        self.remote_end = -1
        if off:
            self.move_log_start(min(self.local_start, self.leader.stable, self.stable))

    def cut(self) -> None:
        """An unclean election: some of the end is lost, whatever was copied of it."""
        last = max((s.end for s in self.sealed[:-1]), default=self.local_start)
        to = self.rng.randint(max(last, self.log_start), self.end)
        self.count("cuts")
        for offset in range(to, self.end):
            del self.truth[offset]
        self.epochs = [x for x in self.epochs if x[1] < to] or [(0, to)]
        self.roll()
        while self.sealed and self.sealed[-1].base >= to:
            self.active_base = self.sealed.pop().base
        if self.sealed and self.sealed[-1].end > to:
            old = self.sealed.pop()
            self.active_base, self.active = old.base, list(old.records[: to - old.base])
        self.active_base = min(self.active_base, to) if not self.active else self.active_base
        assert self.end == to, (self.end, to)

    def local(self) -> LocalLog:
        return LocalLog(
            log_start_offset=self.log_start,
            local_start_offset=self.local_start,
            stable_offset=self.stable,
            end_offset=self.end,
            sealed=tuple(
                LocalSegment(s.base, s.end, len(s.records) * RECORD_BYTES, s.newest_ms)
                for s in self.sealed
            ),
            active_bytes=len(self.active) * RECORD_BYTES,
            epochs=tuple(self.epochs),
        )

    # -- leaderships -------------------------------------------------------------------------------

    def lead(self) -> None:
        """A new leadership: it is told all metadata that is committed."""
        self.remote_end = -1
        number = len(self.leaders) + 1
        leader = Leadership(self, number)
        self.leaders.append(leader)
        if self.epochs[-1][1] == self.end:
            self.epochs[-1] = (number, self.end)
        else:
            self.epochs.append((number, self.end))
        for record in self.metadata:
            self.tell(leader, e.Recorded(record))
        if self.deleted:
            self.tell(leader, e.TopicDeleted())
        events = [e.Loaded(), e.Looked(self.now, self.local(), self.config)]
        self.rng.shuffle(events)
        for event in events:
            self.tell(leader, event)

    def die(self) -> None:
        """The broker is killed: uploads may still reach the store, records the topic."""
        self.count("deaths")
        leader = self.leader
        leader.is_over = True
        for _, effect in leader.under_way:
            if isinstance(effect, e.Write) and self.rng.random() < 0.5:
                self.commit(effect.record)
            elif isinstance(effect, e.Put) and self.rng.random() < 0.5:
                self.put(leader, effect.segment)
            elif isinstance(effect, e.Delete) and self.rng.random() < 0.5:
                self.store.pop(effect.segment.segment_id, None)
        leader.under_way.clear()
        self.lead()

    def replace(self) -> None:
        """Another broker is elected, while the old one goes on for a while."""
        self.count("replaced")
        self.leader.kept = self.local(), list(self.sealed)
        if self.rng.random() < 0.3:
            self.cut()
        self.lead()

    def tell(self, leader: Leadership, event: object) -> None:
        if isinstance(event, e.Looked):
            leader.stable = event.local.stable_offset
        elif isinstance(event, e.Checked):
            leader.answers[event.segment_id] = event.found
        for effect in leader.machine.on(event):
            self.begin(leader, effect)

    def begin(self, leader: Leadership, effect: object) -> None:
        is_leader = leader is self.leader
        if isinstance(effect, e.Tiered):
            if is_leader and not self.config.deletes_all:  # see `Tiering.note_tiered`
                self.remote_end = effect.end_offset
        elif isinstance(effect, e.MoveLogStart):
            if is_leader:
                self.move_log_start(effect.offset)
                leader.under_way.append((self.now, e.LogStartMoved(effect.offset)))
        elif isinstance(effect, e.LookAgain):
            leader.look_at = min(leader.look_at, self.now + 50)
        elif isinstance(effect, e.Forget):
            leader.forgotten = True
        else:
            if isinstance(effect, e.Write):
                self.check_record(leader, effect.record)
            elif isinstance(effect, e.Put):
                leader.put.add(effect.segment.segment_id)
            leader.under_way.append((self.now + self.rng.randint(1, 3000), effect))

    def check_record(self, leader: Leadership, record: object) -> None:
        """May a leader write this?"""
        if isinstance(record, RemoteSegment):
            assert record.end_offset <= leader.stable, "what is not committed was copied"
        elif isinstance(record, RemoteSegmentUpdate):
            known = leader.answers.get(record.segment_id)
            if record.state is SegmentState.DELETE_SEGMENT_STARTED and known is e.Found.UNKNOWN:
                known_better = record.segment_id in leader.put | self.finished()
                assert known_better or self.deleted, "deleted without a look"

    # -- effects -----------------------------------------------------------------------------------

    def commit(self, record: object) -> None:
        self.metadata.append(record)
        for leader in self.leaders:
            if not leader.is_over:
                self.tell(leader, e.Recorded(record))

    def sealed_of(self, leader: Leadership) -> list[Local]:
        return self.sealed if leader.kept is None else leader.kept[1]

    def fails(self) -> bool:
        return self.now < self.away_until or self.rng.random() < self.faults

    def put(self, leader: Leadership, segment: RemoteSegment) -> TailPlace | None:
        found = next((s for s in self.sealed_of(leader) if s.base == segment.base_offset), None)
        if found is None or found.end != segment.end_offset:
            return None
        assert segment.segment_id not in self.keys_ever, "a key was written twice"
        self.keys_ever.add(segment.segment_id)
        if leader is not self.leader:
            self.lost.add(segment.segment_id)
        stored = Stored(found.records, TailPlace(1, 1 + self.rng.randrange(256)))
        self.store[segment.segment_id] = stored
        return stored.tail

    def finish(self, leader: Leadership, effect: object) -> None:
        """One thing that was under way ends."""
        if isinstance(effect, e.LogStartMoved):
            self.tell(leader, effect)
        elif isinstance(effect, e.Write):
            self.write(leader, effect.record)
        elif isinstance(effect, e.Put):
            self.tell(
                leader, e.PutEnded(effect.segment.segment_id, self.try_put(leader, effect.segment))
            )
        elif isinstance(effect, e.Check):
            self.tell(leader, self.checked(effect.segment))
        elif isinstance(effect, e.Delete):
            self.delete(leader, effect.segment)

    def write(self, leader: Leadership, record: object) -> None:
        if self.rng.random() < self.faults / 3:
            if self.rng.random() < 0.5:  # it comes later, although it was given up
                self.count("late_records")
                self.tell(leader, e.Unrecorded(record))
                when = self.now + self.more.choice((0, 0, 3000))
                self.late_records.append((when, leader, record))
            else:
                self.tell(leader, e.Unrecorded(record))
            return
        self.commit(record)

    def try_put(self, leader: Leadership, segment: RemoteSegment) -> TailPlace | None:
        if not self.fails():
            return self.put(leader, segment)
        self.count("failed_puts")
        kind = self.rng.randrange(3)
        if kind == 0:
            self.put(leader, segment)  # stored, and the answer is lost
        elif kind == 1:  # it hangs, is given up, and comes in the end
            found = next((s for s in self.sealed_of(leader) if s.base == segment.base_offset), None)
            if found is not None and found.end == segment.end_offset:
                when = self.now + self.rng.randint(1, 20_000)
                self.lost.add(segment.segment_id)
                self.gave_up[segment.segment_id] = leader
                self.late.append((when, segment, Stored(found.records, TailPlace(1, 1))))
        return None

    def checked(self, segment: RemoteSegment) -> e.Checked:
        if self.fails():
            return e.Checked(segment.segment_id, e.Found.UNKNOWN)
        stored = self.store.get(segment.segment_id)
        if stored is None:
            return e.Checked(segment.segment_id, e.Found.UNSOUND)
        return e.Checked(segment.segment_id, e.Found.SOUND, stored.tail)

    def delete(self, leader: Leadership, segment: RemoteSegment) -> None:
        marked = any(
            isinstance(r, RemoteSegmentUpdate)
            and r.segment_id == segment.segment_id
            and r.state is SegmentState.DELETE_SEGMENT_STARTED
            for r in self.metadata
        )
        assert marked, "an object was deleted on a promise"
        failed = self.fails()
        if not failed or self.rng.random() < 0.5:
            self.store.pop(segment.segment_id, None)
        self.tell(leader, e.DeleteEnded(segment.segment_id, not failed))

    # -- time --------------------------------------------------------------------------------------

    def step(self) -> None:
        """Something happens."""
        roll = self.rng.random()
        if roll < 0.25:
            self.produce(self.rng.randint(1, 5))
        elif roll < 0.35:
            self.roll()
        elif roll < 0.42:
            self.delete_local()
        elif roll < 0.43:
            self.die()
        elif roll < 0.438 and self.in_cluster:
            self.replace()
        elif roll < 0.445:
            self.away_until = self.now + self.rng.randint(1000, 60_000)
        elif roll < 0.45 and self.stable > self.log_start:
            offset = self.rng.randint(self.log_start, self.stable)
            self.move_log_start(offset)
            self.tell(self.leader, e.LogStartMoved(offset))
        elif roll < 0.455:
            self.unstable = self.rng.choice((0, 0, 3, 10))
        elif roll < 0.458:
            self.config = self.config._replace(copies=self.rng.random() < 0.7)
        if self.more.random() < (0.5 if self.config.deletes_all else 0.02):
            self.switch()
        self.run_until(self.now + self.rng.randint(1, 400))
        self.check()

    def run_until(self, until: int) -> None:
        while True:
            for removal in [x for x in self.removals if x[0] <= self.now]:
                self.removals.remove(removal)
                if not removal[1].is_over and removal[1].machine.is_leaving(removal[2]):
                    self.store.pop(removal[2], None)
            for late in [x for x in self.late_records if x[0] <= self.now]:
                self.late_records.remove(late)
                if self.in_cluster or not late[1].is_over:  # its log is its own
                    self.commit(late[2])
            due = [
                (at, number, i)
                for number, leader in enumerate(self.leaders)
                if not leader.is_over
                for i, (at, _) in enumerate(leader.under_way)
                if at <= until
            ]
            looks = [
                (leader.look_at, number, -1)
                for number, leader in enumerate(self.leaders)
                if not leader.is_over and leader.look_at <= until
            ]
            coming = [(at, -1, i) for i, (at, _, _) in enumerate(self.late) if at <= until]
            if not (due or looks or coming):
                break
            at, number, i = min(due + looks + coming)
            self.now = max(self.now, at)
            if number < 0:
                _, segment, stored = self.late.pop(i)
                assert segment.segment_id not in self.keys_ever
                self.keys_ever.add(segment.segment_id)
                self.store[segment.segment_id] = stored
                when = self.now + self.more.randint(0, 5000)
                leader = self.gave_up[segment.segment_id]
                self.removals.append((when, leader, segment.segment_id))
            elif i < 0:
                leader = self.leaders[number]
                leader.look_at = self.now + LOOK_MS
                local = self.local() if leader.kept is None else leader.kept[0]
                self.tell(leader, e.Looked(self.now, local, self.config))
            else:
                leader = self.leaders[number]
                _, effect = leader.under_way.pop(i)
                self.finish(leader, effect)
            if not self.rng.randrange(200):  # an old leadership hears that it is over
                for leader in self.leaders[:-1]:
                    leader.is_over = True
        self.now = until

    # -- promises ----------------------------------------------------------------------------------

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def check(self) -> None:
        """Every record from the log start on can be read, by what the leader knows and what really
        is there."""
        if self.deleted:
            return
        offset = self.log_start
        while offset < self.local_start:
            segment = self.leader.machine.segments.at(offset)
            assert segment is not None, f"offset {offset} is nowhere"
            stored = self.store.get(segment.segment_id)
            assert stored is not None, f"the object of {segment} is gone"
            for at, serial in stored.records:
                if at >= offset and at < self.end:
                    assert self.truth[at] == serial, f"offset {at} has another record"
            offset = segment.end_offset
        for segment in self.leader.machine.segments:
            assert segment.segment_id in self.store, "a segment counts and is not there"

    def heal(self) -> None:
        """The faults stop; in the end nothing is left to be done."""
        self.faults = 0.0
        self.away_until = 0
        self.unstable = 0
        self.config = self.config._replace(copies=True, deletes_all=False)
        for leader in self.leaders[:-1]:
            leader.is_over = True
        for _ in range(400):
            self.run_until(self.now + 1000)
            self.check()
            is_late = self.late or self.late_records or self.removals
            if not self.leader.under_way and not is_late and self._is_settled():
                break
        else:
            raise AssertionError(f"it does not settle: {self.leader.under_way}")
        self.sweep()

    def _is_settled(self) -> bool:
        if self.deleted:
            return self.leader.forgotten
        figures = self.leader.machine.figures()
        lagging = figures.copy_lag_segments and 0 in (
            self.config.copy_lag_ms,
            self.config.copy_lag_bytes,
        )
        looked = figures.metadata_count == len(self.finished())
        return looked and not lagging and not figures.delete_lag_segments

    def sweep(self) -> None:
        """What is in the store and in no metadata is removed; nothing else is superfluous."""
        finished = self.finished()
        orphans = set(self.store) - finished
        assert orphans <= self.lost, "what was deleted is still there"
        self.counts["orphans"] = len(orphans)
        assert finished <= set(self.store)
        if not self.deleted:
            counted = {s.segment_id for s in self.leader.machine.segments}
            assert counted <= finished
            if self.config.retention_bytes >= 0:
                size = bytes_here(self.local(), self.remote_end)
                size += self.leader.machine.segments.bytes_from(self.log_start)
                oldest = self.leader.machine.segments.at(self.log_start)
                if oldest is not None and size > self.config.retention_bytes:
                    assert size - oldest.size < self.config.retention_bytes, "retention.bytes"
        else:
            assert not finished

    def finished(self) -> set[uuid.UUID]:
        """By the metadata topic alone, as any reader of it would say."""
        states: dict[uuid.UUID, SegmentState] = {}
        newest = -1
        for record in self.metadata:
            if not isinstance(record, RemotePartitionDelete):
                custom = parse_custom_metadata(record.custom)
                assert custom is not None
                epoch = custom.leader_epoch
                if epoch < newest:
                    continue
                newest = epoch
            if isinstance(record, RemoteSegment):
                states.setdefault(record.segment_id, record.state)
            elif isinstance(record, RemoteSegmentUpdate):
                state = states.get(record.segment_id)
                if state is not None and record.state > state:
                    states[record.segment_id] = record.state
            elif isinstance(record, RemotePartitionDelete) and record.state == 2:
                states.clear()
        return {i for i, s in states.items() if s is SegmentState.COPY_SEGMENT_FINISHED}


__all__ = ["World"]
