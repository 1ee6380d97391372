"""Replicas with real logs, real produce workers and a simulated network, and every step that they
can take next.

Owns: a world of `tests.cluster`, in which the machines and what must hold are, and a `Broker` for
each of its replicas, on which all is real that the model only assumes.  `Replicas.moves` lists what
can come next, `take` takes one, carries out what the machines want of the brokers, and looks at
what the brokers' kernels have and show.

What a driver of the machines has to see to, because the kernel counts while the machine has not
heard (`_settle`, `_count`, `_heard`):

- the kernel waits for whoever the machine counts, and for those that are about to join;
- a proposal is withdrawn before it is sent where the kernel shows records that a follower lacks
  which is proposed: the machine compared its end with an old high watermark;
- what a follower says by a message moves its mark, too, where the machine believes it;
- a follower begins its segment where the leader's does, before it grants its head.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kdirect.cluster import following_replica as following_rules
from kdirect.cluster import leading_replica as leading_rules
from kdirect.cluster.following_replica import Phase
from kdirect.cluster.leading_replica import Leading
from kdirect.errors import LogError, QueuePairError, TransportError
from kdirect.rdma.sim import Faults, SimNetwork
from tests.cluster import controller
from tests.cluster.effects import follow, lead, put
from tests.cluster.moves import Move, after, moves
from tests.cluster.world import (
    DOWN,
    Bounds,
    Broken,
    Replica,
    begin,
    check,
    check_log,
    show,
)
from tests.replication.broker import Broker, Settings
from tests.replication.kernel_log import KernelLog
from tests.replication.led_head import IN_FLIGHT
from tests.replication.producers import Producer, check_doubles

DRAINING = 10_000

# Of the model's moves: these are not taken, because the datapath does it.
MODELLED = {
    *("push", "land", "tear", "commit", "confirm", "tell", "reconnect", "out of range", "crash"),
}


class Message(NamedTuple):
    """On its way from one broker's process to another's; of `kind`, see `Replicas._deliver`."""

    kind: str
    sender: int
    receiver: int
    incarnation: int  # of the follower
    epoch: int
    value: Any


def counts_of(leading: Leading) -> tuple[frozenset[int], bool]:
    """Whose marks the kernel's high watermark waits for, and whether it stands still: what
    `leading_replica.high_watermark_of` says, for marks."""
    counted = {
        follower.broker
        for follower in leading.followers
        if follower.broker in leading.counted or leading_rules._is_joining(leading, follower)
    }
    few = len(leading.state.in_sync) < min(leading.min_in_sync, len(leading.replicas))
    return frozenset(counted - {leading.broker}), bool(leading.state.eligible or few)


class Replicas:
    """See the module.  `directory`: an empty one; `path`: what has happened."""

    segment_bytes: tuple[int, ...] = (1024, 2048, 8192)  # one of these

    def __init__(
        self,
        seed: int,
        directory: Path,
        bounds: Bounds,
        chance: random.Random,
        acks: Sequence[int] = (),
    ) -> None:
        self.bounds = bounds
        self.chance = chance
        faults = Faults(
            delay_ns=(500, chance.choice((5_000, 20_000, 500_000))),
            tear=chance.choice((0.0, 0.1, 0.4)),
            disconnect=chance.choice((0.0, 0.0, 0.01)),
        )
        with contextlib.redirect_stdout(io.StringIO()):
            self.network = SimNetwork(seed, faults)
        settings = Settings(
            segment_bytes=chance.choice(self.segment_bytes),
            most_bytes=chance.choice((0, 300, 4096)),
            window=chance.choice((1, 4, 8)),
        )
        self.brokers = [
            Broker(number, self.network, directory / str(number), settings)
            for number in range(bounds.replicas + bounds.spares)
        ]
        # Who appends, over RDMA; with none of them, records are appended to the leaders' logs.
        self.producers = [Producer(n, self, acks=each) for n, each in enumerate(acks)]
        self.dead: list[Broker] = []
        logs = tuple(KernelLog.of(b.partition) for b in self.brokers)
        self.world = begin(bounds, logs)  # type: ignore[arg-type]
        self.messages: dict[int, Message] = {}
        self.sent = 0
        self.hung = False
        self.seen = [0] * len(self.brokers)  # the high watermark of each
        self.hung_beyond = 0  # writers that were inside of a copy when their key ended
        self._sent_before: tuple[Any, ...] = ()  # proposals
        self.path: list[Move] = []
        self._take: dict[str, Callable[..., object]] = {
            "append": self._append,
            "network": self._network,
            "work": self._work,
            "flow": self._flow,
            "deliver": self._deliver,
            "ask": self._ask,
            "hear": self._hear,
            "hang": self._hang,
            "go on": self._go_on,
            "sync": self._sync,
            "trim": self._trim,
            "crash": self._crash,
            "fence": self._fence,
            "unlink": self._unlink,
            "remove": self._remove,
            "loop": self._loop,
            "make": lambda number: self.producers[number].make(),
            "write": lambda number: self.producers[number].write(),
            "ask access": self._ask_access,
            "hear acks": lambda number: self.producers[number].hear(),
            "give back": lambda number: self.producers[number].give_back(),
            "stall": self._stall,
        }

    # -- steps -------------------------------------------------------------------------------------

    def close(self) -> None:
        self.network.release()
        for producer in self.producers:
            producer.close()
        for broker in self.brokers + self.dead:
            broker.close()

    def moves(self) -> Iterator[Move]:
        """Every step that can come next."""
        world, bounds = self.world, self.bounds
        may_end = world.crashes < bounds.crashes
        for move in moves(world, bounds._replace(crashes=0)):  # it lists a crash for each record
            if move[0] not in MODELLED and not (move[0] == "append" and self.producers):
                yield move
        yield from self.producers_moves()
        yield ("network",)
        yield ("flow",)
        if self.hung:
            yield ("go on",)
        for number, message in self.messages.items():
            yield ("deliver", number, message.sender, message.receiver, message.kind)
        for broker, replica in enumerate(world.replicas):
            if world.registered[broker] == DOWN:
                continue
            yield ("work", broker)
            yield ("sync", broker)
            if self.may_ask(broker, replica):
                yield ("ask", broker)
            if self.may_trim(replica):
                yield ("trim", broker)
            if replica.leading is not None:
                if self.unheard(broker, replica.leading):
                    yield ("hear", broker)
                for follower in self.brokers[broker].rings:
                    if not self.hung:
                        yield ("hang", broker, follower)
            if may_end and controller.may_crash(world, bounds, broker, False):
                yield ("crash", broker)
                if bounds.expires:
                    yield ("expire", broker)

    def producers_moves(self) -> Iterator[Move]:
        for producer in self.producers:
            number = producer.number
            if self.may_make(producer):
                yield ("make", number)
            if producer.may_repeat:
                yield ("write", number)
                if not self.hung:
                    yield ("stall", number)
            if producer.may_hear:
                yield ("hear acks", number)
            if producer.may_write and not producer.waiting:
                yield ("give back", number)
            for broker in self.brokers:
                if producer.may_ask(broker):
                    yield ("ask access", number, broker.number)
        for broker in self.brokers if self.producers else ():
            if not broker.led_head.loop.is_idle:
                yield ("loop", broker.number)

    def may_make(self, producer: Producer) -> bool:
        made = sum(each.made for each in self.producers)
        return made < self.bounds.records and len(producer.waiting) < 2 * IN_FLIGHT

    def may_ask(self, broker: int, replica: Replica) -> bool:
        """Does the replica follow, and is not written to by its leader, nor will be?"""
        following = replica.following
        if following.phase is not Phase.FOLLOWING or following.leader < 0:
            return False
        process, incarnation = self.brokers[broker], self.world.registered[broker]
        leader = self.brokers[following.leader]
        if any(
            m.epoch == following.epoch and m.incarnation == incarnation
            for m in self.messages.values()
            if broker in (m.sender, m.receiver)
        ):
            return False
        link = leader.links.get(broker)
        return not (
            process.is_written
            and process.followed_as == incarnation
            and broker in leader.rings
            and link is not None
            and link.incarnation == incarnation
        )

    def may_trim(self, replica: Replica) -> bool:
        """Has the leader deleted what this replica keeps?"""
        following = replica.following
        if following.phase is not Phase.FOLLOWING:
            return False
        leading = self.world.replicas[following.leader].leading
        if leading is None or leading.state.leader_epoch != following.epoch:
            return False
        leader = self.brokers[following.leader].partition
        own = self.brokers[following.broker].partition
        return min(leader.log_start_offset, own.high_watermark) > own.log_start_offset

    def unheard(self, broker: int, leading: Leading) -> bool:
        rings = self.brokers[broker].rings
        return any(
            known.broker in rings and rings[known.broker].confirmed > known.end
            for known in leading.followers
        )

    def take(self, move: Move) -> None:
        self.path.append(move)
        own = self._take.get(move[0])
        if own is not None:
            own(*move[1:])
        else:
            self.world = after(self.world, self.bounds, move)
        self._settle()
        check(self.world)

    # -- what the machines want is done, and what the kernels show is looked at --------------------

    def _settle(self) -> None:
        """Carry out what the step made of the machines."""
        if self.world.confirmations:  # `may_ask` sees to it
            self.world = self.world._replace(confirmations=())
        for number, broker in enumerate(self.brokers):
            leading = self.world.replicas[number].leading
            if broker.pushed is not None and (
                leading is None or leading.state.leader_epoch != broker.epoch
            ):
                broker.resign()
            if leading is not None:
                if broker.pushed is None:
                    broker.lead(leading.state.leader_epoch, counts_of(leading))
                self._count(number)
                self._show(number)
            self._see(number)
        self._sent_before = self.world.proposals

    def _count(self, number: int) -> None:
        """The kernel waits for whom the machine counts.  The machine may have proposed a follower
        by a high watermark that the kernel has passed since: then it is not proposed."""
        leading = self.world.replicas[number].leading
        assert leading is not None
        self.brokers[number].count(counts_of(leading))
        if leading.proposed is None:
            return
        shown = self.brokers[number].partition.high_watermark
        joining = {*leading.proposed} - {*leading.state.in_sync}
        if any(f.end < shown for f in leading.followers if f.broker in joining):
            self._withdraw_proposal(number, leading)

    def _withdraw_proposal(self, number: int, leading: Leading) -> None:
        """It was not sent yet."""
        fresh = [
            p for p in self.world.proposals if p.leader == number and p not in self._sent_before
        ]
        if fresh:
            kept = tuple(p for p in self.world.proposals if p not in fresh)
            self.world = self.world._replace(proposals=kept)
            self.world = lead(self.world, number, leading_rules.Refused(leading.state.version))
            after_all = self.world.replicas[number].leading
            assert after_all is not None
            self.brokers[number].count(counts_of(after_all))

    def _show(self, number: int) -> None:
        """The leader's kernel shows its high watermark."""
        log = self.world.replicas[number].log
        shown = self.brokers[number].partition.high_watermark
        if shown > log.end:
            raise Broken("a kernel shows what is not in its log")
        self.world = show(self.world, number, shown)

    def _see(self, number: int) -> None:
        """A consumer asks this broker, whoever leads."""
        seen = self.brokers[number].partition.high_watermark
        if not self.world.void:
            if seen < self.seen[number]:
                raise Broken(f"the high watermark of broker {number} goes back")
            if seen > len(self.world.shown):
                raise Broken(f"broker {number} shows what no leader has shown")
        self.seen[number] = seen
        self._follows(self.world.replicas[number])

    def _follows(self, replica: Replica) -> None:
        """What a replica that follows has is the beginning of what its leader has."""
        following, log = replica.following, replica.log
        if following.phase is not Phase.FOLLOWING:
            return
        leader = self.world.replicas[following.leader]
        leading, other = leader.leading, leader.log
        if leading is None or leading.state.leader_epoch != following.epoch:
            return
        start = max(log.start, other.start)
        if log.end > other.end or log.between(start, log.end) != other.between(start, log.end):
            raise Broken(f"broker {following.broker} follows with records that its leader lacks")

    def _read(self, number: int) -> bool:
        """What was added to a log; whether anything was."""
        replica = self.world.replicas[number]
        log = replica.log
        if self.brokers[number].partition.log_end_offset == log.end:
            return False
        log = log.grown()  # type: ignore[attr-defined]
        check_log(log)
        self.world = put(self.world, number, replica._replace(log=log))
        return True

    # -- steps of the datapath ---------------------------------------------------------------------

    def _append(self, number: int) -> None:
        self.world = after(self.world, self.bounds, ("append", number))
        pushed = self.brokers[number].pushed
        assert pushed is not None
        pushed.push()

    def _network(self) -> None:
        for _ in range(self.chance.randint(1, 8)):
            self.network.step()

    def _flow(self) -> None:
        """For a moment nothing is late."""
        for _ in range(self.chance.randint(2, 6)):
            self._network()
            self._work_all()

    def _work_all(self) -> int:
        """Every produce worker takes what has come; how much was done."""
        done = 0
        for number, broker in enumerate(self.brokers):
            if self.world.registered[number] != DOWN:
                done += self._work(number)
                done += broker.led_head.loop.run()
        self._settle()
        check(self.world)
        return done

    def _work(self, number: int) -> int:
        broker = self.brokers[number]
        done = broker.work()
        if broker.pushed is not None:
            done += self._produced(number)
            for follower in broker.lost_links():
                broker.unlink(follower)
                self.world = lead(self.world, number, leading_rules.LinkLost(follower))
                done += 1
        else:
            done += self._committed(number)
        for grant in broker.ahead:
            following = self.world.replicas[number].following
            self._send("ahead", number, following.leader, number, grant)
        broker.ahead.clear()
        return done

    def _produced(self, number: int) -> bool:
        """What the leader's kernel has committed of what producers wrote."""
        if not self._read(number):
            return False
        log = self.world.replicas[number].log
        if not self.world.void:
            check_doubles(self.producers, log.records)
        self.world = lead(self.world, number, leading_rules.Appended(log.end))
        return True

    def _committed(self, number: int) -> int:
        """What a follower's kernel has committed and shows."""
        broker = self.brokers[number]
        grown = self._read(number)
        epoch = broker.followed.leader_epoch if broker.followed is not None else -1
        if grown:
            log = self.world.replicas[number].log
            event = following_rules.Committed(log.end, log.last_epoch, epoch)
            self.world = follow(self.world, number, event)
        shown = broker.partition.high_watermark
        before = self.world.replicas[number].following
        if shown > before.high_watermark:
            self.world = follow(self.world, number, following_rules.Told(epoch, shown))
            return grown or self.world.replicas[number].following is not before
        return grown

    def _hear(self, number: int) -> None:
        """The leader's machine is told how far the followers are: first those who count."""
        broker = self.brokers[number]
        leading = self.world.replicas[number].leading
        assert leading is not None
        heard = [f.broker for f in leading.followers if f.broker in broker.rings]
        heard.sort(key=lambda follower: follower not in leading.counted)
        for follower in heard:
            ring, link = broker.rings[follower], broker.links[follower]
            end = ring.confirmed
            level = end >= broker.partition.log_end_offset
            event = leading_rules.Confirmed(follower, link.incarnation, broker.epoch, end, level)
            self.world = lead(self.world, number, event)

    def _hang(self, number: int, follower: int) -> None:
        """The leader stops inside of its next copy to a follower; it makes one, if it can."""
        self.network.hold(self.brokers[number].links[follower].link.qp)
        self.hung = True
        if self.producers:
            for producer in self.producers:
                if self.may_make(producer):
                    producer.make()
            self._flow()
        elif sum(self.world.written) < self.bounds.records:
            self._append(number)
        self._network()

    def _stall(self, number: int) -> None:
        """A producer stops inside of its next copy into a head."""
        producer = self.producers[number]
        assert producer.link is not None
        self.network.hold(producer.link.qp)
        self.hung = True
        producer.write()
        self._network()

    def _ask_access(self, number: int, broker: int) -> None:
        self.producers[number].ask(self.brokers[broker])

    def _loop(self, number: int) -> None:
        self.brokers[number].led_head.loop.run()

    def _go_on(self) -> None:
        self.network.release()
        self.hung = False

    def _unlink(self, number: int, follower: int) -> None:
        link = self.brokers[number].links.get(follower)
        self.world = self.world._replace(losses=self.world.losses + 1)
        if link is not None:
            self.network.disconnect(link.link.qp)
        else:
            self.world = lead(self.world, number, leading_rules.LinkLost(follower))

    # -- messages ----------------------------------------------------------------------------------

    def _send(self, kind: str, sender: int, receiver: int, follower: int, value: Any) -> None:
        self.sent += 1
        epoch = self.world.replicas[follower].following.epoch
        incarnation = self.world.registered[follower]
        self.messages[self.sent] = Message(kind, sender, receiver, incarnation, epoch, value)

    def _ask(self, number: int) -> None:
        """A follower tells its leader where its log ends, and wants to be written to."""
        following = self.world.replicas[number].following
        self._send("follow", number, following.leader, number, following.end)

    def _deliver(self, number: int, *_: Any) -> None:
        message = self.messages.pop(number)
        if self.world.registered[message.receiver] == DOWN:
            return
        leading = self.world.replicas[message.receiver].leading
        if leading is None or leading.state.leader_epoch != message.epoch:
            return
        {"follow": self._heard, "granted": self._granted, "ahead": self._ahead}[message.kind](
            message
        )

    def _heard(self, message: Message) -> None:
        """The leader hears of a follower.  Queue pair and grant are made at once; the grant is on
        its way back for any time."""
        follower, leader, end = message.sender, message.receiver, message.value
        replica = self.world.replicas[follower]
        process, led = self.brokers[follower], self.brokers[leader]
        following = replica.following
        log = self.world.replicas[leader].log
        same = (
            self.world.registered[follower] == message.incarnation
            and following.phase is Phase.FOLLOWING
            and (following.epoch, following.leader, following.end) == (message.epoch, leader, end)
        )
        if same and end < log.start:
            gone = following_rules.OutOfRange(message.epoch, log.start)
            self.world = follow(self.world, follower, gone)
            return
        if same and end <= log.end:
            try:
                address = process.accept_link(led.open_link(follower, message.incarnation))
                ring = led.link_opened(follower, address)
            except (TransportError, QueuePairError):
                return
            process.partition.begin_segment(segment_at(led, end))
            grant, ahead = process.grant(ring, message.epoch, message.incarnation)
            if self._read(follower):
                raise Broken("a grant has added records")
            link = led.links[follower]
            self._send("granted", follower, leader, follower, (link, grant, ahead))
        event = leading_rules.Confirmed(follower, message.incarnation, message.epoch, end)
        self.world = lead(self.world, leader, event)
        leading = self.world.replicas[leader].leading
        assert leading is not None
        for known in leading.followers:  # the machine may have thrown it away
            heard = (known.broker, known.incarnation) == (follower, message.incarnation)
            if heard and log.start <= end <= log.end:
                led.confirm(follower, end)

    def _granted(self, message: Message) -> None:
        follower, leader = message.sender, self.brokers[message.receiver]
        link, grant, ahead = message.value
        if leader.links.get(follower) is not link or follower in leader.rings:
            return
        try:
            leader.push_to(follower, grant)
        except LogError:
            leader.unlink(follower)
            return
        if ahead is not None and leader.pushed is not None:
            leader.pushed.grant_ahead(leader.rings[follower], ahead)

    def _ahead(self, message: Message) -> None:
        leader = self.brokers[message.receiver]
        ring = leader.rings.get(message.sender)
        if ring is not None and leader.pushed is not None:
            leader.pushed.grant_ahead(ring, message.value)

    # -- steps of a replica ------------------------------------------------------------------------

    def _sync(self, number: int) -> None:
        broker = self.brokers[number]
        broker.partition.flush()
        broker.logs.checkpoint()

    def _trim(self, number: int) -> None:
        """A replica deletes what its leader has deleted, as far as it knows that to be shown."""
        replica = self.world.replicas[number]
        leader = self.brokers[replica.following.leader].partition
        partition = self.brokers[number].partition
        before = replica.log
        partition.follow_log_start(leader.log_start_offset)
        self._read(number)
        log = KernelLog.of(partition)
        start, replica = max(log.start, before.start), self.world.replicas[number]
        if log.end < before.end or log.between(start, before.end) != before.between(
            start, before.end
        ):
            raise Broken("deleting at the start of a log has changed the rest")
        self.world = put(self.world, number, replica._replace(log=log))  # type: ignore[arg-type]

    def _fence(self, number: int) -> None:
        """Nobody can add to the log any more, whatever is on its way or under a copy."""
        broker = self.brokers[number]
        broker.led_head.end()
        if not broker.end_grant():
            self.hung_beyond += 1
        broker.partition.follow_leader()
        self._read(number)
        replica = self.world.replicas[number]
        log, partition = replica.log, broker.partition
        fenced = following_rules.Fenced(
            replica.fencing, log.end, log.last_epoch, partition.high_watermark
        )
        self.world = put(self.world, number, replica._replace(fencing=-1, granted=-1))
        self.world = follow(self.world, number, fenced)

    def _crash(self, number: int) -> None:
        """The process ends, in good order or not.  What it has not synced is there, or not, or in
        part."""
        old = self.brokers[number]
        partition = old.partition
        start = max(partition.recovery_point, partition.log_start_offset)
        end = partition.log_end_offset
        self._read(number)
        kept = end
        may_lose = controller.may_crash(self.world, self.bounds, number, True)
        if self.bounds.lossy and start < end and may_lose:
            kept = self.chance.randint(start, end)
        orderly = kept == end and self.chance.random() < 0.3
        new = old.stop() if orderly else old.crash(kept, self.chance)
        self.dead.append(old)
        self.seen[number] = 0
        self.brokers[number] = new
        log = KernelLog.of(new.partition)
        check_log(log)  # type: ignore[arg-type]
        world = self.world
        had = world.replicas[number].log
        lost = log.end < had.end
        if log.end < kept or log.between(log.start, kept) != had.between(log.start, kept):
            raise Broken("a restart lost what was synced, or changed it")
        begun = following_rules.begin(
            number,
            end=log.end,
            last_epoch=log.last_epoch,
            high_watermark=new.partition.high_watermark,
        )
        crashed = dict(world.crashed)
        crashed[number] = crashed.get(number, False) or lost
        world = put(world, number, Replica(begun, log=log))  # type: ignore[arg-type]
        self.world = world._replace(
            registered=(*world.registered[:number], DOWN, *world.registered[number + 1 :]),
            crashed=tuple(sorted(crashed.items())),
            crashes=world.crashes + 1,
        )

    def _remove(self, number: int) -> None:
        self.world = after(self.world, self.bounds, ("remove", number))
        broker = self.brokers[number]
        broker.delete_log()
        self.seen[number] = 0
        log = KernelLog.of(broker.partition)
        replica = self.world.replicas[number]
        self.world = put(self.world, number, replica._replace(log=log))  # type: ignore[arg-type]

    def describe(self) -> str:
        """Where everything is, for a message."""
        rows = [f"{self.world.state}, registered {self.world.registered}, {len(self.path)} steps"]
        for broker, replica in zip(self.brokers, self.world.replicas, strict=True):
            following = replica.following
            rows.append(
                f"{broker.number} {following.phase.name} in epoch {following.epoch}, {replica.log},"
                f" shows {broker.partition.high_watermark}"
            )
            for follower, ring in broker.rings.items():
                rows.append(f"  pushes to {follower}: {ring.state} {ring.confirmed} {ring.pushed}")
            if replica.leading is not None:
                rows.append(f"  {replica.leading}")
            rows += self._describe_producers(broker)
            if broker.followed is not None:
                rows.append(f"  is written: {broker.is_written}, refused: {broker.refused}")
        return "\n".join([*rows, *(str(message[:5]) for message in self.messages.values())])

    def _describe_producers(self, broker: Broker) -> Iterator[str]:
        for producer in self.producers:
            if producer.link is not None and producer.link.broker is broker:
                grant, waiting = producer.grant, [sent.number for sent in producer.waiting]
                yield f"  producer {producer.number}: {waiting} ({producer.under_way}), {grant}"

    def drain(self) -> None:
        """Everything that is under way arrives."""
        for _ in range(DRAINING):
            if not self.network.run_until_idle() + self._work_all():
                return
        raise Broken("the datapath does not come to rest")


def segment_at(broker: Broker, offset: int) -> int:
    """Where the segment of a leader begins that holds, or will hold, the record at `offset`."""
    return max(s.base_offset for s in broker.partition.segments if s.base_offset <= offset)
