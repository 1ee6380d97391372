"""Memberships of several brokers in one process and on one event loop, without brokers: each has a
session with the store, and a listener at which the others ask its controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from kazoo.client import KazooClient
from kazoo.handlers.threading import KazooTimeoutError

from kdirect.broker.config import BrokerConfig
from kdirect.broker.handlers_members import MemberHandlers
from kdirect.cluster.codes import Code
from kdirect.cluster.records import Endpoint
from kdirect.cluster.requests import Answer, CreateTopic
from kdirect.errors import ProtocolError
from kdirect.format import protocol as p
from kdirect.member.membership import Membership
from kdirect.member.metadata import Metadata
from kdirect.member.peers import Peers
from kdirect.model import TopicPartition
from kdirect.store.contract import MetadataStore
from kdirect.wire.environment import SYSTEM

WAIT_S = 30.0
SESSION_MS = 4000
NOTICED_WITHIN_S = 1.0


class Member:
    """One broker's membership.  `seen`: every metadata, the oldest first."""

    def __init__(
        self,
        company: Company,
        node_id: int,
        *,
        open_store: Callable[[], MetadataStore] | None = None,
        directory: Path | None = None,
        **properties: Any,
    ) -> None:
        self.node_id = node_id
        self.directory = directory or company.directory / f"broker-{node_id}"
        self.directory.mkdir(parents=True, exist_ok=True)
        config = BrokerConfig(
            {
                "node.id": node_id,
                "log.dirs": [str(self.directory)],
                "listeners": "127.0.0.1:0",
                "zookeeper.connect": company.connect,
                "zookeeper.session.timeout.ms": SESSION_MS,
                "controlled.shutdown.retry.backoff.ms": 100,
                **{name.replace("_", "."): value for name, value in properties.items()},
            }
        )
        self.peers = Peers(lambda: self.membership.metadata, "PLAINTEXT", SYSTEM)
        self.membership = Membership(config, [self.directory], self.peers, open_store=open_store)
        self.membership.subscribe(company.noticed)
        self.seen: list[Metadata] = []
        self.membership.subscribe(lambda before, after: self.seen.append(after))
        self.endpoints: tuple[Endpoint, ...] = ()
        self._handlers = MemberHandlers(self.membership)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._was_asked, self._may_answer = asyncio.Event(), asyncio.Event()
        self._may_answer.set()

    @property
    def metadata(self) -> Metadata:
        return self.membership.metadata

    @property
    def session(self) -> Any:
        return self.membership._session

    @property
    def client(self) -> KazooClient:
        """kazoo's, of the present session."""
        client: KazooClient = self.session.store.store._client
        return client

    async def start(self) -> Member:
        await self.membership.connect()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.endpoints = (Endpoint("PLAINTEXT", "127.0.0.1", port),)
        await self.membership.start(self.endpoints)
        return self

    async def stop(self) -> None:
        self.stop_listening()
        await self.membership.stop()

    def stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    def hold_answers(self) -> tuple[asyncio.Event, asyncio.Event]:
        """From now on others' questions are carried out, and answered once the second event is set;
        the first one is when there was such a question."""
        self._was_asked.clear()
        self._may_answer.clear()
        return self._was_asked, self._may_answer

    def fall_silent(self) -> Any:
        """As a process that was killed: it listens no more, and its session goes on until it times
        out, or the store that is returned is closed."""
        self.stop_listening()
        self.membership._stopped = True
        self.peers.close()
        self.session._end()
        return self.session.store.store

    async def lose_session(self) -> None:
        """Another client attaches to the session and closes it, as ZooKeeper's own tests do, until
        the member has noticed: it may take the session back before it is closed."""

        def steal() -> None:
            thief = KazooClient(servers, client_id=identity)
            with contextlib.suppress(KazooTimeoutError):
                thief.start(WAIT_S)
            thief.stop()
            thief.close()

        servers, identity = _servers(self.client), self.client.client_id
        expired, noticed = self.membership.sessions_expired, asyncio.Event()
        self.membership.subscribe(
            lambda *_: noticed.set() if self.membership.sessions_expired > expired else None
        )
        while not noticed.is_set():
            await asyncio.to_thread(steal)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(noticed.wait(), NOTICED_WITHIN_S)

    async def ask(self, request: Any, timeout_s: float = WAIT_S) -> Answer:
        return await self.membership.ask(request, timeout_s)

    async def create(self, name: str, **fields: Any) -> Answer:
        """Create a topic through this broker, which must succeed."""
        fields.setdefault("factor", 3)
        answer = await self.ask(CreateTopic(None, name, uuid.uuid4(), **fields))
        assert answer.outcome.code is Code.NONE, answer
        return answer

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                frame = memoryview(await reader.readexactly(size))
                header = p.parse_request_header(frame)
                answer = self._handlers.ask_controller(
                    None, header, p.decode_request(header, frame)
                )
                assert answer.awaited is not None and header.api is not None
                answer = await answer.awaited
                self._was_asked.set()
                await self._may_answer.wait()
                body = p.response_header(header.api, header.api_version, header.correlation_id)
                body += b"".join(map(bytes, answer.buffers or ()))
                writer.write(struct.pack(">i", len(body)) + body)
        except (asyncio.IncompleteReadError, ConnectionError, ProtocolError):
            writer.transport.abort()
        finally:
            self._writers.discard(writer)


