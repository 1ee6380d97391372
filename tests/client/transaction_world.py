"""A coordinator, partitions and a network for `Transaction`, from one seed, and who uses them.

The coordinator follows Kafka's rules in the small: two protocols, markers that take their time,
requests and batches that are lost, answered to nobody or delivered late.  `World.run` lets one
program after another work, each with the same transactional id, and `check` compares what readers
of committed records see with what these programs were told.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from kdirect.client import transaction as t
from kdirect.client.transaction import Answer, GroupMetadata, Next, Phase, Transaction
from kdirect.errors import DeliveryError, TransactionError
from kdirect.format.error_codes import ErrorCode as E
from kdirect.model import TopicPartition

PARTITIONS = [TopicPartition("t", i) for i in range(3)]
GROUP = GroupMetadata("g")
MOST_TRIES = 200  # of one request: the network gets better before
REFUSALS = (E.NOT_COORDINATOR, E.COORDINATOR_NOT_AVAILABLE, E.COORDINATOR_LOAD_IN_PROGRESS)


class Died(Exception):
    """A program ends without an answer to its last call."""


@dataclass
class Coordinator:
    """Of one transactional id, with the partitions that it marks."""

    version: int
    epoch: int = -1
    state: str = "empty"  # ongoing, commit and abort being marked, empty
    last_end: bool | None = None  # how the transaction before ended; None: a timeout ended it
    partitions: set[TopicPartition] = field(default_factory=set)
    offsets: int | None = None  # of the open transaction
    committed_offset: int = -1
    log: list[list] = field(default_factory=list)  # [tag, epoch, "open" or how it ended]

    def finish(self) -> None:
        """Write the markers of a transaction that ends."""
        if self.state in ("commit", "abort"):
            for record in self.log:
                if record[2] == "open":
                    record[2] = self.state
            if self.state == "commit" and self.offsets is not None:
                self.committed_offset = self.offsets
            self.state, self.partitions, self.offsets = "empty", set(), None

    def expire(self) -> None:
        """The transaction took too long, or another producer comes."""
        if self.state == "ongoing":
            self.state, self.last_end = "abort", None
            self.epoch += 1

    def answer(self, request: t.Request, epoch: int) -> Answer:
        """What the coordinator says to `request` of a producer with this epoch."""
        match request:
            case t.InitProducer(known, of_epoch):
                if known >= 0 and of_epoch not in (self.epoch, self.epoch - 1):
                    return Answer((E.PRODUCER_FENCED,))
                self.expire()  # whoever had it is fenced
                if self.state != "empty":
                    return Answer((E.CONCURRENT_TRANSACTIONS,))
                if known < 0 or of_epoch == self.epoch:  # else it is repeated
                    self.epoch += 1
                    self.last_end = None
                return Answer((0,), 1, self.epoch)
            case t.EndTransaction(commit):
                return self._end(commit, epoch)
            case t.AddPartitions(partitions):
                code = self._join(epoch)
                if not code:
                    self.partitions |= set(partitions)
                return Answer((code,) * len(partitions))
            case t.AddOffsets():
                return Answer((self._join(epoch),))
            case t.CommitOffsets(_, offsets):
                code = self._join(epoch) if self.version >= 2 else self._belongs(epoch)
                if not code:
                    self.offsets = offsets[PARTITIONS[0]]
                return Answer((code,))
        raise AssertionError(request)

    def _join(self, epoch: int) -> int:
        if epoch != self.epoch:
            return E.PRODUCER_FENCED
        if self.state in ("commit", "abort"):
            return E.CONCURRENT_TRANSACTIONS
        self.state = "ongoing"
        return 0

    def _belongs(self, epoch: int) -> int:
        if epoch != self.epoch:
            return E.INVALID_PRODUCER_EPOCH
        return 0 if self.state == "ongoing" else E.INVALID_TXN_STATE

    def _end(self, commit: bool, epoch: int) -> Answer:
        bump = self.version >= 2
        if bump and epoch == self.epoch - 1 and self.last_end is commit:  # repeated
            if self.state != "empty":
                return Answer((E.CONCURRENT_TRANSACTIONS,))
            return Answer((0,), 1, self.epoch)
        if epoch != self.epoch:
            return Answer((E.PRODUCER_FENCED,))
        if self.state == "ongoing" or (bump and not commit and self.state == "empty"):
            self.state = "commit" if commit else "abort"
            self.last_end = commit
            self.epoch += bump
            return Answer((0,), 1, self.epoch) if bump else Answer()
        if self.state == "empty" and self.last_end is commit and not bump:
            return Answer()
        return Answer(
            (E.INVALID_TXN_STATE if self.state == "empty" else E.CONCURRENT_TRANSACTIONS,)
        )

    def append(self, tp: TopicPartition, tag: str, epoch: int) -> int:
        """A batch arrives at its partition."""
        if any(record[0] == tag for record in self.log):
            return 0  # a duplicate
        code = self._join(epoch) if self.version >= 2 else self._belongs(epoch)
        if not code and self.version < 2 and tp not in self.partitions:
            code = E.INVALID_TXN_STATE
        if not code:
            self.partitions.add(tp)
            self.log.append([tag, epoch, "open"])
        return E.INVALID_PRODUCER_EPOCH if code == E.PRODUCER_FENCED else code


class World:
    """See the module."""

    def __init__(self, seed: int, version: int) -> None:
        self.random = random.Random(seed)
        self.coordinator = Coordinator(version)
        self.version = version
        self.late: list[Callable[[], object]] = []
        self.told: dict[str, set[str]] = {"commit": set(), "abort": set()}
        self.unknown: list[set[str]] = []  # of whoever died before the answer
        self.offsets_told = -1
        self.done = 0
        self.tags = 0

    def run(self, transactions: int = 12) -> None:
        """Programs of the same name, until so many transactions were begun."""
        while self.done < transactions:
            self._program()
        self.coordinator.finish()
        for deliver in self.late:
            deliver()
        last = Transaction("id", self.version)
        last.initialize()
        assert self._drive(last, patient=True)
        self.check()

    def check(self) -> None:
        """Is what readers see what programs were told?"""
        ended = {record[0]: record[2] for record in self.coordinator.log}
        seen = {tag for tag, how in ended.items() if how == "commit"}
        assert "open" not in ended.values(), f"a transaction hangs: {ended}"
        assert self.told["commit"] <= seen, f"lost: {self.told['commit'] - seen}"
        assert not self.told["abort"] & seen, f"aborted and seen: {self.told['abort'] & seen}"
        for tags in self.unknown:
            assert not tags & seen or tags <= seen, f"a part of {tags}: {tags & seen}"

    # -- a program ---------------------------------------------------------------------------------

    def _program(self) -> None:
        chance = self.random.random
        machine = Transaction("id", self.version)
        machine.initialize()
        if not self._drive(machine, patient=True):
            return
        while machine.phase in (Phase.READY, Phase.INITIALIZING):
            if not self._drive(machine, patient=True):
                return
            tags: set[str] = set()
            try:
                self._transaction(machine, tags)
            except (Died, TransactionError) as e:
                if isinstance(e, TransactionError):
                    assert e.fatal, e
                self.unknown.append(tags)
                return
            if chance() < 0.05:
                return

    def _transaction(self, machine: Transaction, tags: set[str]) -> None:
        machine.begin()
        self.done += 1
        offset = self.done if self.random.random() < 0.3 else -1
        try:
            self._write(machine, tags, offset)
            if self.random.random() < 0.1:
                raise Died
            self._end(machine, tags, offset, commit=self.random.random() < 0.7)
        except TransactionError as e:
            if not e.txn_requires_abort:
                raise
            self._end(machine, tags, offset, commit=False)

    def _write(self, machine: Transaction, tags: set[str], offset: int) -> None:
        for _ in range(self.random.randrange(4)):
            tp = self.random.choice(PARTITIONS)
            machine.write([tp])
            if not self._drive(machine):
                machine.check()
                raise Died
            self.tags += 1
            tag = f"r{self.tags}"
            tags.add(tag)
            self._append(machine, tp, tag)
            if self.random.random() < 0.02:
                self.coordinator.expire()
        if offset >= 0:
            machine.send_offsets(GROUP, {PARTITIONS[0]: offset})
            if self.random.random() < 0.8 and not self._drive(machine):
                machine.check()
                raise Died

    def _append(self, machine: Transaction, tp: TopicPartition, tag: str) -> None:
        """Send a batch until it is answered, or has failed."""
        epoch = machine.epoch
        for _ in range(MOST_TRIES):
            way = self.random.random()
            if way < 0.1:  # nobody knows; if it fails, it may arrive later
                self.late.append(lambda: self.coordinator.append(tp, tag, epoch))
                if way < 0.03:
                    machine.failed(DeliveryError("it took too long"))
                    return
                continue
            code = self.coordinator.append(tp, tag, epoch)
            if code == E.CONCURRENT_TRANSACTIONS:
                self._pass_time()
                continue
            if code:
                machine.failed(DeliveryError("refused"), code)
            return

    def _end(self, machine: Transaction, tags: set[str], offset: int, *, commit: bool) -> None:
        (machine.commit if commit else machine.abort)()
        ended = self._drive(machine, until=(Phase.READY, Phase.INITIALIZING))
        if not ended:
            machine.check()
            raise Died
        self.told["commit" if commit else "abort"] |= tags
        if commit and offset >= 0:
            self.coordinator.finish()
            assert self.coordinator.committed_offset == offset, "offsets were lost"

    # -- the network -------------------------------------------------------------------------------

    def _drive(
        self,
        machine: Transaction,
        until: tuple[Phase, ...] = (),
        *,
        patient: bool = False,
    ) -> bool:
        """Send what is pending until nothing is; False: it has failed, or nobody waits longer."""
        for attempt in range(MOST_TRIES):
            request = machine.pending
            if request is None or machine.phase in until:
                return True
            self._pass_time()
            way = self.random.random() if attempt < MOST_TRIES // 2 else 1.0
            if way < 0.02 and not patient:
                return False
            epoch = machine.epoch
            if way < 0.1:
                machine.lost(request)
                continue
            if way < 0.2:  # it arrives, now or later, and nobody hears of it
                machine.lost(request)
                if way < 0.15:
                    self.late.append(lambda r=request, e=epoch: self.coordinator.answer(r, e))
                else:
                    self.coordinator.answer(request, epoch)
                continue
            if way < 0.3:
                answer = Answer((self.random.choice(REFUSALS),))
            else:
                answer = self.coordinator.answer(request, epoch)
            if machine.answered(request, answer) is Next.FAILED:
                return False
        raise AssertionError(f"{machine.phase} is never over")

    def _pass_time(self) -> None:
        if self.random.random() < 0.5:
            self.coordinator.finish()
        if self.late and self.random.random() < 0.2:
            self.late.pop(self.random.randrange(len(self.late)))()
