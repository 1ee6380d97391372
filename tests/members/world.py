"""Several brokers' replicas in one process: real logs, machines and drivers; a store and a network
that a test moves.

`World` plays the metadata store and its controller: it writes a partition's state and tells every
broker.  Requests between brokers are encoded and decoded as they are on the wire; a link that is
cut fails them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from kdirect.cluster.codes import Code
from kdirect.cluster.election import Partition as Picture
from kdirect.cluster.image import Image, Topic
from kdirect.cluster.partition_state import PartitionState
from kdirect.cluster.records import BrokerRegistration, TopicAssignment
from kdirect.cluster.requests import Answer, InSyncAnswer
from kdirect.errors import BrokerUnavailableError, TimedOutError
from kdirect.format import protocol as p
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from kdirect.log.partition import Partition
from kdirect.member.metadata import LiveNode, Metadata
from kdirect.member.replicas import Replicas
from kdirect.model import TopicPartition
from kdirect.wire.environment import SYSTEM

TP = TopicPartition("t", 0)
TOPIC_ID = uuid.UUID(int=7)
DEADLINE_S = 20.0


async def until(holds: Callable[[], Any], what: str = "") -> None:
    """Return when `holds()`; it is asked again and again, for so long."""
    end = asyncio.get_running_loop().time() + DEADLINE_S
    while not holds():
        assert asyncio.get_running_loop().time() < end, what or "it does not come to that"
        await asyncio.sleep(0.002)


class Broker:
    """One broker's replicas; its process ends with `kill`."""

    def __init__(self, world: World, number: int, directory: Path, config: LogConfig) -> None:
        self.world = world
        self.number = number
        self.incarnation = world.new_incarnation()
        self.node_id = number
        self.logs = LogManager(
            [directory], config, node_id=number, cluster_id="c" * 22, replicated=True
        )
        self.metadata = Metadata("c" * 22, number)
        self._subscribers: list[Callable[[Any, Any], None]] = []
        self._threads = ThreadPoolExecutor(2)
        self.loop = asyncio.get_running_loop()
        self.lives = True
        self.dropped: set[int] = set()  # brokers that this one does not reach
        self.logs.open()
        self.replicas = Replicas(
            self,
            self,
            on_thread=self.on_thread,
            read=self.read,
            release=lambda segment: segment.release(),
            environment=SYSTEM,
            lag_ms=world.lag_ms,
        )
        self.led: list[int] = []
        self.replicas.on_lead.append(lambda tp, partition, epoch: self.led.append(epoch))

    @property
    def log(self) -> Partition:
        return self.logs.partitions[TP]

    # what Replicas uses of others

    def subscribe(self, changed: Callable[[Any, Any], None]) -> None:
        self._subscribers.append(changed)

    def tell(self, metadata: Metadata) -> None:
        before, self.metadata = self.metadata, metadata
        for changed in self._subscribers:
            changed(before, metadata)

    def ask(self, request: Any, timeout_s: float) -> asyncio.Future[Answer]:
        future: asyncio.Future[Answer] = self.loop.create_future()
        self.loop.call_soon(self.world.alter_in_sync, request, future)
        return future

    def on_thread(self, partition: Any, work: Callable[[], Any], done: Callable[..., None]) -> None:
        def finish(f: Any) -> None:
            error = f.exception()
            result = None if error is not None else f.result()
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(done, result, error)

        self._threads.submit(work).add_done_callback(finish)

    async def read(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await self.loop.run_in_executor(self._threads, partial(work, *arguments))

    async def call(
        self, node_id: int, message: Any, *, timeout_s: float, version: int | None = None
    ) -> Any:
        other = self.world.brokers.get(node_id)
        link = (self.number, self.incarnation)
        if other is None or not other.lives or node_id in self.dropped:
            raise BrokerUnavailableError(f"broker {node_id} is not there")
        frame = memoryview(bytes(p.encode_request(message, 0, 1, "test")))[4:]
        request = p.decode_request(p.parse_request_header(frame), frame)
        answer = asyncio.ensure_future(other.replicas.answer(link, request))
        cut = self.world.cut_event(self.number, node_id)
        waits = asyncio.ensure_future(cut.wait())
        try:
            await asyncio.wait({answer, waits}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waits.cancel()
        if cut.is_set():
            answer.cancel()
            raise BrokerUnavailableError(f"the link to broker {node_id} was cut")
        body = b"".join(bytes(buffer) for buffer in answer.result())
        header = p.response_header(p.APIS[message.API_KEY], 0, 1)
        return p.decode_response(message.API_KEY, 0, header + body)[1]

    # its life

    async def start(self) -> None:
        await self.replicas.start()
        for partition in list(self.logs.partitions.values()):
            self.replicas.add(partition)

    def make(self, tp: TopicPartition = TP) -> None:
        self.replicas.add(self.logs.create_partition(tp, topic_id=TOPIC_ID))

    async def kill(self, *, clean: bool = False) -> None:
        """The process ends; its connections break."""
        self.lives = False
        self.world.brokers.pop(self.number, None)
        self.world.cut(self.number)
        await self.replicas.stop()
        self._threads.shutdown(wait=True)
        self.logs.close(clean)
        self.world.publish()


class World:
    """See the module."""

    def __init__(self, directory: Path, *, lag_ms: int = 30_000, **config: Any) -> None:
        self.directory = directory
        self.lag_ms = lag_ms
        self.config = LogConfig(**{"segment_bytes": 1 << 20, **config})
        self.brokers: dict[int, Broker] = {}
        self.replicas: tuple[int, ...] = ()
        self.state: PartitionState | None = None
        self.topic_config: dict[str, str] = {}
        self.refuses = False  # the controller is away
        self._incarnations = 100
        self._cuts: dict[tuple[int, int], asyncio.Event] = {}

    def new_incarnation(self) -> int:
        self._incarnations += 1
        return self._incarnations

    def cut_event(self, a: int, b: int) -> asyncio.Event:
        return self._cuts.setdefault((a, b), asyncio.Event())

    def cut(self, number: int) -> None:
        """All connections of a broker break."""
        for (a, b), event in list(self._cuts.items()):
            if number in (a, b):
                event.set()
                del self._cuts[a, b]
        for other in self.brokers.values():
            for session in list(other.replicas._sessions._sessions.values()):
                if session.broker == number:
                    other.replicas.connection_closed(session.connection)

    async def start(self, *numbers: int) -> None:
        for number in numbers:
            broker = Broker(self, number, self.directory / f"b{number}", self.config)
            self.brokers[number] = broker
            self.publish()
            await broker.start()

    async def create(self, *replicas: int, in_sync: Iterable[int] | None = None) -> None:
        """Make the partition; the first replica leads."""
        self.replicas = replicas
        for number in replicas:
            self.brokers[number].make()
        self.elect(replicas[0], in_sync=in_sync or replicas)

    def elect(self, leader: int, *, in_sync: Iterable[int] | None = None) -> int:
        """A new leader epoch; returns it."""
        old = self.state
        epoch = 0 if old is None else old.leader_epoch + 1
        version = 0 if old is None else old.version + 1
        members = tuple(in_sync) if in_sync is not None else old.in_sync if old else ()
        incarnation = self.brokers[leader].incarnation if leader in self.brokers else -1
        self.state = PartitionState(leader, epoch, members, version, (), incarnation)
        self.publish()
        return epoch

    def publish(self) -> None:
        """Tell every broker what the store says."""
        nodes = {
            n: LiveNode(n, BrokerRegistration((), {}), b.incarnation, 0)
            for n, b in self.brokers.items()
        }
        topics = {}
        if self.replicas:
            partition = Picture(self.replicas, state=self.state)
            record = TopicAssignment(TOPIC_ID, (self.replicas,))
            topics["t"] = Topic(record, (partition,), dict(self.topic_config))
        image = Image(1, 1, topics=topics)
        for broker in list(self.brokers.values()):
            broker.tell(Metadata("c" * 22, broker.number, broker.incarnation, 1, nodes, image, 1))

    def alter_in_sync(self, request: Any, future: asyncio.Future[Answer]) -> None:
        rows = []
        for row in request.rows:
            state = self.state
            assert state is not None
            if self.refuses:
                future.set_exception(TimedOutError("the controller does not answer"))
                return
            if row.leader_epoch < state.leader_epoch:
                rows.append(InSyncAnswer(row.partition, Code.FENCED_LEADER_EPOCH, state))
            elif row.version < state.version:
                rows.append(InSyncAnswer(row.partition, Code.INVALID_UPDATE_VERSION, state))
            else:
                in_sync = tuple(b for b, _ in row.in_sync)
                self.state = state._replace(in_sync=in_sync, version=state.version + 1)
                rows.append(InSyncAnswer(row.partition, Code.NONE, self.state))
        self.publish()
        if not future.done():
            future.set_result(Answer(None, rows=tuple(rows)))

    async def stop(self) -> None:
        for broker in list(self.brokers.values()):
            await broker.kill()

    # -- records -----------------------------------------------------------------------------------

    def append(self, leader: int, batch: Callable[..., bytes], count: int) -> int:
        """Append so many batches of one record at a leader; the log's end."""
        broker = self.brokers[leader]
        partition = broker.replicas.leader(TP)
        for _ in range(count):
            result = partition.append(batch())
            assert result.error == 0
        broker.replicas.appended(TP)
        return partition.log_end_offset

    def leads(self, number: int, epoch: int) -> bool:
        replica = self.brokers[number].replicas._replicas.get(TP)
        return replica is not None and replica.leader is not None and replica.epoch == epoch


def sealed(partition: Partition) -> dict[int, str]:
    """SHA-256 of each sealed segment, by base offset."""
    return {
        s.base_offset: hashlib.sha256(s.path.read_bytes()[: s.size]).hexdigest()
        for s in partition.segments[:-1]
    }