def _servers(client: KazooClient) -> str:
    return ",".join(f"{host}:{port}" for host, port in client.hosts)


class Company:
    """Members that are stopped together.  `connect`: zookeeper.connect of all."""

    def __init__(self, connect: str, directory: Path) -> None:
        self.connect = connect
        self.directory = directory
        self.members: dict[int, Member] = {}
        self._everyone: list[Member] = []
        self._news = asyncio.Event()

    async def __aenter__(self) -> Company:
        return self

    async def __aexit__(self, *exception: object) -> None:
        for member in reversed(self._everyone):
            await member.stop()

    def noticed(self, before: Metadata, after: Metadata) -> None:
        self._news.set()

    def member(self, node_id: int, **arguments: Any) -> Member:
        made = Member(self, node_id, **arguments)
        self.members[node_id] = made
        self._everyone.append(made)
        return made

    async def start(self, count: int, **properties: Any) -> list[Member]:
        """Start so many, and wait until all know one another and their controller."""
        made = [self.member(len(self.members) + 1, **properties) for _ in range(count)]
        await asyncio.gather(*(member.start() for member in made))
        await self.until(lambda: self.agree(*made))
        return made

    @staticmethod
    def agree(*members: Member) -> bool:
        """Do these know the same brokers, themselves among them, and the same controller?"""
        first = members[0].metadata
        return first.controller_id in first.brokers and all(
            m.metadata.controller_id == first.controller_id
            and m.metadata.brokers == first.brokers
            and m.node_id in first.brokers
            and m.metadata.incarnation == first.brokers[m.node_id].incarnation
            for m in members
        )

    async def until(self, holds: Callable[[], Any], timeout_s: float = WAIT_S) -> None:
        """Wait for metadata of any member by which something holds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not holds():
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), deadline - loop.time())
            except asyncio.TimeoutError:
                raise AssertionError({n: m.metadata for n, m in self.members.items()}) from None

    def controller(self) -> Member:
        """Of whom the members say so."""
        return self.members[next(iter(self.members.values())).metadata.controller_id]

    def others(self) -> list[Member]:
        controller = self.controller()
        return [m for m in self.members.values() if m is not controller]


def run_company(connect: str, directory: Path, test: Callable[[Company], Awaitable[None]]) -> None:
    """Run a coroutine with a company of brokers on an event loop of its own."""

    async def body() -> None:
        async with Company(connect, directory) as company:
            await test(company)

    asyncio.run(body())


def state_of(member: Member, topic: str, partition: int = 0) -> Any:
    """What the member knows of a partition's state; None: nothing."""
    found = member.metadata.partition(TopicPartition(topic, partition))
    return None if found is None else found.state
