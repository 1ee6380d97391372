"""What the client's tests share: a proxy that loses and forges answers, and clients of the shared
broker."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable

import confluent_kafka
import pytest

from kdirect.client import connect
from kdirect.model import TopicPartition
from kdirect.wire.cluster import Cluster

# What a proxy may do with a request instead of forwarding it; bytes are sent as the answer.
CUT = "cut"  # close the connection, the broker does not see the request
CUT_AFTER = "cut after"  # the broker gets the request, its answer is lost with the connection
SILENT = "silent"  # the broker gets the request, its answer is dropped

Decision = str | bytes | None
FIXTURE_TIMEOUT_S = 10


class Proxy:
    """Stands between client and broker, frame by frame.

    `decide(api_key, version, correlation_id, body)` is asked about each request: None forwards it,
    CUT, CUT_AFTER and SILENT lose something, bytes are the body of a forged response (behind its
    correlation id) and the broker is not asked.
    """

    def __init__(self, servers: str) -> None:
        host, _, port = servers.rpartition(":")
        self.target = (host, int(port))
        self.decide: Callable[[int, int, int, bytes], Decision] = lambda *request: None
        self.requests: list[int] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.bootstrap_servers = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def once(
        self, api_key: int, decision: Decision | Callable[[int], bytes], times: int = 1
    ) -> None:
        """`decision` for the next `times` requests with `api_key`."""
        left = times

        def decide(key: int, version: int, correlation_id: int, body: bytes) -> Decision:
            nonlocal left
            if key != api_key or left == 0:
                return None
            left -= 1
            return decision(version) if callable(decision) else decision

        self.decide = decide

    def _accept(self) -> None:
        while True:
            try:
                client = self.listener.accept()[0]
            except OSError:
                return
            try:
                server = socket.create_connection(self.target, FIXTURE_TIMEOUT_S)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            self.pairs.append((client, server))
            dropped: set[int] = set()
            cut: set[int] = set()
            lock = threading.Lock()
            threading.Thread(
                target=self._requests, args=(client, server, dropped, cut, lock), daemon=True
            ).start()
            threading.Thread(
                target=self._answers, args=(client, server, dropped, cut, lock), daemon=True
            ).start()

    def _requests(
        self,
        client: socket.socket,
        server: socket.socket,
        dropped: set[int],
        cut: set[int],
        lock: threading.Lock,
    ) -> None:
        try:
            for frame in _frames(client):
                key, version, correlation_id = struct.unpack_from(">hhi", frame)
                self.requests.append(key)
                decision = self.decide(key, version, correlation_id, frame)
                if decision == CUT:
                    return
                if decision == SILENT:
                    dropped.add(correlation_id)
                elif decision == CUT_AFTER:
                    cut.add(correlation_id)
                if isinstance(decision, bytes):
                    answer = struct.pack(">i", correlation_id) + decision
                    with lock:
                        client.sendall(struct.pack(">i", len(answer)) + answer)
                else:
                    server.sendall(struct.pack(">i", len(frame)) + frame)
        except OSError:
            pass
        finally:
            _end(client, server)

    def _answers(
        self,
        client: socket.socket,
        server: socket.socket,
        dropped: set[int],
        cut: set[int],
        lock: threading.Lock,
    ) -> None:
        try:
            for frame in _frames(server):
                correlation_id = struct.unpack_from(">i", frame)[0]
                if correlation_id in cut:
                    return
                if correlation_id not in dropped:
                    with lock:
                        client.sendall(struct.pack(">i", len(frame)) + frame)
        except OSError:
            pass
        finally:
            _end(client, server)

    def close(self) -> None:
        _end(self.listener)  # wakes the thread that accepts
        self.listener.close()
        for pair in self.pairs:
            _end(*pair)
            for s in pair:
                s.close()


def _frames(s: socket.socket):
    data = bytearray()
    while True:
        while len(data) < 4 or len(data) < 4 + struct.unpack_from(">i", data)[0]:
            piece = s.recv(1 << 20)
            if not piece:
                return
            data += piece
        size = struct.unpack_from(">i", data)[0]
        frame = bytes(data[4 : 4 + size])
        del data[: 4 + size]
        yield frame


def _end(*sockets: socket.socket) -> None:
    for s in sockets:
        try:
            s.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def create(broker, name="t", partitions=1, **configs):
    connect(broker.bootstrap_servers).admin.create_topic(name, partitions, configs=configs)


def kafka_messages(servers, topic, partition=0):
    """Everything in a partition, by librdkafka."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": servers, "group.id": "check", "enable.partition.eof": True}
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, partition, 0)])
    out = []
    while True:
        message = consumer.poll(20)
        assert message is not None, "the stock client did not get to the end"
        if message.error():
            assert message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF, (
                message.error()
            )
            break
        out.append(message)
    consumer.close()
    return out


def produce_answer(tp: TopicPartition, code: int):
    """The body of a produce response with an error, by version."""

    def answer(version: int) -> bytes:
        flexible = version >= 9
        topic = tp.topic.encode()
        parts = [b"\0" if flexible else b""]
        parts.append(
            b"\2" + bytes([len(topic) + 1]) if flexible else struct.pack(">ih", 1, len(topic))
        )
        parts += [
            topic,
            b"\2" if flexible else struct.pack(">i", 1),
            struct.pack(">ihqq", tp.partition, code, -1, -1),
        ]
        if version >= 5:
            parts.append(struct.pack(">q", -1))
        if version >= 8:
            parts.append(b"\1\0" if flexible else struct.pack(">ih", 0, -1))
        parts.append(b"\0\0" if flexible else b"")  # tags of partition and topic
        parts.append(struct.pack(">i", 0) + (b"\0" if flexible else b""))
        return b"".join(parts)

    return answer


@pytest.fixture
def proxy(broker):
    """A proxy before the shared broker."""
    p = Proxy(broker.bootstrap_servers)
    yield p
    p.close()


@pytest.fixture
def cluster(broker):
    """A client's view of the shared broker."""
    with Cluster({"bootstrap.servers": broker.bootstrap_servers}) as c:
        yield c


@pytest.fixture
def behind(proxy):
    """Makes clusters whose connections run through the proxy; settings as keyword arguments with
    `_` for `.`."""
    made = []

    def make(**settings) -> Cluster:
        made.append(
            Cluster(
                {
                    "bootstrap.servers": proxy.bootstrap_servers,
                    **{k.replace("_", "."): v for k, v in settings.items()},
                }
            )
        )
        return made[-1]

    yield make
    for c in made:
        c.close()


@pytest.fixture
def new_topic(cluster, request):
    """Makes topics with names of their own."""
    from kdirect.client.admin import Admin

    count = 0

    def make(partitions: int = 1, **configs) -> str:
        nonlocal count
        count += 1
        name = f"{request.node.name[:60].translate(str.maketrans('[]/ ', '....'))}-{count}"
        Admin(cluster).create_topic(
            name, partitions, configs={k.replace("_", "."): v for k, v in configs.items()}
        )
        return name

    return make
