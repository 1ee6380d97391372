"""The processes of the simulated job: executors, and the channels between them.

An executor drives the machines `helper` and `leader` as the real one does: it carries out one
effect, or takes one message or page, at a time, and may be killed between any two.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from kdirect.state import batches, helper, leader, recovery
from kdirect.state.batches import Part, Phase
from kdirect.state.messages import (
    Connect,
    Hello,
    Listening,
    NotRestored,
    Output,
    Ready,
    Restore,
    SnapshotDone,
    StartBatch,
    Stop,
    TakeOutput,
    TakeSnapshot,
    Welcome,
)
from tests.state.tables import Entry, StateFile, entry_of, merge, tally, vpart_of

CREDITS = 3
ENTRIES_OF_PAGE = 3


class Broken(Exception):
    """A property does not hold."""


class Channel:
    """Pages of one executor to another, in order, never more than the credits."""

    def __init__(self) -> None:
        self.credits = CREDITS
        self.flying: deque[tuple[leader.Page, tuple[Entry, ...], bool]] = deque()
        self.returning = 0

    def send(self, page: leader.Page, entries: tuple[Entry, ...]) -> None:
        self.credits -= 1
        self.flying.append((page, entries, True))

    def repeat(self, page: leader.Page, entries: tuple[Entry, ...]) -> None:
        """A page that was sent before comes again; the fabric does not count it."""
        self.flying.appendleft((page, entries, False))

    def release(self) -> None:
        _, _, counted = self.flying.popleft()
        self.returning += counted

    def absorb(self) -> None:
        self.credits, self.returning = self.credits + self.returning, 0

    def check(self) -> None:
        counted = sum(counted for _, _, counted in self.flying)
        if self.credits < 0 or self.credits + counted + self.returning != CREDITS:
            raise Broken("credits are not conserved")


class Link:
    """A connection of an executor to the coordinator; whatever was sent arrives, in order."""

    def __init__(self) -> None:
        self.up: deque[Any] = deque()  # to the coordinator
        self.down: deque[Any] = deque()
        self.executor_open = self.coordinator_open = True


class Executor:
    """One process and its state file.  `world` is everything outside of it."""

    def __init__(self, world: Any, index: int) -> None:
        self.world = world
        self.index = index
        self.file: StateFile | None = None
        self.alive = True
        self.doomed: object = None  # of real processes
        self.reset()

    def reset(self) -> None:
        """All that a process forgets when it ends, or when its attempt does."""
        self.link: Link | None = None
        self.welcome: Welcome | None = None
        self.leading: leader.Leading | None = None
        self.reading: helper.Reading | None = None
        self.effects: deque[Any] = deque()
        self.open: dict[int, dict] = {}  # fragments of other leaders
        self.queue: dict[int, deque[tuple[leader.Page, tuple[Entry, ...]]]] = {}
        self.flushing: int | None = None
        self.copies: deque[tuple[TakeSnapshot, dict]] = deque()  # snapshots that are written
        self.restoring = False
        self.connecting = False
        self.base: Counter = Counter()
        self.applied: Counter = Counter()

    def follow(self, old: Executor) -> None:
        """The next executor of the same number finds the state file."""
        self.file = old.file

    def kill(self, *, with_file: bool) -> None:
        if self.link is not None:
            self.link.executor_open = False
        self.reset()
        self.alive = False
        if with_file:
            self.file = None

    # -- what it can do ----------------------------------------------------------------------------

    def moves(self) -> list[tuple[str, Any]]:
        """What this process can do next."""
        if not self.alive:
            return []
        if self.link is None:
            return [("connect", None)] if self.world.is_listening() else []
        found: list[tuple[str, Any]] = []
        if self.link.down:
            found.append(("hear", None))
        elif not self.link.coordinator_open:
            return [("reset", None)]
        if self.effects:
            found.append(("effect", None))
        if self.copies:
            found.append(("write", None))
        for peer, pages in self.queue.items():
            channel = self.world.channel(self, peer)
            if channel.returning:
                found.append(("absorb", channel))
            if pages and channel.credits:
                found.append(("send", peer))
        if self.flushing is not None and not any(self.queue.values()):
            found.append(("flushed", None))
        if self.leading is not None and not self.effects:
            for sender, channel in self.world.incoming(self):
                # A page that would be held is looked at now and then only.
                if channel.flying and (
                    self.leading.running is not None or self.world.chance.random() < 0.2
                ):
                    found.append(("take", (sender, channel)))
        return found

    def move(self, kind: str, what: Any) -> None:
        if kind == "connect":
            self.link = Link()
            header = None if self.file is None else self.file.header
            self.say(
                Hello(
                    executor=self.index,
                    token="secret",
                    process_id=1,
                    host="here",
                    address={},
                    header=header,
                )
            )
            self.world.accept(self.index, self.link)
        elif kind == "reset":
            self.reset()
        elif kind == "hear":
            assert self.link is not None
            self.hear(self.link.down.popleft())
        elif kind == "effect":
            self.carry_out(self.effects.popleft())
        elif kind == "write":
            self.write_part(*self.copies.popleft())
        elif kind == "absorb":
            what.absorb()
            what.check()
        elif kind == "send":
            page, entries = self.queue[what].popleft()
            channel = self.world.channel(self, what)
            channel.send(page, entries)
            channel.check()
            self.world.sent.append((self.index, what, page, entries))
        elif kind == "flushed":
            self.flushed()
        elif kind == "take":
            self.take(*what)

    def say(self, message: Any) -> None:
        assert self.link is not None
        if self.link.executor_open:
            self.link.up.append(self.world.as_sent(message))

    # -- control messages --------------------------------------------------------------------------

    def hear(self, message: Any) -> None:
        if isinstance(message, Welcome):
            self.welcome = message
            self.leading = leader.begin(self.index, message.attempt, message.vparts)
            self.restoring = message.cold
            self.say(Listening(attempt=message.attempt, executor=self.index))
        elif isinstance(message, Restore):
            self.restore(message)
        elif isinstance(message, Connect):
            self.connecting = True
            self.get_ready()
        elif isinstance(message, StartBatch):
            self.start(message)
        elif isinstance(message, TakeOutput):
            assert self.file is not None
            self.world.outputs[message.attempt, message.batch, self.index] = self.file.kept.copy()
            self.say(
                Output(attempt=message.attempt, batch=message.batch, executor=self.index, size=1)
            )
        elif isinstance(message, TakeSnapshot):
            self.snapshot(message)
        elif isinstance(message, Stop):
            self.alive = False
            self.link.executor_open = False  # type: ignore[union-attr]
            self.reset()

    def get_ready(self) -> None:
        if self.connecting and not self.restoring:
            assert self.welcome is not None
            self.say(Ready(attempt=self.welcome.attempt, executor=self.index))
            self.connecting = False

    def restore(self, message: Restore) -> None:
        assert self.welcome is not None
        plan_hash, executors = self.welcome.plan.hash, len(self.welcome.vparts)
        led = first, last = self.welcome.vparts[self.index]
        self.file = StateFile.empty(plan_hash, self.index, executors, led, message.attempt)
        self.file.mark(message.attempt, max(message.batch, 0), Phase.DIRTY)
        for part in message.parts:
            cells = self.world.parts.get((message.batch, part.file))
            if cells is None:
                self.world.seen["not restored"] += 1
                self.say(
                    NotRestored(
                        attempt=message.attempt,
                        executor=self.index,
                        batch=message.batch,
                        message="it is gone",
                    )
                )
                return
            for where, cell in cells.items():
                if first <= vpart_of(where[0]) < last:
                    self.file.cells[where] = list(cell)
        self.world.seen["restored from a snapshot"] += bool(message.parts)
        self.file.mark(message.attempt, message.batch, Phase.CLEAN)
        self.restoring = False
        self.get_ready()

    def start(self, message: StartBatch) -> None:
        assert self.leading is not None and self.welcome is not None
        self.leading, effects = leader.step(self.leading, message)
        self.effects += effects
        self.reading, reads = helper.begin(
            message,
            self.world.delays,
            epoch_bytes=self.world.bounds.epoch_bytes,
            block_rows=self.world.bounds.block_rows,
        )
        self.effects += reads
        self.world.seen["repeated for some"] += message.vparts != recovery.EVERYTHING
        self.world.seen["repeated without output"] += not message.emit
        peers = [i for i in range(len(self.welcome.vparts)) if i != self.index]
        self.open = {peer: {} for peer in peers}
        self.queue = {peer: deque() for peer in peers}
        self.base = Counter() if self.file is None else self.file.tally()
        self.applied = Counter()

    # -- effects -----------------------------------------------------------------------------------

    def carry_out(self, effect: Any) -> None:
        file, attempt = self.file, self.leading.attempt if self.leading else 0
        if isinstance(effect, leader.MarkDirty):
            assert file is not None
            file.mark(attempt, effect.batch, Phase.DIRTY)
            file.kept = Counter()
        elif isinstance(effect, helper.Read):
            self.read(effect)
        elif isinstance(effect, helper.Flush):
            self.flush(effect)
        elif isinstance(effect, leader.Trigger):
            assert file is not None
            self.world.check_closes(self.leading.batch, effect)
            file.trigger(self.world.window, effect.before, effect.closes, effect.emit)
        elif isinstance(effect, leader.MarkDone):
            assert file is not None
            after = effect.after if effect.phase is Phase.DONE else None
            file.mark(attempt, effect.batch, effect.phase, after)
        elif isinstance(effect, leader.Report):
            self.say(effect.message)
        else:
            raise Broken(f"executor {self.index} has to {effect}")

    def read(self, effect: helper.Read) -> None:
        """Apply some of the rows that were asked for."""
        start = self.leading.running
        upto = self.world.chance.randint(effect.start + 1, effect.end)
        greatest = None
        for row in self.world.rows[effect.tp][effect.start : upto]:
            time = row.time
            if time is None or time < 0 or time > start.now_us + self.world.bounds.ahead:
                continue
            greatest = time if greatest is None else max(greatest, time)
            if time < self.world.window.late_below(self.late_clock(start)):
                continue
            entry = entry_of(self.world.window, time, row.key, row.value)
            vpart = vpart_of(row.key)
            if not any(first <= vpart < last for first, last in start.vparts):
                continue
            self.applied[row.key, "count"] += 1
            self.applied[row.key, "total"] += row.value
            self.put(vpart, entry)
        done = helper.BlockRead(effect.tp, upto, 10 * (upto - effect.start), greatest)
        self.step_reading(done)

    def late_clock(self, start: StartBatch) -> int:
        return start.closed_before

    def put(self, vpart: int, entry: Entry) -> None:
        vparts = self.welcome.vparts
        first, last = vparts[self.index]
        if first <= vpart < last:
            self.file.apply(entry)
        else:
            only_read = sum(first == last for first, last in vparts)
            to = batches.leader_of(vpart, len(vparts), only_read)
            merge(self.open[to], entry)

    def step_reading(self, event: helper.Event) -> None:
        self.reading, effects = helper.step(self.reading, event)
        self.effects += effects

    def flush(self, effect: helper.Flush) -> None:
        """The fragments become pages; new rows go into new fragments."""
        attempt, batch = self.leading.attempt, self.leading.batch
        clock = None if effect.clock is None else dict(effect.clock.entries)
        for peer, cells in self.open.items():
            entries = [e for cell in cells.values() for e in cell]
            chunks = [
                tuple(entries[i : i + ENTRIES_OF_PAGE])
                for i in range(0, len(entries), ENTRIES_OF_PAGE)
            ] or [()]
            for sequence, chunk in enumerate(chunks):
                is_last = sequence == len(chunks) - 1
                page = leader.Page(
                    self.index,
                    attempt,
                    batch,
                    effect.epoch,
                    sequence,
                    is_last,
                    clock if is_last else None,
                )
                self.queue[peer].append((page, chunk))
        self.open = {peer: {} for peer in self.open}
        self.flushing = effect.epoch

    def flushed(self) -> None:
        epoch, self.flushing = self.flushing, None
        self.step_reading(helper.Flushed(epoch))
        if self.reading.phase is helper.Phase.SENT:
            own = leader.OwnRead(dict(self.reading.clock.entries))
            self.leading, effects = leader.step(self.leading, own)
            self.effects += effects

    def take(self, sender: int, channel: Channel) -> None:
        page, entries, _ = channel.flying[0]
        self.leading, effects = leader.step(self.leading, page)
        for effect in effects:
            if isinstance(effect, leader.Merge):
                for entry in entries:
                    self.file.apply(entry)
                channel.release()
            elif isinstance(effect, leader.Drop):
                channel.release()
                self.world.seen[f"dropped: {effect.reason.value}"] += 1
            elif isinstance(effect, leader.Refuse):
                raise Broken(f"executor {self.index} refuses {effect}")
            elif isinstance(effect, leader.Hold):
                self.world.seen["held"] += 1
            else:
                self.effects.append(effect)
        channel.check()

    def snapshot(self, message: TakeSnapshot) -> None:
        assert self.file is not None and self.welcome is not None
        header = self.file.header
        if (header.batch, header.phase is Phase.DIRTY) != (message.batch, False):
            raise Broken(f"a snapshot of batch {message.batch} from {header}")
        first, last = self.welcome.vparts[self.index]
        self.copies.append((message, self.file.part(first, last)))

    def write_part(self, message: TakeSnapshot, cells: dict) -> None:
        """The copy is on disk, at any time after it was taken."""
        first, last = self.welcome.vparts[self.index]
        self.world.parts[message.batch, message.file] = cells
        self.world.seen["written while a batch ran"] += self.leading.batch != message.batch
        part = Part(file=message.file, first=first, last=last, size=1, crc=0)
        self.say(
            SnapshotDone(
                attempt=message.attempt, batch=message.batch, executor=self.index, part=part
            )
        )

    # -- what is on its way ------------------------------------------------------------------------

    def on_the_way(self) -> Counter:
        """The tally of what this executor has and has not merged into its own state."""
        found = tally(e for cells in self.open.values() for cell in cells.values() for e in cell)
        for peer, pages in self.queue.items():
            found.update(tally(e for _, entries in pages for e in entries))
            flying = self.world.channel(self, peer).flying
            found.update(tally(e for _, entries, counted in flying if counted for e in entries))
        return found
